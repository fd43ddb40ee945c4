"""Several sinks, one batch, all or nothing."""

from delivered.group.sinks import Columns, Group

__all__ = ["Columns", "Group"]
