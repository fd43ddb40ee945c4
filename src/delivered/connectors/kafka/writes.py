"""Transactions of the ledger's topic: who holds a transactional id, and how its holder writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

from delivered.clients.kafka import NoAnswer, NotSent, protocol
from delivered.clients.kafka.protocol import FATAL, Wire, is_leader, name_of, retried
from delivered.clients.kafka.sender import VERDICTS, Verdict
from delivered.clients.kafka.transactions import Transaction, describe, end, end_request, initialise
from delivered.connectors.kafka.committer import build_refusal, end_hanging, find_hanging
from delivered.connectors.kafka.topics import HIDDEN_S, HISTORY_PARTITION, STATE_PARTITION, Hidden
from delivered.model.limits import RECOVERY_WAIT_S, REQUEST_TIMEOUT_S
from delivered.model.work import Failed, Ok, Outcome, Unknown

LEDGER_TRANSACTION_TIMEOUT_S = 15
"""A ledger transaction is open for milliseconds. If its driver dies meanwhile, other sinks wait at most this long."""

# Ends of the ledger's own transactions that its brokers lost (P28).
#
# The next commit of the same producer id would end them, too, and make a record visible whose abort everybody acted on.


def take_id(wire: Wire, name: str, topic: str, timeout_ms: int, deadline: float) -> Outcome[Transaction]:
    """Initialise a transactional id of the ledger, once neither partition holds an open transaction of it.

    An open one is aborted first, by name: its outcome is known then, whatever its coordinator forgets.

    Raises:
        DeliveredError: one that ended is still open in a partition, and this user may not end it.
    """
    delays: list[None] = []
    try:
        before = describe(wire, name)
        if before is not None:
            while before.state == "Ongoing" and isinstance(
                found := end(wire, before.participant, commit=False), Unknown
            ):
                if time.monotonic() > deadline:
                    return found
                time.sleep(0.05)  # its coordinator moves or loads; the request is idempotent
            settle_ids(wire, [name], topic, deadline)
        outcome = initialise(wire, name, timeout_ms, deadline, lambda: delays.append(None))
        if delays and isinstance(outcome, Ok):
            settle_ids(wire, [name], topic, deadline)
    except NoAnswer as error:
        return Unknown(str(error))
    return outcome


def settle_ids(wire: Wire, names: Sequence[str], topic: str, deadline: float, *, known: bool = False) -> int:
    """End what these ids left open in the ledger's partitions: abort what their coordinator aborted, commit the rest.

    If the outcome is unknown, a commit is safe: a decision counts if it is in the ledger, and its participants are
    written again if they were aborted. A decision that was acknowledged must not vanish.

    Args:
        known: only what their coordinator reports as ended.

    Returns:
        How many there were.

    Raises:
        NoAnswer: a broker did not answer. DeliveredError: one is still open, and this user may not end it.
    """
    count = 0
    for found in find_hanging(wire, [(topic, STATE_PARTITION), (topic, HISTORY_PARTITION)], names, (), deadline):
        if known and found.committed is None:
            continue
        commit = found.committed is not False
        match end_hanging(wire, found, commit, deadline):
            case Ok():
                count += 1
            case Unknown(reason):
                raise NoAnswer(reason)
            case Failed(reason):
                # The next transaction of this producer id would end it, too. If that aborts, a decision vanishes.
                raise build_refusal(found, commit, reason, by_hand=False)
    return count


def read_settled(wire: Wire, ids: Sequence[str], topic: str, read: Callable[[float], None]) -> None:
    """Read what the ledger's partitions hold. An open transaction that hides their end may be one whose end was lost.

    Args:
        read: until a deadline; may be called again.

    Raises:
        Hidden: as `read`. Otherwise as `settle_ids`.
    """
    deadline = time.monotonic() + RECOVERY_WAIT_S
    try:
        read(min(deadline, time.monotonic() + HIDDEN_S))
    except Hidden:
        settle_ids(wire, ids, topic, deadline, known=True)
        read(deadline)


def holders(wire: Wire, ids: Collection[str]) -> frozenset[int] | None:
    """Producer ids of these transactional ids now. None: this user may not ask."""
    try:
        found = [describe(wire, name) for name in ids]
    except NoAnswer as error:
        if "AUTHORIZATION" in str(error).upper():
            return None
        raise
    return frozenset(t.participant.producer_id for t in found if t is not None)


# One ledger transaction, request by request, so that each failure has a definite outcome.
#
# Not through librdkafka: it retries EndTxn by itself, so a rejected commit would be Unknown. With the read before it, a
#     decision takes 12 to 16 ms (p50) here and 21 ms there (docs/decisions/039).


class Again(Enum):
    """Whether a failed write may be retried after the transactional id has been initialised again."""

    NO = "no"
    FENCED = "a newer epoch of the id exists"
    AWAY = "no answer before EndTxn was sent: nothing was or will be committed"


def _added(response: Any) -> int:
    """The error code of an AddPartitionsToTxn response."""
    codes = [p.partition_error_code for t in response.results_by_topic_v3_and_below for p in t.results_by_partition]
    # After one partition's error the others report "operation not attempted".
    return next((c for c in codes if c not in (protocol.NONE, protocol.OPERATION_NOT_ATTEMPTED)), protocol.NONE)


Writes = Mapping[int, Sequence[tuple[bytes, bytes | None]]]
"""Partition -> records. A partition's records fit into one record batch."""

_FENCED = frozenset({protocol.INVALID_PRODUCER_EPOCH, protocol.PRODUCER_FENCED, protocol.INVALID_PRODUCER_ID_MAPPING})
_PASSING = frozenset(
    code
    for code, (_, verdict) in VERDICTS.items()
    if verdict in (Verdict.AGAIN, Verdict.MAYBE, Verdict.ELSEWHERE, Verdict.MISSING)
)
"""Of Produce. Also NOT_ENOUGH_REPLICAS, which is how brokers say that they cannot ask the coordinator just now."""
_AWAY = _PASSING | protocol.COORDINATOR_MOVED | {protocol.CONCURRENT_TRANSACTIONS}
_GZIP = 1
_GZIP_FROM_BYTES = 4096


class LedgerProducer:
    """A transactional id held by this process, under an epoch of its own.

    Attributes:
        ends: partition -> offset beyond the last acknowledged record.
    """

    def __init__(self, wire: Wire, topic: str, held: Transaction) -> None:
        self._wire = wire
        self._topic = topic
        self._held = held
        self._written: dict[int, int] = {}  # records per partition so far: the next sequence number
        self.ends: dict[int, int] = {}
        self._under_way: set[int] = set()  # partitions already written in the current transaction

    @property
    def producer_id(self) -> int:
        return self._held.producer_id

    def write(self, writes: Writes) -> tuple[Outcome[None], Again]:
        """Write records in one transaction.

        1 add the partitions       <- rejected here: nothing was or will be committed
        2 write the records
        3 EndTxn(commit), once     <- no answer here: the outcome is unknown

        Returns:
            The outcome; and for a failed one, whether it may be retried.
        """
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        self._under_way.clear()
        try:
            code = self.add(writes, deadline)
            if code == protocol.NONE:
                code = self.produce(writes)
                while code in _PASSING and time.monotonic() < deadline:
                    # For instance, the leader moved. The sequence number makes a retry idempotent.
                    time.sleep(0.02)
                    code = self.produce(writes)
        except NoAnswer as error:
            # Appended records are aborted without EndTxn, by the next InitProducerId or the time-out.
            return Failed(f"the records could not be written: {error}"), Again.AWAY
        if code != protocol.NONE:
            again = Again.FENCED if code in _FENCED else Again.AWAY if code in _AWAY else Again.NO
            return Failed(f"the records could not be written: {name_of(code)}"), again
        return self.commit()

    def add(self, writes: Writes, deadline: float) -> int:
        from kafka.protocol.producer.transaction import AddPartitionsToTxnRequest

        Topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic  # noqa: N806
        name = self._held.transactional_id

        def ask() -> Any:
            request = AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=name,
                v3_and_below_producer_id=self._held.producer_id,
                v3_and_below_producer_epoch=self._held.epoch,
                v3_and_below_topics=[Topic(name=self._topic, partitions=list(writes))],
                max_version=3,
            )
            response = self._wire.ask_coordinator(name, request, again=True, code_of=_added)
            return SimpleNamespace(error_code=_added(response))

        # The id's last transaction may still be completing; adding partitions is idempotent.
        again = protocol.COORDINATOR_MOVED | {protocol.CONCURRENT_TRANSACTIONS, protocol.UNKNOWN_TOPIC_OR_PARTITION}
        return int(retried(ask, again, deadline, pause_s=0.002).error_code)

    def produce(self, writes: Writes) -> int:
        from kafka.protocol.producer.produce import ProduceRequest

        Topic = ProduceRequest.TopicProduceData  # noqa: N806
        by_leader: dict[int, list[int]] = {}
        failed = protocol.NONE
        for partition in writes.keys() - self._under_way:
            by_leader.setdefault(self._wire.leader(self._topic, partition), []).append(partition)
        for node, partitions in by_leader.items():
            data = [Topic.PartitionProduceData(index=p, records=self._batch(p, writes[p])) for p in partitions]
            request = ProduceRequest(
                transactional_id=self._held.transactional_id,
                acks=-1,
                timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
                topic_data=[Topic(name=self._topic, partition_data=data)],
                max_version=9,
            )
            for part in (p for found in self._wire.ask(request, node).responses for p in found.partition_responses):
                if part.error_code != protocol.NONE:
                    self._wire.forget()
                    failed = int(part.error_code)
                    if failed in FATAL and not is_leader(self._wire, node, self._topic, part.index):
                        failed = protocol.NOT_LEADER
                    continue
                self._under_way.add(part.index)
                self.ends[part.index] = int(part.base_offset) + len(writes[part.index])
                self._written[part.index] = self._written.get(part.index, 0) + len(writes[part.index])
        return failed

    def commit(self) -> tuple[Outcome[None], Again]:
        request, name = end_request(self._held, commit=True), self._held.transactional_id
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        try:
            # A coordinator that is loading, or has moved, did nothing.
            answer = retried(
                lambda: self._wire.ask_coordinator(name, request, again=False), protocol.COORDINATOR_MOVED, deadline
            )
        except NotSent as error:
            return Failed(f"the commit was not sent: {error}"), Again.AWAY
        except NoAnswer as error:
            return Unknown(f"the commit was sent and not answered: {error}"), Again.NO
        if answer.error_code == protocol.NONE:
            return Ok(None), Again.NO
        reason = f"the commit was rejected: {name_of(answer.error_code)}"
        if answer.error_code in _FENCED | {protocol.INVALID_TXN_STATE}:
            # Rejected, and this was the only EndTxn: the transaction was or will be aborted.
            return Failed(reason), Again.FENCED if answer.error_code in _FENCED else Again.NO
        return Unknown(reason), Again.NO

    def _batch(self, partition: int, records: Sequence[tuple[bytes, bytes | None]]) -> bytes:
        from kafka.record.default_records import DefaultRecordBatchBuilder

        size = sum(len(k) + len(v or b"") for k, v in records)
        builder = DefaultRecordBatchBuilder(
            magic=2,
            compression_type=_GZIP if size > _GZIP_FROM_BYTES else 0,
            is_transactional=True,
            producer_id=self._held.producer_id,
            producer_epoch=self._held.epoch,
            base_sequence=self._written.get(partition, 0),
            batch_size=1 << 30,
        )
        now = time.time_ns() // 1_000_000
        for offset, (key, value) in enumerate(records):
            builder.append(offset, timestamp=now, key=key, value=value, headers=[])
        return bytes(builder.build())
