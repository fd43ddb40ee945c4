"""One transaction of the ledger, request by request, so that each way to fail has its own outcome."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from delivered.connectors.kafka import protocol
from delivered.connectors.kafka.protocol import NoAnswer, NotSent, Wire, name_of, retried
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.outcome import Failed, Ok, Outcome, Unknown


class Again(Enum):
    """Whether a failed write may be made again, once its transactional id was taken anew."""

    NO = "no"
    FENCED = "a newer epoch of the id exists"
    AWAY = "no answer before its end was asked for: nothing of it is in, nor will be"


@dataclass
class LedgerProducer:
    """A transactional id as this process holds it.

    Attributes:
        written: records in each partition so far: the sequence number of the next.
        under_way: partitions that have their records of the transaction under way.
    """

    id: int
    epoch: int
    written: dict[int, int] = field(default_factory=dict)
    under_way: set[int] = field(default_factory=set)


Writes = Mapping[int, Sequence[tuple[bytes, bytes | None]]]
"""Partition -> records. The records of one partition fit into one batch."""

_FENCED = frozenset({protocol.INVALID_PRODUCER_EPOCH, protocol.PRODUCER_FENCED, protocol.INVALID_PRODUCER_ID_MAPPING})
_ELSEWHERE = frozenset({protocol.NOT_LEADER, protocol.UNKNOWN_TOPIC_OR_PARTITION, protocol.LEADER_NOT_AVAILABLE})
_AWAY = _ELSEWHERE | protocol.COORDINATOR_MOVED | {protocol.CONCURRENT_TRANSACTIONS}
_GZIP = 1
_GZIP_FROM_BYTES = 4096


def write(
    wire: Wire, transactional_id: str, producer: LedgerProducer, topic: str, writes: Writes
) -> tuple[Outcome[None], Again]:
    """Write records in one transaction of this producer, whose epoch is used by nobody else.

        1  add the partitions      <- refused here: nothing is in, nothing will be
        2  write the records
        3  EndTxn(commit), once    <- no answer here: nobody knows

    Returns:
        The outcome; and of one that failed, whether it may be made again.
    """
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    producer.under_way.clear()
    try:
        code = _add(wire, transactional_id, producer, topic, writes, deadline)
        if code == protocol.NONE:
            code = _produce(wire, transactional_id, producer, topic, writes)
            while code in _ELSEWHERE and time.monotonic() < deadline:
                # Led by another broker, or by none yet. The sequence number keeps a repetition from counting twice.
                time.sleep(0.02)
                code = _produce(wire, transactional_id, producer, topic, writes)
    except NoAnswer as error:
        # Records may lie there; without EndTxn they are aborted, by the next one to take the id or by the time-out.
        return Failed(f"the records could not be written: {error}"), Again.AWAY
    if code != protocol.NONE:
        again = Again.FENCED if code in _FENCED else Again.AWAY if code in _AWAY else Again.NO
        return Failed(f"the records could not be written: {name_of(code)}"), again
    return _commit(wire, transactional_id, producer)


def _add(
    wire: Wire, transactional_id: str, producer: LedgerProducer, topic: str, writes: Writes, deadline: float
) -> int:
    from kafka.protocol.producer.transaction import AddPartitionsToTxnRequest

    Topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic  # noqa: N806

    class Answer:
        error_code = protocol.NONE

    def ask() -> Any:
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=transactional_id,
            v3_and_below_producer_id=producer.id,
            v3_and_below_producer_epoch=producer.epoch,
            v3_and_below_topics=[Topic(name=topic, partitions=list(writes))],
            max_version=3,
        )
        said = wire.ask_coordinator(transactional_id, request, again=True)
        codes = [p.partition_error_code for t in said.results_by_topic_v3_and_below for p in t.results_by_partition]
        answer = Answer()
        # One partition's error makes the others say "operation not attempted".
        answer.error_code = next((c for c in codes if c not in (protocol.NONE, 55)), protocol.NONE)
        if answer.error_code in protocol.COORDINATOR_MOVED:
            wire.forget(transactional_id)
        return answer

    # The last transaction of this id may still be ending; to add partitions twice is the same as once.
    again = protocol.COORDINATOR_MOVED | {protocol.CONCURRENT_TRANSACTIONS, protocol.UNKNOWN_TOPIC_OR_PARTITION}
    return int(retried(ask, frozenset(again), deadline, pause_s=0.002).error_code)


def _produce(wire: Wire, transactional_id: str, producer: LedgerProducer, topic: str, writes: Writes) -> int:
    from kafka.protocol.producer.produce import ProduceRequest

    Topic = ProduceRequest.TopicProduceData  # noqa: N806
    by_leader: dict[int, list[int]] = {}
    failed = protocol.NONE
    for partition in writes.keys() - producer.under_way:
        by_leader.setdefault(wire.leader(topic, partition), []).append(partition)
    for node, partitions in by_leader.items():
        data = [
            Topic.PartitionProduceData(index=p, records=_batch(writes[p], producer, producer.written.get(p, 0)))
            for p in partitions
        ]
        request = ProduceRequest(
            transactional_id=transactional_id,
            acks=-1,
            timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
            topic_data=[Topic(name=topic, partition_data=data)],
            max_version=9,
        )
        answer = wire.ask(request, node)
        for found in answer.responses:
            for part in found.partition_responses:
                if part.error_code != protocol.NONE:
                    wire.forget()
                    failed = int(part.error_code)
                    continue
                producer.under_way.add(part.index)
                producer.written[part.index] = producer.written.get(part.index, 0) + len(writes[part.index])
    return failed


def _commit(wire: Wire, transactional_id: str, producer: LedgerProducer) -> tuple[Outcome[None], Again]:
    from kafka.protocol.producer.transaction import EndTxnRequest

    request = EndTxnRequest(
        transactional_id=transactional_id,
        producer_id=producer.id,
        producer_epoch=producer.epoch,
        committed=True,
        max_version=4,
    )
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    try:
        # A coordinator that is loading, or is another one by now, did nothing.
        answer = retried(
            lambda: wire.ask_coordinator(transactional_id, request, again=False), protocol.COORDINATOR_MOVED, deadline
        )
    except NotSent as error:
        return Failed(f"the commit was not sent: {error}"), Again.AWAY
    except NoAnswer as error:
        return Unknown(f"the commit was sent and not answered: {error}"), Again.NO
    if answer.error_code == protocol.NONE:
        return Ok(None), Again.NO
    reason = f"the commit was refused: {name_of(answer.error_code)}"
    if answer.error_code in _FENCED | {protocol.INVALID_TXN_STATE}:
        # Refused, and this was its only commit: the transaction was or will be aborted.
        return Failed(reason), Again.FENCED if answer.error_code in _FENCED else Again.NO
    return Unknown(reason), Again.NO


def _batch(records: Sequence[tuple[bytes, bytes | None]], producer: LedgerProducer, sequence: int) -> bytes:
    from kafka.record.default_records import DefaultRecordBatchBuilder

    size = sum(len(k) + len(v or b"") for k, v in records)
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=_GZIP if size > _GZIP_FROM_BYTES else 0,
        is_transactional=True,
        producer_id=producer.id,
        producer_epoch=producer.epoch,
        base_sequence=sequence,
        batch_size=1 << 30,
    )
    now = time.time_ns() // 1_000_000
    for offset, (key, value) in enumerate(records):
        builder.append(offset, timestamp=now, key=key, value=value, headers=[])
    return bytes(builder.build())
