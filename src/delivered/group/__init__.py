"""Atomic batches across several sinks."""

from delivered.group.sinks import Columns, Group

__all__ = ["Columns", "Group"]
