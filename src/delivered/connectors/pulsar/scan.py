"""A scan of the sink's topic between two positions, what happened to the messages before one, and how long Pulsar keeps
those behind one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from delivered.connectors.pulsar import (
    START,
    Partition,
    Position,
    from_json,
    physical,
    ranges,
    rest,
    short_name,
    to_json,
)
from delivered.connectors.pulsar.client import Admin, Bounds, Retention
from delivered.connectors.pulsar.source import PulsarSource, all_bounds, is_deleted, with_follower
from delivered.contract.sink import Changes, Expired
from delivered.contract.source import Offsets, Retained, Slice
from delivered.model.errors import UsageError
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


# How long Pulsar keeps messages that no subscription waits for, by a topic's retention and the time of its messages.
#
# Brokers delete complete ledgers behind the slowest subscription, never the one that is written, once they have been
# closed for longer than the retention time, or while the others are larger than the retention size. So what is said
# here is the earliest time. Nothing says what a topic held before its first ledger.

CLOCKS_APART_MS = 60_000
"""Of producers, of brokers, and of the host that compares."""
_MINUTE_MS, _MEBIBYTE = 60_000, 1 << 20


def retained(
    admin: Admin,
    there: Mapping[Partition, Bounds],
    at: Mapping[Partition, Position],
) -> Retained:
    """See `delivered.contract.source.SourceDriver`."""
    policies, unknown = _policies(admin, {topic for topic, _ in at})
    missing: dict[str, int] = {}
    until: dict[str, int] = {}
    for partition, position in at.items():
        topic, name = partition[0], short_name(physical(partition))
        if (bounds := there.get(partition)) is None:
            unknown.append(f"{name}: no longer there, or no longer read")
            continue
        if is_deleted(position, bounds):
            missing[name] = 0
        retention = policies.get(topic)
        if retention is not None and (ms := _until(admin, partition, position, bounds, retention)) is not None:
            until[name] = ms
    return Retained(missing, until, "; ".join(unknown))


def reach_ms(admin: Admin, bounds: Mapping[Partition, Bounds]) -> dict[Partition, int | None]:
    """Messages published before this time, in ms since 1970, may have been removed; None: of any age; 0: none. Absent:
    this user may not see the topic's retention."""
    policies, _ = _policies(admin, {topic for topic, _ in bounds})
    return {p: _reach_ms(policies[p[0]], there.size) for p, there in bounds.items() if p[0] in policies}


def _policies(admin: Admin, topics: Iterable[str]) -> tuple[dict[str, Retention], list[str]]:
    """By topic; and why some are unknown."""
    found: dict[str, Retention] = {}
    unknown: list[str] = []
    for topic in sorted(topics):
        try:
            found[topic] = admin.retention(topic)
        except UsageError as error:
            if error.code != "DELIVERED_NOT_PERMITTED":
                raise
            unknown.append(f"{short_name(topic)}: this user may not see its retention (an administrator's token does)")
    return found, unknown


def _reach_ms(retention: Retention, size: int) -> int | None:
    if retention.keeps_all:
        return 0
    # What is left after a cut by size is at least that large.
    if retention.mebibytes >= 0 and size >= retention.mebibytes * _MEBIBYTE:
        return None
    return 0 if retention.minutes < 0 else _now_ms() - retention.minutes * _MINUTE_MS + CLOCKS_APART_MS


def _until(admin: Admin, partition: Partition, position: Position, bounds: Bounds, retention: Retention) -> int | None:
    """When the first message behind a position may be deleted, if no subscription waits for it; None: there is none, or
    it is kept."""
    behind = ranges(position, bounds.last, bounds.ledgers)
    if not behind or retention.keeps_all:
        return None
    ledger, first, _ = behind[0]
    entry = admin.entry(physical(partition), ledger, first)
    if entry is None or entry.published_ms is None:
        return None
    limits = [] if retention.minutes < 0 else [entry.published_ms + retention.minutes * _MINUTE_MS]
    if retention.mebibytes >= 0:
        # At the rate at which the topic has grown since that message.
        share = rest(position, bounds.last, bounds.ledgers) / max(1, sum(count for _, count in bounds.ledgers))
        grown, took_ms = bounds.size * share, max(1, _now_ms() - entry.published_ms)
        left = max(0.0, retention.mebibytes * _MEBIBYTE - grown)
        limits.append(_now_ms() + int(left / max(grown, 1.0) * took_ms))
    return min(limits)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
