"""What the Kafka source asks brokers: the driver partitions, offsets, retention, an executor the records of a range."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from delivered.clients.kafka import NoAnswer, consumer, resolved
from delivered.clients.kafka.consumer import Fetched, Fetcher, Topic
from delivered.clients.kafka.protocol import NoTopic, Wire, explain
from delivered.clients.kafka.record_batch import BatchTooLarge, Partition
from delivered.connectors.kafka import (
    EARLIEST,
    LATEST,
    OWNER,
    SOURCE_SETTINGS,
    Place,
    Positions,
    SourceOptions,
    Timestamp,
    Where,
    by_arrow,
    check_settings,
    is_internal,
)
from delivered.contract.source import Offsets, Resumption, Retained
from delivered.kits import WarmClients
from delivered.model.errors import BadRecord, DeliveredError, InvariantBroken, Refused, Unreachable, UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S, RESTART_CONFIRM_S, SOURCE_PATIENCE_S
from delivered.model.patience import within
from delivered.model.rows import Origin, Rejection, Rows
from delivered.source import US_MAX, US_MIN, Range, columns

# The driver's requests of the Kafka source: partitions, offsets, and offsets of a consumer group.

T = TypeVar("T")
_TIMES = {EARLIEST: consumer.EARLIEST, LATEST: consumer.LATEST}


class KafkaDriverClient:
    """Connects on first use. Not thread-safe."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._wire: Wire | None = None

    def partitions(self) -> tuple[dict[Partition, None], dict[str, str]]:
        """Partitions to read now, sorted, and topic -> topic id.

        Raises:
            UsageError: a named topic does not exist, or may not be read. (Topics matched by a pattern may come and go.)
        """
        options = self._options
        if options.pattern is not None:
            names = self._matching(re.compile(options.pattern))
        elif options.topics is not None:
            names = list(options.topics)
        else:
            names = sorted({t for t, _ in options.partitions or ()})
        found: dict[Partition, None] = {}
        ids: dict[str, str] = {}
        for topic, description in self._describe(names):
            if description is None or (options.pattern is not None and description.internal):
                continue
            ids[topic] = description.id
            found.update(dict.fromkeys((topic, p) for p in description.partitions))
        if options.partitions is not None:
            for topic, number in options.partitions:
                if topic in ids and (topic, number) not in found:
                    raise UsageError(
                        "PARTITION_UNKNOWN.KAFKA",
                        owner=OWNER,
                        topic=topic,
                        partition=number,
                        servers=options.servers,
                    )
            found = {p: None for p in options.partitions if p in found}
        return found, ids

    def _matching(self, pattern: re.Pattern[str]) -> list[str]:
        listed = self.ask(Wire.topics, self._options.what)
        return sorted(t for t in listed if pattern.search(t) and not is_internal(t))

    def _known(self) -> list[str]:
        """Topics that a name may stand for; none, if this user may not list them."""
        try:
            return self._matching(re.compile(""))
        except DeliveredError:
            return []

    def _describe(self, names: list[str], missing_is_an_error: bool = False) -> list[tuple[str, Topic | None]]:
        """Topic and description; with a pattern, None for a topic that no longer exists."""
        if not names:
            return []
        found = self.ask(partial(consumer.describe_topics, names=names), ",".join(names))
        if self._options.pattern is None or missing_is_an_error:
            for name, topic in found.items():
                if topic is None:
                    raise explain(OWNER, "UNKNOWN_TOPIC_OR_PART", "", name, self._options.servers, self._known())
        return list(found.items())

    def offsets(self, wanted: Mapping[Partition, Place]) -> dict[Partition, int | None]:
        """Resolve places to offsets. `LATEST` is the last stable offset, or the high watermark with read_uncommitted.

        None: no record at or after that time.
        """
        found: dict[Partition, int | None] = {}
        ask: dict[Partition, Place] = {}
        for partition, place in wanted.items():
            if isinstance(place, int) and place >= 0:
                found[partition] = place
            else:
                ask[partition] = place
        if ask:
            listed = self._list(ask)
            found.update({p: offset for p, (offset, _) in listed.items()})
        return {p: found[p] for p in wanted}

    def ends(self, partitions: Iterable[Partition]) -> tuple[dict[Partition, int], dict[Partition, int]]:
        """As `offsets` for `LATEST`, and the epochs of the leaders that answered (none before Kafka 2.1)."""
        ask: dict[Partition, Place] = dict.fromkeys(partitions, LATEST)
        listed = self._list(ask) if ask else {}
        ends = {p: offset or 0 for p, (offset, _) in listed.items()}
        return ends, {p: epoch for p, (_, epoch) in listed.items() if epoch is not None}

    def _list(self, ask: Mapping[Partition, Place]) -> dict[Partition, tuple[int | None, int | None]]:
        """Offset and leader epoch."""
        times = {p: v.ms if isinstance(v, Timestamp) else _TIMES[v] for p, v in ask.items()}
        committed_only = self._options.committed_only
        return self.ask(partial(consumer.list_offsets, asked=times, committed_only=committed_only), self._options.what)

    def bounds(self, partition: Partition) -> tuple[int, int]:
        """First offset and end of one partition; (0, 0) if the partition does not exist."""
        try:
            self._describe([partition[0]], missing_is_an_error=True)
            low = self.offsets({partition: EARLIEST})[partition]
            high = self.offsets({partition: LATEST})[partition]
        except UsageError as error:
            if error.code == "DELIVERED_TOPIC_MISSING":
                return 0, 0
            raise
        return low or 0, high or 0

    def group_members(self, group: str) -> int:
        """Number of consumers in a group now."""
        return self.ask(partial(consumer.group_members, group=group), group)

    def committed(self, group: str, partitions: list[Partition]) -> dict[Partition, int]:
        """Offsets that a consumer group has committed, of these partitions. Raises Unreachable, UsageError."""
        ask = partial(consumer.committed_offsets, group=group, partitions=partitions)
        return self.ask(ask, f"group {group}")

    def commit(self, group: str, at: Mapping[Partition, int]) -> None:
        """Commit offsets to a consumer group. Raises Unreachable, UsageError."""
        if at:
            self.ask(partial(consumer.commit_offsets, group=group, at=at), f"group {group}", CONNECT_TIMEOUT_S)

    def ask(self, ask: Callable[[Wire], T], what: str, longest_s: float | None = None) -> T:
        """Ask until there is an answer: for 10 s, or for 120 s if brokers answered before and may be restarting.

        Args:
            ask: idempotent.
        """
        wire, servers = self.wire(), self._options.servers
        try:
            with nullcontext() if longest_s is None else within(longest_s):
                return wire.patiently(lambda: ask(wire))
        except consumer.Refusal as error:
            raise explain(OWNER, error.name, str(error), error.what, servers) from None
        except NoTopic as error:
            raise explain(OWNER, "UNKNOWN_TOPIC_OR_PART", str(error), what, servers) from None
        except NoAnswer as error:
            raise explain(OWNER, "_TIMED_OUT", str(error), what, servers) from None
        except Unreachable as error:
            name = "_TRANSPORT" if error.may_come_back else "_AUTHENTICATION"
            raise explain(OWNER, name, error.message, what, servers) from None

    def wire(self) -> Wire:
        """Its connections. Raises UsageError: a setting that no client knows."""
        if self._wire is None:
            if set(self._options.client) - SOURCE_SETTINGS:
                check_settings(OWNER, self._options.client)
            self._wire = Wire(resolved(self._options.client))
        return self._wire

    def close(self) -> None:
        """Idempotent."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


def joined(partitions: Iterable[Partition]) -> str:
    """The first five partitions, for messages."""
    names = [f"{t}-{n}" for t, n in sorted(partitions)]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# Turns the user's starting and ending offsets into offsets of the partitions.


def resolve(
    client: KafkaDriverClient,
    options: SourceOptions,
    where: Where,
    ends: Mapping[Partition, int],
    missing: int | None,
) -> dict[Partition, int]:
    """Resolve a place to an offset per partition.

    Args:
        ends: of the partitions to read, now.
        missing: used for a time after the last record; None: that is an error.
    """
    places: dict[Partition, Place] = {}
    silent = [p for p in ends if where.place(p) is None]
    foreign = [p for p in where.each if p not in ends]
    if silent or foreign:
        problem = f"does not name {joined(silent)}" if silent else f"names {joined(foreign)}, not read here"
        raise UsageError("OPTION_VALUE.KAFKA_PARTITIONS", option=where.option, problem=problem)
    for partition, end in ends.items():
        place = where.place(partition)
        # The end is the snapshot's, so that a batch's start and end, and a frozen stream, agree.
        places[partition] = end if place == LATEST or place is None else place
    found = client.offsets(places)
    late = [p for p, offset in found.items() if offset is None]
    if late and missing is None:
        ms = where.place(late[0])
        raise UsageError(
            "OPTION_VALUE.NO_RECORD_AFTER",
            option=where.option,
            partitions=joined(late),
            time=ms.ms if isinstance(ms, Timestamp) else ms,
        )
    # Never beyond the snapshot's end: records may have been appended since.
    at = {p: ends[p] if o is None else o for p, o in found.items()}
    if options.fail_on_data_loss:
        _check_range(client, where, at, ends)
    return {p: min(o, ends[p]) for p, o in at.items()}


def _check_range(
    client: KafkaDriverClient, where: Where, at: Mapping[Partition, int], ends: Mapping[Partition, int]
) -> None:
    """Reject offsets of the user's that do not exist."""
    named = {p: o for p, o in at.items() if where.place(p) == o}
    if not named:
        return
    low = client.offsets(dict.fromkeys(named, EARLIEST))
    for partition, offset in named.items():
        first, last = low[partition] or 0, ends[partition]
        if not first <= offset <= last:
            raise UsageError(
                "OFFSET_OUT_OF_RANGE.KAFKA",
                option=where.option,
                offset=offset,
                partition=joined([partition]),
                first=first,
                last=last,
            )


# Where another reader of the same topics stopped: a consumer group, a time, or offsets that it stored.


def find_resumption(options: SourceOptions, stopped: Offsets | str | int) -> Resumption:
    """See `delivered.contract.source.Source.resumption`."""
    with closing(KafkaDriverClient(options)) as client:
        match stopped:
            case dict():
                at = Positions.from_json(stopped).at
                return _build_resumption(options, client, at, "was never read by the old job")
            case str():
                return _build_resumption(options, client, _read_committed(options, client, stopped), None)
            case _:
                found = client.offsets(dict.fromkeys(client.partitions()[0], Timestamp(stopped)))
                ends = client.offsets(dict.fromkeys(found, LATEST))
                at = {p: o if o is not None else ends[p] or 0 for p, o in found.items()}
                return _build_resumption(options, client, at, None)


def _read_committed(options: SourceOptions, client: KafkaDriverClient, group: str) -> Mapping[Partition, int]:
    if members := client.group_members(group):
        raise Refused("ADOPT_RUNNING.GROUP", group=group, members=members)
    at = client.committed(group, list(client.partitions()[0]))
    if not at:
        raise Refused("ADOPT_GROUP_UNKNOWN", group=group, what=options.what)
    return at


def _build_resumption(
    options: SourceOptions, client: KafkaDriverClient, at: Mapping[Partition, int], unread: str | None
) -> Resumption:
    """Args: unread: what is known of a partition without an offset; None: nothing, so it must be empty."""
    partitions, ids = client.partitions()
    first = {p: o or 0 for p, o in client.offsets(dict.fromkeys(partitions, EARLIEST)).items()}
    ends = {p: o or 0 for p, o in client.offsets(dict.fromkeys(partitions, LATEST)).items()}
    if unread_partitions := at.keys() - partitions.keys():
        raise Refused("ADOPT_PARTITIONS.NOT_READ", partitions=joined(unread_partitions), what=options.what)
    missing = partitions.keys() - at.keys()
    unknown = [p for p in missing if ends[p] > first[p]] if unread is None else []
    if unknown:
        raise Refused("ADOPT_PARTITIONS.NO_OFFSET", partitions=joined(unknown))
    expired = {p: o for p, o in at.items() if o < first[p]}
    if expired and options.fail_on_data_loss:
        partition, offset = next(iter(sorted(expired.items())))
        raise Refused("ADOPT_RECORDS_GONE", offset=offset, partition=joined([partition]), first=first[partition])
    ahead = {p: o for p, o in at.items() if o > ends[p]}
    if ahead:
        partition, offset = next(iter(sorted(ahead.items())))
        raise Refused("ADOPT_OFFSETS_AHEAD", offset=offset, partition=joined([partition]), end=ends[partition])
    start = {p: max(at.get(p, first[p]), first[p]) for p in partitions}
    notes = [f"{joined([p])} {unread or 'is empty'}: it begins at {first[p]}" for p in sorted(missing)]
    return Resumption(
        Positions(start, ids).to_json(),
        {f"{t}-{n}": (o, ends[t, n] - o) for (t, n), o in start.items()},
        tuple(notes),
    )


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
    found = client.ask(
        partial(consumer.describe_configs, kind=consumer.TOPIC_CONFIG, name=topic, keys=_SETTINGS), topic
    )
    policy, *limits = ((found or {}).get(key) for key in _SETTINGS)
    if policy is None or None in limits:
        return None
    ms_max, bytes_max = (int(n) if "delete" in policy and int(n) >= 0 else None for n in limits if n is not None)
    return Retention(ms_max, bytes_max, "compact" in policy)


def find_compacted(client: KafkaDriverClient) -> list[str]:
    """Which topics are compacted, each a sentence. Raises Unreachable, UsageError."""
    policies = {t: retention_of(client, t) for t in sorted({t for t, _ in client.partitions()[0]})}
    return [
        f"topic {topic} is compacted, which removes older records of a key at any time"
        for topic, policy in policies.items()
        if policy is not None and policy.compacts
    ]


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
        sizes = client.ask(partial(consumer.log_bytes, partitions=own), topic) if has_limit else {}
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
            sizes = client.ask(partial(consumer.log_bytes, partitions=list(since)), topic)
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


# Record batches that are too large to be decompressed, as dead letters of their source.

_RECORDS = pa.field("recordBatch", pa.int64())
"""In a letter: its value is a record batch of so many offsets, not a record's value."""


def raw_schema(headers: bool) -> pa.Schema:
    """Columns of records, and of what stands for a record batch."""
    return columns(headers).append(_RECORDS)


def read_rows(options: SourceOptions, wanted: Range[Partition]) -> Iterator[Rows]:
    """As `read_range`; a record batch above `maxRecordBatchBytes`, and a record with a time that Spark cannot hold, is
    rejected."""
    found: list[Rejection] = []

    def keep(rejection: Rejection) -> None:
        found.append(rejection)  # the list of its time: each batch takes one along

    for batch in read_range(options, wanted, keep):
        rejected, found = found, []
        yield Rows(batch, rejected)
    if found:
        yield Rows(pa.RecordBatch.from_pylist([], schema=columns(options.headers)), found)


def decode(raw: pa.RecordBatch) -> Rows:
    """See `delivered.contract.source.Source`."""
    is_batch = raw.column(_RECORDS.name).is_valid()
    rows = raw.drop_columns([_RECORDS.name])
    why = "it is a record batch; raise maxRecordBatchBytes, and replay its offsets"
    rejected = [Rejection(Origin.SOURCE, why, row) for row in rows.filter(is_batch).to_pylist()]
    return Rows(rows.filter(pc.invert(is_batch)), rejected)


# One slice: the records of a range of offsets of one partition, on an executor.
#
# A range is complete when the consumer's position reaches its end, even if the last offsets hold no records:
# transaction markers and aborted records take offsets too. Records are never counted by subtracting offsets.

log = logging.getLogger("delivered.kafka")

Rejected = Callable[[Rejection], None]
"""Called for what is not among the records, after those before it were yielded."""

_POLL_S = 0.5
_STALL_LOOK_S = 5.0


class RangeConsumer(Protocol):
    """Reads one partition after another. Not thread-safe."""

    def assign(self, partition: Partition, offset: int) -> None:
        """Read a partition, from this offset. What was fetched ahead for the previous one is dropped."""

    def fetch(self, end: int, timeout_s: float) -> Fetched:
        """Wait at most `timeout_s` for records; return what is there.

        Raises:
            UsageError, Unreachable: reading is not permitted, or the connection is refused.
        """

    def fetch_position(self) -> int:
        """Where fetching is; -1: unknown. It also moves over aborted records."""

    def release(self) -> None:
        """Stop fetching; keep the connection."""

    def close(self) -> None: ...


_idle: WarmClients[RangeConsumer] = WarmClients(2)


@contextmanager
def warm_consumer(options: SourceOptions) -> Iterator[RangeConsumer]:
    """An idle, connected consumer with the same options, or a new one."""
    key = repr((options.through, sorted(options.client.items()), options.headers, options.batch_bytes_max))
    with _idle.lent(key, lambda: _consumer(options)) as consumer:
        yield consumer  # if the slice is not read to its end, the consumer is closed
        consumer.release()


def _consumer(options: SourceOptions) -> RangeConsumer:
    if by_arrow(OWNER, options.through, options.client, SOURCE_SETTINGS):
        fetcher = Fetcher(OWNER, options.client, options.headers, options.batch_bytes_max)
        if fetcher.possible():
            return fetcher
        fetcher.close()
        if options.through == "arrow":
            raise UsageError("KAFKA_TOO_OLD", servers=options.servers)
        log.warning("the brokers at %s are older than Kafka 2.7: reading through librdkafka", options.servers)
    from delivered.clients.kafka.librdkafka import Consumer  # not loaded if Arrow's client reads

    return Consumer(OWNER, options.client, options.headers)


def read_range(
    options: SourceOptions, wanted: Range[Partition], rejected: Rejected | None = None
) -> Iterator[pa.RecordBatch]:
    """Records of a range, in offset order.

    Memory is bounded by the consumer's queue and one batch. An empty range sends no request.

    Args:
        rejected: called for a record batch above `maxRecordBatchBytes`, and for a record with a time that Spark cannot
            hold; None: they are errors.

    Raises:
        BatchTooLarge, BadRecord
        InvariantBroken: records of the range no longer exist, and `failOnDataLoss` is true.
        Unreachable: the brokers did not answer for two minutes, or rejected the connection.
        UsageError: reading is not permitted.
    """
    if wanted.start >= wanted.end:
        return
    with warm_consumer(options) as consumer:
        yield from _Reading(options, wanted, consumer, rejected).batches()


def find_write_times(options: SourceOptions, waiting: Mapping[Partition, tuple[int, int]]) -> dict[Partition, int]:
    """When the first visible record of each range of offsets was written, in milliseconds since 1970. Fetches little.

    Raises:
        Unreachable, UsageError, InvariantBroken: as `read_range`.
    """
    small = replace(options, headers=False, client={**options.client, "max.partition.fetch.bytes": "16384"})
    found: dict[Partition, int] = {}
    with closing(_consumer(small)) as consumer:
        for partition, (start, end) in waiting.items():
            reading = _Reading(small, Range(partition, start, end), consumer, lambda _: None)
            first = next((batch for batch in reading.batches() if batch.num_rows), None)
            if first is not None:
                found[partition] = first.column("timestamp")[0].value // 1000
    return found


class _Reading:
    def __init__(
        self, options: SourceOptions, wanted: Range[Partition], consumer: RangeConsumer, rejected: Rejected | None
    ) -> None:
        self._options = options
        self._rejected = rejected
        self._wanted = wanted
        self._consumer = consumer
        self._position = wanted.start
        self._where = f"{wanted.key[0]}-{wanted.key[1]}"
        self._waited_s = 0.0
        self._look_at_s = _STALL_LOOK_S
        self._fetcher = -1
        self._asker: KafkaDriverClient | None = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        end = self._wanted.end
        self._consumer.assign(self._wanted.key, self._position)
        while self._position < end:
            asked = time.monotonic()
            try:
                fetched = self._consumer.fetch(end, _POLL_S)
            except BatchTooLarge as error:
                self._pass_over(error)
                continue
            # Count only the time spent waiting for the broker, not the task's own.
            self._waited_s += time.monotonic() - asked
            if fetched.batch is not None:
                yield self._in_time(fetched.batch)
            if fetched.position > self._position:
                self._position = fetched.position
                self._waited_s, self._look_at_s = 0.0, _STALL_LOOK_S
            if self._position >= end:
                return
            if fetched.out_of_range or fetched.unknown or fetched.end_of_log:
                self._confirm(fetched)
            elif self._waited_s > self._look_at_s:
                self._look_for_progress()

    def _pass_over(self, error: BatchTooLarge) -> None:
        if self._rejected is None:
            raise error
        offset = max(error.offset, self._wanted.start)
        record = {"value": error.batch, _RECORDS.name: error.next_offset - offset}
        self._rejected(Rejection(Origin.SOURCE, error.message, record, *self._wanted.key, offset))
        self._position = min(error.next_offset, self._wanted.end)
        self._waited_s = 0.0
        if self._position < self._wanted.end:
            self._consumer.assign(self._wanted.key, self._position)

    def _in_time(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The records whose time is one: of nanoseconds, say, where Kafka means milliseconds, there is only the bound
        left (`delivered.source.micros`)."""
        times = batch.column("timestamp").view(pa.int64())
        if not {US_MIN, US_MAX} & set(pc.min_max(times).as_py().values()):
            return batch
        wild = pc.or_(pc.equal(times, US_MIN), pc.equal(times, US_MAX))
        for record in batch.drop_columns(["timestamp"]).filter(wild).to_pylist():
            error = BadRecord("TIMESTAMP_OUT_OF_RANGE", where=self._where, offset=record["offset"])
            if self._rejected is None:
                raise error
            self._rejected(Rejection(Origin.SOURCE, error.message, record, *self._wanted.key, record["offset"]))
        return batch.filter(pc.invert(wild))

    def _confirm(self, fetched: Fetched) -> None:
        """The log seems to end before the range does: ask until that is certain."""
        end = self._wanted.end
        stuck = fetched.out_of_range or fetched.unknown  # librdkafka stopped fetching this assignment
        deadline = time.monotonic() + RESTART_CONFIRM_S
        while True:
            asked = time.monotonic()
            bounds = self._bounds()
            if bounds is None:
                self._waited_s += time.monotonic() - asked
                if self._waited_s > SOURCE_PATIENCE_S:
                    raise self._unreachable()
                if not stuck:
                    return  # nothing confirmed missing: go on reading
                deadline = time.monotonic() + RESTART_CONFIRM_S
                continue
            low, high = bounds
            if low > self._position:
                self._lost(self._position, min(low, end))
                self._position = min(low, end)
                stuck = True
            if high >= end:
                if stuck and self._position < end:
                    self._consumer.assign(self._wanted.key, self._position)
                return
            if time.monotonic() > deadline:
                self._lost(max(self._position, high), end)
                self._position = end
                return
            time.sleep(_POLL_S / 5)

    def _bounds(self) -> tuple[int, int] | None:
        """First offset and end (last stable offset) of the partition now; None: no answer.

        Not asked through the consumer, to which an unavailable broker and a missing partition look alike.
        """
        if self._asker is None:
            self._asker = KafkaDriverClient(self._options)
        try:
            found = self._asker.bounds(self._wanted.key)
        except Unreachable:
            self._asker.close()
            self._asker = None
            return None
        return found

    def _lost(self, start: int, end: int) -> None:
        text = (
            f"Offsets {start} to {end - 1} of {self._where} no longer exist and were not read: they were deleted "
            "(retention, DeleteRecords), or the topic was deleted and recreated."
        )
        if self._options.fail_on_data_loss:
            raise InvariantBroken("DATA_LOST.KAFKA_RECORDS", text=text)
        log.warning(text, extra={"topic": self._wanted.key[0], "partition": self._wanted.key[1]})

    def _look_for_progress(self) -> None:
        """No record for a while: check whether the fetcher advances, as it does over aborted records."""
        stands = self._consumer.fetch_position()
        if stands > self._fetcher:
            self._fetcher = stands
            self._waited_s, self._look_at_s = 0.0, _STALL_LOOK_S
            return
        if self._waited_s > SOURCE_PATIENCE_S:
            raise self._unreachable()
        # librdkafka does not report a topic that no longer exists: ask, at most every few seconds.
        self._confirm(Fetched(end_of_log=True))
        self._look_at_s = self._waited_s + _STALL_LOOK_S

    def _unreachable(self) -> Unreachable:
        return Unreachable(
            "KAFKA_STALLED",
            where=self._where,
            servers=self._options.servers,
            source_patience_s=SOURCE_PATIENCE_S,
            position=self._position,
            start=self._wanted.start,
            end=self._wanted.end,
        )
