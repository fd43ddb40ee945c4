"""The rules of a ledger, in one place, above stores that only read and write."""
