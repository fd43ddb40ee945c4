"""Which dead letters an operator has looked at, kept in the checkpoint: those since then are a problem."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from delivered.checkpoint import folder
from delivered.model.errors import DeliveredError
from delivered.model.work import without_format

log = logging.getLogger(__name__)

FILE = "delivered/looked-at.json"


@dataclass(frozen=True)
class NewDeadLetters:
    """
    Attributes:
        count: since the last look. since_ms: when that was, in milliseconds since 1970; None: never.
    """

    count: int
    since_ms: int | None


class _Counted(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def records(self) -> int | None: ...
    @property
    def dead_letters(self) -> bool: ...


def new_dead_letters(location: str, sinks: Iterable[_Counted]) -> dict[str, NewDeadLetters]:
    """By sink that holds dead letters, and whose ledger answered."""
    queues = {s.name: s.records for s in sinks if s.dead_letters and s.records is not None}
    seen = _read(location) if queues else {}
    found: dict[str, NewDeadLetters] = {}
    for name, records in queues.items():
        at = seen.get(name)
        # More were seen than there are: the checkpoint is a new one.
        before = at["records"] if at is not None and at["records"] <= records else 0
        found[name] = NewDeadLetters(records - before, at["at_ms"] if before and at is not None else None)
    return found


def looked_at(location: str, sinks: Iterable[_Counted]) -> None:
    """Remember that an operator has seen what there is. Never raises: one who may only read looks, too."""
    now = time.time_ns() // 1_000_000
    counts = {s.name: {"records": s.records, "at_ms": now} for s in sinks if s.dead_letters and s.records is not None}
    try:
        folder.write_record(location, FILE, {"dead_letters": {**_read(location), **counts}})
    except DeliveredError as error:
        log.debug("the look was not kept: %s", error)


def _read(location: str) -> Mapping[str, Any]:
    try:
        text = folder.read(location, FILE)
        return {} if text is None else dict(without_format(json.loads(text), "looks")["dead_letters"])
    except (DeliveredError, ValueError, KeyError, TypeError) as error:
        log.debug("earlier looks cannot be read: %s", error)
        return {}
