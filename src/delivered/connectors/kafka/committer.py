"""Commits and aborts the transactions that tasks prepared; whether they ended, by evidence: markers, partitions.

Markers: each shard of a batch writes one into its transaction, so it is visible if and only if the rows are.

Markers have their own partitions of the internal topic: a prepared transaction hides everything behind it in the
partitions it wrote to.

A marker counts if the producer and epoch that the decision names wrote it: brokers check who uses them (decision 113).
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from delivered.clients.kafka import NoAnswer, protocol
from delivered.clients.kafka.channel import Channel
from delivered.clients.kafka.protocol import NoTopic, Wire
from delivered.clients.kafka.record_batch import Partition
from delivered.clients.kafka.transactions import (
    OPEN_STATES,
    OpenAt,
    Transaction,
    TransactionState,
    describe,
    describe_all,
    end,
    end_all,
    end_at,
    held,
    hidden_in,
    listed,
    named,
    open_in,
    partitions_of,
)
from delivered.connectors.kafka import SinkOptions, is_internal
from delivered.connectors.kafka.topics import (
    HIDDEN_S,
    MARKER_PARTITIONS,
    MARKERS_FROM,
    NOBODY,
    CommittedReader,
    Hidden,
    Record,
    abort_orphans,
    barrier,
    damaged,
    ensure_topic,
    id_prefix,
    is_ours,
    ledger_topic,
    open_transactions,
    starts_from_the_end,
    topic_id,
)
from delivered.contract.sink import Committer, OpenTransaction, Shards
from delivered.contract.source import Blocking, HeldBack
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, OutcomeUnknown, Unreachable, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Target, Work
from delivered.model.limits import RECOVERY_WAIT_S, REQUEST_TIMEOUT_S
from delivered.model.patience import left_s
from delivered.model.work import Failed, Handle, Ok, Outcome, Prepared, Unknown, with_format, without_format


def marker_partition(scope: Scope) -> int:
    digest = hashlib.blake2b(f"{scope.pipeline}\0{scope.sink}".encode(), digest_size=4).digest()
    return MARKERS_FROM + int.from_bytes(digest, "big") % MARKER_PARTITIONS


def marker_key(scope: Scope, shard: int) -> bytes:
    return json.dumps(["marker", scope.pipeline, scope.sink, shard], separators=(",", ":")).encode()


def marker_value(work: Work, fingerprint: Fingerprint) -> bytes:
    marker = {
        "incarnation": work.scope.incarnation,
        "batch": work.batch,
        "attempt": work.attempt,
        "fingerprint": str(fingerprint),
    }
    return json.dumps(with_format(marker), separators=(",", ":")).encode()


def read_marker(value: bytes) -> tuple[str, int, Fingerprint]:
    """Incarnation, batch and fingerprint of a marker."""
    marker = without_format(json.loads(value), "a marker")
    return marker["incarnation"], marker["batch"], Fingerprint.parse(marker["fingerprint"])


def find_marker(
    wire: Wire, topic: str, work: Work, held: Transaction, wait_s: float, settle: Callable[[], object] = lambda: None
) -> Fingerprint | None:
    """Fingerprint in a transaction's marker if its rows are visible, else None.

    Args:
        held: what the decision names.
        settle: called if an open transaction hides it for 2 s: its end may have been lost.

    Raises:
        OutcomeUnknown: the partition could not be read to its end, or another application wrote under the marker's key.
        InvariantBroken: LEDGER_DAMAGED.
    """
    partition, key = marker_partition(work.scope), marker_key(work.scope, work.shard)
    reader = CommittedReader(wire, topic, partition)
    found: Fingerprint | None = None
    foreign: Record | None = None

    def is_own(record: Record) -> bool:
        return (record.producer, record.epoch) == (held.producer_id, held.epoch)

    def read(wait_s: float) -> None:
        nonlocal found, foreign
        for record in reader.read(time.monotonic() + wait_s, ours=is_own):
            if is_own(record) and record.key in (key, b""):
                found = _read_own(topic, partition, record, work)
            elif record.key == key and _is_foreign(record, work):
                foreign = record

    try:
        try:
            read(min(wait_s, HIDDEN_S))
        except Hidden:
            settle()
            read(wait_s)
        if found is None:
            # Without a marker the rows are written again, so its absence must be certain.
            reader.reach(barrier(wire, topic, partition))
            read(wait_s)
        if found is None and foreign is not None and not _was_aborted(wire, held):
            raise _build_overwritten(topic, partition, foreign, work)
        return found
    except NoAnswer as error:
        raise OutcomeUnknown("MARKER_UNREADABLE", shard=work.shard, batch=work.batch, error=error) from None


def find_visible(wire: Wire, topic: str, scope: Scope, batch: int) -> set[int]:
    """Shards whose newest visible marker is of this batch or a later one.

    Reads from the partition's end back to a marker of an earlier batch: a batch starts after the previous one's end.

    Raises:
        NoAnswer: the partition could not be read.
    """
    partition, prefix = marker_partition(scope), marker_key(scope, 0)[: -len(b"0]")]
    shards = set[int]()
    try:
        for start in starts_from_the_end(CommittedReader(wire, topic, partition).end()):
            reader, earlier = CommittedReader(wire, topic, partition), False
            reader.position = start
            # Not waiting: orphans were aborted, and what a late task has opened since is not visible.
            for record in reader.read(time.monotonic() + RECOVERY_WAIT_S, ours=lambda _: False):
                if not record.key.startswith(prefix) or (marker := _read_any(record)) is None:
                    continue
                shard, incarnation, marked = marker
                if incarnation == scope.incarnation and marked >= batch:
                    shards.add(shard)
                else:
                    earlier = True
            if earlier:
                break
    except NoTopic:
        return set()
    return shards


def _read_any(record: Record) -> tuple[int, str, int] | None:
    """Shard, incarnation and batch; None: no marker."""
    try:
        incarnation, batch, _ = read_marker(record.value or b"")
        return (int(json.loads(record.key)[-1]), incarnation, batch) if record.producer != NOBODY else None
    except Exception:  # any bytes
        return None


def _read_own(topic: str, partition: int, record: Record, work: Work) -> Fingerprint | None:
    try:
        incarnation, batch, fingerprint = read_marker(record.value or b"")
    except (ValueError, KeyError, TypeError) as error:
        why = f"a marker cannot be read: {type(error).__name__}"
        raise damaged(topic, partition, record.offset, why) from None
    return fingerprint if (incarnation, batch) == (work.scope.incarnation, work.batch) else None


def _is_foreign(record: Record, work: Work) -> bool:
    """Whether no task of ours wrote a record under a marker's key."""
    if record.producer == NOBODY or record.value is None:
        return True
    try:
        incarnation, batch, _ = read_marker(record.value)
    except Exception:  # any bytes
        return True
    return (incarnation, batch) == (work.scope.incarnation, work.batch)


def _was_aborted(wire: Wire, held: Transaction) -> bool:
    """Whether its coordinator still knows that it aborted it; to expire or fence one, it does so under the next epoch.

    Raises:
        NoAnswer: the coordinator does not answer.
    """
    now = describe(wire, held.transactional_id)
    if now is None or now.participant.producer_id != held.producer_id:
        return False
    return now.state in ("PrepareAbort", "CompleteAbort") and now.participant.epoch - held.epoch in (0, 1)


def _build_overwritten(topic: str, partition: int, foreign: Record, work: Work) -> OutcomeUnknown:
    """Compaction keeps the newest record of a key, so it may have removed the marker."""
    return OutcomeUnknown(
        "MARKER_OVERWRITTEN",
        shard=work.shard,
        batch=work.batch,
        topic=topic,
        partition=partition,
        offset=foreign.offset,
        producer=foreign.producer,
    )


# Which partitions a sink's transactions may have written.


def written_partitions(wire: Wire, options: SinkOptions, scope: Scope) -> list[Partition]:
    """Every partition that a transaction of this sink may have written: its topic's and the markers'.

    If rows name their topics: those of all topics that they may name.
    """
    if options.topic is not None:
        topics = [options.topic]
    else:
        topics = [t for t in wire.topics() if not is_internal(t, options.ledger_topic)]
    marker = ledger_topic(scope, options.ledger_topic), marker_partition(scope)
    return [*partitions_of(wire, topics), marker]


# Whether a sink's transactions ended, by evidence in the partitions that they wrote.
#
# A coordinator's answer is not enough (P28): one that restarts may report a transaction as complete whose markers are
# in no partition. Its rows stay hidden, together with everything behind them, until the next transaction of the same
# producer id ends. They get that one's outcome: committed rows are lost, or aborted ones become visible.

log = logging.getLogger(__name__)

ENDING = ("PrepareEpochFence", "PrepareCommit", "PrepareAbort")
_ENDING_S = 5.0
"""How long a status waits for markers that are on their way."""


@dataclass(frozen=True)
class Hanging(TransactionState):
    """A transaction that partitions hold open although its coordinator has ended it. `state`: "Hanging".

    Attributes:
        at: where.
        reported_state: of the transactional id, by its coordinator.
        committed: how it ended, by that state; None: the state is that of another transaction.
    """

    at: tuple[OpenAt, ...] = ()
    reported_state: str = ""
    committed: bool | None = None


def find_hanging(
    wire: Wire,
    partitions: Sequence[Partition],
    ids: Collection[str],
    handles: Iterable[Transaction],
    deadline: float,
    *,
    shown: bool = False,
) -> list[Hanging]:
    """What these partitions hold open although its coordinator has ended it.

    Asks the coordinators first: what is complete by then must have its markers in the partitions afterwards. Waits
    for transactions that are ending.

    Args:
        ids: transactional ids.
        handles: transactions whose coordinator may have forgotten them.
        shown: only for display: waits for nothing, and takes no notice of what this user may not read.

    Raises:
        NoAnswer: a broker did not answer, or a transaction was still ending at the deadline.
        DeliveredError: a partition holds an open transaction, and this user may not see whose.
    """
    known = {h.producer_id: h.transactional_id for h in handles}
    pause_s = 0.01
    while True:
        now = describe_all(wire, {*ids, *known.values()})
        owners = known | {t.participant.producer_id: name for name, t in now.items() if t is not None}
        found, hidden = open_in(wire, partitions, owners.keys(), deadline)
        if hidden and not shown:
            raise _unreadable(hidden)
        hanging: dict[tuple[int, int], list[OpenAt]] = {}
        ending: list[OpenAt] = []
        for at in found:
            match _is_hanging(at, now.get(owners[at.producer_id])):
                case True:
                    hanging.setdefault((at.producer_id, at.epoch), []).append(at)
                case None:
                    ending.append(at)
                case False:
                    pass
        if not ending or shown:
            return [_build_hanging(owners[p], at, now.get(owners[p])) for (p, _), at in hanging.items()]
        if time.monotonic() > deadline:
            raise NoAnswer(f"transaction {owners[ending[0].producer_id]} is still ending in {ending[0]}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.25)


def _is_hanging(at: OpenAt, now: TransactionState | None) -> bool | None:
    """None: not known yet."""
    if now is None or now.participant.producer_id != at.producer_id:
        return True
    if now.state in ENDING:
        return None
    if at.epoch > now.participant.epoch:
        return None  # of a transaction that was opened since
    return now.state != "Ongoing" or at.epoch < now.participant.epoch


def _build_hanging(name: str, at: Sequence[OpenAt], now: TransactionState | None) -> Hanging:
    committed = None
    # To fence a transaction, its coordinator aborts it under the next epoch.
    if (
        now is not None
        and now.participant.producer_id == at[0].producer_id
        and now.participant.epoch - at[0].epoch in (0, 1)
    ):
        committed = {"CompleteCommit": True, "CompleteAbort": False}.get(now.state)
    return Hanging(
        Transaction(name, at[0].producer_id, at[0].epoch),
        state="Hanging",
        started_ms=-1,
        timeout_ms=0 if now is None else now.timeout_ms,
        targets=tuple(f"{a.topic}-{a.partition}" for a in at),
        at=tuple(at),
        reported_state="unknown" if now is None else now.state,
        committed=committed,
    )


def end_hanging(wire: Wire, found: Hanging, commit: bool, deadline: float) -> Outcome[None]:
    """Write the missing markers. Failed: not permitted, or the producer id has been used again since."""
    for at in found.at:
        outcome = end_at(wire, at, commit, deadline)
        if not isinstance(outcome, Ok):
            return Failed(f"{at}: {outcome.reason}") if isinstance(outcome, Failed) else outcome
    log.warning(
        "%s, epoch %d: its coordinator reported %s without having written its end; %s it in %s",
        found.transactional_id,
        found.participant.epoch,
        found.reported_state,
        "committed" if commit else "aborted",
        ", ".join(found.targets),
    )
    return Ok(None)


def build_refusal(found: Hanging, commit: bool, reason: str, *, by_hand: bool = True) -> DeliveredError:
    """It cannot be ended: using its producer id again would end it with the outcome of another transaction.

    Args:
        by_hand: whether `delivered transactions` ends it: not what is the ledger's own, which it has to read first.
    """
    end = "apply" if commit else "abort"
    other = (
        f"as a user who has it: delivered transactions {end} PIPELINE.yaml {found.transactional_id}"
        if by_hand
        else "start once as a user who has it: delivered run PIPELINE.yaml"
    )
    return DeliveredError(
        "TRANSACTION_HANGING.COMMIT",
        transactional_id=found.transactional_id,
        producer_id=found.participant.producer_id,
        epoch=found.participant.epoch,
        end="committed" if commit else "aborted",
        partitions=", ".join(map(str, found.at[:5])),
        reason=reason,
        alternative=other,
    )


def _unreadable(hidden: Sequence[Partition]) -> DeliveredError:
    topic, number = hidden[0]
    return DeliveredError("TRANSACTIONS_UNREADABLE", number=number, topic=topic, count=len(hidden))


class Ends:
    """What one process knows of the ends of a sink's transactions. Args: wire: opens the committer's connections."""

    def __init__(self, wire: Callable[[], Wire], options: SinkOptions, scope: Scope) -> None:
        self._connected, self._options, self._scope = wire, options, scope
        self._held: dict[int, Channel] = {}
        self.decided: Mapping[Transaction, Work] = {}

    @property
    def _wire(self) -> Wire:
        return self._connected()

    def settle(
        self, decided: Mapping[Transaction, Work], earlier: Callable[[], Iterable[Transaction]], wait_s: float
    ) -> int:
        """End what hangs, as its coordinator decided; if that is unknown, commit what a decision names, abort the rest.

        Args:
            decided: transactions of the newest decision; earlier: of older ones, read only if something hangs.

        Returns:
            How many hung.

        Raises:
            NoAnswer: a broker did not answer. DeliveredError: not permitted.
        """
        deadline = time.monotonic() + wait_s
        wire = self._wire
        names = listed(wire, partial(is_ours, self._scope), (), deadline)
        confirmed = held(wire)
        count = 0
        self.decided = decided
        if not names and not decided:
            self._held = confirmed
            return 0
        while found := self._hanging(names, deadline):
            older = frozenset(earlier())
            for hanging in found:
                self._end(hanging, self._outcome(hanging, older, wait_s), deadline)
            count += len(found)
        self._held = confirmed
        return count

    def settle_known(self) -> None:
        """End what hangs and whose outcome its coordinator still knows. Raises as `settle`."""
        deadline = time.monotonic() + RECOVERY_WAIT_S
        for hanging in self._hanging(listed(self._wire, partial(is_ours, self._scope), (), deadline), deadline):
            if hanging.committed is not None:
                self._end(hanging, hanging.committed, deadline)

    def _outcome(self, hanging: Hanging, older: Collection[Transaction], wait_s: float) -> bool:
        """Whether to commit it."""
        if hanging.committed is not None:
            return hanging.committed
        work = self.decided.get(hanging.participant)
        if work is None:
            return hanging.participant in older
        # Its other partitions have the end that this one lacks, and the marker's may be one of them.
        topic, number = ledger_topic(self._scope, self._options.ledger_topic), marker_partition(self._scope)
        if f"{topic}-{number}" in hanging.targets:
            return True
        return find_marker(self._wire, topic, work, hanging.participant, wait_s) is not None

    def believe(
        self, handles: Sequence[Transaction], outcomes: Sequence[Outcome[None]], wait_s: float
    ) -> list[Outcome[None]]:
        """Outcomes of EndTxn(commit); an Ok of a coordinator that may have restarted is confirmed by the partitions."""
        trusted = self._undisturbed(
            {h.transactional_id for h, o in zip(handles, outcomes, strict=True) if isinstance(o, Ok)}
        )
        doubtful = [
            h for h, o in zip(handles, outcomes, strict=True) if isinstance(o, Ok) and h.transactional_id not in trusted
        ]
        if not doubtful:
            return list(outcomes)
        deadline = time.monotonic() + wait_s
        wire, wanted = self._wire, set(doubtful)
        try:
            while True:
                confirmed = held(wire)
                partitions = written_partitions(wire, self._options, self._scope)
                found = find_hanging(wire, partitions, {h.transactional_id for h in doubtful}, doubtful, deadline)
                ours = [f for f in found if f.participant in wanted]
                for hanging in ours:
                    self._end(hanging, True, deadline)
                if not ours:
                    break
        except NoAnswer as error:
            return [
                Unknown(str(error)) if h in wanted and isinstance(o, Ok) else o
                for h, o in zip(handles, outcomes, strict=True)
            ]
        self._held = self._held | confirmed
        return list(outcomes)

    def are_steady(self) -> bool:
        """Whether no broker restarted since everything was confirmed."""
        now = held(self._wire)
        return bool(self._held) and all(now.get(node) is channel for node, channel in self._held.items())

    def are_complete(self) -> bool:
        """Whether no broker restarted since everything was confirmed, and none is still ending something of ours.

        One small request to each broker, on the connection that has been open since then.
        """
        deadline = time.monotonic() + _ENDING_S
        try:
            while self.are_steady() and time.monotonic() < deadline:
                if not self._are_ending():
                    return True
                time.sleep(0.005)
        except NoAnswer:
            pass
        return False

    def _are_ending(self) -> bool:
        """Raises NoAnswer."""
        from kafka.protocol.admin.transactions import ListTransactionsRequest

        sent = [
            channel.post(ListTransactionsRequest(state_filters=list(ENDING), max_version=0))
            for channel in self._held.values()
        ]
        answers = [pending.answer(left_s(REQUEST_TIMEOUT_S)) for pending in sent]
        if any(answer.error_code != protocol.NONE for answer in answers):
            raise NoAnswer("a coordinator is loading")
        return any(is_ours(self._scope, row.transactional_id) for a in answers for row in a.transaction_states)

    def hanging(self) -> list[Hanging]:
        """What hangs now, for display: without what is ending, and without partitions that this user may not read.

        Raises:
            NoAnswer: a broker did not answer.
        """
        deadline = time.monotonic() + _ENDING_S
        names = listed(self._wire, partial(is_ours, self._scope), (), deadline)
        if not names:
            return []
        partitions = written_partitions(self._wire, self._options, self._scope)
        return find_hanging(self._wire, partitions, names, (), deadline, shown=True)

    def end_by_hand(self, hanging: Hanging, commit: bool) -> Outcome[None]:
        """Raises UsageError: its coordinator had ended it otherwise."""
        if hanging.committed is (not commit):
            outcome, verb = ("committed", "abort") if hanging.committed else ("aborted", "apply")
            raise UsageError(
                "TRANSACTION_ENDED",
                transactional_id=hanging.transactional_id,
                outcome=outcome,
                verb=verb,
                partitions=", ".join(hanging.targets),
                end="apply" if hanging.committed else "abort",
            )
        return end_hanging(self._wire, hanging, commit, time.monotonic() + REQUEST_TIMEOUT_S)

    def _undisturbed(self, names: Collection[str]) -> set[str]:
        """Those whose coordinator's connection has been open since it was last confirmed: it did not restart."""
        now = held(self._wire)
        steady = {node for node, channel in now.items() if self._held.get(node) is channel}
        return {n for n in names if self._wire.coordinators.get(n) in steady}

    def _hanging(self, names: Collection[str], deadline: float) -> list[Hanging]:
        partitions = written_partitions(self._wire, self._options, self._scope)
        return find_hanging(self._wire, partitions, names, self.decided, deadline)

    def _end(self, hanging: Hanging, commit: bool, deadline: float) -> None:
        match end_hanging(self._wire, hanging, commit, deadline):
            case Failed(reason):
                raise build_refusal(hanging, commit, reason)
            case Unknown(reason):
                raise NoAnswer(reason)
            case Ok():
                pass


# Commits and aborts the Kafka transactions that tasks prepared.


class KafkaCommitter(Committer):
    """See `delivered.contract.sink.Committer`. Also serves `delivered transactions`."""

    def __init__(self, options: SinkOptions, scope: Scope) -> None:
        self._scope = scope
        self._topic = ledger_topic(scope, options.ledger_topic)
        self._timeout_ms = options.transaction_timeout_s * 1000
        self._options = options
        self._opened: Wire | None = None
        self._ends = Ends(lambda: self._wire, options, scope)

    @property
    def _wire(self) -> Wire:
        if self._opened is None:
            self._opened = Wire(self._options.resolved())
        return self._opened

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:  # noqa: ARG002 - the handle is enough
        """EndTxn(commit) with this producer id and epoch; after a disturbance, confirmed by the partitions."""
        handle = Transaction.of(prepared)
        return self._ends.believe([handle], [end(self._wire, handle, commit=True)], RECOVERY_WAIT_S)[0]

    def commit_all(self, shards: Sequence[tuple[Work, Prepared]]) -> list[Outcome[None]]:
        """See `delivered.contract.sink.Committer`."""
        handles = [Transaction.of(p) for _, p in shards]
        return self._ends.believe(handles, end_all(self._wire, handles, commit=True), RECOVERY_WAIT_S)

    def settle_ends(self, decided: Shards, earlier: Callable[[], Sequence[Prepared]]) -> Outcome[int]:
        """See `delivered.contract.sink.Committer`."""
        try:
            named = {Transaction.of(p): work for work, p in decided if p.handle}
            return Ok(self._ends.settle(named, lambda: map(Transaction.of, earlier()), RECOVERY_WAIT_S))
        except NoAnswer as error:
            return Unknown(str(error))

    def ends_hold(self, applied: Sequence[Prepared]) -> bool:
        """See `delivered.contract.sink.Committer`."""
        return not any(p.handle for p in applied) or self._ends.are_complete()

    def was_committed(self, work: Work, prepared: Prepared) -> bool:
        """Whether this transaction has a committed marker."""
        held, settle = Transaction.of(prepared), self._ends.settle_known
        return find_marker(self._wire, self._topic, work, held, RECOVERY_WAIT_S, settle) is not None

    def visible_shards(self, batch: int) -> Sequence[int]:
        """By markers. See `delivered.contract.sink.Committer`."""
        try:
            return sorted(find_visible(self._wire, self._topic, self._scope, batch))
        except NoAnswer as error:
            raise Unreachable("KAFKA_NO_ANSWER.MARKERS", topic=self._topic, error=error) from None

    def abort(self, prepared: Prepared) -> Outcome[None]:
        """EndTxn(abort). If another producer has initialised the id since, this transaction is aborted already."""
        if not prepared.handle:
            return Ok(None)
        match end(self._wire, Transaction.of(prepared), commit=False):
            case Failed():
                return Ok(None)
            case other:
                return other

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Fence every id of this sink whose open or future transaction is not in `keep`, and see that they ended."""
        handles = [Transaction.of(p) for p in keep if p.handle]
        outcome = abort_orphans(self._wire, self._scope, handles, self._timeout_ms, RECOVERY_WAIT_S)
        if not isinstance(outcome, Ok) or (outcome.value == 0 and self._ends.are_steady()):
            return outcome
        try:
            # An abort may have lost its markers, too. What the ledger decides was named before.
            return Ok(outcome.value + self._ends.settle(self._ends.decided, lambda: handles, RECOVERY_WAIT_S))
        except NoAnswer as error:
            return Unknown(str(error))

    def targets(self) -> dict[str, Target]:
        """The topic's id, if the sink writes to one topic. See `delivered.contract.sink.Committer`."""
        topic = self._options.topic
        if topic is None:
            return {}
        try:
            known = topic_id(self._wire, topic)
        except NoAnswer as error:
            raise Unreachable("KAFKA_NO_ANSWER.TOPIC_ID", topic=topic, error=error) from None
        return {} if known is None else {self._scope.sink: Target(f"topic {topic}", known)}

    def set_up(self, guarantee: Guarantee, *, decides: bool) -> None:  # noqa: ARG002
        """Create the topic for markers if another sink keeps the ledger. See `delivered.contract.sink.Committer`."""
        if not decides:
            ensure_topic(self._wire, self._topic, self._options)

    def forget(self, batch: int) -> None:
        """Nothing to do: a shard's new marker replaces the previous one."""

    def open_transactions(self) -> list[OpenTransaction]:
        """This sink's unfinished transactions in this pipeline, of all incarnations, oldest first.

        Includes those that partitions hold open although their coordinator has ended them.

        Raises:
            Unreachable: a broker did not answer.
        """
        return [_format_handles(t) for t in self._unfinished()]

    def held_back(self) -> HeldBack | None:
        """Of a sink with one topic: rows that name theirs may go to any."""
        if self._options.topic is None:
            return None
        *partitions, _ = written_partitions(self._wire, self._options, self._scope)
        servers = self._options.client["bootstrap.servers"]
        return find_held_back(self._wire, partitions, servers, partial(is_ours, self._scope))

    def _unfinished(self) -> list[TransactionState]:
        try:
            return [*open_transactions(self._wire, self._scope), *self._ends.hanging()]
        except NoAnswer as error:
            raise Unreachable("KAFKA_NO_ANSWER.TRANSACTIONS", error=error) from None

    def end_by_id(self, transactional_id: str, commit: bool, handle: Handle | None = None) -> Outcome[None]:
        """Commit or abort by hand the open transaction of one of this sink's transactional ids.

        Raises:
            UsageError: the id belongs to another sink, or has no open transaction.
        """
        if not is_ours(self._scope, transactional_id):
            raise UsageError(
                "TRANSACTION_FOREIGN",
                transactional_id=transactional_id,
                pipeline=self._scope.pipeline,
                sink=self._scope.sink,
                id_prefix=id_prefix(self._scope),
            )
        named = (t for t in self._unfinished() if t.transactional_id == transactional_id)
        found = next((t for t in named if handle in (None, t.participant)), None)
        if found is None:
            raise UsageError("TRANSACTION_NOT_OPEN.KAFKA", transactional_id=transactional_id)
        if isinstance(found, Hanging):
            return self._ends.end_by_hand(found, commit)
        return end(self._wire, found.participant, commit)

    def close(self) -> None:
        wire, self._opened = self._opened, None
        if wire is not None:
            wire.close()


def _format_handles(found: TransactionState) -> OpenTransaction:
    hanging = found if isinstance(found, Hanging) else None
    return OpenTransaction(
        found.transactional_id,
        found.state,
        found.participant,
        found.targets,
        started_ms=None if found.started_ms < 0 else found.started_ms,
        timeout_s=found.timeout_ms / 1000,
        end_lost=hanging is not None,
        committed=None if hanging is None else hanging.committed,
    )


# Which transactions, of any application, hide records from readers of committed records.

_COMMANDS_MAX = 5


def find_held_back(
    wire: Wire, partitions: Collection[Partition], servers: str, own: Callable[[str], bool] = lambda _: False
) -> HeldBack:
    """What transactions hide in these partitions.

    Args:
        servers: for commands.
        own: whether a transactional id is the pipeline's own, which is not reported.

    Raises:
        Unreachable: a broker did not answer.
    """
    deadline = time.monotonic() + left_s(REQUEST_TIMEOUT_S)
    try:
        hidden, transactions = hidden_in(wire, partitions, deadline)
        by_producer: dict[int, list[tuple[OpenAt, int]]] = {}
        for at, newest_ms in transactions:
            by_producer.setdefault(at.producer_id, []).append((at, newest_ms))
        known = named(wire, by_producer, deadline) if by_producer else {}
    except NoAnswer as error:
        raise Unreachable("KAFKA_NO_ANSWER.TRANSACTIONS", error=error) from None
    found = [_blocking(producer, at, known.get(producer), servers) for producer, at in by_producer.items()]
    others = sorted((b for b in found if not own(b.id)), key=lambda b: b.since_ms or 0)
    return HeldBack({f"{t}/{n}": count for (t, n), count in sorted(hidden.items())}, tuple(others))


def _blocking(producer: int, at: list[tuple[OpenAt, int]], known: TransactionState | None, servers: str) -> Blocking:
    starts = {f"{a.topic}/{a.partition}": a.start for a, _ in at}
    tool = f"kafka-transactions.sh --bootstrap-server {servers}"
    if known is None or known.state not in OPEN_STATES:  # the latter: its end was lost
        name = "" if known is None else known.transactional_id
        aborts = [f"{tool} abort --topic {a.topic} --partition {a.partition} --start-offset {a.start}" for a, _ in at]
        newest_ms = max(newest for _, newest in at)
        return Blocking(name, producer, newest_ms, None, starts, "; ".join(aborts[:_COMMANDS_MAX]))
    since = known.started_ms if known.started_ms >= 0 else None
    # Not `abort`: it ends one partition without the coordinator, and the application could still commit the others.
    end = f"{tool} forceTerminateTransaction --transactionalId {shlex.quote(known.transactional_id)}"
    return Blocking(known.transactional_id, producer, since, known.timeout_ms / 1000, starts, end)
