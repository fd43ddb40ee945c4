"""Where a pipeline's source began, kept beside Spark's checkpoint.

Spark logs where a batch ends, and takes where batch 0 begins from the source, again if batch 0 runs again. With
startingOffsets "latest" that would be another place, and what lies between would be lost. So the first start writes
the offsets down, once, and every start passes them as explicit `startingOffsets`.
"""

from __future__ import annotations

import json

from delivered.contract import Offsets, Source
from delivered.model.errors import InvariantBroken
from delivered.spark import beside

FILE = "delivered/source-offsets.json"


def kept(location: str) -> Offsets | None:
    """The offsets that an earlier start wrote down, or None.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    text = beside.read(location, FILE)
    if text is None:
        return None
    try:
        found: Offsets = json.loads(text)["offsets"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvariantBroken(
            "SOURCE_OFFSETS_DAMAGED",
            f"{FILE!r} of the checkpoint {location!r} holds {text[:80]!r}; it must be what the first start of the "
            "pipeline wrote.",
            next_step="restore the file from the checkpoint's backup",
        ) from error
    return found


def keep(location: str, source: Source) -> Offsets:
    """The offsets that the first start wrote down; written now if this is the first.

    Runs on the driver, before the query starts. May be called again: the first one stands.
    """
    found = kept(location)
    if found is not None:
        return found
    driver = source.driver()
    try:
        offsets = driver.initial()
    finally:
        driver.close()
    beside.write(location, FILE, json.dumps({"offsets": offsets}, separators=(",", ":")).encode(), first=True)
    # Another start may have been first: what the file holds is what counts.
    return kept(location) or offsets
