"""Shared code of connectors to message queues, where sent messages are visible at once."""
