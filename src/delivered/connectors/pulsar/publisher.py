"""Producers of one task on an executor, one for each partition that rows go to.

Under exactly_once they send in a transaction, which stays open for the driver; else without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from delivered.clients.pulsar.connection import Cluster, Error, NoAnswer, Rejected
from delivered.clients.pulsar.producer import BATCH_BYTES, Flow, Message, Producer, Resend
from delivered.clients.pulsar.transactions import Coordinators, TransactionId
from delivered.connectors.pulsar import PulsarSinkOptions, Router, physical
from delivered.connectors.pulsar.committer import (
    CLIENT_ERRORS,
    Marker,
    Transaction,
    cluster,
    ensure_topics,
    explained_client,
    markers_topic,
    open_to_transactions,
    opened_topic,
    soon,
)
from delivered.model.errors import DeliveredError, OutcomeUnknown, Unreachable
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Work
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.patience import left_s, patiently, query_patience_s


class Producers:
    """One for each partition, opened when the first message goes there."""

    def __init__(
        self,
        at: Cluster,
        options: PulsarSinkOptions,
        flow: Flow,
        schema: tuple[str, str] | None,
        *,
        before: Callable[[str], None] = lambda _: None,
        **settings: Any,
    ) -> None:
        """
        Args:
            schema: kind and text of already encoded messages; None: bytes.
            before: called with a partition's topic before its producer is opened.
            settings: of each producer.

        Raises:
            NoAnswer, Rejected, ssl.SSLError
        """
        self._cluster, self._options, self._flow, self._before = at, options, flow, before
        longest = options.bytes_max
        self._settings = {
            "schema": schema,
            "compression": options.compression,
            "chunks": longest is None,
            "batch_bytes": min(BATCH_BYTES, (longest or BATCH_BYTES) // 4),
            **settings,
        }
        self._router = Router()
        self._open: dict[int, Producer] = {}
        self._partitions = at.partitions(options.topic, soon())

    def send(self, message: Message, deadline: float) -> None:
        """Blocks while too much is in flight. Raises NoAnswer, Rejected, TooLong, ssl.SSLError."""
        number = self._router.partition(message.key, self._partitions) if self._partitions else -1
        self._to(number).send(message, deadline)

    def open_first(self) -> None:
        """As if a message went there: whether it may, and with this schema."""
        self._to(0 if self._partitions else -1)

    def end_batches(self, deadline: float) -> None:
        for producer in self._open.values():
            producer.end_batch(deadline)

    def close(self) -> None:
        for producer in self._open.values():
            producer.close(soon())

    def _to(self, partition: int) -> Producer:
        if partition not in self._open:
            topic = physical((self._options.topic, partition))
            self._before(topic)
            self._open[partition] = Producer(self._cluster, topic, self._flow, soon(), **self._settings)
        return self._open[partition]


class Publisher:
    """at_least_once, or at_most_once: messages are visible once the broker has them.

    If a connection breaks, what was not acknowledged is sent again on another one, under the same sequence ids: a
    broker that deduplicates drops what it has. at_most_once sends again only to a broker that does.
    """

    def __init__(
        self, options: PulsarSinkOptions, schema: tuple[str, str] | None = None, gives_up: bool = False
    ) -> None:
        """
        Args:
            schema: kind and text of already encoded messages, registered if missing; None: bytes.
            gives_up: at_most_once.
        """
        self._options, self._schema, self._gives_up = options, schema, gives_up
        self._sent = 0
        self._acknowledged = 0  # of producers that were given up
        self._flow = Flow()
        self._producers: Producers | None = None
        self._connect()

    @property
    def unconfirmed(self) -> int:
        """Messages sent and neither acknowledged nor rejected."""
        return self._sent - self._acknowledged - self._flow.acknowledged

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages; blocks while too much is in flight. Raises if one was rejected."""
        self._sent += len(messages)
        try:
            producers = self._producers or patiently(self._options.label, self._connect, patience_s=_patience_s())
            deadline = _deadline()
            for message in messages:
                producers.send(message, deadline)
        except CLIENT_ERRORS as error:
            if not (self._gives_up and isinstance(error, NoAnswer)):
                raise self._explained(error) from None
            self._give_up()
        except Unreachable:
            if not self._gives_up:
                raise

    def flush(self) -> None:
        """Wait until every message is acknowledged. Raises if one was rejected, or its outcome is unknown."""
        try:
            if self._producers is not None:
                deadline = _deadline()
                self._producers.end_batches(deadline)
                self._flow.drain(deadline)
        except CLIENT_ERRORS as error:
            raise self._explained(error) from None
        finally:
            self.close()
        if self.unconfirmed:
            raise self._unconfirmed()

    def close(self) -> None:
        """Idempotent."""
        producers, self._producers = self._producers, None
        if producers is not None:
            producers.close()

    def _connect(self) -> Producers:
        resend = Resend.WHERE_DROPPED if self._gives_up else Resend.ALWAYS
        try:
            made = Producers(cluster(self._options), self._options, self._flow, self._schema, resend=resend)
            made.open_first()
        except CLIENT_ERRORS as error:
            raise self._translated(error) from None
        self._producers = made
        return made

    def _give_up(self) -> None:
        """What is in flight stays unknown; later messages get producers of their own."""
        self.close()
        self._acknowledged += self._flow.acknowledged
        self._flow = Flow()

    def _explained(self, error: Exception) -> DeliveredError:
        if isinstance(error, NoAnswer):
            return self._unconfirmed()
        explained = self._translated(error)
        if isinstance(error, Rejected) and isinstance(explained, Unreachable):
            return DeliveredError("MESSAGE_REFUSED.PULSAR", label=self._options.label, failed=error)
        return explained

    def _translated(self, error: Exception) -> DeliveredError:
        if isinstance(error, Rejected) and error.code == Error.NOT_ALLOWED:  # of a transaction it would mean more
            return DeliveredError("MESSAGE_REFUSED.PULSAR", label=self._options.label, failed=error)
        return explained_client(error, self._options, self._options.label)

    def _unconfirmed(self) -> OutcomeUnknown:
        return OutcomeUnknown(
            "PULSAR_UNCONFIRMED",
            unconfirmed=self.unconfirmed,
            label=self._options.label,
            url=self._options.url,
            request_timeout_s=_patience_s(),
        )


def _patience_s() -> float:
    """How long to wait for a broker that is away, with messages in flight; a running query waits longer."""
    return max(REQUEST_TIMEOUT_S, query_patience_s())


def _deadline() -> float:
    return time.monotonic() + left_s(_patience_s())


class OpenShard:
    """An open transaction."""

    def __init__(self, options: PulsarSinkOptions, work: Work, schema: tuple[str, str] | None) -> None:
        """Args: schema: kind and text of already encoded messages; None: bytes."""
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
        open_to_transactions(self._options, self._work.scope, [topic])
        if self._id is not None:
            self._coordinators.add(self._id, [topic], soon())

    def _explained(self, error: Exception) -> DeliveredError:
        return explained_client(error, self._options, self._options.label)
