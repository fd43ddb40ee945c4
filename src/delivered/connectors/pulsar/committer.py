"""Commits and aborts the transactions that tasks prepared, on the driver; whether they ended, by their markers.

A coordinator says the same of a transaction that was committed, aborted or expired: it does not know it. The marker
tells. Its place is in the handle, so it is looked up and never searched for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from delivered.clients.pulsar.transactions import Coordinators, TransactionId
from delivered.connectors.pulsar import PulsarSinkOptions
from delivered.connectors.pulsar.client import Opened
from delivered.connectors.pulsar.journal import SUBSCRIPTION, Topic
from delivered.connectors.pulsar.positions import START, Position, short_name
from delivered.connectors.pulsar.transactions import (
    CLIENT_ERRORS,
    Marker,
    Transaction,
    cluster,
    ensure_topics,
    explained_client,
    markers_topic,
    opened_topic,
    soon,
)
from delivered.contract.sink import Committer, OpenTransaction, Shards
from delivered.model.errors import DeliveredError, OutcomeUnknown, Unreachable, UsageError
from delivered.model.identity import Scope, Work
from delivered.model.work import Failed, Ok, Outcome, Prepared, Unknown

log = logging.getLogger(__name__)

_ABORTED_AT_ONCE = 100


class PulsarCommitter(Committer):
    """See `delivered.contract.sink.Committer`."""

    def __init__(self, options: PulsarSinkOptions, scope: Scope) -> None:
        self._options, self._scope = options, scope
        self._coordinators = Coordinators(cluster(options))

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        return self.commit_all([(work, prepared)])[0]

    def commit_all(self, shards: Shards) -> Sequence[Outcome[None]]:
        """See `delivered.contract.sink.Committer`."""
        outcomes = self._coordinators.end_all([Transaction.of(p).id for _, p in shards], commit=True, deadline=soon())
        return [
            Ok(None) if isinstance(outcome, Failed) and self._is_visible(Transaction.of(p), work) else outcome
            for (work, p), outcome in zip(shards, outcomes, strict=True)
        ]

    def was_committed(self, work: Work, prepared: Prepared) -> bool:
        """Whether a reader sees the marker at its place.

        A message sent without a transaction is hidden as long as a transaction before it is open. So a reader that sees
        that one would see the marker by now.

        Raises:
            OutcomeUnknown: nobody can tell: it is hidden by an open transaction, or was deleted.
        """
        held = Transaction.of(prepared)
        place, topic = Position(held.ledger, held.entry), Topic(self._options, held.markers)
        try:
            bounds = topic.bounds()
            if bounds is None or held.ledger not in [number for number, _ in bounds.ledgers]:
                raise OutcomeUnknown(
                    "PULSAR_MARKER_DELETED", shard=work.shard, batch=work.batch, topic=topic.label, place=place
                )
            barrier = topic.send(b"")
            for at, data in topic.messages(Position(held.ledger, held.entry - 1), until=barrier):
                if at.order[:2] >= place.order[:2]:
                    return _is_its_marker(at, data, held, work)
        except Unreachable as error:
            raise OutcomeUnknown("MARKER_UNREADABLE", shard=work.shard, batch=work.batch, error=error) from None
        finally:
            topic.close()
        return False

    def abort(self, prepared: Prepared) -> Outcome[None]:
        if not prepared.handle:
            return Ok(None)
        outcome = self._coordinators.end(Transaction.of(prepared).id, commit=False, deadline=soon())
        return Ok(None) if isinstance(outcome, Failed) else outcome  # it has ended

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Abort what tasks recorded as opened, except `keep`; forget records and markers that are no longer needed."""
        kept = [Transaction.of(p) for p in keep if p.handle]
        opened = Topic(self._options, opened_topic(self._options, self._scope))
        aborted = 0
        try:
            recorded = self._recorded(opened)
            held = {k.id for k in kept}
            orphans = [m.transaction for _, m in recorded if m.transaction not in held]
            for at in range(0, len(orphans), _ABORTED_AT_ONCE):
                outcomes = self._coordinators.end_all(
                    orphans[at : at + _ABORTED_AT_ONCE], commit=False, deadline=soon()
                )
                if (unknown := next((o for o in outcomes if isinstance(o, Unknown)), None)) is not None:
                    return unknown
                aborted += sum(isinstance(o, Ok) for o in outcomes)  # the others had ended
            if recorded:
                first_kept = next((at for at, m in recorded if m.transaction in held), None)
                end = recorded[-1][0]
                self._forget(opened, end if first_kept is None else Position(first_kept.ledger, first_kept.entry - 1))
                self._forget_markers(kept)
            return Ok(aborted)
        except (Unreachable, OutcomeUnknown) as error:
            return Unknown(str(error))
        finally:
            opened.close()

    def _recorded(self, opened: Topic) -> list[tuple[Position, Marker]]:
        """Records of what was opened, behind the subscription."""
        if (bounds := opened.bounds()) is None:
            return []
        start = bounds.cursors.get(SUBSCRIPTION, START)
        return [(at, m) for at, data in opened.messages(start) if (m := Marker.from_json(data))]

    def open_transactions(self) -> list[OpenTransaction]:
        """Of those that tasks recorded, the ones that their coordinators have not ended, oldest first."""
        opened = Topic(self._options, opened_topic(self._options, self._scope))
        try:
            recorded = [m.transaction for _, m in self._recorded(opened)]
            self._coordinators.load(sorted({t.most for t in recorded}), soon())
            found = [(t, opened.admin.transaction(*t)) for t in recorded]
        except CLIENT_ERRORS as error:
            raise explained_client(error, self._options, "transactions") from None
        finally:
            opened.close()
        shown = [_shown(t, now) for t, now in found if now is not None]
        return sorted(shown, key=lambda t: t.started_ms or 0)

    def end_by_id(self, transactional_id: str, commit: bool) -> Outcome[None]:
        """See `delivered.contract.sink.Committer`."""
        found = next((t for t in self.open_transactions() if t.transactional_id == transactional_id), None)
        if found is None:
            raise UsageError("TRANSACTION_NOT_OPEN.PULSAR", transactional_id=transactional_id)
        most, least = map(int, transactional_id.split("-"))
        return self._coordinators.end(TransactionId(most, least), commit=commit, deadline=soon())

    def set_up(self) -> None:
        """See `delivered.contract.sink.Committer`."""
        ensure_topics(self._options, self._scope)

    def _is_visible(self, held: Transaction, work: Work) -> bool:
        """Whether a reader sees the marker now. False: not yet, or never."""
        topic = Topic(self._options, held.markers)
        try:
            at, data = next(topic.messages(Position(held.ledger, held.entry - 1)), (START, b""))
            return _is_its_marker(at, data, held, work)
        except DeliveredError as error:
            log.warning("%s: the marker of shard %d could not be read: %s", topic.label, work.shard, error)
            return False
        finally:
            topic.close()

    def _forget_markers(self, kept: Sequence[Transaction]) -> None:
        """Those before the newest decision's: only they are ever asked for."""
        name = markers_topic(self._options, self._scope)
        if here := [(k.ledger, k.entry) for k in kept if k.markers == name]:
            ledger, entry = min(here)
            self._forget(Topic(self._options, name), Position(ledger, entry - 1))

    def _forget(self, topic: Topic, until: Position) -> None:
        """Move the subscription, so that Pulsar may delete what lies before."""
        if until.entry < 0:
            return
        try:
            topic.admin.move(topic.name, SUBSCRIPTION, until, exists=True)
        except DeliveredError as error:
            log.warning("%s: what is no longer needed was not forgotten: %s", topic.label, error)


def _is_its_marker(at: Position, data: bytes, held: Transaction, work: Work) -> bool:
    found = Marker.from_json(data) if (at.ledger, at.entry) == (held.ledger, held.entry) else None
    own = Marker.of(work, held.id)
    return found is not None and replace(found, attempt=own.attempt, fingerprint=None) == own


def _shown(transaction: TransactionId, now: Opened) -> OpenTransaction:
    return OpenTransaction(
        f"{transaction.most}-{transaction.least}",
        now.state,
        Transaction(transaction.most, transaction.least, "", -1, -1),
        tuple(short_name(topic) for topic in now.topics),
        now.started_ms,
        now.timeout_ms / 1000,
    )
