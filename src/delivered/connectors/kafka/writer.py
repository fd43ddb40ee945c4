"""Writes one shard to Kafka, on an executor: a transactional writer and a direct one, with warm producers."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delivered.clients.kafka.channel import NoAnswer
from delivered.clients.kafka.librdkafka import Producer
from delivered.clients.kafka.protocol import Failures, ProducerError, Wire, server_name
from delivered.clients.kafka.record_batch import Rows
from delivered.clients.kafka.sender import Cluster, Sender
from delivered.clients.kafka.transactions import (
    Transaction,
    TransactionState,
    describe,
    initialise,
    open_in,
    producer_id,
)
from delivered.connectors.kafka import SINK_OWNER, SINK_SETTINGS, SinkOptions, by_arrow, producer_config
from delivered.connectors.kafka.committer import marker_key, marker_partition, marker_value, written_partitions
from delivered.connectors.kafka.sink import binary, headers, topics
from delivered.connectors.kafka.topics import ledger_topic, transactional_id
from delivered.contract.sink import Writer
from delivered.kits.queue import identified
from delivered.kits.warm import WarmClients, retire
from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, DeliveredError, Fenced, Refused, Unreachable, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Work
from delivered.model.limits import CONNECT_TIMEOUT_S, OUTAGE_PATIENCE_S, REQUEST_TIMEOUT_S
from delivered.model.patience import patience_s, unanswered, wait_out, within
from delivered.model.work import Failed, Ok, Promise, Unknown

# Translates a producer's errors for the user of a sink.


def producer_error(error: ProducerError, topic: str | None, options: SinkOptions) -> DeliveredError:
    """Translate an error of a producer."""
    servers = options.client["bootstrap.servers"]
    if error.fenced:
        return Fenced("PRODUCER_FENCED", error=error)
    if error.topic_unknown:
        return UsageError("TOPIC_UNKNOWN.WRITER", topic=topic, servers=servers)
    if error.no_permission:
        return Refused("KAFKA_PERMISSION.WRITE", topic=topic, servers=servers, error=error)
    if error.away:
        return Unreachable("KAFKA_UNREACHABLE.WRITER", servers=servers, error=error)
    return DeliveredError("KAFKA_CLIENT", servers=servers, error=error)


def delivery_error(failures: Failures, options: SinkOptions) -> DeliveredError:
    """The error for undelivered records."""
    if failures.name == "MSG_SIZE_TOO_LARGE":  # the broker's code; librdkafka uses it for its own limit too
        limit = options.client.get("message.max.bytes", "1048588")
        return BadRecord("RECORD_TOO_LARGE.KAFKA_RECORD", largest=failures.largest, limit=limit, count=failures.count)
    error = ProducerError(
        failures.fatal or failures.name, f"{failures.count} records were not delivered{failures.hint()}"
    )
    if error.topic_unknown or error.no_permission or error.fenced or failures.name == "_MSG_TIMED_OUT":
        named = ProducerError("_TIMED_OUT", error.reason) if failures.name == "_MSG_TIMED_OUT" else error
        return producer_error(named, options.topic, options)
    return DeliveredError("DELIVERY_FAILED", count=failures.count, failures=failures.name, hint=failures.hint())


# Warm producers, kept in Spark's reused worker process.
#
# A transactional id is initialised when the first rows of its attempt arrive, and never ahead: late, it would fence the
# worker that Spark gave the shard to (decision 093). It serves one attempt of one batch: one epoch, one transaction.
# Producers without transactions are pooled.

START_TIMEOUT_S = OUTAGE_PATIENCE_S
IDLE_MAX = 8

IDLE_AGE_S_MAX = 3_600.0
"""An idle sender's producer id is dropped before brokers forget it."""

AnyProducer = Producer | Sender

_lock = threading.Lock()
_idle: WarmClients[AnyProducer] = WarmClients(IDLE_MAX)
_clusters: dict[tuple[str, ...], Cluster] = {}


@dataclass(frozen=True)
class ProducerSession:
    """A transactional producer that holds its id.

    Attributes:
        held: as the coordinator reported it after initialisation. If another producer took the id in between, this is
            that producer's epoch, and all writes of this one are fenced: a transaction that was written in full always
            has this epoch.
    """

    producer: AnyProducer
    held: Transaction


def key_of(config: Mapping[str, str], *more: str) -> tuple[str, ...]:
    return (*more, *(f"{k}={v}" for k, v in sorted(config.items())))


def _by_arrow(options: SinkOptions) -> bool:
    return by_arrow(SINK_OWNER, options.through, options.client, SINK_SETTINGS)


def take(options: SinkOptions, work: Work) -> ProducerSession:
    """A transactional producer for one attempt of one shard of one batch; owned by the caller.

    Raises:
        ProducerError: its transactional id could not be initialised.
    """
    name = transactional_id(work)
    if _by_arrow(options):
        cluster = _cluster(options)
        with within(START_TIMEOUT_S):
            deadline = time.monotonic() + START_TIMEOUT_S
            delays: list[None] = [] if work.attempt == 0 else [None]
            outcome = initialise(
                cluster.wire, name, options.transaction_timeout_s * 1000, deadline, lambda: delays.append(None)
            )
        match outcome:
            case Ok(held):
                if delays:  # another attempt's transaction was ended just now
                    _check_ended(cluster.wire, options, work, held)
                config = producer_config(options, Guarantee.EXACTLY_ONCE, name)
                return ProducerSession(Sender(cluster, config, held), held)
            case Failed(reason):
                raise ProducerError(reason.rpartition(": ")[2], reason)
            case Unknown(reason):
                raise ProducerError("_TIMED_OUT", reason)
    producer = Producer(SINK_OWNER, producer_config(options, Guarantee.EXACTLY_ONCE, name))
    try:
        with unanswered(server_name(options.client["bootstrap.servers"])):
            producer.start(START_TIMEOUT_S)
        held = state_of(options, name).participant
        _check_ended(_cluster(options).wire, options, work, held)
        return ProducerSession(producer, held)
    except BaseException:
        producer.close()
        raise


def _check_ended(wire: Wire, options: SinkOptions, work: Work, held: Transaction) -> None:
    """Refuse an id whose last transaction is still open in a partition: this one's end would be that one's, too (P28).

    Not needed if the id was free at once: the driver has checked what earlier batches left.
    """
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    try:
        open_there, _ = open_in(wire, written_partitions(wire, options, work.scope), {held.producer_id}, deadline)
    except NoAnswer as error:
        raise ProducerError("_TIMED_OUT", f"the partitions of {held.transactional_id!r}: {error}") from None
    if open_there:
        raise DeliveredError(
            "TRANSACTION_HANGING.WRITER",
            transactional_id=held.transactional_id,
            producer_id=held.producer_id,
            epoch=open_there[0].epoch,
            partitions=", ".join(map(str, open_there[:5])),
        )


def state_of(options: SinkOptions, name: str) -> TransactionState:
    """The coordinator's state of a transactional id. Raises ProducerError: no answer, or unknown id."""
    try:
        found = describe(_cluster(options).wire, name)
    except NoAnswer as error:
        raise ProducerError("_TIMED_OUT", f"the holder of {name!r} is unknown: {error}") from None
    if found is None:
        raise ProducerError("_STATE", f"the coordinator does not know {name!r}")
    return found


def _cluster(options: SinkOptions) -> Cluster:
    """The process's connections."""
    client = options.resolved()
    key = key_of(client)
    with _lock:
        return _clusters.get(key) or _clusters.setdefault(key, Cluster(Wire(client), client["bootstrap.servers"]))


def borrow(options: SinkOptions, guarantee: Guarantee) -> AnyProducer:
    """An idle producer without transactions, or a new one; owned by the caller until `give_back`.

    Raises:
        ProducerError: no producer id.
    """
    config = producer_config(options, guarantee, None)
    producer = _idle.take(_idle_key(options, config))
    if isinstance(producer, Sender) and time.monotonic() - producer.used_at > IDLE_AGE_S_MAX:
        producer = None
    if producer is None:
        return _new_sender(options, config, guarantee) if _by_arrow(options) else Producer(SINK_OWNER, config)
    producer.failures.clear()
    return producer


def _new_sender(options: SinkOptions, config: Mapping[str, str], guarantee: Guarantee) -> Sender:
    cluster = _cluster(options)
    if guarantee is Guarantee.AT_MOST_ONCE:
        return Sender(cluster, config, None)
    try:
        return Sender(cluster, config, producer_id(cluster.wire))
    except NoAnswer as error:
        raise ProducerError("_TIMED_OUT", str(error)) from None


def _idle_key(options: SinkOptions, config: Mapping[str, str]) -> tuple[str, ...]:
    return key_of(config, options.through)


def give_back(options: SinkOptions, guarantee: Guarantee, producer: AnyProducer) -> None:
    """Return a producer with nothing in flight to the pool."""
    _idle.give(_idle_key(options, producer_config(options, guarantee, None)), producer)


def close_all() -> None:
    """Close all warm producers. Ends no transaction."""
    _idle.clear()


atexit.register(close_all)


# Writes one shard to Kafka, on an executor: a transactional writer and a direct one.

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 180.0
"""Longer than a record's delivery time-out, so that failed records give the reason."""


class _Sender:
    """Sends batches through a producer; caches the topics' partition counts."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._partitions: dict[str, int] = {}

    def send(self, producer: AnyProducer, batch: pa.RecordBatch) -> None:
        for rows in self._by_topic(identified(batch, self._options.message_id_columns)):
            self._check(producer, rows)
            producer.send(rows)

    def _by_topic(self, batch: pa.RecordBatch) -> Iterator[Rows]:
        n = batch.num_rows
        named = topics(batch, self._options.topic, self._options.ledger_topic)
        listed = headers(batch, n)
        rows = Rows(
            topic=self._options.topic or "",
            key=binary(batch, "key", n) if "key" in batch.schema.names else None,
            value=binary(batch, "value", n),
            headers=None if listed.null_count == n else listed,
            partition=_partition_column(batch),
        )
        if named is None:
            yield rows
            return
        for topic in named.unique().to_pylist():
            picked = pc.indices_nonzero(pc.equal(named, topic))
            yield Rows(
                topic=topic,
                key=None if rows.key is None else rows.key.take(picked),
                value=rows.value.take(picked),
                headers=None if rows.headers is None else rows.headers.take(picked),
                partition=None if rows.partition is None else rows.partition[np.asarray(picked)],
            )

    def _check(self, producer: AnyProducer, rows: Rows) -> None:
        """Reject unknown topics and partitions before anything is sent."""
        count = self._partitions.get(rows.topic)
        if count is None:
            count = self._partitions[rows.topic] = known_partitions(producer, rows.topic, self._options)
        if rows.partition is not None and len(rows) and int(rows.partition.max()) >= count:
            raise BadRecord(
                "PARTITION_UNKNOWN.TOO_HIGH",
                partition=int(rows.partition.max()),
                topic=rows.topic,
                count=count,
                last=count - 1,
            )


def known_partitions(producer: AnyProducer, topic: str, options: SinkOptions) -> int:
    """Partition count of a topic; waits briefly for a topic that was just created.

    Raises:
        UsageError: the topic does not exist. Unreachable: no broker answers. Refused: no permission.
    """
    deadline = time.monotonic() + 3
    server = server_name(options.client["bootstrap.servers"])
    while True:
        try:
            return wait_out(server, lambda: producer.partitions(topic, CONNECT_TIMEOUT_S), _away, patience_s(False))
        except ProducerError as error:
            if not error.topic_unknown or time.monotonic() > deadline:
                raise producer_error(error, topic, options) from None
        time.sleep(0.1)


def _away(error: BaseException) -> bool:
    return isinstance(error, ProducerError) and error.away


@contextmanager
def _explained(options: SinkOptions) -> Iterator[None]:
    try:
        yield
    except ProducerError as error:
        raise producer_error(error, options.topic, options) from None


def _retire(producer: AnyProducer) -> None:
    if isinstance(producer, Sender):
        producer.close()
    else:
        retire(producer)


def _refuse_failures(producer: AnyProducer, options: SinkOptions) -> None:
    if producer.failures.count:
        raise delivery_error(producer.failures, options)


class TransactionalWriter(Writer):
    """exactly_once: rows and a marker in one transaction, left open for the driver to commit or abort."""

    def __init__(self, options: SinkOptions, work: Work) -> None:
        self._options = options
        self._work = work
        self._id = transactional_id(work)
        self._sender = _Sender(options)
        self._session: ProducerSession | None = None

    def stage(self, batch: pa.RecordBatch) -> None:
        """Send rows in the transaction, opened by the first rows."""
        if batch.num_rows == 0:
            return
        producer = self._begin()
        with _explained(self._options):
            self._sender.send(producer, batch)
        _refuse_failures(producer, self._options)

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        """Flush rows and marker until acknowledged; leave the transaction open. No rows: no transaction."""
        session = self._session
        if session is None:
            return Promise()
        producer, scope = session.producer, self._work.scope
        with _explained(self._options):
            producer.send_one(
                ledger_topic(scope, self._options.ledger_topic),
                marker_partition(scope),
                marker_key(scope, self._work.shard),
                marker_value(self._work, fingerprint),
            )
            producer.flush(min(FLUSH_TIMEOUT_S, self._options.transaction_timeout_s))
            _refuse_failures(producer, self._options)
            if not isinstance(producer, Sender):
                self._confirm(session)
        # From here on the transaction belongs to the driver.
        self._session = None
        _retire(producer)
        return Promise(session.held)

    def _confirm(self, session: ProducerSession) -> None:
        """Promise only a transaction that the coordinator reports as open, including the marker's partition.

        librdkafka reports neither its epoch nor which partitions were added. A `Sender` has both from the coordinator's
        own answers, and its requests carry the epoch: what was acknowledged is in this transaction.
        """
        found = state_of(self._options, self._id)
        scope = self._work.scope
        marker = f"{ledger_topic(scope, self._options.ledger_topic)}-{marker_partition(scope)}"
        held, now = session.held, found.participant
        if found.state == "Ongoing" and now == held and marker in found.targets:
            return
        raise DeliveredError(
            "PREPARE_REFUSED",
            transaction=self._id,
            producer_id=held.producer_id,
            epoch=held.epoch,
            state=found.state,
            current_producer_id=now.producer_id,
            current_epoch=now.epoch,
            partitions=", ".join(found.targets) or "none",
            hint=session.producer.failures.hint(),
        )

    def abort(self) -> None:
        """Abort the transaction unless it is prepared: then it is left to recovery."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(ProducerError):
                session.producer.abort(REQUEST_TIMEOUT_S)
            session.producer.close()

    def _begin(self) -> AnyProducer:
        """The producer, with an open transaction."""
        if self._session is None:
            with _explained(self._options):
                self._session = take(self._options, self._work)
                self._session.producer.begin()
        return self._session.producer


class DirectWriter(Writer):
    """Sends rows without a transaction, through a pooled producer.

    at_least_once: an unacknowledged record fails the task, whose rows are sent again.
    at_most_once: every record is sent at most once; unacknowledged ones are counted as given up. As an unanswered
    request may have been stored, the count is an upper bound of the loss.
    """

    def __init__(self, options: SinkOptions, guarantee: Guarantee) -> None:
        self._options = options
        self._gives_up = guarantee is Guarantee.AT_MOST_ONCE
        self._guarantee = guarantee
        self._sender = _Sender(options)
        self._producer: AnyProducer | None = None

    def stage(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        if self._producer is None:
            with _explained(self._options):
                self._producer = borrow(self._options, self._guarantee)
        with _explained(self._options):
            self._sender.send(self._producer, batch)
        self._judge(self._producer)

    def prepare(self, fingerprint: Fingerprint) -> Promise:  # noqa: ARG002 - no marker is written
        producer = self._producer
        if producer is None:
            return Promise()
        with _explained(self._options):
            producer.flush(FLUSH_TIMEOUT_S)
        self._judge(producer)
        self._producer = None
        failed = dict(sorted(producer.failures.by_name.items()))
        if not failed:
            give_back(self._options, self._guarantee, producer)
            return Promise()
        log.warning("at_most_once: records given up: %s", failed)
        _retire(producer)
        return Promise(given_up=failed)

    def abort(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            _retire(producer)

    def _judge(self, producer: AnyProducer) -> None:
        if not self._gives_up:
            _refuse_failures(producer, self._options)


def _partition_column(batch: pa.RecordBatch) -> Any | None:
    if "partition" not in batch.schema.names:
        return None
    column = batch.column(batch.schema.get_field_index("partition"))
    lowest = pc.min(column).as_py()
    if lowest is not None and lowest < 0:
        raise BadRecord("PARTITION_UNKNOWN.NEGATIVE", partition=lowest)
    return np.asarray(column.cast(pa.int32()).fill_null(-1))
