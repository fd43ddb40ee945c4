"""Commits and aborts the Kafka transactions that tasks prepared."""

from __future__ import annotations

from collections.abc import Sequence

from delivered.connectors.kafka import transactions
from delivered.connectors.kafka.markers import find_marker
from delivered.connectors.kafka.protocol import NoAnswer, Wire
from delivered.connectors.kafka.sink_options import SinkOptions
from delivered.connectors.kafka.topics import ensure_topic, ledger_topic, topic_id
from delivered.connectors.kafka.transactions import OpenTransaction, Transaction
from delivered.model.errors import Unreachable, UsageError
from delivered.model.identity import Scope, Target, Work
from delivered.model.limits import RECOVERY_WAIT_S
from delivered.model.outcome import Failed, Ok, Outcome
from delivered.model.prepared import Prepared


class KafkaCommitter:
    """See `delivered.contract.sink.Committer`. Also what `delivered transactions` shows and does."""

    def __init__(self, options: SinkOptions, scope: Scope) -> None:
        self._scope = scope
        self._topic = ledger_topic(scope, options.ledger_topic)
        self._timeout_ms = options.transaction_timeout_s * 1000
        self._options = options
        self._opened: Wire | None = None

    @property
    def _wire(self) -> Wire:
        if self._opened is None:
            self._opened = Wire(self._options.resolved())
        return self._opened

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:  # noqa: ARG002 - the handle says it all
        """EndTxn(commit) with the producer id and epoch of this transaction alone."""
        return transactions.end(self._wire, Transaction.of(prepared), commit=True)

    def was_committed(self, work: Work) -> bool:
        """Whether a committed marker names this shard of this batch."""
        return find_marker(self._wire, self._topic, work, RECOVERY_WAIT_S) is not None

    def abort(self, prepared: Prepared) -> Outcome[None]:
        """EndTxn(abort); an id that somebody else took meanwhile holds nothing of this participant any more."""
        if not prepared.handle:
            return Ok(None)
        match transactions.end(self._wire, Transaction.of(prepared), commit=False):
            case Failed():
                return Ok(None)
            case other:
                return other

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Fence every id of this sink that holds, or could open, a transaction that `keep` does not name."""
        handles = [Transaction.of(p) for p in keep if p.handle]
        return transactions.abort_orphans(self._wire, self._scope, handles, self._timeout_ms, RECOVERY_WAIT_S)

    def targets(self) -> dict[str, Target]:
        """The topic's id, where the sink has one topic. See `delivered.contract.powers.KnowsTarget`."""
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
        """The topic for markers, where another sink keeps the ledger. See `delivered.contract.powers.SetsUp`."""
        ensure_topic(self._wire, self._topic, self._options.ledger_replication)

    def forget(self, batch: int) -> None:
        """Nothing: a shard's marker takes the place of its former one."""

    def open_transactions(self) -> list[OpenTransaction]:
        """Every transaction of this sink of this pipeline that is not over, of any incarnation, oldest first.

        Raises:
            Unreachable: a broker did not answer.
        """
        try:
            return transactions.open_transactions(self._wire, self._scope)
        except NoAnswer as error:
            raise Unreachable("KAFKA_NO_ANSWER", f"The brokers did not list open transactions: {error}.") from None

    def end_by_id(self, transactional_id: str, commit: bool) -> Outcome[None]:
        """Commit or abort, by hand, the transaction that an id of this sink holds now.

        Raises:
            UsageError: the id belongs to somebody else, or holds no open transaction.
        """
        if not transactions.is_ours(self._scope, transactional_id):
            raise UsageError(
                "TRANSACTION_FOREIGN",
                f"{transactional_id!r} is not a transaction of pipeline {self._scope.pipeline!r}, sink "
                f"{self._scope.sink!r}: their ids start with {transactions.id_prefix(self._scope)!r}.",
                next_step="list them with `delivered transactions list`",
            )
        found = next((t for t in self.open_transactions() if t.transactional_id == transactional_id), None)
        if found is None:
            raise UsageError(
                "TRANSACTION_NOT_OPEN",
                f"{transactional_id!r} has no open transaction.",
                next_step="list the open ones with `delivered transactions list`",
            )
        return transactions.end(self._wire, found.participant, commit)

    def close(self) -> None:
        wire, self._opened = self._opened, None
        if wire is not None:
            wire.close()
