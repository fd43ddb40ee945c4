"""Open transactions as the partitions' leaders hold them: what hides records from readers. How to end one there.

A coordinator answers EndTxn once the end is in its own log; the markers in the partitions follow. One that loads its
log before its metadata knows the leaders reports the transaction as complete without having written them (P28).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from delivered.clients.kafka import protocol
from delivered.clients.kafka.answers import NoAnswer, only
from delivered.clients.kafka.channel import Channel, Pending
from delivered.clients.kafka.protocol import NoTopic, Wire, name_of
from delivered.clients.kafka.rows import Partition, by_topic
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.patience import left_s

_PARTITIONS_PER_REQUEST = 500
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
                    OpenAt(
                        topic.name,
                        part.partition_index,
                        p.producer_id,
                        p.producer_epoch,
                        p.coordinator_epoch,
                        p.current_txn_start_offset,
                    )
                    for p in part.active_producers or ()
                    if p.current_txn_start_offset >= 0 and p.producer_id in producer_ids
                ]
    if denied:
        ends, stable = (_ends(wire, denied, level, deadline) for level in (_UNCOMMITTED, _COMMITTED))
        denied = [p for p in denied if stable.get(p, 0) < ends.get(p, 0)]
    return sorted(found), denied


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
