"""One shard's transaction, on an executor: rows and a marker, left open for the driver to commit or abort."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from delivered.clients.pulsar.producer import Flow, Message, Producer
from delivered.clients.pulsar.transactions import Coordinators, TransactionId
from delivered.connectors.pulsar import PulsarSinkOptions
from delivered.connectors.pulsar.publisher import Producers
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
from delivered.model.errors import DeliveredError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Work


class OpenShard:
    """An open transaction."""

    def __init__(self, options: PulsarSinkOptions, work: Work, schema: tuple[str, str] | None) -> None:
        """
        Args:
            schema: kind and text of already encoded messages; None: bytes.
        """
        self._options, self._work = options, work
        self._cluster = cluster(options)
        self._coordinators = Coordinators(self._cluster)
        self._flow = Flow()
        self._producers: Producers | None = None
        self._id: TransactionId | None = None
        ensure_topics(options, work.scope)
        try:
            spread = work.batch * 31 + work.shard  # over the coordinators
            self._id = self._coordinators.begin(spread, options.transaction_timeout_s, soon())
            self._record(self._id)
            self._producers = Producers(
                self._cluster, options, self._flow, schema, before=self._add, transaction=self._id
            )
        except CLIENT_ERRORS as error:
            self.abort()
            raise self._explained(error) from None

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages; blocks while too much is in flight."""
        producers, deadline = self._opened[1], soon()
        try:
            for message in messages:
                producers.send(message, deadline)
        except CLIENT_ERRORS as error:
            raise self._explained(error) from None

    def prepare(self, fingerprint: Fingerprint) -> Transaction:
        (transaction, producers), topic = self._opened, markers_topic(self._options, self._work.scope)
        try:
            self._coordinators.add(transaction, [topic], soon())
            marking = Producer(self._cluster, topic, self._flow, soon(), transaction=transaction)
            marking.send(Message(Marker.of(self._work, transaction, fingerprint).to_json()), soon())
            producers.end_batches(soon())
            marking.end_batch(soon())
            self._flow.drain(soon())
            producers.close()
            marking.close(soon())
        except CLIENT_ERRORS as error:
            raise self._explained(error) from None
        if marking.last is None:
            raise DeliveredError("PULSAR_TRANSACTION_ENDED", what=topic, url=self._options.url, detail="no marker")
        return Transaction(*transaction, topic, *marking.last)

    def abort(self) -> None:
        """Best effort: recovery finds what stays open."""
        transaction, self._id = self._id, None
        with suppress(*CLIENT_ERRORS):
            if self._producers is not None:
                self._producers.close()
        if transaction is not None:
            self._coordinators.end(transaction, commit=False, deadline=soon())

    @property
    def _opened(self) -> tuple[TransactionId, Producers]:
        if self._id is None or self._producers is None:
            raise DeliveredError(
                "PULSAR_TRANSACTION_ENDED", what=self._options.label, url=self._options.url, detail="it was aborted"
            )
        return self._id, self._producers

    def _record(self, transaction: TransactionId) -> None:
        """Before anything else is done in it: what has no record is never found."""
        flow = Flow()
        recording = Producer(self._cluster, opened_topic(self._options, self._work.scope), flow, soon())
        recording.send(Message(Marker.of(self._work, transaction).to_json()), soon())
        recording.end_batch(soon())
        flow.drain(soon())
        recording.close(soon())

    def _add(self, topic: str) -> None:
        if self._id is not None:
            self._coordinators.add(self._id, [topic], soon())

    def _explained(self, error: Exception) -> DeliveredError:
        return explained_client(error, self._options, self._options.label)
