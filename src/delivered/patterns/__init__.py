"""Patterns for an application's own transaction: outbox, inbox, events and sagas."""
