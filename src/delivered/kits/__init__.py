"""Shared code of connectors of a kind: `sql` databases, `table` formats and files, message `queue` systems."""
