"""Several sinks, one batch, all or nothing."""

from delivered.group.route import Columns
from delivered.group.sinks import Group

__all__ = ["Columns", "Group"]
