"""Whether a sink's transactions ended, by evidence in the partitions that they wrote.

A coordinator's word is not enough (P28): one that restarts may report a transaction as complete whose markers are in no
partition. Its rows stay hidden, together with everything behind them, until the next transaction of the same producer
id ends. They get that one's outcome: committed rows are lost, or aborted ones become visible.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from delivered.clients.kafka import protocol
from delivered.clients.kafka.channel import Channel
from delivered.clients.kafka.login import NoAnswer
from delivered.clients.kafka.partition_state import OpenAt, end_at, held, open_in
from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.rows import Partition
from delivered.clients.kafka.transactions import OpenTransaction, Transaction, describe_all, listed
from delivered.connectors.kafka.markers import find_marker, marker_partition
from delivered.connectors.kafka.partitions import written_partitions
from delivered.connectors.kafka.sink_options import SinkOptions
from delivered.connectors.kafka.topics import ledger_topic
from delivered.connectors.kafka.transactions import is_ours
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.identity import Scope, Work
from delivered.model.limits import RECOVERY_WAIT_S, REQUEST_TIMEOUT_S
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.patience import left_s

log = logging.getLogger(__name__)

ENDING = ("PrepareEpochFence", "PrepareCommit", "PrepareAbort")
_ENDING_S = 5.0
"""How long a status waits for markers that are on their way."""


@dataclass(frozen=True)
class Hanging(OpenTransaction):
    """A transaction that partitions hold open although its coordinator has ended it. `state`: "Hanging".

    Attributes:
        at: where.
        word: the coordinator's state of the transactional id.
        committed: how it ended, by that word; None: the word is of another transaction.
    """

    at: tuple[OpenAt, ...] = ()
    word: str = ""
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
            return [_hanging(owners[p], at, now.get(owners[p])) for (p, _), at in hanging.items()]
        if time.monotonic() > deadline:
            raise NoAnswer(f"transaction {owners[ending[0].producer_id]} is still ending in {ending[0]}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.25)


def _is_hanging(at: OpenAt, now: OpenTransaction | None) -> bool | None:
    """None: not known yet."""
    if now is None or now.participant.producer_id != at.producer_id:
        return True
    if now.state in ENDING:
        return None
    if at.epoch > now.participant.epoch:
        return None  # of a transaction that was opened since
    return now.state != "Ongoing" or at.epoch < now.participant.epoch


def _hanging(name: str, at: Sequence[OpenAt], now: OpenTransaction | None) -> Hanging:
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
        word="unknown" if now is None else now.state,
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
        found.word,
        "committed" if commit else "aborted",
        ", ".join(found.targets),
    )
    return Ok(None)


def refused(found: Hanging, commit: bool, reason: str, *, by_hand: bool = True) -> DeliveredError:
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
        "TRANSACTION_HANGING",
        f"{found.transactional_id}, producer {found.participant.producer_id}, epoch {found.participant.epoch}, was "
        f"{'committed' if commit else 'aborted'}, but its brokers lost the end: it is still open in "
        f"{', '.join(map(str, found.at[:5]))}, which hides these and all later records from read_committed "
        f"readers. It could not be ended there: {reason}. Its transactional id is not used again.",
        next_step=f"grant this user Alter on the cluster and start again; or, {other}",
    )


def _unreadable(hidden: Sequence[Partition]) -> DeliveredError:
    topic, number = hidden[0]
    return DeliveredError(
        "TRANSACTIONS_UNREADABLE",
        f"Partition {number} of {topic!r} (of {len(hidden)}) holds an open transaction, and this user may not read the "
        "topic: it is unknown whether the transaction is this pipeline's.",
        next_step=f"grant this user Read on topic {topic!r}",
    )


class Ends:
    """What one process knows of the ends of a sink's transactions.

    Args:
        wire: opens the committer's connections.
    """

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
        topic, number = self._marker_partition
        if f"{topic}-{number}" in hanging.targets:
            return True
        return find_marker(self._wire, topic, work, hanging.participant, wait_s) is not None

    @property
    def _marker_partition(self) -> Partition:
        return ledger_topic(self._scope, self._options.ledger_topic), marker_partition(self._scope)

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
            did, asked = ("committed", "abort") if hanging.committed else ("aborted", "apply")
            raise UsageError(
                "TRANSACTION_ENDED",
                f"{hanging.transactional_id!r} was {did} in the partitions that its end reached: to {asked} it in "
                f"{', '.join(hanging.targets)} would tear it.",
                next_step=f"delivered transactions {'apply' if hanging.committed else 'abort'} PIPELINE.yaml "
                f"{hanging.transactional_id}",
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
                raise refused(hanging, commit, reason)
            case Unknown(reason):
                raise NoAnswer(reason)
            case Ok():
                pass
