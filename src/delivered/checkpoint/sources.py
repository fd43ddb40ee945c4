"""Sources removed from a query, stored in the checkpoint sidecar with their end offsets.

Spark's offset log forgets a source once a batch has run without it. If it returns under its name, Spark reads it from
the start again (4.3.0: unless only one batch ran without it).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from delivered.checkpoint import folder
from delivered.model.offsets import SOURCE, by_source

FILE = "delivered/removed-sources.json"


def removed(location: str) -> Mapping[str, str]:
    """Where each removed source ended, by name.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    what = "a checkpoint's removed sources"
    of = folder.read_record(location, FILE, what, lambda found: dict(found["removed"]), "REMOVED_SOURCES_DAMAGED")
    return of or {}


def keep_removed(location: str, names: Collection[str]) -> None:
    """Store where sources ended that the newest logged batch read and this start does not.

    Runs on the driver, before the query starts. May be called again.

    Args:
        names: of the sources that the query will read.

    Raises:
        Unreachable: the checkpoint cannot be written to.
    """
    if set(names) == {SOURCE}:
        return  # Spark's log identifies a source without a name by its position
    gone = {n: at for n, at in by_source(folder.newest_offsets(location)).items() if n not in names}
    if gone:
        folder.write_record(location, FILE, {"removed": {**removed(location), **gone}})
