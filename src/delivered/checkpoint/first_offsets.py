"""Where a pipeline's source began, kept beside Spark's checkpoint.

Spark logs where a batch ends, and takes where batch 0 begins from the source, again if batch 0 runs again. With
startingOffsets "latest" that would be another place, and what lies between would be lost. So the source's first start
writes the offsets down, once, and every later one begins there. The audit reads from here on.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from delivered.checkpoint import folder
from delivered.contract.source import Offsets
from delivered.model import record_format
from delivered.model.errors import InvariantBroken

FILE = "delivered/source-offsets.json"

_SPARKS_OWN = "sources/0/0"
"""Where Spark's Kafka source keeps its first offsets: a zero byte, a line with a version, the offsets as JSON."""


def kept(location: str) -> Offsets | None:
    """The offsets that an earlier start wrote down, ours or one of Spark's own Kafka source; None: nobody did.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    text = folder.read(location, FILE)
    if text is None:
        return _kept_by_spark(location)
    try:
        found: Offsets = record_format.known(json.loads(text), "a source's first offsets")["offsets"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvariantBroken(
            "SOURCE_OFFSETS_DAMAGED",
            f"{FILE!r} of the checkpoint {location!r} holds {text[:80]!r}; it must be what the first start of the "
            "pipeline wrote.",
            next_step="restore the file from the checkpoint's backup",
        ) from error
    return found


def _kept_by_spark(location: str) -> Offsets | None:
    text = folder.read(location, _SPARKS_OWN)
    if text is None:
        return None
    try:
        found = json.loads(text.lstrip(b"\0").split(b"\n", 1)[1])
    except (ValueError, IndexError):
        return None  # of another source, whose shape is its own
    return found if isinstance(found, dict) else None


def keep(location: str, initial: Callable[[], Offsets]) -> Offsets | None:
    """Where batch 0 begins, by what the first start wrote down; written now if this is the first.

    Runs on the driver, before Spark logs the first batch. May be called again: the first one stands. None: a checkpoint
    that holds a batch already, and whose first start wrote nothing: it began elsewhere than the source would today.

    Args:
        initial: asks the source.
    """
    found = kept(location)
    if found is not None or folder.holds_batches(location):
        return found
    offsets = initial()
    text = json.dumps(record_format.numbered({"offsets": offsets}), separators=(",", ":"))
    folder.write(location, FILE, text.encode(), first=True)
    # Another start may have been first: what the file holds is what counts.
    return kept(location) or offsets
