"""What a consumer asks brokers: topics, offsets, groups, a log's history, and records by Fetch requests."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from delivered.clients.kafka import NoAnswer, NotSent, committed_only, protocol, resolved
from delivered.clients.kafka.channel import Buffer, Pending, only, varint
from delivered.clients.kafka.protocol import Leader, NoTopic, Wire, ask_member, explain, name_of
from delivered.clients.kafka.record_batch import HEADER_BYTES, CorruptBatch, Decoded, Partition, by_topic, decode
from delivered.model.errors import UsageError
from delivered.model.limits import (
    CONNECT_TIMEOUT_S,
    DECOMPRESSED_BYTES_MAX,
    KAFKA_RESPONSE_BYTES_MAX,
    REQUEST_TIMEOUT_S,
)
from delivered.model.patience import patience_s, within
from delivered.source import columns

# What a reader's driver asks brokers: topics, offsets of partitions, offsets and members of consumer groups.

EARLIEST, LATEST = -2, -1
_LATER = protocol.LEADER_MOVED | protocol.COORDINATOR_MOVED
_GROUP_ID_NOT_FOUND = 69
_LIST_OFFSETS_VERSIONS = (1, 7)
_OFFSET_FETCH_VERSIONS, _OFFSET_COMMIT_VERSIONS = (1, 7), (2, 8)
"""Later ones are by topic id, or for several groups."""


class Refusal(Exception):
    """A broker's final answer. `name`: Kafka's name of the error; `what`: the topic, partition or group."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{what}: {name}")
        self.name, self.what = name, what


@dataclass(frozen=True)
class Topic:
    """
    Attributes:
        id: as Kafka writes it, in base64.
    """

    id: str
    internal: bool
    partitions: Sequence[int]


def describe_topics(wire: Wire, names: Sequence[str]) -> dict[str, Topic | None]:
    """Topics; None: there is none of this name. Raises NoAnswer, Refusal: the user may not see it."""
    from kafka.protocol.metadata import MetadataRequest

    Asked = MetadataRequest.MetadataRequestTopic  # noqa: N806 - a class
    wanted = [Asked(name=name) for name in names]
    request = MetadataRequest(topics=wanted, allow_auto_topic_creation=False)
    found: dict[str, Topic | None] = {}
    for topic in wire.ask(request, timeout_s=CONNECT_TIMEOUT_S).topics:
        if topic.error_code == protocol.UNKNOWN_TOPIC_OR_PARTITION:
            found[topic.name] = None
            continue
        if topic.error_code != protocol.LEADER_NOT_AVAILABLE:
            _check(topic.error_code, topic.name)
        wire.learn_leaders(topic)  # or `list_offsets` would ask topic by topic
        numbers = sorted(p.partition_index for p in topic.partitions)
        found[topic.name] = Topic(_coded(getattr(topic, "topic_id", None)), bool(topic.is_internal), numbers)
    return {name: found.get(name) for name in names}


def _coded(topic_id: Any) -> str:
    return base64.b64encode(topic_id.bytes if topic_id is not None else bytes(16)).decode().rstrip("=")


def list_offsets(
    wire: Wire, asked: Mapping[Partition, int], committed_only: bool
) -> dict[Partition, tuple[int | None, int | None]]:
    """Offset and leader epoch of each partition.

    Args:
        asked: `EARLIEST`, `LATEST`, or milliseconds since 1970: the first record then or later.
        committed_only: the latest offset is the last stable one.

    Returns:
        Offset None: no record at or after that time. Epoch None: before Kafka 2.1.

    Raises:
        NoAnswer: not all leaders answered. NoTopic. Refusal: the user may not read a topic.
    """
    by_node: dict[int, dict[Partition, tuple[int, int]]] = {}
    for partition, at in asked.items():
        leader = _leader(wire, partition)
        by_node.setdefault(leader.node, {})[partition] = (leader.epoch, at)
    # All at the same time: a batch waits for the slowest leader, not for their sum.
    pending = [wire.post(_offsets_request(wanted, committed_only), node) for node, wanted in by_node.items()]
    found: dict[Partition, tuple[int | None, int | None]] = {}
    for each in pending:
        for topic in each.answer(REQUEST_TIMEOUT_S).topics:
            for answer in topic.partitions:
                where = f"{topic.name}-{answer.partition_index}"
                if answer.error_code == protocol.UNKNOWN_TOPIC_OR_PARTITION:  # a former leader says so, too
                    raise NotSent(f"{where}: {name_of(answer.error_code)}")
                _check(answer.error_code, where)
                offset, epoch = answer.offset, answer.leader_epoch
                found[topic.name, answer.partition_index] = (
                    offset if offset >= 0 else None,
                    epoch if epoch >= 0 else None,
                )
    return found


def _leader(wire: Wire, partition: Partition) -> Leader:
    try:
        return wire.led(*partition)
    except NoTopic:
        raise
    except NotSent:
        topic = wire.topic(partition[0])
        known = [p.partition_index for p in topic.partitions]
        if topic.error_code == protocol.NONE and known and partition[1] not in known:
            raise NoTopic(f"{partition[0]!r} has no partition {partition[1]}") from None
        raise


def _offsets_request(wanted: Mapping[Partition, tuple[int, int]], committed_only: bool) -> Any:
    from kafka.protocol.consumer import ListOffsetsRequest as Request

    Asked = Request.ListOffsetsTopic  # noqa: N806 - a class
    one = Asked.ListOffsetsPartition
    topics = by_topic(
        (topic, one(partition_index=number, current_leader_epoch=epoch, timestamp=at))
        for (topic, number), (epoch, at) in wanted.items()
    )
    low, high = _LIST_OFFSETS_VERSIONS
    listed = [Asked(name=name, partitions=parts) for name, parts in topics.items()]
    return Request(replica_id=-1, isolation_level=int(committed_only), topics=listed, min_version=low, max_version=high)


TOPIC_CONFIG, BROKER_CONFIG = 2, 4
"""Kinds of resources that have settings."""


def describe_configs(
    wire: Wire, kind: int, name: str, keys: Sequence[str], node: int | None = None
) -> dict[str, str | None] | None:
    """Settings of a topic or broker; None: this user may not see them, or the broker left the cluster."""
    from kafka.protocol.admin.configs import DescribeConfigsRequest

    Resource = DescribeConfigsRequest.DescribeConfigsResource  # noqa: N806 - a class
    request = DescribeConfigsRequest(
        resources=[Resource(resource_type=kind, resource_name=name, configuration_keys=list(keys))],
        include_synonyms=False,
        max_version=1,
    )
    answer: Any
    if node is None:
        answer = wire.patiently(lambda: wire.ask(request))
    else:
        answer = ask_member(wire, node, request, time.monotonic() + patience_s(answered=True))
    found = next(iter(answer.results), None) if answer is not None else None
    if found is None or found.error_code != protocol.NONE:
        return None
    return {c.name: c.value for c in found.configs}


def log_bytes(wire: Wire, partitions: Sequence[Partition]) -> dict[Partition, int]:
    """Size of each partition's log at its leader; one that this user may not see is absent. Raises NoAnswer."""
    from kafka.protocol.admin import DescribeLogDirsRequest as Request

    by_node: dict[int, list[Partition]] = {}
    for partition in partitions:
        by_node.setdefault(_leader(wire, partition).node, []).append(partition)
    found: dict[Partition, int] = {}
    for node, led in by_node.items():
        listed = [Request.DescribableLogDirTopic(topic=t, partitions=p) for t, p in by_topic(led).items()]
        for folder in wire.ask(Request(topics=listed, min_version=1, max_version=1), node).results:
            for topic in folder.topics:
                now = [p for p in topic.partitions if not p.is_future_key]
                found |= {(topic.name, p.partition_index): p.partition_size for p in now}
    return found


def group_members(wire: Wire, group: str) -> int:
    """Number of consumers in a group now. Raises NoAnswer, Refusal."""
    from kafka.protocol.admin.groups import DescribeGroupsRequest

    request = DescribeGroupsRequest(groups=[group], include_authorized_operations=False, max_version=5)
    found = only(wire.ask(request, wire.group_coordinator(group)).groups, "groups")
    if found.error_code == _GROUP_ID_NOT_FOUND:
        return 0
    _check(found.error_code, group)
    return len(found.members)


def committed_offsets(wire: Wire, group: str, partitions: Sequence[Partition]) -> dict[Partition, int]:
    """Offsets that a group has committed, of these partitions. Raises NoAnswer, Refusal."""
    from kafka.protocol.consumer import OffsetFetchRequest as Request

    Asked = Request.OffsetFetchRequestTopic  # noqa: N806 - a class
    low, high = _OFFSET_FETCH_VERSIONS
    listed = [Asked(name=name, partition_indexes=numbers) for name, numbers in by_topic(partitions).items()]
    request = Request(group_id=group, topics=listed, require_stable=False, min_version=low, max_version=high)
    answer = wire.ask(request, wire.group_coordinator(group))
    code = getattr(answer, "error_code", protocol.NONE)
    if code == _GROUP_ID_NOT_FOUND:
        return {}
    _check(code, f"group {group}")
    found = {}
    for topic in answer.topics:
        for part in topic.partitions:
            _check(part.error_code, f"{topic.name}-{part.partition_index}")
            if part.committed_offset >= 0:
                found[topic.name, part.partition_index] = part.committed_offset
    return found


def commit_offsets(wire: Wire, group: str, at: Mapping[Partition, int]) -> None:
    """Commit offsets for a group without members. Raises NoAnswer, Refusal."""
    from kafka.protocol.consumer import OffsetCommitRequest as Request

    Asked = Request.OffsetCommitRequestTopic  # noqa: N806 - a class
    one = partial(Asked.OffsetCommitRequestPartition, committed_leader_epoch=-1, committed_metadata="")
    topics = by_topic((topic, one(partition_index=n, committed_offset=offset)) for (topic, n), offset in at.items())
    low, high = _OFFSET_COMMIT_VERSIONS
    listed = [Asked(name=name, partitions=parts) for name, parts in topics.items()]
    request = Request(
        group_id=group, generation_id_or_member_epoch=-1, member_id="", retention_time_ms=-1, topics=listed,
        min_version=low, max_version=high,
    )  # fmt: skip
    for topic in wire.ask(request, wire.group_coordinator(group)).topics:
        for part in topic.partitions:
            _check(part.error_code, f"{topic.name}-{part.partition_index}")


def _check(code: int, what: str) -> None:
    """Raise NotSent for an error that passes, Refusal for any other."""
    if code in _LATER:
        raise NotSent(f"{what}: {name_of(code)}")
    if code != protocol.NONE:
        raise Refusal(name_of(code), what)


# What a partition's log says of its own history: where leader epochs end, and a record batch's header.
#
# Every leader has an epoch, and writes it into its record batches. If a log loses its end, the offsets are used again
# under a newer epoch: an offset, with an epoch in which it was before the log's end, names one history (KIP-320).

_EPOCH_END, _EPOCH_END_VERSIONS = 23, (2, 3)
"""OffsetForLeaderEpoch; since version 2 (Kafka 2.1) a consumer may ask, and an outdated leader refuses to answer."""
FETCH, FETCH_VERSION = 1, 12
"""The last that names topics; the fields up to the records are read here, so that these are not copied."""
_RECORDS_V2 = 2
_PREFIX_BYTES = 12
"""Of a record batch, before what its length counts."""
_LATER_EPOCHS = protocol.LEADER_MOVED | {protocol.UNKNOWN_TOPIC_OR_PARTITION}


@dataclass(frozen=True)
class EpochEnd:
    """
    Attributes:
        epoch: the newest one of the log up to the requested one; -1: the log has none so old, or so new.
        offset: where its successor begins, or the log's end.
    """

    epoch: int
    offset: int


@dataclass(frozen=True)
class BatchHeader:
    """A record batch's header.

    Attributes:
        first, last: offsets; compaction keeps them, the epoch and the producer, even if it drops records.
        timestamp: the newest, in milliseconds since 1970.
        producer: its id, epoch and sequence number; -1: none.
    """

    first: int
    last: int
    epoch: int
    crc: int
    flags: int
    timestamp: int
    producer: tuple[int, int, int]
    count: int


def epoch_ends(wire: Wire, epochs: Mapping[Partition, int]) -> dict[Partition, EpochEnd]:
    """Where a leader epoch of each partition ends, by its current leader. Partitions whose broker does not know the
    request (before Kafka 2.1) are absent.

    Raises:
        NoAnswer: none within two minutes.
        UsageError: the user may not describe a topic.
    """
    newest = wire.patiently(wire.channel).versions.api_versions.get(_EPOCH_END, (0, 0))[1]
    if newest < _EPOCH_END_VERSIONS[0]:
        return {}
    found: dict[Partition, EpochEnd | None] = {}

    def ask() -> None:
        left = {p: e for p, e in epochs.items() if p not in found}
        by_node: dict[int, dict[Partition, tuple[int, int]]] = {}
        for partition, epoch in left.items():
            leader = find_leader(wire, partition)
            by_node.setdefault(leader.node, {})[partition] = (leader.epoch, epoch)
        for node, wanted in by_node.items():
            for topic in wire.ask(_request(wanted), node).topics:
                for answer in topic.partitions:
                    known = is_answered(answer.error_code, (topic.topic, answer.partition))
                    end = EpochEnd(answer.leader_epoch, answer.end_offset) if known else None
                    found[topic.topic, answer.partition] = end

    wire.patiently(ask)
    return {p: end for p, end in found.items() if end is not None}


def find_leader(wire: Wire, partition: Partition) -> Leader:
    try:
        return wire.led(*partition)
    except protocol.NoTopic as error:  # a broker that has just started may not know it yet
        raise NotSent(str(error)) from None


def _request(wanted: Mapping[Partition, tuple[int, int]]) -> Any:
    from kafka.protocol.consumer import OffsetForLeaderEpochRequest as Request

    Topic = Request.OffsetForLeaderTopic  # noqa: N806 - a class
    one = Topic.OffsetForLeaderPartition
    topics = by_topic(
        (topic, one(partition=number, current_leader_epoch=current, leader_epoch=epoch))
        for (topic, number), (current, epoch) in wanted.items()
    )
    low, high = _EPOCH_END_VERSIONS
    asked = [Topic(topic=t, partitions=p) for t, p in topics.items()]
    return Request(replica_id=-1, topics=asked, min_version=low, max_version=high)


def is_answered(code: int, partition: Partition) -> bool:
    """Whether there is an answer; False: never, as from a server that does not implement the request."""
    if code == protocol.TOPIC_AUTHORIZATION_FAILED:
        raise UsageError("NOT_PERMITTED.KAFKA_DESCRIBE", topic=partition[0])
    if code in _LATER_EPOCHS:
        raise NoAnswer(f"{partition[0]}-{partition[1]}: {name_of(code)}")
    return code == protocol.NONE


def batches_before(wire: Wire, ends: Mapping[Partition, int]) -> dict[Partition, BatchHeader]:
    """The record batch that holds the offset before each of these; a partition that has none there now is absent.

    One request for each partition, which returns one batch.

    Raises:
        NoAnswer: none within two minutes.
        UsageError: the user may not read a topic.
    """
    if wire.patiently(wire.channel).versions.api_versions.get(FETCH, (0, 0))[1] < FETCH_VERSION:
        return {}
    found: dict[Partition, BatchHeader | None] = {}

    def ask() -> None:
        for partition, end in _left(ends, found):
            leader = find_leader(wire, partition)
            pending = wire.post(fetch_request(partition, end - 1, leader.epoch, 1), leader.node)
            response = Response(pending.body(REQUEST_TIMEOUT_S))
            found[partition] = _header(response.records, end) if is_answered(response.error, partition) else None

    wire.patiently(ask)
    return {p: header for p, header in found.items() if header is not None}


def _left(ends: Mapping[Partition, int], found: Mapping[Partition, object]) -> Iterable[tuple[Partition, int]]:
    return [(p, end) for p, end in ends.items() if end > 0 and p not in found]


def fetch_request(
    partition: Partition,
    offset: int,
    leader_epoch: int,
    bytes_max: int,
    *,
    partition_bytes_max: int | None = None,
    wait_ms: int = 0,
    committed_only: bool = False,
) -> Any:
    """Fetch of one partition. `wait_ms`: how long the broker may wait for a first record."""
    from kafka.protocol.consumer import FetchRequest

    (topic, number), FetchTopic = partition, FetchRequest.FetchTopic  # noqa: N806 - a class
    place = FetchTopic.FetchPartition(
        partition=number,
        current_leader_epoch=leader_epoch,
        fetch_offset=offset,
        partition_max_bytes=partition_bytes_max or bytes_max,
    )
    return FetchRequest(
        max_wait_ms=wait_ms,
        min_bytes=1 if wait_ms else 0,
        max_bytes=bytes_max,
        isolation_level=int(committed_only),
        topics=[FetchTopic(topic=topic, partitions=[place])],
        min_version=FETCH_VERSION,
        max_version=FETCH_VERSION,
    )


def _header(records: memoryview, end: int) -> BatchHeader | None:
    """The first batch's header; None: it does not hold the offset before `end`."""
    header = next(headers(records), None)
    return header if header is not None and header.first < end <= header.last + 1 else None


def headers(records: Buffer) -> Iterator[BatchHeader]:
    """Of consecutive record batches; the last one may be incomplete. Ends at what is none, or of an earlier format."""
    at = 0
    while at + HEADER_BYTES <= len(records):
        first, length, epoch, magic, crc, flags, last, _, newest, *producer, count = struct.unpack_from(
            ">qiibIhiqqqhii", records, at
        )
        if magic != _RECORDS_V2 or length < HEADER_BYTES - _PREFIX_BYTES:
            return
        identity = (int(producer[0]), int(producer[1]), int(producer[2]))
        yield BatchHeader(first, first + last, epoch, crc, flags, newest, identity, count)
        at += _PREFIX_BYTES + length


# Records of partitions: record batches in, Arrow columns out.
#
# As soon as a response is here, the next request is sent, so that the broker and the network work while this one is
# decoded. At most one response is held, and a few MB of its records decompressed.

FETCH_BYTES = 4 << 20
CHUNK_BYTES = 2 << 20
"""Decompressed records in one RecordBatch."""
_WAIT_MS = 10
_ABORTED_BYTES_MIN = 17
_PAUSE_S = 0.1

_UNKNOWN_PARTITION = {3, 100, 103}
_MOVED = {5, 6, 7, 8, 9, 13, 56, 74, 75, 78, -1, 2}
"""Errors that a later request may not meet, most of them at another broker."""
_LIES = (struct.error, IndexError, ValueError)
"""What a response raises that is not what it says to be."""


@dataclass
class Fetched:
    """Result of one call.

    Attributes:
        batch: records in offset order, all below the requested end; None: none.
        position: every visible record below it was returned; -1: no progress.
        end_of_log: the broker had nothing beyond `position` at that moment.
        out_of_range: the broker does not have the requested offset.
        unknown: the broker does not know the partition (perhaps only for a moment, after a restart).
    """

    batch: pa.RecordBatch | None = None
    position: int = -1
    end_of_log: bool = False
    out_of_range: bool = False
    unknown: bool = False


class Fetcher:
    """Reads one partition after another (a `RangeConsumer` of the connector). Not thread-safe.

    Args:
        owner: of the options, for errors.
        client: settings by librdkafka's names; secrets are not resolved yet.
        headers: whether to read them.
        batch_bytes_max: of a record batch, decompressed.
    """

    def __init__(
        self,
        owner: str,
        client: Mapping[str, str],
        headers: bool,
        batch_bytes_max: int = DECOMPRESSED_BYTES_MAX,
    ) -> None:
        self._owner, self._servers = owner, client["bootstrap.servers"]
        self._headers, self._batch_bytes_max = headers, batch_bytes_max
        self._committed = committed_only(client)
        self._wire = Wire(resolved(client))
        self._partition: Partition = ("", -1)
        self._position = -1  # of the next request
        self._returned = -1  # position: all records below it were returned
        self._pending: Pending | None = None
        self._version = 0
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._decoded: Decoded | None = None
        self._first_size = int(client.get("max.partition.fetch.bytes", FETCH_BYTES))
        self._size_max = int(client.get("fetch.max.bytes", KAFKA_RESPONSE_BYTES_MAX))
        self._wait_ms = int(client.get("fetch.wait.max.ms", _WAIT_MS))
        self._size = self._first_size
        self._not_before_s = 0.0
        self._ended_at = -1
        self._corrupt_at = -1
        self._trouble = ""

    def possible(self) -> bool:
        """Whether the brokers know the version of Fetch spoken here (Kafka 2.7). Raises Unreachable."""
        _, newest = self._wire.patiently(self._wire.channel).versions.api_versions.get(FETCH, (0, 0))
        return int(newest) >= FETCH_VERSION

    def assign(self, partition: Partition, offset: int) -> None:
        self.release()
        self._partition, self._position = partition, offset
        self._returned = offset
        self._ended_at = self._corrupt_at = -1
        self._size = self._first_size

    def fetch(self, end: int, timeout_s: float) -> Fetched:
        """Raises CorruptBatch, too: twice at the same offset; BatchTooLarge: after the records before it."""
        deadline = time.monotonic() + timeout_s
        if self._decoded is None:
            fetched = self._receive(end, deadline)
            if fetched is not None:
                return fetched
        return self._next()

    def _next(self) -> Fetched:
        decoded = self._decoded
        if decoded is None:
            return Fetched()
        try:
            batch = next(self._batches, None)
        except CorruptBatch:
            return self._again_or_raise()
        if batch is None:
            self._decoded, self._returned = None, decoded.position
            return Fetched(position=decoded.position)
        (topic, number), n = self._partition, batch.num_rows
        if n == 0:
            return Fetched()
        arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
        arrays["topic"] = pa.repeat(pa.scalar(topic), n)
        arrays["partition"] = pa.repeat(pa.scalar(number, pa.int32()), n)
        schema = columns(self._headers)
        batch = pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)
        self._returned = arrays["offset"][-1].as_py() + 1
        return Fetched(batch=batch, position=self._returned)

    def _again_or_raise(self) -> Fetched:
        """A corrupt batch is fetched once more: it may have been damaged on its way."""
        self._decoded = None
        self._drop_pending()
        if self._corrupt_at == self._returned:
            raise
        self._corrupt_at = self._position = self._returned
        return Fetched()

    def _receive(self, end: int, deadline: float) -> Fetched | None:
        """Wait for a response. None: its records are being decoded."""
        pause = self._not_before_s - time.monotonic()
        if pause > 0:
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            return Fetched()
        try:
            if self._pending is None:
                with within(max(0.1, deadline - time.monotonic())):
                    self._pending = self._send()
            if not self._pending.ready(deadline - time.monotonic()):
                if time.monotonic() - self._pending.sent_s > REQUEST_TIMEOUT_S:
                    self._pending.body(0)
                return Fetched()
            pending, self._pending = self._pending, None
            return self._parsed(pending.body(0), end)
        except NoTopic:
            return Fetched(unknown=True)
        except NoAnswer as error:
            self._pending = None
            return self._later(str(error))

    def _later(self, why: str, pause_s: float = _PAUSE_S) -> Fetched:
        self._trouble = why
        self._wire.forget()
        self._not_before_s = time.monotonic() + pause_s
        return Fetched()

    def _send(self) -> Pending:
        leader = self._wire.led(*self._partition)
        request = fetch_request(
            self._partition,
            self._position,
            leader.epoch,
            min(self._size, self._size_max),
            partition_bytes_max=self._size,
            wait_ms=self._wait_ms,
            committed_only=self._committed,
        )
        return self._wire.post(request, leader.node)

    def _parsed(self, body: memoryview, end: int) -> Fetched | None:
        found = Response(body)
        if found.throttle_ms:  # the broker reads nothing earlier, and a request would time out
            self._not_before_s = time.monotonic() + found.throttle_ms / 1000
        code = found.error
        if code == protocol.OFFSET_OUT_OF_RANGE:
            return Fetched(out_of_range=True)
        if code in _UNKNOWN_PARTITION:
            self._wire.forget()
            return Fetched(unknown=True)
        if code in _MOVED:
            return self._later(name_of(code))
        if code:
            topic, number = self._partition
            raise explain(self._owner, name_of(code), "", f"{topic}-{number}", self._servers)
        if found.high < 0:  # above its quota, a client gets a response without partitions
            return Fetched()
        aborted = found.aborted if self._committed else None
        try:
            decoded = decode(
                found.records, self._partition, self._position, end,
                aborted=aborted, headers=self._headers, chunk_bytes=CHUNK_BYTES,
                bytes_max=self._batch_bytes_max,
            )  # fmt: skip
        except CorruptBatch:
            return self._again_or_raise()
        if decoded.position == self._position:
            if decoded.partial:
                self._size = min(KAFKA_RESPONSE_BYTES_MAX, max(decoded.partial, 2 * self._size))
                return Fetched()
            stable = found.last_stable if self._committed else found.high
            ended = self._position >= stable and self._ended_at != self._position
            if ended:
                self._ended_at = self._position
            return Fetched(position=self._position, end_of_log=ended)
        self._decoded, self._batches = decoded, iter(decoded)
        self._position = decoded.position
        if self._position < end and not found.throttle_ms:
            self._pending = self._send()  # travels while this response is decoded
        return None

    def fetch_position(self) -> int:
        return self._position

    def _drop_pending(self) -> None:
        self._pending = None  # its response is read, and dropped, before the next one

    def release(self) -> None:
        self._drop_pending()
        self._decoded, self._batches = None, iter(())

    def close(self) -> None:
        self._wire.close()


class Response:
    """A Fetch response of version 12 for one partition; `records` is a view of it. Raises NoAnswer: it is none."""

    def __init__(self, body: memoryview) -> None:
        try:
            self._read(body)
        except _LIES as error:
            raise NoAnswer(f"a Fetch response that cannot be read: {error}") from None

    def _read(self, body: memoryview) -> None:
        self.throttle_ms, self.error, _, at = *struct.unpack_from(">ihi", body, 0), 10
        self.records = memoryview(b"")
        self.aborted: list[tuple[int, int]] = []
        self.high = self.last_stable = -1
        topics, at = varint(body, at)
        if topics < 2:
            return
        size, at = varint(body, at)
        at += size - 1
        partitions, at = varint(body, at)
        if partitions < 2:
            return
        _, error, self.high, self.last_stable, _ = struct.unpack_from(">ihqqq", body, at)
        self.error, at = self.error or error, at + 30
        count, at = varint(body, at)
        if count - 1 > len(body) // _ABORTED_BYTES_MIN:
            raise ValueError(f"{count - 1} aborted transactions in {len(body)} bytes")
        for _ in range(count - 1):
            self.aborted.append(struct.unpack_from(">qq", body, at))
            tags, at = varint(body, at + 16)
            if tags:
                raise NoAnswer("an aborted transaction with unknown fields")
        at += 4
        size, at = varint(body, at)
        if size - 1 > len(body) - at:
            raise ValueError(f"{size - 1} bytes of records, with {len(body) - at} left")
        self.records = body[at : at + max(0, size - 1)]
