"""Transactions by requests to coordinators and partitions: how any process initialises, ends and lists them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from delivered.clients.kafka import NoAnswer, protocol
from delivered.clients.kafka.channel import Channel, Pending, only
from delivered.clients.kafka.consumer import (
    FETCH,
    FETCH_VERSION,
    LATEST,
    BatchHeader,
    Refusal,
    Response,
    fetch_request,
    find_leader,
    headers,
    is_answered,
    list_offsets,
)
from delivered.clients.kafka.protocol import FATAL, NoTopic, Wire, ask_member, name_of, retried
from delivered.clients.kafka.record_batch import SEQUENCES, Partition, by_topic
from delivered.model.errors import UsageError
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.patience import left_s
from delivered.model.work import Failed, Handle, Ok, Outcome, Unknown

OPEN_STATES = ("Ongoing", "PrepareEpochFence", "PrepareCommit", "PrepareAbort")
_LIST_TRANSACTIONS = 66
_PIPELINED_MAX = 48
"""EndTxn requests without an answer; below the connections' own limit."""
_ENDING_WAIT_S = 2.0


@dataclass(frozen=True)
class Transaction(Handle):
    """A transactional id under the epoch of one transaction: all that another process needs to commit or abort it."""

    transactional_id: str
    producer_id: int
    epoch: int


@dataclass(frozen=True)
class TransactionState:
    """An unfinished transaction, for display.

    Attributes:
        state: as Kafka names it: Ongoing, PrepareCommit, ...
        started_ms: milliseconds since 1970; -1: nothing was written yet.
        targets: the partitions it wrote to, as "topic-partition".
    """

    participant: Transaction
    state: str
    started_ms: int
    timeout_ms: int
    targets: tuple[str, ...]

    @property
    def transactional_id(self) -> str:
        return self.participant.transactional_id


def end_request(handle: Transaction, commit: bool) -> Any:
    """EndTxn. Up to version 4 it leaves the epoch unchanged, so it is idempotent."""
    from kafka.protocol.producer.transaction import EndTxnRequest

    return EndTxnRequest(
        transactional_id=handle.transactional_id,
        producer_id=handle.producer_id,
        producer_epoch=handle.epoch,
        committed=commit,
        max_version=4,
    )


def end(wire: Wire, handle: Transaction, commit: bool) -> Outcome[None]:
    """Commit or abort a prepared transaction from any process. Idempotent.

    The epoch belongs to this transaction alone, so a late request either finds it or is fenced by a newer epoch.
    """
    request, name = end_request(handle, commit), handle.transactional_id
    deadline = time.monotonic() + _ENDING_WAIT_S
    try:
        answer = wire.ask_coordinator(name, request, again=False)
        while answer.error_code == protocol.CONCURRENT_TRANSACTIONS and time.monotonic() < deadline:
            # An earlier EndTxn is still writing its markers.
            time.sleep(0.005)
            answer = wire.ask_coordinator(name, request, again=False)
    except NoAnswer as error:
        return Unknown(str(error))
    return _ended(handle, answer.error_code)


def end_all(wire: Wire, handles: Sequence[Transaction], commit: bool) -> list[Outcome[None]]:
    """`end` for many transactions: requests to a coordinator follow each other without waiting for answers."""
    wire.find_coordinators([h.transactional_id for h in handles])
    outcomes: list[Outcome[None]] = [Unknown("not asked yet")] * len(handles)
    deadline = time.monotonic() + _ENDING_WAIT_S
    todo: deque[int] = deque(range(len(handles)))
    flying: deque[tuple[int, Pending]] = deque()
    while todo or flying:
        while todo and len(flying) < _PIPELINED_MAX:
            at = todo.popleft()
            name = handles[at].transactional_id
            try:
                flying.append((at, wire.post(end_request(handles[at], commit), wire.coordinator(name))))
            except NoAnswer as error:
                wire.forget(name)
                outcomes[at] = Unknown(str(error))
        if not flying:
            break
        at, pending = flying.popleft()
        try:
            code = pending.answer(left_s(REQUEST_TIMEOUT_S)).error_code
        except NoAnswer as error:
            wire.forget(handles[at].transactional_id)
            outcomes[at] = Unknown(str(error))
            continue
        if code in protocol.COORDINATOR_MOVED:
            wire.forget(handles[at].transactional_id)
        # A coordinator that reports the promise as lost is asked once more, if it is still the coordinator.
        outcomes[at] = end(wire, handles[at], commit) if code in FATAL else _ended(handles[at], code)
        if code == protocol.CONCURRENT_TRANSACTIONS and time.monotonic() < deadline:
            # An earlier EndTxn is still writing its markers.
            if not flying:
                time.sleep(0.005)
            todo.append(at)
    return outcomes


def _ended(handle: Transaction, code: int) -> Outcome[None]:
    what = f"{handle.transactional_id}, epoch {handle.epoch}: {name_of(code)}"
    if code == protocol.NONE:
        return Ok(None)
    return Failed(what) if code in FATAL else Unknown(what)


def initialise(
    wire: Wire,
    transactional_id: str,
    timeout_ms: int,
    deadline: float,
    delayed: Callable[[], None] = lambda: None,
) -> Outcome[Transaction]:
    """Initialise a transactional id, which fences previous holders and aborts their open transaction.

    Args:
        deadline: of time.monotonic(), for waiting until the broker has ended the old transaction.
        delayed: called if it was not free at once: a transaction had to be ended, or the coordinator was away.
    """
    from kafka.protocol.producer.transaction import InitProducerIdRequest

    asked, disturbed = 0, wire.disturbed

    def ask() -> Any:
        nonlocal asked
        asked += 1
        request = InitProducerIdRequest(
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
            producer_id=-1,
            producer_epoch=-1,
            max_version=4,
        )
        return wire.ask_coordinator(transactional_id, request, again=True)

    # Safe to retry: each attempt gets a newer epoch.
    again = protocol.COORDINATOR_MOVED | {protocol.CONCURRENT_TRANSACTIONS}
    try:
        answer = retried(ask, again, deadline)
    except NoAnswer as error:
        return Unknown(str(error))
    if asked > 1 or wire.disturbed != disturbed:
        delayed()
    if answer.error_code == protocol.NONE:
        return Ok(Transaction(transactional_id, answer.producer_id, answer.producer_epoch))
    what = f"{transactional_id}: {name_of(answer.error_code)}"
    return Unknown(what) if answer.error_code in again else Failed(what)


def producer_id(wire: Wire) -> Transaction:
    """A new producer id without a transactional id. Raises NoAnswer."""
    from kafka.protocol.producer.transaction import InitProducerIdRequest

    request = InitProducerIdRequest(
        transactional_id=None, transaction_timeout_ms=60_000, producer_id=-1, producer_epoch=-1, max_version=4
    )

    def ask() -> Any:
        answer = wire.ask(request)
        if answer.error_code != protocol.NONE:
            raise NoAnswer(f"no producer id: {name_of(answer.error_code)}")
        return answer

    answer = wire.patiently(ask)
    return Transaction("", answer.producer_id, answer.producer_epoch)


def listed(wire: Wire, ours: Callable[[str], bool], states: Iterable[str], deadline: float) -> dict[str, str]:
    """Our transactional ids in one of `states`, with the state, from all brokers.

    Raises:
        NoAnswer: a broker of the cluster did not answer.
    """
    from kafka.protocol.admin.transactions import ListTransactionsRequest

    wanted = list(states)
    while True:
        placed = _placement(wire)
        found: dict[str, str] = {}
        serving = placed is not None and _are_serving(wire, placed, deadline)
        for node in wire.nodes() if serving else ():

            def ask(node: int = node) -> Any:
                request = ListTransactionsRequest(state_filters=wanted, max_version=0)
                return ask_member(wire, node, request, deadline) or _LEFT

            answer = retried(ask, protocol.COORDINATOR_MOVED, deadline, pause_s=0.05)
            if answer.error_code != protocol.NONE:
                raise NoAnswer(f"broker {node}: {name_of(answer.error_code)}")
            for row in answer.transaction_states:
                if ours(row.transactional_id):
                    found[row.transactional_id] = row.transaction_state
        # A coordinator that moved meanwhile may have been asked at neither of its places.
        if serving and placed == _placement(wire):
            return found
        if time.monotonic() > deadline:
            raise NoAnswer("transaction coordinators kept moving, or some partition of their log has no leader")
        time.sleep(0.05)


def named(wire: Wire, producer_ids: Collection[int], deadline: float) -> dict[int, TransactionState]:
    """The newest transactions of these producers, of any application and in any state, as their coordinators know them.

    Those that this user may not describe, or that no coordinator knows, are absent; before Kafka 3.0, all are.

    Raises:
        NoAnswer: a broker of the cluster did not answer.
    """
    from kafka.protocol.admin.transactions import ListTransactionsRequest

    names: list[str] = []
    if _LIST_TRANSACTIONS not in wire.patiently(wire.channel).versions.api_versions:
        return {}
    for node in wire.nodes():
        request = ListTransactionsRequest(state_filters=[], producer_id_filters=list(producer_ids), max_version=0)
        answer = ask_member(wire, node, request, deadline) or _LEFT
        names += [row.transactional_id for row in answer.transaction_states if row.producer_id in producer_ids]
    found = describe_all(wire, names) if names else {}
    return {t.participant.producer_id: t for t in found.values() if t is not None}


def _are_serving(wire: Wire, placed: Mapping[int, tuple[int, int]], deadline: float) -> bool:
    """Whether these brokers know already which transactions they coordinate.

    One that has just become a coordinator lists no transaction of that partition and no error until it has applied what
    the others know. For an id of the partition it says then that it is not the coordinator.
    """
    from kafka.protocol.admin.transactions import DescribeTransactionsRequest

    probes = _probes(len(placed))
    by_node: dict[int, list[str]] = {}
    for partition, (node, _) in placed.items():
        by_node.setdefault(node, []).append(probes[partition])
    for node, names in by_node.items():
        answer = ask_member(wire, node, DescribeTransactionsRequest(transactional_ids=names), deadline)
        if answer is None or any(row.error_code in protocol.COORDINATOR_MOVED for row in answer.transaction_states):
            return False
    return True


@cache
def _probes(partitions: int) -> dict[int, str]:
    """An unused transactional id of each partition of the coordinators' log."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < partitions:
        name = f"delivered.none.{number}"
        found.setdefault(_partition_of(name, partitions), name)
        number += 1
    return found


def _partition_of(transactional_id: str, partitions: int) -> int:
    """As brokers do: Java's hash of the text, without its sign."""
    hashed = 0
    for character in transactional_id:
        hashed = (31 * hashed + ord(character)) & 0xFFFF_FFFF
    return abs(hashed - (1 << 32) if hashed >> 31 else hashed) % partitions


_LEFT = SimpleNamespace(error_code=protocol.NONE, transaction_states=())


def _placement(wire: Wire) -> dict[int, tuple[int, int]] | None:
    """Coordinators and their epochs, by partition of their log; empty: this user may not see them. None: some have
    none now."""
    found = wire.patiently(lambda: wire.topic("__transaction_state"))
    if found.error_code in (protocol.UNKNOWN_TOPIC_OR_PARTITION, protocol.TOPIC_AUTHORIZATION_FAILED):
        return {}
    placed = {p.partition_index: (p.leader_id, getattr(p, "leader_epoch", -1)) for p in found.partitions}
    if any(leader < 0 for leader, _ in placed.values()) or sorted(placed) != list(range(len(placed))):
        return None
    return placed


def describe(wire: Wire, transactional_id: str) -> TransactionState | None:
    """The coordinator's state of one id; None: unknown id. Raises NoAnswer."""
    from kafka.protocol.admin.transactions import DescribeTransactionsRequest

    def ask() -> Any:
        request = DescribeTransactionsRequest(transactional_ids=[transactional_id])
        code_of = lambda found: int(only(found.transaction_states, "transactions").error_code)  # noqa: E731
        answer = wire.ask_coordinator(transactional_id, request, again=True, code_of=code_of)
        row: Any = only(answer.transaction_states, "transactions")
        if row.error_code in protocol.COORDINATOR_MOVED:
            wire.forget(transactional_id)
            raise NoAnswer(f"{transactional_id}: {name_of(row.error_code)}")
        return row

    return _described(wire.patiently(ask))


def describe_all(wire: Wire, transactional_ids: Collection[str]) -> dict[str, TransactionState | None]:
    """`describe` for many ids: their coordinators are asked side by side. Raises NoAnswer."""
    from kafka.protocol.admin.transactions import DescribeTransactionsRequest

    found: dict[str, TransactionState | None] = {}

    def ask() -> None:
        wire.find_coordinators(transactional_ids)
        by_node: dict[int, list[str]] = {}
        for name in transactional_ids:
            if name not in found:
                by_node.setdefault(wire.coordinator(name), []).append(name)
        requests = {n: DescribeTransactionsRequest(transactional_ids=names) for n, names in by_node.items()}
        moved = ""
        for pending in [wire.post(request, node) for node, request in requests.items()]:
            for row in pending.answer(left_s(REQUEST_TIMEOUT_S)).transaction_states:
                if row.error_code in protocol.COORDINATOR_MOVED:
                    moved = f"{row.transactional_id}: {name_of(row.error_code)}"
                else:
                    found[row.transactional_id] = _described(row)
        if moved:
            raise NoAnswer(moved)

    def once() -> None:
        try:
            ask()
        except NoAnswer:
            wire.coordinators.clear()
            raise

    wire.patiently(once)
    return found


def _described(row: Any) -> TransactionState | None:
    if row.error_code == protocol.TRANSACTIONAL_ID_NOT_FOUND:
        return None
    if row.error_code != protocol.NONE:
        raise NoAnswer(f"{row.transactional_id}: {name_of(row.error_code)}")
    return TransactionState(
        Transaction(row.transactional_id, row.producer_id, row.producer_epoch),
        state=row.transaction_state,
        started_ms=row.transaction_start_time_ms,
        timeout_ms=row.transaction_timeout_ms,
        targets=tuple(sorted(f"{t.topic}-{p}" for t in row.topics for p in t.partitions)),
    )


# Transactions by the producer state of partitions, which says what their coordinator may not know (P28).

_PARTITIONS_PER_REQUEST = 500
_DESCRIBE_PRODUCERS = 61
_CONTROL = 1 << 5
"""Flag of a batch that holds a transaction's marker: its producer's, with a sequence that is none."""
_SEARCHED_BYTES = 1 << 20
"""Of a log, in one request."""
_COMMITTED, _UNCOMMITTED = 1, 0
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
    if _DESCRIBE_PRODUCERS not in versions or versions.get(FETCH, (0, 0))[1] < FETCH_VERSION:
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
        leader = find_leader(wire, partition)
        pending = wire.post(fetch_request(partition, offset, leader.epoch, _SEARCHED_BYTES), leader.node)
        response = Response(pending.body(left_s(REQUEST_TIMEOUT_S)))
        if not is_answered(response.error, partition):
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
                        Topic.ListOffsetsPartition(partition_index=n, current_leader_epoch=-1, timestamp=LATEST)
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
