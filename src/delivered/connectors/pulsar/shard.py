"""One shard's transaction, on an executor: rows and a marker, left open for the driver to commit or abort."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from delivered.clients.pulsar.producer import BATCH_BYTES, Flow, Message, Producer
from delivered.clients.pulsar.transactions import Coordinators, TransactionId
from delivered.connectors.pulsar import PulsarSinkOptions
from delivered.connectors.pulsar.positions import Router, physical
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
    """An open transaction with a producer for each partition that rows go to."""

    def __init__(self, options: PulsarSinkOptions, work: Work, schema: tuple[str, str] | None) -> None:
        """
        Args:
            schema: kind and text of already encoded messages; None: bytes.
        """
        self._options, self._work, self._schema = options, work, schema
        self._cluster = cluster(options)
        self._coordinators = Coordinators(self._cluster)
        self._flow = Flow()
        self._router = Router()
        self._producers: dict[int, Producer] = {}
        self._id: TransactionId | None = None
        ensure_topics(options, work.scope)
        try:
            self._partitions = self._cluster.partitions(options.topic, soon())
            spread = work.batch * 31 + work.shard  # over the coordinators
            self._id = self._coordinators.begin(spread, options.transaction_timeout_s, soon())
            self._record(self._id)
        except CLIENT_ERRORS as error:
            self.abort()
            raise self._explained(error) from None

    def send(self, messages: Sequence[dict[str, Any]]) -> None:
        """Send messages; blocks while too much is in flight."""
        deadline = soon()
        try:
            for message in messages:
                key = message["partition_key"]
                producer = self._to(self._router.partition(key, self._partitions) if self._partitions else -1)
                made = Message(message["content"], key, message["properties"], message["event_timestamp"])
                producer.send(made, deadline)
        except CLIENT_ERRORS as error:
            raise self._explained(error) from None

    def prepare(self, fingerprint: Fingerprint) -> Transaction:
        transaction, topic = self._opened, markers_topic(self._options, self._work.scope)
        try:
            self._coordinators.add(transaction, [topic], soon())
            marking = Producer(self._cluster, topic, self._flow, soon(), transaction=transaction)
            marking.send(Message(Marker.of(self._work, transaction, fingerprint).to_json()), soon())
            for producer in (*self._producers.values(), marking):
                producer.end_batch(soon())
            self._flow.drain(soon())
            for producer in (*self._producers.values(), marking):
                producer.close(soon())
        except CLIENT_ERRORS as error:
            raise self._explained(error) from None
        if marking.last is None:
            raise DeliveredError("PULSAR_TRANSACTION_ENDED", what=topic, url=self._options.url, detail="no marker")
        return Transaction(*transaction, topic, *marking.last)

    def abort(self) -> None:
        """Best effort: recovery finds what stays open."""
        transaction, self._id = self._id, None
        with suppress(*CLIENT_ERRORS):
            for producer in self._producers.values():
                producer.close(soon())
        if transaction is not None:
            self._coordinators.end(transaction, commit=False, deadline=soon())

    @property
    def _opened(self) -> TransactionId:
        if self._id is None:
            raise DeliveredError(
                "PULSAR_TRANSACTION_ENDED", what=self._options.label, url=self._options.url, detail="it was aborted"
            )
        return self._id

    def _record(self, transaction: TransactionId) -> None:
        """Before anything else is done in it: what has no record is never found."""
        flow = Flow()
        recording = Producer(self._cluster, opened_topic(self._options, self._work.scope), flow, soon())
        recording.send(Message(Marker.of(self._work, transaction).to_json()), soon())
        recording.end_batch(soon())
        flow.drain(soon())
        recording.close(soon())

    def _to(self, partition: int) -> Producer:
        if partition not in self._producers:
            topic, longest = physical((self._options.topic, partition)), self._options.bytes_max
            self._coordinators.add(self._opened, [topic], soon())
            self._producers[partition] = Producer(
                self._cluster,
                topic,
                self._flow,
                soon(),
                transaction=self._opened,
                schema=self._schema,
                compression=self._options.compression,
                chunks=longest is None,
                batch_bytes=min(BATCH_BYTES, (longest or BATCH_BYTES) // 4),
            )
        return self._producers[partition]

    def _explained(self, error: Exception) -> DeliveredError:
        return explained_client(error, self._options, self._options.label)
