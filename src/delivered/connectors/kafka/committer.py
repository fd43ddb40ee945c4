"""Commits and aborts the Kafka transactions that tasks prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from delivered.clients.kafka.login import NoAnswer
from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.transactions import OpenTransaction, Transaction, end, end_all
from delivered.connectors.kafka.evidence import Ends, Hanging
from delivered.connectors.kafka.markers import find_marker
from delivered.connectors.kafka.sink_options import SinkOptions
from delivered.connectors.kafka.topics import ensure_topic, ledger_topic, topic_id
from delivered.connectors.kafka.transactions import abort_orphans, id_prefix, is_ours, open_transactions
from delivered.contract.sink import Committer, Shards
from delivered.model.errors import Unreachable, UsageError
from delivered.model.identity import Scope, Target, Work
from delivered.model.limits import RECOVERY_WAIT_S
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.prepared import Prepared


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

    def abort(self, prepared: Prepared) -> Outcome[None]:
        """EndTxn(abort). If another producer has taken the id since, this transaction is aborted already."""
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
            raise Unreachable(
                "KAFKA_NO_ANSWER",
                f"The brokers did not return the id of topic {topic!r}: {error}.",
                next_step="start again once the brokers respond",
            ) from None
        return {} if known is None else {self._scope.sink: Target(f"topic {topic}", known)}

    def set_up(self) -> None:
        """Create the topic for markers if another sink keeps the ledger. See `delivered.contract.sink.Committer`."""
        ensure_topic(self._wire, self._topic, self._options)

    def forget(self, batch: int) -> None:
        """Nothing to do: a shard's new marker replaces the previous one."""

    def open_transactions(self) -> list[OpenTransaction]:
        """This sink's unfinished transactions in this pipeline, of all incarnations, oldest first.

        Includes those that partitions hold open although their coordinator has ended them (`evidence.Hanging`).

        Raises:
            Unreachable: a broker did not answer.
        """
        try:
            return [*open_transactions(self._wire, self._scope), *self._ends.hanging()]
        except NoAnswer as error:
            raise Unreachable(
                "KAFKA_NO_ANSWER",
                f"The brokers did not list open transactions: {error}.",
                next_step="check that the brokers are up, then repeat the command",
            ) from None

    def end_by_id(self, transactional_id: str, commit: bool) -> Outcome[None]:
        """Commit or abort by hand the open transaction of one of this sink's transactional ids.

        Raises:
            UsageError: the id belongs to another sink, or has no open transaction.
        """
        if not is_ours(self._scope, transactional_id):
            raise UsageError(
                "TRANSACTION_FOREIGN",
                f"{transactional_id!r} is not a transaction of pipeline {self._scope.pipeline!r}, sink "
                f"{self._scope.sink!r}: their ids start with {id_prefix(self._scope)!r}.",
                next_step="list them with `delivered transactions list`",
            )
        found = next((t for t in self.open_transactions() if t.transactional_id == transactional_id), None)
        if found is None:
            raise UsageError(
                "TRANSACTION_NOT_OPEN",
                f"{transactional_id!r} has no open transaction.",
                next_step="list the open ones with `delivered transactions list`",
            )
        if isinstance(found, Hanging):
            return self._ends.end_by_hand(found, commit)
        return end(self._wire, found.participant, commit)

    def close(self) -> None:
        wire, self._opened = self._opened, None
        if wire is not None:
            wire.close()
