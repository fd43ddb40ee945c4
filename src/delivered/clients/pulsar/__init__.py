"""Pulsar's binary protocol as far as transactions need it: connections, lookups, transactions, producers.

Knows no sink and no ledger. The brokers' own client for Python has no transactions.
"""
