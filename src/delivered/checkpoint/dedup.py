"""The dedup that created a checkpoint's state, stored in its sidecar.

If the dedup does not match the state, Spark at best reports its internal row layout; with another `within`, it silently
continues. So the first start stores the dedup, and later starts with another one are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from delivered.checkpoint import folder
from delivered.model.dedup import Dedup
from delivered.model.errors import Refused

FILE = "delivered/dedup.json"


@dataclass(frozen=True)
class _Kept:
    dedup: Dedup | None
    sink: str
    """The one whose database has the key table."""

    @classmethod
    def of(cls, found: dict[str, Any]) -> _Kept:
        dedup = found["dedup"]
        return cls(None if dedup is None else Dedup.from_json(dedup), str(found.get("sink", "")))


def _read(location: str) -> _Kept | None:
    return folder.read_record(location, FILE, "a dedup's settings", _Kept.of, "DEDUP_DAMAGED")


def kept(location: str) -> Dedup | None:
    """The dedup that created the checkpoint's state; None: none.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    found = _read(location)
    return None if found is None else found.dedup


def changed(location: str, dedup: Dedup | None, sink: str = "") -> str | None:
    """The checkpoint's dedup, for messages, if the pipeline's differs; else None.

    Args:
        sink: the deciding sink, whose database has the key table.
    """
    found = _read(location)
    if found is None or found.dedup is None:
        return None if dedup is None else "no dedup"
    before = found.dedup
    at = found.sink if before.in_table else sink
    if dedup is not None and dedup.remembers_as(before) and at == sink:
        return None
    return f"dedup {before.says}" + f" of the database of sink {at!r}" * before.in_table


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
    folder.write_record(location, FILE, {"dedup": dedup.to_json() if dedup is not None else None, **place})
