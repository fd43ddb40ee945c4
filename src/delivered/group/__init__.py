"""Several sinks, one batch, all or nothing.

sinks.py      the sinks of a pipeline as the engine sees them: one ledger, one committer
route.py      which rows and columns a sink gets
ledger.py     the deciding sink's ledger, which remembers what the ledgers of the others knew before
committer.py   the hand on every sink's participants
"""

from delivered.group.route import Columns
from delivered.group.sinks import Group

__all__ = ["Columns", "Group"]
