"""Writes one shard to Kafka, on an executor: a transactional writer and a direct one."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delivered.clients.kafka.errors import ProducerError
from delivered.clients.kafka.protocol import server_name
from delivered.clients.kafka.rows import Rows
from delivered.clients.kafka.sender import Sender
from delivered.connectors.kafka import columns, warm
from delivered.connectors.kafka.errors import delivery_error, producer_error
from delivered.connectors.kafka.markers import marker_key, marker_partition, marker_value
from delivered.connectors.kafka.sink_options import SinkOptions
from delivered.connectors.kafka.topics import ledger_topic
from delivered.connectors.kafka.transactions import transactional_id
from delivered.connectors.kafka.warm import AnyProducer, Taken
from delivered.kits.queue.columns import identified
from delivered.kits.warm import retire
from delivered.model.errors import BadRecord, DeliveredError
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.model.limits import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S
from delivered.model.patience import patience_s, wait_out
from delivered.model.prepared import Promise

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
        named = columns.topics(batch, self._options.topic, self._options.ledger_topic)
        headers = columns.headers(batch, n)
        rows = Rows(
            topic=self._options.topic or "",
            key=columns.binary(batch, "key", n) if "key" in batch.schema.names else None,
            value=columns.binary(batch, "value", n),
            headers=None if headers.null_count == n else headers,
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
                "PARTITION_UNKNOWN",
                f"A row asks for partition {int(rows.partition.max())} of topic {rows.topic!r}, which has {count} "
                f"(0 to {count - 1}).",
                next_step="correct the column 'partition', or drop it: rows are then partitioned by key",
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


class TransactionalWriter:
    """exactly_once: rows and a marker in one transaction, left open for the driver to commit or abort."""

    def __init__(self, options: SinkOptions, work: Work) -> None:
        self._options = options
        self._work = work
        self._id = transactional_id(work)
        self._sender = _Sender(options)
        self._taken: Taken | None = None

    def stage(self, batch: pa.RecordBatch) -> None:
        """Send rows in the transaction, opened by the first rows."""
        if batch.num_rows == 0:
            return
        producer = self._begun()
        with _explained(self._options):
            self._sender.send(producer, batch)
        _refuse_failures(producer, self._options)

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        """Flush rows and marker until acknowledged; leave the transaction open. No rows: no transaction."""
        taken = self._taken
        if taken is None:
            return Promise()
        producer, scope = taken.producer, self._work.scope
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
                self._confirm(taken)
        # From here on the transaction belongs to the driver.
        self._taken = None
        _retire(producer)
        return Promise(taken.held)

    def _confirm(self, taken: Taken) -> None:
        """Promise only a transaction that the coordinator reports as open, including the marker's partition.

        librdkafka tells neither its epoch nor which partitions were added. A `Sender` has both from the coordinator's
        own answers, and its requests carry the epoch: what was acknowledged is in this transaction.
        """
        found = warm.state_of(self._options, self._id)
        scope = self._work.scope
        marker = f"{ledger_topic(scope, self._options.ledger_topic)}-{marker_partition(scope)}"
        held, now = taken.held, found.participant
        if found.state == "Ongoing" and now == held and marker in found.targets:
            return
        raise DeliveredError(
            "PREPARE_REFUSED",
            f"Transaction {self._id}, producer {held.producer_id}, epoch {held.epoch}, should be open now; its "
            f"coordinator reports {found.state}, producer {now.producer_id}, epoch {now.epoch}, partitions "
            f"{', '.join(found.targets) or 'none'}{taken.producer.failures.hint()}. Nothing of it is visible.",
            next_step="start again; if this recurs, check the permissions on the topics and that batches are shorter "
            "than transactionTimeout",
        )

    def abort(self) -> None:
        """Abort the transaction unless it is prepared: then it is left to recovery."""
        taken, self._taken = self._taken, None
        if taken is not None:
            with suppress(ProducerError):
                taken.producer.abort(REQUEST_TIMEOUT_S)
            taken.producer.close()

    def _begun(self) -> AnyProducer:
        if self._taken is None:
            with _explained(self._options):
                self._taken = warm.take(self._options, self._work)
                self._taken.producer.begin()
        return self._taken.producer


class DirectWriter:
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
                self._producer = warm.borrow(self._options, self._guarantee)
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
            warm.give_back(self._options, self._guarantee, producer)
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
        raise BadRecord(
            "PARTITION_UNKNOWN",
            f"A row asks for partition {lowest}; partitions count from 0.",
            next_step="correct the column 'partition'; null partitions by key",
        )
    return np.asarray(column.cast(pa.int32()).fill_null(-1))
