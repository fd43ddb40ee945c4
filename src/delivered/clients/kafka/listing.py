"""What a driver asks brokers about topics: offsets, groups, a log's history, and transactions open in partitions."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from delivered.clients.kafka import protocol
from delivered.clients.kafka.channel import Buffer, Channel, Pending, only
from delivered.clients.kafka.errors import NoAnswer, NotSent
from delivered.clients.kafka.fetcher import Response
from delivered.clients.kafka.protocol import Leader, NoTopic, Wire, ask_member, name_of
from delivered.clients.kafka.record_batch import HEADER_BYTES, SEQUENCES, Partition, by_topic
from delivered.model.errors import UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S
from delivered.model.patience import left_s, patience_s
from delivered.model.work import Failed, Ok, Outcome, Unknown

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
_FETCH, _FETCH_VERSION = 1, 12
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
            leader = _led(wire, partition)
            by_node.setdefault(leader.node, {})[partition] = (leader.epoch, epoch)
        for node, wanted in by_node.items():
            for topic in wire.ask(_request(wanted), node).topics:
                for answer in topic.partitions:
                    known = _answered(answer.error_code, (topic.topic, answer.partition))
                    end = EpochEnd(answer.leader_epoch, answer.end_offset) if known else None
                    found[topic.topic, answer.partition] = end

    wire.patiently(ask)
    return {p: end for p, end in found.items() if end is not None}


def _led(wire: Wire, partition: Partition) -> Leader:
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


def _answered(code: int, partition: Partition) -> bool:
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
    if wire.patiently(wire.channel).versions.api_versions.get(_FETCH, (0, 0))[1] < _FETCH_VERSION:
        return {}
    found: dict[Partition, BatchHeader | None] = {}

    def ask() -> None:
        for partition, end in _left(ends, found):
            leader = _led(wire, partition)
            pending = wire.post(_fetch(partition, end - 1, leader.epoch), leader.node)
            response = Response(pending.body(REQUEST_TIMEOUT_S))
            found[partition] = _header(response.records, end) if _answered(response.error, partition) else None

    wire.patiently(ask)
    return {p: header for p, header in found.items() if header is not None}


def _left(ends: Mapping[Partition, int], found: Mapping[Partition, object]) -> Iterable[tuple[Partition, int]]:
    return [(p, end) for p, end in ends.items() if end > 0 and p not in found]


def _fetch(partition: Partition, offset: int, epoch: int, bytes_max: int = 1) -> Any:
    from kafka.protocol.consumer import FetchRequest

    FetchTopic = FetchRequest.FetchTopic  # noqa: N806 - a class
    place = FetchTopic.FetchPartition(
        partition=partition[1], current_leader_epoch=epoch, fetch_offset=offset, partition_max_bytes=bytes_max
    )
    return FetchRequest(
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=bytes_max,
        isolation_level=0,
        topics=[FetchTopic(topic=partition[0], partitions=[place])],
        min_version=_FETCH_VERSION,
        max_version=_FETCH_VERSION,
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


# Transactions by the producer state of partitions, which says what their coordinator may not know (P28).

_PARTITIONS_PER_REQUEST = 500
_DESCRIBE_PRODUCERS = 61
_CONTROL = 1 << 5
"""Flag of a batch that holds a transaction's marker: its producer's, with a sequence that is none."""
_SEARCHED_BYTES = 1 << 20
"""Of a log, in one request."""
_COMMITTED, _UNCOMMITTED = 1, 0
_LATEST = -1
_TIMED_OUT = 7
_NOT_ENOUGH_REPLICAS, _NOT_ENOUGH_REPLICAS_AFTER_APPEND = 19, 20
_STORAGE_ERROR, _OFFSET_NOT_AVAILABLE = 56, 78
_RETRIED = frozenset(
    {
        protocol.LEADER_NOT_AVAILABLE,
        protocol.NOT_LEADER,
        _TIMED_OUT,
        _NOT_ENOUGH_REPLICAS,
        _NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        _STORAGE_ERROR,
        _OFFSET_NOT_AVAILABLE,
    }
)
_DENIED = frozenset({protocol.TOPIC_AUTHORIZATION_FAILED})


@dataclass(frozen=True, order=True)
class OpenAt:
    """A producer's open transaction in one partition.

    Attributes:
        epoch: of the newest records of this producer there.
        start: offset of the transaction's first record: readers with read_committed see nothing from there on.
    """

    topic: str
    partition: int
    producer_id: int
    epoch: int
    coordinator_epoch: int
    start: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition} from offset {self.start}"


def held(wire: Wire) -> dict[int, Channel]:
    """Open connections, by node. One that stays open proves that its broker did not restart."""
    return {n: c for n, c in list(wire._channels.items()) if n is not None and c.usable()}


def partitions_of(wire: Wire, topics: Iterable[str]) -> list[Partition]:
    """All partitions of these topics; of those that do not exist, none. Raises NoAnswer."""
    found: list[Partition] = []
    for topic in topics:

        def ask(topic: str = topic) -> Any:
            answer = wire.topic(topic)
            if answer.error_code not in (protocol.NONE, protocol.UNKNOWN_TOPIC_OR_PARTITION, *_DENIED):
                raise NoAnswer(f"topic {topic!r}: {name_of(answer.error_code)}")
            return answer

        found += [(topic, p.partition_index) for p in wire.patiently(ask).partitions]
    return found


def open_in(
    wire: Wire, partitions: Iterable[Partition], producer_ids: Collection[int], deadline: float
) -> tuple[list[OpenAt], list[Partition]]:
    """Open transactions of these producers, from the partitions' leaders.

    Where the user may not read a topic, its partitions are compared by their ends, which takes Describe alone.

    Args:
        deadline: of time.monotonic(), for partitions without a leader.

    Returns:
        The transactions; and partitions that hold an open transaction, perhaps of others, and may not be read.

    Raises:
        NoAnswer: a partition's leader did not answer.
    """
    found: list[OpenAt] = []
    denied: list[Partition] = []
    for answer in _ask_leaders(wire, partitions, _describe_request, deadline):
        for topic in answer.topics:
            for part in topic.partitions:
                if part.error_code in _DENIED:
                    denied.append((topic.name, part.partition_index))
                found += [
                    _open_at(topic.name, part.partition_index, p)
                    for p in part.active_producers or ()
                    if p.current_txn_start_offset >= 0 and p.producer_id in producer_ids
                ]
    if denied:
        ends, stable = (_ends(wire, denied, level, deadline) for level in (_UNCOMMITTED, _COMMITTED))
        denied = [p for p in denied if stable.get(p, 0) < ends.get(p, 0)]
    return sorted(found), denied


def hidden_in(
    wire: Wire, partitions: Collection[Partition], deadline: float
) -> tuple[dict[Partition, int], list[tuple[OpenAt, int]]]:
    """What open transactions hide in these partitions.

    Args:
        deadline: of time.monotonic(), for partitions without a leader.

    Returns:
        Offsets from the last stable one to the high watermark, of partitions that have any; and each open transaction
        in these, with the timestamp of its producer's newest record. None of topics that this user may not read, and
        none before Kafka 2.8.

    Raises:
        NoAnswer: a partition's leader did not answer.
    """
    # In this order: a transaction that starts in between hides nothing here.
    ends, stable = (_ends(wire, partitions, level, deadline) for level in (_UNCOMMITTED, _COMMITTED))
    hidden = {p: ends[p] - stable[p] for p in ends if stable.get(p, ends[p]) < ends[p]}
    known = _DESCRIBE_PRODUCERS in wire.patiently(wire.channel).versions.api_versions
    found = [
        (_open_at(topic.name, part.partition_index, p), p.last_timestamp)
        for answer in (_ask_leaders(wire, hidden, _describe_request, deadline) if hidden and known else ())
        for topic in answer.topics
        for part in topic.partitions
        for p in part.active_producers or ()
        if p.current_txn_start_offset >= 0
    ]
    return hidden, sorted(found)


def _open_at(topic: str, partition: int, producer: Any) -> OpenAt:
    return OpenAt(
        topic,
        partition,
        producer.producer_id,
        producer.producer_epoch,
        producer.coordinator_epoch,
        producer.current_txn_start_offset,
    )


def is_stored(wire: Wire, partition: Partition, sent: BatchHeader, after: int | None, deadline: float) -> bool:
    """Whether a partition's log holds the records of a batch, by producer id, epoch and sequences.

    The last sequence that the leader knows of the producer does not prove it: a broker without any state of a producer
    accepts a batch whose predecessors are missing. So the batch itself is looked for.

    Args:
        sent: as it was sent: its offsets mean nothing.
        after: an offset that the batch cannot precede, if one is known.
        deadline: of time.monotonic().

    Returns:
        False also if the user may not read the topic, or the broker is too old to be asked.

    Raises:
        NoAnswer: the leader did not answer.
    """
    versions = wire.patiently(wire.channel).versions.api_versions
    if _DESCRIBE_PRODUCERS not in versions or versions.get(_FETCH, (0, 0))[1] < _FETCH_VERSION:
        return False
    id_, epoch, _ = sent.producer
    states = [
        state
        for answer in _ask_leaders(wire, [partition], _describe_request, deadline)
        for topic in answer.topics
        for part in topic.partitions
        for state in part.active_producers or ()
        if (state.producer_id, state.producer_epoch) == (id_, epoch)
    ]
    if not states or _distance(_last(sent), states[0].last_sequence) < 0:
        return False
    try:
        if after is None:
            after = states[0].current_txn_start_offset
        if after < 0:
            after, _ = list_offsets(wire, {partition: sent.timestamp}, committed_only=False)[partition]
        return after is not None and _is_in_log(wire, partition, sent, after, deadline)
    except (Refusal, UsageError):
        return False


def _is_in_log(wire: Wire, partition: Partition, sent: BatchHeader, offset: int, deadline: float) -> bool:
    while True:
        leader = _led(wire, partition)
        pending = wire.post(_fetch(partition, offset, leader.epoch, _SEARCHED_BYTES), leader.node)
        response = Response(pending.body(left_s(REQUEST_TIMEOUT_S)))
        if not _answered(response.error, partition):
            return False
        found = list(headers(response.records))
        for header in found:
            offset = header.last + 1
            if header.producer[:2] != sent.producer[:2] or header.flags & _CONTROL:
                continue
            if _distance(header.producer[2], sent.producer[2]) >= 0 and _distance(_last(sent), _last(header)) >= 0:
                return True
            if _distance(_last(sent), header.producer[2]) > 0:  # a producer's records are in order
                return False
        if not found:  # not replicated yet, as its state is there
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)


def _last(batch: BatchHeader) -> int:
    """The sequence of its last record."""
    return (batch.producer[2] + batch.count - 1) % SEQUENCES


def _distance(a: int, b: int) -> int:
    """From sequence a to b, across the wrap; negative: b precedes a."""
    return (b - a + SEQUENCES // 2) % SEQUENCES - SEQUENCES // 2


def end_at(wire: Wire, at: OpenAt, commit: bool, deadline: float) -> Outcome[None]:
    """Write the marker that its coordinator did not, as Kafka's own tool does.

    It has the epoch of the records, so that it ends no later transaction, and the partition's coordinator epoch, which
    fences no coordinator.

    Takes Alter or ClusterAction on the cluster. Idempotent.

    Returns:
        Failed: not permitted, or a newer epoch of the producer has written there since.
    """
    from kafka.protocol.producer.transaction import WriteTxnMarkersRequest

    Marker = WriteTxnMarkersRequest.WritableTxnMarker  # noqa: N806
    Topic = Marker.WritableTxnMarkerTopic  # noqa: N806
    while True:
        request = WriteTxnMarkersRequest(
            markers=[
                Marker(
                    producer_id=at.producer_id,
                    producer_epoch=at.epoch,
                    transaction_result=commit,
                    topics=[Topic(name=at.topic, partition_indexes=[at.partition])],
                    coordinator_epoch=max(at.coordinator_epoch, 0),
                )
            ],
            max_version=1,
        )
        try:
            answer = wire.ask(request, wire.leader(at.topic, at.partition))
            ended = only(only(answer.markers, "markers").topics, "topics")
            code = only(ended.partitions, "partitions").error_code
            reason = name_of(code)
        except NoAnswer as error:
            code, reason = _TIMED_OUT, str(error)
        if code == protocol.NONE:
            return Ok(None)
        if code not in _RETRIED:
            return Failed(reason)
        if time.monotonic() > deadline:
            return Unknown(reason)
        wire.forget()
        time.sleep(0.05)


def _ask_leaders(wire: Wire, partitions: Iterable[Partition], build: Any, deadline: float) -> list[Any]:
    """Ask every partition's leader, all leaders side by side, until each partition has an answer."""
    answers: list[Any] = []
    todo = set(partitions)
    pause_s, reason = 0.02, ""
    while todo:
        flying: list[Pending] = []
        by_leader: dict[int, list[Partition]] = {}
        try:
            for partition in sorted(todo):
                try:
                    by_leader.setdefault(wire.leader(*partition), []).append(partition)
                except NoTopic:
                    todo.discard(partition)
            for node, led in by_leader.items():
                for at in range(0, len(led), _PARTITIONS_PER_REQUEST):
                    flying.append(wire.post(build(led[at : at + _PARTITIONS_PER_REQUEST]), node))
            for pending in flying:
                answer = pending.answer(left_s(REQUEST_TIMEOUT_S))
                for topic in answer.topics:
                    for part in topic.partitions:
                        if part.error_code in _RETRIED:
                            reason = f"{topic.name}-{part.partition_index}: {name_of(part.error_code)}"
                        else:
                            todo.discard((topic.name, part.partition_index))
                answers.append(answer)
        except NoAnswer as error:
            reason = str(error)
        if todo:
            if time.monotonic() > deadline:
                raise NoAnswer(reason)
            wire.forget()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.5)
    return answers


def _describe_request(partitions: Iterable[Partition]) -> Any:
    from kafka.protocol.admin.transactions import DescribeProducersRequest

    Topic = DescribeProducersRequest.TopicRequest  # noqa: N806
    return DescribeProducersRequest(
        topics=[Topic(name=t, partition_indexes=numbers) for t, numbers in by_topic(partitions).items()]
    )


def _ends(wire: Wire, partitions: Iterable[Partition], isolation: int, deadline: float) -> dict[Partition, int]:
    """The last stable offset, or the high watermark."""
    from kafka.protocol.consumer.offsets import ListOffsetsRequest

    Topic = ListOffsetsRequest.ListOffsetsTopic  # noqa: N806

    def build(of: Iterable[Partition]) -> Any:
        return ListOffsetsRequest(
            replica_id=-1,
            isolation_level=isolation,
            topics=[
                Topic(
                    name=t,
                    partitions=[
                        Topic.ListOffsetsPartition(partition_index=n, current_leader_epoch=-1, timestamp=_LATEST)
                        for n in numbers
                    ],
                )
                for t, numbers in by_topic(of).items()
            ],
            max_version=5,
        )

    return {
        (topic.name, part.partition_index): part.offset
        for answer in _ask_leaders(wire, partitions, build, deadline)
        for topic in answer.topics
        for part in topic.partitions
        if part.error_code == protocol.NONE
    }
