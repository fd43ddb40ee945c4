"""The rules of a ledger, once, above stores that only read and write."""
