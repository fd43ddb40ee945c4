"""How long Pulsar keeps messages that no subscription waits for, by a topic's retention and the time of its messages.

Brokers delete complete ledgers behind the slowest subscription, never the one that is written, once they have been
closed for longer than the retention time, or while the others are larger than the retention size. So what is said here
is the earliest time. Nothing says what a topic held before its first ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from delivered.connectors.pulsar.client import Admin, Bounds, Retention
from delivered.connectors.pulsar.positions import Partition, Position, physical, ranges, rest, short_name
from delivered.contract.source import Retained
from delivered.model.errors import UsageError

CLOCKS_APART_MS = 60_000
"""Of producers, of brokers, and of the host that compares."""
_MINUTE_MS, _MEBIBYTE = 60_000, 1 << 20


def retained(
    admin: Admin,
    there: Mapping[Partition, Bounds],
    at: Mapping[Partition, Position],
    is_deleted: Callable[[Position, Bounds], bool],
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
