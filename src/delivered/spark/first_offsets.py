"""Where a pipeline's source began, kept beside Spark's checkpoint.

Spark logs where a batch ends, and takes where batch 0 begins from the source, again if batch 0 runs again. With
startingOffsets "latest" that would be another place, and what lies between would be lost. So the first start writes
the offsets down, once, and every start of a `Pipeline` passes them as explicit `startingOffsets`. In the bare idiom the
sink writes down what the source told it (handover.py). The audit reads from here on.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from delivered.contract.source import Offsets, Source
from delivered.model import record_format
from delivered.model.dialect import shown, starting_at
from delivered.model.errors import InvariantBroken
from delivered.spark import sidecar
from delivered.spark.checkpoint import holds_batches

FILE = "delivered/source-offsets.json"

_SPARKS_OWN = "sources/0/0"
"""Where Spark's Kafka source keeps its first offsets: a zero byte, a line with a version, the offsets as JSON."""


def kept(location: str) -> Offsets | None:
    """The offsets that an earlier start wrote down, ours or one of Spark's own Kafka source; None: nobody did.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    text = sidecar.read(location, FILE)
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
    text = sidecar.read(location, _SPARKS_OWN)
    if text is None:
        return None
    try:
        found = json.loads(text.lstrip(b"\0").split(b"\n", 1)[1])
    except (ValueError, IndexError):
        return None  # of another source, whose shape is its own
    return found if isinstance(found, dict) else None


def keep(location: str, source: Source) -> Offsets | None:
    """The offsets that the first start wrote down; written now if this is the first. None: they are not known.

    Runs on the driver, before the query starts. May be called again: the first one stands. A checkpoint that holds a
    batch already began elsewhere than the source would begin today.
    """
    found = kept(location)
    if found is not None or holds_batches(location):
        return found
    driver = source.driver()
    try:
        offsets = driver.initial()
    finally:
        driver.close()
    note(location, offsets)
    # Another start may have been first: what the file holds is what counts.
    return kept(location) or offsets


def note(location: str, offsets: Offsets) -> None:
    """Write down where batch 0 begins, unless that is known."""
    if kept(location) is None:
        sidecar.write(
            location,
            FILE,
            json.dumps(record_format.numbered({"offsets": offsets}), separators=(",", ":")).encode(),
            first=True,
        )


def check(location: str, start: Offsets, end: Offsets, metadata: Collection[str] = ()) -> None:
    """Batch 0 runs again: it must begin where it began the first time, or what lies between is lost.

    Args:
        start: where it would begin now.
        end: as Spark logged it. A batch 0 without records, as at "latest" on a quiet source, may begin anywhere.
        metadata: keys of offsets that `start` leaves out.

    Raises:
        InvariantBroken: it begins elsewhere, as with startingOffsets "latest".
    """
    began = {k: v for k, v in (kept(location) or start).items() if k not in metadata}
    if began not in (start, end):
        text = json.dumps(began, separators=(",", ":"))
        raise InvariantBroken(
            "START_CHANGED",
            f"Batch 0 of the checkpoint {location!r} runs again. It began at {shown(text)}; now the source begins at "
            f"{shown(json.dumps(start))}, and what lies between would be lost. Nothing was written.",
            next_step=f"start once with {starting_at(text)} on the source; or always name "
            f"""the checkpoint to it too, with .option("checkpointLocation", {location!r})""",
        )
