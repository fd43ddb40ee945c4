"""A source's first offsets, stored in the checkpoint sidecar.

Spark logs where a batch ends, but asks the source where batch 0 starts, also on a rerun. With startingOffsets "latest"
the answer would change, and records in between would be lost. So the source's first start stores the offsets, and every
later one uses them. The audit reads from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from delivered.checkpoint import folder
from delivered.contract.source import Offsets
from delivered.model.offsets import SOURCE, by_source

FILE = "delivered/source-offsets.json"

_SPARKS_OWN = "sources/0/0"
"""First offsets of Spark's own Kafka source: a zero byte, a version line, the offsets as JSON."""


def kept(location: str, source: str = SOURCE) -> Offsets | None:
    """The first offsets stored by an earlier start, or by Spark's own Kafka source; None: none.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    file = folder.sidecar(FILE, source)
    found = folder.read_record(
        location, file, "a source's first offsets", lambda found: dict(found["offsets"]), "SOURCE_OFFSETS_DAMAGED"
    )
    return _kept_by_spark(location) if found is None and source == SOURCE else found


def is_ours(location: str) -> bool:
    """Whether a source of this package has stored first offsets here, under any name."""
    return folder.holds(location, "delivered", FILE.rsplit("/", 1)[1])


def _kept_by_spark(location: str) -> Offsets | None:
    text = folder.read(location, _SPARKS_OWN)
    if text is None:
        return None
    try:
        found = json.loads(text.lstrip(b"\0").split(b"\n", 1)[1])
    except (ValueError, IndexError):
        return None  # another source's, in its own format
    return found if isinstance(found, dict) else None


def keep(location: str, initial: Callable[[], Offsets], source: str = SOURCE) -> Offsets | None:
    """The start of a source's first batch, as stored by the first start; stored now if this is the first.

    Runs on the driver, before Spark logs that batch. May be called again: the first call wins. None: the checkpoint has
    batches of the source but no stored start, which may have changed since.

    Args:
        initial: asks the source.
    """
    found = kept(location, source)
    if found is not None or source in by_source(folder.newest_offsets(location)):
        return found
    offsets = initial()
    folder.write_record(location, folder.sidecar(FILE, source), {"offsets": offsets}, first=True)
    # Another start may have been faster: the file's content counts.
    return kept(location, source) or offsets
