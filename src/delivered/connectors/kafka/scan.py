"""A scan of the sink's topics between two positions, and what happened to the records before one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from delivered.clients.kafka.record_batch import Partition
from delivered.connectors.kafka import EARLIEST, Place, Positions
from delivered.connectors.kafka.reader import KafkaDriverClient, find_compacted, joined, reach_ms
from delivered.connectors.kafka.source import KafkaSource, LogHistory, Parting, are_different
from delivered.contract.sink import Changes, Expired
from delivered.contract.source import Offsets, Slice
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

    def compacted(self) -> Sequence[str]:
        with self._topics() as now:
            return find_compacted(now.client)

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
