"""The dedup that created a checkpoint's state, stored in its sidecar.

If the dedup does not match the state, Spark at best reports its internal row layout; with another `within`, it silently
continues. So the first start stores the dedup, and later starts with another one are refused.
"""

from __future__ import annotations

import json

from delivered.checkpoint import folder
from delivered.model import record_format
from delivered.model.dedup import Dedup
from delivered.model.errors import InvariantBroken, Refused

FILE = "delivered/dedup.json"


def kept(location: str) -> Dedup | None:
    """The dedup that created the checkpoint's state; None: none.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    text = folder.read(location, FILE)
    if text is None:
        return None
    try:
        found = record_format.known(json.loads(text), "a dedup's settings")["dedup"]
        return None if found is None else Dedup.from_json(found)
    except (ValueError, KeyError, TypeError) as error:
        raise InvariantBroken(
            "DEDUP_DAMAGED",
            f"{FILE!r} of the checkpoint {location!r} contains {text[:80]!r}; it must be what the first start of the "
            "pipeline wrote.",
            next_step="restore the file from the checkpoint's backup",
        ) from error


def changed(location: str, dedup: Dedup | None, sink: str = "") -> str | None:
    """The checkpoint's dedup, for messages, if the pipeline's differs; else None.

    Args:
        sink: the deciding sink, whose database has the key table.
    """
    before = kept(location)
    if before is None:
        return None if dedup is None else "no dedup"
    at = _sink(location) if before.in_table else sink
    if dedup is not None and dedup.remembers_as(before) and at == sink:
        return None
    return f"dedup {before.says}" + f" of the database of sink {at!r}" * before.in_table


def _sink(location: str) -> str:
    """The sink whose database has the key table."""
    return str(json.loads(folder.read(location, FILE) or "{}").get("sink", ""))


def keep(location: str, dedup: Dedup | None, *, fresh: bool, sink: str = "") -> None:
    """Store the dedup before there is any state.

    Args:
        sink: the deciding sink.
        fresh: no query has run on this checkpoint; what a failed start left behind is replaced.

    Raises:
        Refused: the checkpoint started with another one. The plan checks this first; it is enforced here.
    """
    before = changed(location, dedup, sink)
    if before is None:
        return
    if not fresh:
        raise Refused("DEDUP_CHANGED", f"The checkpoint {location!r} started with {before}.", "restore that setting")
    place = {"sink": sink} if dedup is not None and dedup.in_table else {}
    record = record_format.numbered({"dedup": dedup.to_json() if dedup is not None else None, **place})
    data = json.dumps(record, separators=(",", ":"))
    folder.write(location, FILE, data.encode(), first=False)
