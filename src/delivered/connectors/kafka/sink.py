"""The Kafka sink: its checks, the columns of its rows, and the writers of a shard on an executor."""

from __future__ import annotations

import atexit
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from delivered.clients.kafka import NoAnswer
from delivered.clients.kafka.librdkafka import Producer
from delivered.clients.kafka.protocol import Failures, ProducerError, Wire, server_name
from delivered.clients.kafka.record_batch import RECORD_OVERHEAD, Rows
from delivered.clients.kafka.sender import Cluster, Sender
from delivered.clients.kafka.transactions import (
    Transaction,
    TransactionState,
    describe,
    initialise,
    open_in,
    producer_id,
)
from delivered.connectors.kafka import (
    SINK_OWNER,
    SINK_SETTINGS,
    TOPIC_LENGTH_MAX,
    SinkOptions,
    SourceOptions,
    by_arrow,
    check_settings,
    is_internal,
    is_topic,
    path,
    producer_config,
)
from delivered.connectors.kafka.committer import (
    KafkaCommitter,
    marker_key,
    marker_partition,
    marker_value,
    written_partitions,
)
from delivered.connectors.kafka.topics import check_ledger, ledger_topic, preflight, transactional_id
from delivered.contract.sink import BoundedScan, Committer, Sink, Writer
from delivered.contract.source import Finding
from delivered.kits import WarmClients, retire
from delivered.kits.queue import ID, identified, identified_schema
from delivered.ledger import Store
from delivered.model.capability import Commit, Guarantee, SinkCapability
from delivered.model.errors import BadRecord, DeliveredError, Fenced, Refused, Unreachable, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.limits import CONNECT_TIMEOUT_S, OUTAGE_PATIENCE_S, REQUEST_TIMEOUT_S
from delivered.model.patience import patience_s, unanswered, wait_out, within
from delivered.model.rows import EVERYTHING, Range, check_storable, unstorable
from delivered.model.work import Failed, Ok, Promise, Unknown
from delivered.source import COLUMNS, HEADER, HEADERS


@dataclass(frozen=True)
class KafkaSink(Sink):
    """See `delivered.contract.sink.Sink`. Picklable; secrets travel as references."""

    options: SinkOptions

    @property
    def name(self) -> str:
        return self.options.default_name

    def capability(self) -> SinkCapability:
        target = self.options.topic or "the topics that rows name"
        timeout = self.options.transaction_timeout_s
        return SinkCapability(
            system="kafka",
            commit=Commit.TWO_PHASE,
            mechanism="two-phase commit",
            stage=f"kafka {target}: a transaction for each shard, invisible to read_committed readers",
            prepare="flush: every record and a marker in the same transaction acknowledged; transaction left open",
            decide="one transaction in the pipeline's internal topic, under the owner's transactional id",
            apply="EndTxn(commit) for each shard, from the driver",
            send=f"kafka {target}: acks=all",
            batch_atomic=False,
            validates=True,
            no_position="",
            prepared_timeout_s=float(timeout),
            records=path(self.options.through, self.options.client, SINK_SETTINGS, "Arrow, encoded in C"),
            assumes=(
                f"readers of {target} use isolation.level=read_committed",
                "a replayed batch gives the same rows (only needed if the query keeps state or a transaction expired: "
                f"{timeout} s after its first record)",
                "min.insync.replicas replicas are never lost together, of the topic or of Kafka's internal topics",
            ),
            transaction_limits=(
                f"a batch must be written and decided within {timeout} s (transactionTimeout)",
                "readers may see some shards of a batch about 20 ms before the others",
                "while a batch is open, read_committed readers of its partitions wait",
            ),
        )

    @property
    def routed_by(self) -> str | None:
        return "topic" if self.options.topic is None else None

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        try:
            self.check_guarantee(guarantee)
            check_settings(SINK_OWNER, self.options.client)
            by_arrow(SINK_OWNER, self.options.through, self.options.client, SINK_SETTINGS)
        except UsageError as error:
            return [Finding.refusal(error)]
        return preflight(self.options, guarantee)

    def check_ledger(self, scope: Scope) -> Sequence[Finding]:
        return check_ledger(self.options, scope)

    def check_guarantee(self, guarantee: Guarantee) -> None:
        if self.options.acks != "all" and guarantee is not Guarantee.AT_MOST_ONCE:
            raise UsageError("ACKS", acks=self.options.acks, guarantee=guarantee.value)

    def check_schema(self, schema: pa.Schema) -> None:
        check_settings(SINK_OWNER, self.options.client)
        check_schema(identified_schema("kafka", schema, self.options.message_id_columns), self.options.topic)

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        """What the client itself rejects. A lower limit of the broker, or an unknown partition, fails the query."""
        longest = int(self.options.client.get("message.max.bytes", "1048588")) - RECORD_OVERHEAD
        options, ids = self.options, self.options.message_id_columns
        rows = identified(batch, ids, nulls=True)
        return invalid_rows(rows, options.topic, longest, bool(ids), options.ledger_topic)

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return records(identified(batch, self.options.message_id_columns))

    def writer(
        self,
        work: Work,
        guarantee: Guarantee,
        schema: pa.Schema,  # noqa: ARG002 - each batch carries its own
    ) -> Writer:
        if guarantee is Guarantee.EXACTLY_ONCE:
            return TransactionalWriter(self.options, work)
        return DirectWriter(self.options, guarantee)

    def scan(self) -> BoundedScan:
        from delivered.connectors.kafka.scan import KafkaScan
        from delivered.connectors.kafka.source import KafkaSource

        options = {f"kafka.{k}": v for k, v in self.options.client.items() if _for_readers(k)}
        if self.options.topic is not None:
            options["subscribe"] = self.options.topic
        else:
            own = re.escape(self.options.ledger_topic or "__")
            options["subscribePattern"] = rf"^(?!__|_schemas|_confluent|{own}$)"
        options |= {"startingOffsets": "earliest", "endingOffsets": "latest", "includeHeaders": "true"}
        return KafkaScan(KafkaSource(SourceOptions.parse(options)))

    def store(self, scope: Scope) -> Store:
        from delivered.connectors.kafka.store import KafkaStore

        return KafkaStore(self.options, scope)

    def committer(self, scope: Scope) -> Committer:
        return KafkaCommitter(self.options, scope)


def _for_readers(key: str) -> bool:
    """Whether a client setting is about connecting, not producing."""
    return key.startswith(("bootstrap.", "security.", "sasl.", "ssl.", "enable.ssl", "client.", "socket.", "broker."))


# A sink's input rows: the columns it uses, and the record that a reader of the topic gets.

KNOWN = ("key", "value", "headers", "topic", "partition", "message_id")
PARTITION_MAX = 2**31 - 1
OF_SOURCES = {name: COLUMNS.field(name).type for name in ("offset", "timestamp", "timestampType")}
"""Ignored, as by Spark's own sink, so that a stream from the Kafka source can be written unchanged."""


def check_schema(schema: pa.Schema, topic: str | None) -> None:
    """Raise UsageError if rows of this schema cannot be written. Args: topic: the option `topic`."""
    unknown = [f.name for f in schema if f.name not in KNOWN and OF_SOURCES.get(f.name) != f.type]
    if unknown:
        raise UsageError("COLUMN_UNKNOWN", unknown=unknown[0], known=", ".join(KNOWN))
    if "value" not in schema.names:
        raise UsageError("COLUMN_MISSING.KAFKA_VALUE", columns=", ".join(schema.names) or "none")
    if topic is None and "topic" not in schema.names:
        raise UsageError("TOPIC_MISSING.KAFKA_NO_OPTION")
    for name in ("key", "value"):
        if name in schema.names:
            _check(schema, name, _is_bytes(schema.field(name).type), "string or binary")
    for name in ("topic", "message_id"):
        if name in schema.names:
            _check(schema, name, _is_text(schema.field(name).type), "string")
    if "partition" in schema.names:
        _check(schema, "partition", pa.types.is_integer(schema.field("partition").type), "integer")
    if "headers" in schema.names:
        kind = schema.field("headers").type
        fits = (
            (pa.types.is_list(kind) or pa.types.is_large_list(kind))
            and pa.types.is_struct(kind.value_type)
            and kind.value_type.num_fields == 2
            and kind.value_type.field(0).name == "key"
            and kind.value_type.field(1).name == "value"
            and _is_text(kind.value_type.field(0).type)
            and _is_bytes(kind.value_type.field(1).type)
        )
        _check(schema, "headers", fits or pa.types.is_null(kind), _HEADERS_TYPE)


def records(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows as records of the topic: key, value, headers; null where a column is absent."""
    n = batch.num_rows
    columns = [
        binary(batch, "key", n),
        binary(batch, "value", n),
        headers(batch, n),
    ]
    return pa.RecordBatch.from_arrays(columns, names=["key", "value", "headers"])


def binary(batch: pa.RecordBatch, name: str, n: int) -> pa.Array:
    """A column as binary or large_binary. Strings are UTF-8 already, so nothing is copied."""
    if name not in batch.schema.names:
        return pa.nulls(n, pa.binary())
    array = batch.column(batch.schema.get_field_index(name))
    kind = array.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return array
    if pa.types.is_string(kind):
        return array.view(pa.binary())
    if pa.types.is_large_string(kind):
        return array.view(pa.large_binary())
    return array.cast(pa.binary())


def headers(batch: pa.RecordBatch, n: int) -> pa.Array:
    """The headers, the column message_id last; an empty list becomes null, since a reader cannot distinguish them."""
    check_storable("Kafka", batch, _find_not_utf8(batch, "message_id"))
    given = _headers(batch, n)
    return _with_ids(given, batch.column("message_id")) if "message_id" in batch.schema.names else given


def _with_ids(given: pa.Array, ids: pa.Array) -> pa.Array:
    """Append the header `ID` to each row that has an id."""
    has_id = np.asarray(pc.is_valid(ids))
    counts = np.asarray(pc.fill_null(pc.list_value_length(given), 0)).astype(np.int64)
    ends = np.cumsum(counts + has_id)
    flat = pc.list_flatten(given)
    added = ids.drop_null().cast(pa.string()).cast(pa.binary())
    names = pa.repeat(pa.scalar(ID, pa.string()), len(added))
    entries = pa.concat_arrays([flat, pa.StructArray.from_arrays([names, added], fields=list(HEADER))])
    order = np.empty(len(entries), np.int64)
    is_added = np.zeros(len(entries), bool)
    is_added[ends[has_id] - 1] = True
    order[~is_added] = np.arange(len(flat))
    order[is_added] = len(flat) + np.arange(len(added))
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    array = pa.ListArray.from_arrays(offsets, entries.take(pa.array(order)), type=HEADERS.type)
    return pc.if_else(pc.equal(pc.list_value_length(array), 0), pa.scalar(None, HEADERS.type), array)


def _headers(batch: pa.RecordBatch, n: int) -> pa.Array:
    if "headers" not in batch.schema.names:
        return pa.nulls(n, HEADERS.type)
    array = batch.column(batch.schema.get_field_index("headers"))
    if array.null_count == n:
        return pa.nulls(n, HEADERS.type)
    check_storable("Kafka", batch, _find_not_utf8(batch, "headers"))
    array = array.cast(HEADERS.type)
    unnamed = _find_unnamed(array)
    if unnamed is not None and pc.any(unnamed).as_py():
        row = pc.index(unnamed, True).as_py()
        raise BadRecord("HEADER_UNNAMED", row=row, headers=str(array[row].as_py())[:200])
    empty = pc.equal(pc.list_value_length(array), 0)
    if pc.any(empty).as_py():
        array = pc.if_else(pc.fill_null(empty, False), pa.scalar(None, HEADERS.type), array)
    return array


def _find_unnamed(array: pa.Array) -> pa.Array | None:
    """For each row, whether one of its headers is null or has a null key; None: no row has one."""
    flat = pc.list_flatten(array)
    nameless = pc.is_null(pc.struct_field(flat, [0]))
    if not pc.any(nameless).as_py():
        return None
    rows = pc.list_parent_indices(array).filter(nameless)
    return pc.is_in(pa.array(range(len(array)), rows.type), rows)


def _find_not_utf8(batch: pa.RecordBatch, name: str) -> pa.Array | None:
    """Reasons of rows with a text that is not UTF-8, in a column that need not be there. Values may hold any bytes, but
    of a header with such a name, librdkafka's consumers crash; they cut a name at a zero byte."""
    limits = Range(zero_byte=False) if name == "headers" else EVERYTHING
    return unstorable(limits, batch.select([name])) if name in batch.schema.names else None


def topics(batch: pa.RecordBatch, default: str | None, ledger_topic: str | None = None) -> pa.Array | None:
    """The topic of each row; None: all go to `default`.

    Raises:
        BadRecord: a row has no topic and there is no default, or its topic name is invalid or internal.
    """
    if default is not None or "topic" not in batch.schema.names:
        return None
    check_storable("Kafka", batch, _find_not_utf8(batch, "topic"))
    column = batch.column(batch.schema.get_field_index("topic")).cast(pa.string())
    if column.null_count:
        row = pc.index(pc.is_null(column), True).as_py()
        raise BadRecord("TOPIC_MISSING.KAFKA_ROW", row=row)
    bad = next((name for name in column.unique().to_pylist() if not is_topic(name)), None)
    if bad is not None:
        raise BadRecord(
            "TOPIC_INVALID.ROW", row=pc.index(column, bad).as_py(), topic=bad, topic_length_max=TOPIC_LENGTH_MAX
        )
    internal = next((name for name in column.unique().to_pylist() if is_internal(name, ledger_topic)), None)
    if internal is not None:
        raise BadRecord("TOPIC_INTERNAL.ROW", row=pc.index(column, internal).as_py(), topic=internal)
    return column


def invalid_rows(
    batch: pa.RecordBatch,
    topic: str | None,
    bytes_max: int,
    ids_required: bool = False,
    ledger_topic: str | None = None,
) -> pa.Array | None:
    """For each row, why the client would reject it, or null; None: no row is rejected.

    Args:
        bytes_max: of key, value and headers together, with the id as one of them.
        ids_required: a null message_id is a reason.
    """
    n, nothing = batch.num_rows, pa.scalar(None, pa.string())
    size = pc.add(
        *(pc.fill_null(pc.cast(pc.binary_length(binary(batch, c, n)), pa.int64()), 0) for c in ("key", "value"))
    )
    size = pc.add(size, _header_bytes(batch, n))
    found, too_long = [pa.nulls(n, pa.string())], pc.greater(size, bytes_max)
    if pc.any(too_long).as_py():
        ids = ", 'message_id'" if "message_id" in batch.schema.names else ""
        why = (
            f" bytes in 'key', 'value'{ids} and 'headers'; the limit (kafka.message.max.bytes) is {bytes_max} for them"
        )
        found.append(pc.if_else(too_long, pc.binary_join_element_wise(size.cast(pa.string()), why, ""), nothing))
    names = batch.schema.names
    not_utf8 = {name: _find_not_utf8(batch, name) for name in ("topic", "message_id", "headers")}
    found += [reasons for reasons in not_utf8.values() if reasons is not None]
    if topic is None and "topic" in names:
        column = batch.column(names.index("topic"))
        if (bad := not_utf8["topic"]) is not None:
            column = pc.if_else(bad.is_null(), column, pa.scalar(None, column.type))
        found.append(pc.if_else(pc.is_null(column), "no topic", nothing))
        named = [t for t in column.unique().to_pylist() if t is not None]
        for reason, unfit in (
            ("not a valid topic name", [t for t in named if not is_topic(t)]),
            ("an internal topic", [t for t in named if is_internal(t, ledger_topic)]),
        ):
            found.append(pc.if_else(pc.is_in(column, pa.array(unfit, column.type)), reason, nothing))
    if "headers" in names and pa.types.is_list(batch.column(names.index("headers")).type):
        unnamed = _find_unnamed(batch.column(names.index("headers")).cast(HEADERS.type))
        if unnamed is not None:
            found.append(pc.if_else(unnamed, "a header without a key", nothing))
    if "partition" in names:
        column = batch.column(names.index("partition"))
        for reason, unfit in (
            ("partition below 0", pc.less(column, 0)),
            (f"partition above {PARTITION_MAX}, Kafka's highest", pc.greater(column, PARTITION_MAX)),
        ):
            found.append(pc.if_else(pc.fill_null(unfit, False), reason, nothing))
    if ids_required:
        found.append(pc.if_else(pc.is_null(batch.column("message_id")), "no message id", nothing))
    reasons = pc.coalesce(*found)
    return None if reasons.null_count == n else reasons


def _header_bytes(batch: pa.RecordBatch, n: int) -> pa.Array:
    """Bytes of names and values of each row's headers, and of their lengths, as a record holds them."""
    names, found = batch.schema.names, np.zeros(n, np.int64)
    if "message_id" in names:
        ids = batch.column("message_id")
        length = np.asarray(pc.fill_null(pc.binary_length(ids), 0)).astype(np.int64)
        found += np.where(np.asarray(pc.is_valid(ids)), 1 + len(ID) + _varint_bytes(length) + length, 0)
    if "headers" not in names or not pa.types.is_list(batch.column("headers").type):
        return pa.array(found)
    column = batch.column("headers")
    entries = pc.list_flatten(column)
    lengths = np.zeros(len(entries), np.int64)
    for part in (0, 1):
        text = pc.struct_field(entries, [part])
        if pa.types.is_null(text.type):  # headers whose values are all NULL
            text = text.cast(pa.binary())
        length = np.asarray(pc.fill_null(pc.binary_length(text), 0)).astype(np.int64)
        lengths += _varint_bytes(length) + length
    return pa.array(found + np.bincount(np.asarray(pc.list_parent_indices(column)), lengths, n).astype(np.int64))


def _varint_bytes(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes that a record needs for each length: seven bits in each, one of them for the sign."""
    return np.searchsorted(_LENGTHS, lengths, side="right") + 1


_LENGTHS = np.array([1 << bits for bits in (6, 13, 20, 27)])


_HEADERS_TYPE = "array<struct<key: string, value: binary>>"
_CASTS = {
    "integer": "CAST(partition AS INT)",
    _HEADERS_TYPE: "array(named_struct('key', 'name', 'value', CAST(x AS BINARY))) AS headers; of a map: "
    "transform(map_entries(m), e -> named_struct('key', e.key, 'value', CAST(e.value AS BINARY))) AS headers",
}


def _check(schema: pa.Schema, name: str, fits: bool, wanted: str) -> None:
    if not fits:
        raise UsageError(
            "COLUMN_TYPE.KAFKA",
            name=name,
            type=schema.field(name).type,
            wanted=wanted,
            example=_CASTS.get(wanted, f"CAST({name} AS STRING)"),
        )


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(_is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_null(kind))


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
    highest = pc.max(column).as_py()
    if highest is not None and highest > PARTITION_MAX:
        raise BadRecord("PARTITION_UNKNOWN.ABOVE_ANY", partition=highest, partition_max=PARTITION_MAX)
    return np.asarray(column.cast(pa.int32()).fill_null(-1))
