"""A scan of the sink's topic between two positions, and what happened to the messages before one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from delivered.connectors.pulsar import (
    START,
    Partition,
    Position,
    from_json,
    physical,
    short_name,
    to_json,
)
from delivered.connectors.pulsar.client import Admin, Bounds
from delivered.connectors.pulsar.source import PulsarSource, all_bounds, is_deleted, reach_ms, with_follower
from delivered.contract.sink import Changes, Expired
from delivered.contract.source import Offsets, Slice
from delivered.source import SourceScan


@dataclass(frozen=True)
class PulsarScan(SourceScan):
    """See `delivered.contract.sink.BoundedScan`. A position is the last entry of each partition."""

    source: PulsarSource

    def position(self) -> Offsets:
        return to_json({p: with_follower(bounds.last, bounds) for p, bounds in self._now().items()})

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        """Where messages after `since` were deleted, the ones that are left."""
        now, at = self._now(), from_json(since or {})
        end = {p: bounds.last for p, bounds in now.items()}
        stop = end if until is None else {p: stop for p, stop in from_json(until).items() if p in now}
        with closing(self.source.driver()) as driver:
            start = {p: START if is_deleted(at.get(p, START), now[p]) else at.get(p, START) for p in stop}
            stop = {p: START if is_deleted(position, now[p]) else position for p, position in stop.items()}
            return driver.slices(to_json(start), to_json(stop))

    def kept(self, position: Offsets) -> Mapping[str, Any]:
        """The ledgers, with their entries, and a hash of the entry at the position."""
        at, now = from_json(position), self._now()
        with closing(self.source.driver()) as driver:
            return {
                "ledgers": {physical(p): _ledgers(now[p], at[p]) for p in at if p in now},
                "entries": dict(driver.landmarks(to_json({p: at[p] for p in at if p in now}))),
            }

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:
        at, now, found = from_json(position), self._now(), self.kept(position)
        known = found if before is None else before
        expired, altered, unknown = [], [], []
        for partition, last in at.items():
            topic = physical(partition)
            name = short_name(topic)
            if partition not in now:
                altered.append(f"{name} was deleted")
                continue
            there = {ledger for ledger, _ in found["ledgers"][topic]}
            removed = [(ledger, count) for ledger, count in known["ledgers"].get(topic, ()) if ledger not in there]
            if removed and is_deleted(last, now[partition]):
                unknown.append(f"all messages of {name} up to {last} were removed, by retention or with the topic")
            elif removed:
                count = sum(count for _, count in removed)
                expired.append(f"{name}: {count} entries up to ledger {removed[-1][0]} were removed by retention")
            if known["entries"].get(topic) not in (None, found["entries"].get(topic)) and topic in found["entries"]:
                altered.append(f"{name} has another entry at {last} than before")
            if now[partition].last.order[:2] < last.order[:2] and not is_deleted(last, now[partition]):
                altered.append(f"{name} ends at {now[partition].last}, and had messages up to {last}")
        return Changes(tuple(expired), tuple(altered), (), tuple(unknown), continues=not altered)

    def expired(self) -> Mapping[str, Expired]:
        """What the retention of the topics may have removed: Pulsar does not say what a topic held before."""
        now = self._now()
        reach = reach_ms(Admin(self.source.options), {p: bounds for p, bounds in now.items() if bounds.ledgers})
        names = {p: short_name(physical(p)) for p in reach}
        return {
            names[p]: Expired(f"{names[p]}: its retention may have removed messages before ledger {_first(now[p])}", ms)
            for p, ms in sorted(reach.items())
            if ms != 0
        }

    def _now(self) -> dict[Partition, Bounds]:
        return dict(all_bounds(Admin(self.source.options), self.source.options))


def _first(bounds: Bounds) -> int:
    return bounds.ledgers[0][0]


def _ledgers(bounds: Bounds, at: Position) -> list[list[int]]:
    """Ledgers that hold entries before a position, with their number."""
    counts = [[ledger, at.entry + 1 if ledger == at.ledger else count] for ledger, count in bounds.ledgers]
    return [[ledger, count] for ledger, count in counts if ledger <= at.ledger and count > 0]
