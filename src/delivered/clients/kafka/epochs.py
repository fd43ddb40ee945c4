"""What a partition's log says of its own history: where leader epochs end, and a record batch's header.

Every leader has an epoch, and writes it into its record batches. If a log loses its end, the offsets are used again
under a newer epoch: an offset, with an epoch in which it was before the log's end, names one history (KIP-320).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from delivered.clients.kafka import protocol
from delivered.clients.kafka.current import Leader
from delivered.clients.kafka.fetcher import Response
from delivered.clients.kafka.login import NoAnswer, NotSent
from delivered.clients.kafka.protocol import Wire, name_of
from delivered.clients.kafka.record_batch import HEADER_BYTES
from delivered.clients.kafka.rows import Partition, by_topic
from delivered.model.errors import UsageError
from delivered.model.limits import REQUEST_TIMEOUT_S

_EPOCH_END, _EPOCH_END_VERSIONS = 23, (2, 3)
"""OffsetForLeaderEpoch; since version 2 (Kafka 2.1) a consumer may ask, and an outdated leader refuses to answer."""
_FETCH, _FETCH_VERSION = 1, 12
_RECORDS_V2 = 2
_LATER = protocol.LEADER_MOVED | {protocol.UNKNOWN_TOPIC_OR_PARTITION}


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
        raise UsageError(
            "NOT_PERMITTED",
            f"The user may not describe the topic {partition[0]!r}.",
            next_step="permit Describe on the topic",
        )
    if code in _LATER:
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


def _fetch(partition: Partition, offset: int, epoch: int) -> Any:
    from kafka.protocol.consumer import FetchRequest

    FetchTopic = FetchRequest.FetchTopic  # noqa: N806 - a class
    place = FetchTopic.FetchPartition(
        partition=partition[1], current_leader_epoch=epoch, fetch_offset=offset, partition_max_bytes=1
    )
    return FetchRequest(
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=1,
        isolation_level=0,
        topics=[FetchTopic(topic=partition[0], partitions=[place])],
        min_version=_FETCH_VERSION,
        max_version=_FETCH_VERSION,
    )


def _header(records: memoryview, end: int) -> BatchHeader | None:
    """The first batch's header; None: it does not hold the offset before `end`."""
    if len(records) < HEADER_BYTES:
        return None
    first, _, epoch, magic, crc, flags, last, _, newest, *producer, count = struct.unpack_from(
        ">qiibIhiqqqhii", records, 0
    )
    if magic != _RECORDS_V2 or not first < end <= first + last + 1:
        return None
    identity = (int(producer[0]), int(producer[1]), int(producer[2]))
    return BatchHeader(first, first + last, epoch, crc, flags, newest, identity, count)
