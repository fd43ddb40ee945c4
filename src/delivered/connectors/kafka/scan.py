"""A scan of the sink's topics between two positions, what happened to the records before one, and how long Kafka keeps
those behind one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from delivered.clients.kafka.consumer import TOPIC_CONFIG, describe_configs, log_bytes
from delivered.clients.kafka.record_batch import Partition
from delivered.connectors.kafka import EARLIEST, LATEST, Place, Positions, SourceOptions
from delivered.connectors.kafka.reader import KafkaDriverClient, find_write_times, joined
from delivered.connectors.kafka.source import KafkaSource, LogHistory, Parting, are_different
from delivered.contract.sink import Changes, Expired
from delivered.contract.source import Offsets, Retained, Slice
from delivered.model.errors import UsageError
from delivered.source import SourceScan


@dataclass(frozen=True)
class _Topics:
    """The topics now.

    Attributes:
        first: partition -> its first offset.
        end: last stable offsets, topic ids, leader epochs.
    """

    client: KafkaDriverClient
    history: LogHistory
    first: Mapping[Partition, int]
    end: Positions

    def same(self, at: Positions) -> list[Partition]:
        """Partitions of `at` whose topic was not recreated since."""
        ids = self.end.ids
        return [p for p in at.at if p in self.end.at and at.ids.get(p[0], ids[p[0]]) == ids[p[0]]]


@dataclass(frozen=True)
class KafkaScan(SourceScan):
    """See `delivered.contract.sink.BoundedScan`. Positions are last stable offsets: the records of open transactions
    lie behind them."""

    source: KafkaSource

    def position(self) -> Offsets:
        with self._topics() as now:
            return now.end.to_json()

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: without topic ids, offsets that a user wrote, which must exist."""
        if since is None and until is None:
            return super().slices()
        with self._topics() as now, closing(self.source.driver()) as driver:
            stop = now.end if until is None else _without_recreated(Positions.from_json(until), now)
            start = _find_start(Positions.from_json(since or {}), now, stop)
            return driver.slices(start.to_json(), stop.to_json())

    def kept(self, position: Offsets) -> Mapping[str, Any]:
        """First offsets and when they were written, and the header of the record batch before the position."""
        with self._topics() as now:
            at = Positions.from_json(position)
            first = {p: now.first[p] for p in now.same(at)}
            oldest = Positions({p: offset + 1 for p, offset in first.items() if offset < at.at[p]}, at.ids)
            return {
                "first": Positions(first).to_json(),
                "landmarks": _find_landmarks(now, at),
                "written_ms": {p: _written_ms(text) for p, text in _find_landmarks(now, oldest).items()},
            }

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:
        at = Positions.from_json(position)
        try:
            with self._topics() as now:
                expired, deleted, missed, unknown = _find_removed(now, at, before)
                partings = _find_partings(now, at)
                known = (before or {}).get("landmarks", {})
                altered = [*_find_replaced(now, at), *_describe_partings(now, at, partings, known), *deleted]
        except UsageError as error:
            if error.code != "DELIVERED_TOPIC_MISSING":
                raise
            return Changes.deleted(self.source.options.what)
        return Changes(
            tuple(expired),
            tuple(altered),
            tuple(missed),
            tuple(unknown),
            continues=all(parting.offset is not None for parting in partings.values()),
        )

    def expired(self) -> Mapping[str, Expired]:
        """As the settings of the topics are now."""
        with self._topics() as now:
            reach = reach_ms(now.client, [p for p in now.end.at if now.first[p]])
        return {
            joined([p]): Expired(f"{joined([p])}: offsets 0 to {now.first[p] - 1} were removed by retention", ms)
            for p, ms in sorted(reach.items())
            if ms != 0
        }

    @contextmanager
    def _topics(self) -> Iterator[_Topics]:
        """Raises Unreachable, UsageError."""
        options = self.source.options
        with closing(KafkaDriverClient(options)) as client:
            partitions, ids = client.partitions()
            ends, epochs = client.ends(partitions)
            earliest: dict[Partition, Place] = dict.fromkeys(partitions, EARLIEST)
            first = {p: offset or 0 for p, offset in client.offsets(earliest).items()}
            end = Positions({p: ends[p] for p in partitions}, ids, epochs=epochs)
            yield _Topics(client, LogHistory(options, client.wire), first, end)


def _without_recreated(at: Positions, now: _Topics) -> Positions:
    """Without topics that were recreated since, all of whose records lie behind `at`."""
    same = now.same(at)
    return Positions({p: at.at[p] for p in same}, {p[0]: now.end.ids[p[0]] for p in same})


def _find_start(since: Positions, now: _Topics, stop: Positions) -> Positions:
    """Where to start reading: the first record that is left behind `since`, also of a log that lost its end since."""
    if since.at and not since.ids:
        return Positions({**now.first, **since.at}, now.end.ids)
    partings = _find_partings(now, since)
    start = dict(now.first)
    for p in now.same(since):
        parted = partings.get(p)
        same = since.at[p] if parted is None or parted.offset is None else min(parted.offset, since.at[p])
        start[p] = max(start[p], min(same, now.end.at[p]))
    return Positions({p: min(o, stop.at.get(p, o)) for p, o in start.items()}, now.end.ids)


def _find_partings(now: _Topics, at: Positions) -> Mapping[Partition, Parting]:
    same = set(now.same(at))
    return now.history.compare(at, {p: e for p, e in at.epochs.items() if p in same})


def _find_landmarks(now: _Topics, at: Positions) -> dict[str, str]:
    found = now.history.landmarks({p: at.at[p] for p in now.same(at)})
    return {f"{topic}/{number}": text for (topic, number), text in sorted(found.items())}


def _find_replaced(now: _Topics, at: Positions) -> Iterator[str]:
    """Topics that are others now, and partitions that end before the position."""
    for topic in sorted({t for t, _ in at.at}):
        if topic not in now.end.ids:
            yield f"topic {topic} was deleted"
        elif at.ids.get(topic, now.end.ids[topic]) != now.end.ids[topic]:
            yield f"topic {topic} was deleted and recreated"
    if short := [p for p in now.same(at) if now.end.at[p] < at.at[p]]:
        p = min(short)
        yield f"{joined(short)} ends at offset {now.end.at[p]}, and had records up to offset {at.at[p] - 1}"


def _describe_partings(
    now: _Topics, at: Positions, partings: Mapping[Partition, Parting], known: Mapping[str, str]
) -> Iterator[str]:
    for p, parting in sorted(partings.items()):
        where = "it has no leader epoch as new" if parting.offset is None else f"from offset {parting.offset} on"
        yield f"{joined([p])} has other records before offset {at.at[p]} than it had: {where}"
    left = Positions({p: o for p, o in at.at.items() if p not in partings}, at.ids)
    for name, text in _find_landmarks(now, left).items():
        if name in known and are_different(known[name], text):
            topic, _, number = name.rpartition("/")
            yield f"{topic}-{number} has other records before offset {at.at[topic, int(number)]} than it had"


def _find_removed(
    now: _Topics, at: Positions, before: Mapping[str, Any] | None
) -> tuple[list[str], list[str], list[str], list[str]]:
    """What is missing from the start of logs: expired, deleted, missed and unknown."""
    expired, deleted, missed, unknown = [], [], [], []
    same, known = now.same(at), {t for t, _ in at.at}
    first = now.first if before is None else Positions.from_json(before["first"]).at
    removed = {p: until for p in same if (until := min(now.first[p], at.at[p])) > first.get(p, 0)}
    reach = reach_ms(now.client, removed)
    for p, until in sorted(removed.items()):
        what = f"{joined([p])}: offsets {first.get(p, 0)} to {until - 1} were removed"
        ms = reach.get(p)
        if p not in reach:
            unknown.append(f"{what}; this user may not see whether the topic's settings let records expire")
        elif ms == 0:
            deleted.append(f"{what}, and the topic's settings let no record expire")
        elif ms is not None and _newest_ms(before or {}, p, complete=until == at.at[p]) >= ms:
            deleted.append(f"{what}, and were younger than the topic's settings let records expire")
        else:
            expired.append(f"{what} by retention")
    for p in sorted(now.end.at):
        low, until = now.first[p], at.at.get(p, 0)
        if low > until and (p in same or (p[0] in known and p not in at.at)):
            missed.append(f"{joined([p])}: offsets {until} to {low - 1} were removed before an audit read them")
    return expired, deleted, missed, unknown


def _newest_ms(before: Mapping[str, Any], partition: Partition, *, complete: bool) -> int:
    """When the newest of the records that were removed before a position was written, at the earliest; 0: unknown.

    Args:
        before: facts about them.
        complete: all of them were removed.
    """
    name = "{}/{}".format(*partition)
    last = before.get("landmarks", {}).get(name) if complete else None
    return _written_ms(last) if last is not None else int(before.get("written_ms", {}).get(name, 0))


def _written_ms(landmark: str) -> int:
    return int(json.loads(landmark)["timestamp"])


# How long Kafka keeps the records from a position on, by a topic's settings and the time of its first record there.
#
# Brokers delete complete segments, some time after their newest record is older than `retention.ms`, or while the log
# is larger than `retention.bytes`. So what is said here is the earliest time; of a limit in bytes, at the rate at which
# the log has grown since that record.

CLOCKS_APART_MS = 60_000
"""Of brokers, of hosts that write records, and of the one that compares."""

_SETTINGS = ("cleanup.policy", "retention.ms", "retention.bytes")


@dataclass(frozen=True)
class Retention:
    """A topic's settings.

    Attributes:
        ms_max, bytes_max: from which age and size on records are deleted; None: from none on.
        compacts: removes records with newer ones of their key, at any time.
    """

    ms_max: int | None
    bytes_max: int | None
    compacts: bool

    def reach_ms(self, size: int | None) -> int | None:
        """Records written before this time, in ms since 1970, may have been removed; None: of any age; 0: none.

        Args:
            size: of the partition's log, in bytes; None: unknown.
        """
        # What a limit in bytes cuts is at least that long afterwards, and only compaction makes it shorter.
        if self.bytes_max is not None and (size is None or size >= self.bytes_max or self.compacts):
            return None
        return 0 if self.ms_max is None else _now_ms() - self.ms_max + CLOCKS_APART_MS


def retention_of(client: KafkaDriverClient, topic: str) -> Retention | None:
    """None: this user may not see the topic's settings. Raises Unreachable, UsageError."""
    found = client.ask(partial(describe_configs, kind=TOPIC_CONFIG, name=topic, keys=_SETTINGS), topic)
    policy, *limits = ((found or {}).get(key) for key in _SETTINGS)
    if policy is None or None in limits:
        return None
    ms_max, bytes_max = (int(n) if "delete" in policy and int(n) >= 0 else None for n in limits if n is not None)
    return Retention(ms_max, bytes_max, "compact" in policy)


def reach_ms(client: KafkaDriverClient, partitions: Collection[Partition]) -> dict[Partition, int | None]:
    """`Retention.reach_ms` of each partition; absent: this user may not see its topic's settings.

    Raises:
        Unreachable, UsageError: no answer.
    """
    found: dict[Partition, int | None] = {}
    for topic in sorted({t for t, _ in partitions}):
        own, retention = [p for p in partitions if p[0] == topic], retention_of(client, topic)
        if retention is None:
            continue
        has_limit = retention.bytes_max is not None
        sizes = client.ask(partial(log_bytes, partitions=own), topic) if has_limit else {}
        found |= {p: retention.reach_ms(sizes.get(p)) for p in own}
    return found


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def find_retained(options: SourceOptions, client: KafkaDriverClient, at: Positions) -> Retained:
    """See `delivered.contract.source.SourceDriver`."""
    partitions, ids = client.partitions()
    again = [p for p in at.at if p in partitions and at.ids.get(p[0], ids[p[0]]) != ids[p[0]]]
    kept = {p: o for p, o in at.at.items() if p in partitions and p not in again}
    first = {p: o or 0 for p, o in client.offsets(dict.fromkeys(kept, EARLIEST)).items()}
    ends = {p: o or 0 for p, o in client.offsets(dict.fromkeys(kept, LATEST)).items()}
    waiting = {p: (max(o, first[p]), ends[p]) for p, o in kept.items() if ends[p] > max(o, first[p])}
    unknown = [f"{joined(again)}: the topic was deleted and recreated"] if again else []
    if absent := [p for p in at.at if p not in partitions]:
        unknown.append(f"{joined(absent)}: no longer there, or no longer read")
    until: dict[str, int] = {}
    written = find_write_times(options, waiting) if waiting else {}
    for topic in sorted({t for t, _ in written}):
        since = {p: ms for p, ms in written.items() if p[0] == topic}
        retention = retention_of(client, topic)
        if retention is None:
            unknown.append(f"{topic}: this user may not see its settings (DescribeConfigs)")
            continue
        if retention.compacts:
            unknown.append(f"{topic}: it is compacted, which removes records at any time")
        limits = [] if retention.ms_max is None else [{p: ms + retention.ms_max for p, ms in since.items()}]
        if retention.bytes_max is not None:
            sizes = client.ask(partial(log_bytes, partitions=list(since)), topic)
            if since.keys() - sizes.keys():
                unknown.append(f"{topic}: this user may not see the size of its log (Describe on the cluster)")
            limits.append(_by_size(since, sizes, retention.bytes_max, first, waiting))
        for (name, number), ms in ((p, min(found)) for p in since if (found := [t[p] for t in limits if p in t])):
            until[f"{name}/{number}"] = ms
    missing = {f"{t}/{n}": first[t, n] - o for (t, n), o in kept.items() if first[t, n] > o}
    return Retained(missing, until, "; ".join(unknown))


def _by_size(
    since: Mapping[Partition, int],
    sizes: Mapping[Partition, int],
    bytes_max: int,
    first: Mapping[Partition, int],
    waiting: Mapping[Partition, tuple[int, int]],
) -> dict[Partition, int]:
    """When the log behind these records will have grown to its limit, if it grows on as it has since then."""
    now, until = _now_ms(), dict[Partition, int]()
    for partition, size in sizes.items():
        start, end = waiting[partition]
        behind = size * (end - start) / max(1, end - first[partition])
        took_ms = max(1, now - since[partition])
        until[partition] = now + int(max(0.0, bytes_max - behind) / max(behind, 1.0) * took_ms)
    return until
