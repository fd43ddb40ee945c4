"""Sources removed from a query, stored in the checkpoint sidecar with their end offsets.

Spark's offset log forgets a source once a batch has run without it. If it returns under its name, Spark reads it from
the start again (4.3.0: unless only one batch ran without it).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from delivered.checkpoint import folder
from delivered.model import record_format
from delivered.model.errors import InvariantBroken
from delivered.model.offsets import SOURCE, by_source

FILE = "delivered/removed-sources.json"


def removed(location: str) -> Mapping[str, str]:
    """Where each removed source ended, by name.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    text = folder.read(location, FILE)
    if text is None:
        return {}
    try:
        return dict(record_format.known(json.loads(text), "a checkpoint's removed sources")["removed"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvariantBroken(
            "REMOVED_SOURCES_DAMAGED",
            f"{FILE!r} of the checkpoint {location!r} contains {text[:80]!r}; it must be what a start of the pipeline "
            "wrote.",
            next_step="restore the file from the checkpoint's backup",
        ) from error


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
        record = record_format.numbered({"removed": {**removed(location), **gone}})
        folder.write(location, FILE, json.dumps(record, separators=(",", ":")).encode(), first=False)
