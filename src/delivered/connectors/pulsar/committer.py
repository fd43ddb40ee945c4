"""Commits and aborts the transactions that tasks prepared, on the driver; whether they ended, by their markers.

A coordinator says the same of a transaction that was committed, aborted or expired: it does not know it. The marker
tells. Its place is in the handle, so it is looked up and never searched for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from delivered.clients.pulsar.transactions import Coordinators, TransactionId
from delivered.connectors.pulsar import PulsarSinkOptions
from delivered.connectors.pulsar.journal import SUBSCRIPTION, Topic
from delivered.connectors.pulsar.positions import START, Position
from delivered.connectors.pulsar.transactions import (
    Marker,
    Transaction,
    cluster,
    ensure_topics,
    markers_topic,
    opened_topic,
    soon,
)
from delivered.contract.sink import Committer, Shards
from delivered.model.errors import DeliveredError, OutcomeUnknown, Unreachable
from delivered.model.identity import Scope, Work
from delivered.model.work import Ok, Outcome, Prepared, Unknown

log = logging.getLogger(__name__)

_ABORTED_AT_ONCE = 100


class PulsarCommitter(Committer):
    """See `delivered.contract.sink.Committer`."""

    def __init__(self, options: PulsarSinkOptions, scope: Scope) -> None:
        self._options, self._scope = options, scope
        self._coordinators = Coordinators(cluster(options))

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:  # noqa: ARG002 - the handle is enough
        return self._coordinators.end(Transaction.of(prepared).id, commit=True, deadline=soon())

    def commit_all(self, shards: Shards) -> Sequence[Outcome[None]]:
        """See `delivered.contract.sink.Committer`."""
        return self._coordinators.end_all([Transaction.of(p).id for _, p in shards], commit=True, deadline=soon())

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
                    found = Marker.from_json(data) if at.order[:2] == place.order[:2] else None
                    return found is not None and found.transaction == held.id
        except Unreachable as error:
            raise OutcomeUnknown("MARKER_UNREADABLE", shard=work.shard, batch=work.batch, error=error) from None
        finally:
            topic.close()
        return False

    def abort(self, prepared: Prepared) -> Outcome[None]:
        return self._abort([Transaction.of(prepared).id]) if prepared.handle else Ok(None)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Abort what tasks recorded as opened, except `keep`; forget records and markers that are no longer needed."""
        kept = [Transaction.of(p) for p in keep if p.handle]
        opened = Topic(self._options, opened_topic(self._options, self._scope))
        try:
            found, end = self._recorded(opened)
            orphans = [t for t in found if t not in {k.id for k in kept}]
            for at in range(0, len(orphans), _ABORTED_AT_ONCE):
                outcome = self._abort(orphans[at : at + _ABORTED_AT_ONCE])
                if not isinstance(outcome, Ok):
                    return outcome
            if found:
                self._forget(opened, end)
                self._forget_markers(kept)
            return Ok(len(orphans))
        except (Unreachable, OutcomeUnknown) as error:
            return Unknown(str(error))
        finally:
            opened.close()

    def set_up(self) -> None:
        """See `delivered.contract.sink.Committer`."""
        ensure_topics(self._options, self._scope)

    def _abort(self, transactions: Sequence[TransactionId]) -> Outcome[None]:
        """What its coordinator does not know any more has ended."""
        outcomes = self._coordinators.end_all(transactions, commit=False, deadline=soon())
        return next((o for o in outcomes if isinstance(o, Unknown)), Ok(None))

    def _recorded(self, opened: Topic) -> tuple[list[TransactionId], Position]:
        """Transactions whose records lie behind the subscription, and where these end."""
        bounds = opened.bounds()
        if bounds is None:
            return [], START
        end = bounds.cursors.get(SUBSCRIPTION, START)
        records = [*opened.messages(end if end.entry >= 0 else START)]
        found = [record.transaction for _, data in records if (record := Marker.from_json(data)) is not None]
        return found, records[-1][0] if records else end

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
