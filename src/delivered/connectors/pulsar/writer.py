"""A task's side of the sink: what is staged is visible.

Each message has the property delivered.id, the same when a batch runs again, so readers can tell repeats. The broker's
own deduplication is not used for that: it compares numbers alone, and would drop what another order of the rows moved.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import pyarrow as pa

from delivered.connectors.pulsar.client import explained, pulsar, warm_client
from delivered.connectors.pulsar.sink_options import PulsarSinkOptions
from delivered.model.errors import BadRecord, DeliveredError, OutcomeUnknown, Unreachable
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Work
from delivered.model.limits import REQUEST_TIMEOUT_S

ID = "delivered.id"
IN_FLIGHT_MAX = 2_000
"""Messages sent and not acknowledged, of one task and partition."""
_ROWS = 1_000
_BATCH_BYTES = 1 << 20


def check_connection(options: PulsarSinkOptions) -> None:
    """Raise Unreachable or UsageError if nothing can be written. The topic must be there: this would make it."""
    _producer(options).close()


class SendingWriter:
    """
    Args:
        gives_up: at_most_once: a message whose acknowledgement is lost is counted and not sent again.
    """

    def __init__(self, options: PulsarSinkOptions, work: Work, gives_up: bool) -> None:
        self._options = options
        self._gives_up = gives_up
        scope = work.scope
        self._id = f"{scope.pipeline}.{scope.sink}.{scope.incarnation}.{work.batch}.{work.shard}"
        self._rows = 0
        self._lock = threading.Lock()
        self._answered = 0
        self._lost = 0  # nobody knows whether they are in
        self._failed: Any = None  # the first result that says no
        self._producer: Any = None

    def stage(self, batch: pa.RecordBatch) -> None:
        if self._producer is None:
            self._producer = _producer(self._options)
        library = pulsar()
        for at in range(0, batch.num_rows, _ROWS):
            self._check()
            try:
                for message in self._messages(batch.slice(at, _ROWS)):
                    self._producer.send_async(callback=self._on_answer, **message)
            except library.PulsarException as error:
                raise explained(error, self._options, self._options.label) from None

    def prepare(self, fingerprint: Fingerprint) -> dict[str, Any]:
        del fingerprint
        producer = self._producer
        if producer is None:
            return {}
        library = pulsar()
        try:
            producer.flush()
        except library.PulsarException as error:
            if not self._gives_up and self._rows == self._answered and not self._lost:
                raise explained(error, self._options, self._options.label) from None
        finally:
            self.abort()
        self._check()
        unknown = self._lost + self._rows - self._answered
        if not unknown:
            return {}
        if self._gives_up:
            return {"given_up": unknown}
        raise OutcomeUnknown(
            "PULSAR_UNCONFIRMED",
            f"{unknown} messages to {self._options.label} at {self._options.url} were sent, and the broker did not "
            f"acknowledge them within {REQUEST_TIMEOUT_S:.0f} s.",
            next_step="start again when the brokers run; the batch is handled as its guarantee says",
        )

    def abort(self) -> None:
        if self._producer is not None:
            producer, self._producer = self._producer, None
            try:
                producer.close()
            except pulsar().PulsarException:
                pass  # the connection is gone, and the producer with it

    def _check(self) -> None:
        """Raises when the broker refused a message."""
        if self._failed is None:
            return
        found: DeliveredError = explained(_exception(self._failed), self._options, self._options.label)
        if isinstance(found, Unreachable):
            found = DeliveredError(
                "MESSAGE_REFUSED", f"Pulsar refused a message to {self._options.label}: {self._failed}."
            )
        raise found

    def _check_size(self, value: bytes | None, key: bytes | None, properties: dict[str, str]) -> None:
        """Before the client does: this error can name the row."""
        longest = self._options.bytes_max
        if longest is None:
            return
        size = len(value or b"") + len(key or b"") + sum(len(k) + len(v.encode()) for k, v in properties.items())
        if size > longest:
            raise BadRecord(
                "RECORD_TOO_LARGE",
                f"Row {self._rows} of a shard for {self._options.label} has {size} bytes; the limit is {longest}.",
                next_step="set the option chunking to true, or write smaller messages; messageBytesMax may be as large "
                "as the brokers' maxMessageSize",
            )

    def _on_answer(self, result: Any, _: Any) -> None:
        """Runs in a thread of the client, which ends the process when this raises."""
        results = pulsar().Result
        with self._lock:
            self._answered += 1
            if result == results.Ok:
                return
            if result in (results.Timeout, results.NotConnected, results.AlreadyClosed, results.ConnectError):
                self._lost += 1
            elif self._failed is None:
                self._failed = result

    def _messages(self, rows: pa.RecordBatch) -> list[dict[str, Any]]:
        names = rows.schema.names
        values = rows.column("value").cast(pa.binary()).to_pylist()
        nothing = [None] * len(values)
        keys = rows.column("key").cast(pa.binary()).to_pylist() if "key" in names else nothing
        headers = rows.column("headers").to_pylist() if "headers" in names else nothing
        times = (
            rows.column("event_time").cast(pa.timestamp("ms")).cast(pa.int64()).to_pylist()
            if "event_time" in names
            else nothing
        )
        messages = []
        for value, key, pairs, time in zip(values, keys, headers, times, strict=True):
            properties = {h["key"]: _text(h["value"], "a header") for h in pairs} if pairs else {}
            properties[ID] = f"{self._id}.{self._rows}"
            self._check_size(value, key, properties)
            self._rows += 1
            messages.append(
                {
                    "content": value,
                    "partition_key": _text(key, "the key") if key else None,
                    "properties": properties,
                    "event_timestamp": time,
                }
            )
        return messages


def _producer(options: PulsarSinkOptions) -> Any:
    library = pulsar()
    kinds = library.CompressionType
    compression = {"none": kinds.NONE, "lz4": kinds.LZ4, "zlib": kinds.ZLib, "zstd": kinds.ZSTD, "snappy": kinds.SNAPPY}
    client = warm_client(options)
    try:
        return client.create_producer(
            options.topic,
            compression_type=compression[options.compression],
            send_timeout_millis=int(REQUEST_TIMEOUT_S * 1000),
            max_pending_messages=IN_FLIGHT_MAX,
            block_if_queue_full=True,
            batching_enabled=options.bytes_max is not None,
            batching_max_messages=_ROWS,
            batching_max_allowed_size_in_bytes=_BATCH_BYTES,
            batching_type=library.BatchingType.Default,
            chunking_enabled=options.bytes_max is None,
            message_routing_mode=library.PartitionsRoutingMode.CustomPartition,
            message_router=_Router(),
        )
    except library.PulsarException as error:
        raise explained(error, options, options.label) from None


class _Router:
    """Keys to partitions as Java's client does by default (this library has another hash); rows without one in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, message: Any, partitions: int) -> int:
        key = message.partition_key()
        if key:
            return _java_hash(key) % partitions
        self._turn += 1
        return self._turn // _ROWS % partitions


@lru_cache(maxsize=65_536)
def _java_hash(key: str) -> int:
    found = 0
    units = key.encode("utf-16-be", "surrogatepass")
    for at in range(0, len(units), 2):
        found = (31 * found + (units[at] << 8 | units[at + 1])) & 0xFFFFFFFF
    return found & 0x7FFFFFFF


def _text(value: bytes | None, what: str) -> str:
    try:
        return "" if value is None else value.decode()
    except UnicodeDecodeError:
        raise BadRecord(
            "NOT_TEXT",
            f"{what} of a row is {value!r:.80}, which is no UTF-8; Pulsar's keys and properties are text.",
            next_step="encode it, for instance with base64 or hex",
        ) from None


def _exception(result: Any) -> Exception:
    """The exception that belongs to a result of the client."""
    library = pulsar()
    kind = getattr(library, str(result).rpartition(".")[2], None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind(str(result))
    return library.PulsarException(str(result))  # type: ignore[no-any-return]
