"""Versions and ids of the registered schemas that a query reads and writes with, stored in the checkpoint's sidecar.

A registry moves on while a query is stopped; a batch that runs again after its decision must not.
"""

from __future__ import annotations

from collections.abc import Mapping

from delivered.checkpoint import folder

READ = "delivered/reader-schemas.json"
WRITTEN = "delivered/writer-schemas.json"
_KEPT_MAX = 16
"""Changes of the schemas written with. Only the newest decided batch can run again."""


def written(location: str, batch: int) -> dict[str, int] | None:
    """Ids of the schemas that a decided batch was written with, by sink and column; None: not stored.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    return next((ids for first, ids in reversed(_changes(location)) if first <= batch), None)


def keep_written(location: str, batch: int, ids: Mapping[str, int]) -> None:
    """Store the ids that an undecided batch, and those after it, are written with. Before its tasks start.

    Raises:
        Unreachable: the checkpoint cannot be written to.
    """
    known = _changes(location)
    changes = [(first, each) for first, each in known if first < batch]  # later ones were never decided
    if not changes or changes[-1][1] != ids:
        changes.append((batch, dict(ids)))
    if changes != known:
        folder.write_record(location, WRITTEN, {"changes": changes[-_KEPT_MAX:]})


def read(location: str) -> dict[str, dict[str, int]]:
    """Versions by source and column that the query was last started with. Raises as `written`."""
    what = "the schemas that a query reads with"
    found = folder.read_record(location, READ, what, lambda found: dict(found["sources"]), "SCHEMAS_DAMAGED")
    return found or {}


def keep_read(location: str, versions: Mapping[str, Mapping[str, int]]) -> None:
    """Store them, before the query starts. Raises as `keep_written`."""
    if read(location) != versions:
        folder.write_record(location, READ, {"sources": versions})


def _changes(location: str) -> list[tuple[int, dict[str, int]]]:
    what = "the schemas that batches were written with"
    found = folder.read_record(
        location, WRITTEN, what, lambda found: [(int(b), dict(ids)) for b, ids in found["changes"]], "SCHEMAS_DAMAGED"
    )
    return found or []
