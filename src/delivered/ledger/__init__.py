"""The rules of a ledger, on top of stores that only read and write."""
