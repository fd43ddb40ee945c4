"""Messages to one topic of one partition: batched, compressed, many in flight, in a transaction or without.

A producer never sends anything twice: if its connection breaks, it is lost, with what was in flight. Its transaction
can then only be aborted.
"""

from __future__ import annotations

import struct
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import pyarrow as pa

from delivered.clients.pulsar.cluster import Cluster
from delivered.clients.pulsar.commands import MESSAGE, NoAnswer, NotSent, Rejected, encode_send
from delivered.clients.pulsar.transactions import TransactionId
from delivered.model.limits import PULSAR_IN_FLIGHT_BYTES_MAX

BATCH_ROWS = 1_000
BATCH_BYTES = 1 << 20
_SIZE = struct.Struct(">I")
_Single = MESSAGE["SingleMessageMetadata"]
_KeyValue = MESSAGE["KeyValue"]


def _by_arrow(codec: str) -> Callable[[bytes], bytes]:
    def compress(data: bytes) -> bytes:
        return bytes(pa.Codec(codec).compress(data, asbytes=True))

    return compress


COMPRESSIONS: Mapping[str, tuple[int, Callable[[bytes], bytes]]] = {
    "none": (0, lambda data: data),
    "lz4": (1, _by_arrow("lz4_raw")),
    "zlib": (2, zlib.compress),
    "zstd": (3, _by_arrow("zstd")),
    "snappy": (4, _by_arrow("snappy")),
}
"""Option -> number in the protocol, and how."""
SCHEMA_KINDS = {"AVRO": 4, "JSON": 2}


class TooLong(Exception):
    """A message above the broker's limit; nothing of it was sent. The broker would end the connection."""


class Message(NamedTuple):
    """
    Attributes:
        value: None: no value, which is not an empty one.
        event_time: in milliseconds since 1970.
    """

    value: bytes | None
    key: str | None = None
    properties: Mapping[str, str] = {}
    event_time: int | None = None


class Flow:
    """What the producers of one task have in flight, bounded. Thread-safe."""

    def __init__(self, bytes_max: int = PULSAR_IN_FLIGHT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._changed = threading.Condition()
        self._bytes = 0
        self._error: Exception | None = None

    def take(self, size: int, deadline: float) -> None:
        """Wait for room. One message above the bound is sent alone. Raises what went wrong, NoAnswer: in time."""
        self._wait(lambda: self._bytes == 0 or self._bytes + size <= self._bytes_max, deadline)
        with self._changed:
            self._bytes += size

    def give(self, size: int) -> None:
        with self._changed:
            self._bytes -= size
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """The first one counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what went wrong."""
        if self._error is not None:
            raise self._error

    def drain(self, deadline: float) -> None:
        """Wait until everything is acknowledged. Raises as `take`."""
        self._wait(lambda: self._bytes == 0, deadline)

    def _wait(self, ready: Callable[[], bool], deadline: float) -> None:
        with self._changed:
            while not (self._error is not None or ready()):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise NoAnswer(f"{self._bytes} bytes were not acknowledged in time")
                self._changed.wait(left)
        self.check()


class Producer:
    """One thread sends. Acknowledgements arrive in the connection's.

    Attributes:
        last: (ledger, entry) of the newest acknowledged message; None: none yet.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        flow: Flow,
        deadline: float,
        *,
        transaction: TransactionId | None = None,
        schema: tuple[str, str] | None = None,
        compression: str = "none",
        chunks: bool = False,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        """
        Args:
            topic: of one partition; a transaction holds it already.
            schema: kind and text of already encoded values, registered if missing; None: bytes.
            chunks: messages above the broker's limit are split, and none is batched.

        Raises:
            NoAnswer, Rejected, ssl.SSLError
        """
        self.last: tuple[int, int] | None = None
        self._flow = flow
        self._transaction = transaction
        self._kind, self._compress = COMPRESSIONS[compression]
        self._chunks, self._batch_bytes = chunks, batch_bytes
        self._parts: list[bytes] = []
        self._count = self._bytes = 0
        self._first_key: str | None = None
        self._sequence = 0
        self._in_flight: dict[int, int] = {}
        self._closed = False
        self._connection, self._number, self._name, self._version = self._opened(cluster, topic, schema, deadline)

    def _opened(
        self, cluster: Cluster, topic: str, schema: tuple[str, str] | None, deadline: float
    ) -> tuple[Any, int, str, bytes]:
        fields: dict[str, Any] = {}
        if schema is not None:
            kind, text = schema
            fields["schema"] = MESSAGE["Schema"](name=kind, schema_data=text.encode(), type=SCHEMA_KINDS[kind])
        again = False
        while True:
            try:
                connection = cluster.serving(topic, deadline, again=again)
                number = connection.attach(self)
                try:
                    answer = connection.ask(
                        "producer",
                        deadline,
                        topic=topic,
                        producer_id=number,
                        producer_name=f"delivered-{uuid.uuid4().hex}",  # unique: the broker remembers its sequence
                        user_provided_producer_name=False,
                        txn_enabled=self._transaction is not None,
                        **fields,
                    )
                except BaseException:
                    connection.detach(number)
                    raise
                return connection, number, answer.producer_name, answer.schema_version
            except (NotSent, Rejected) as error:
                passes = isinstance(error, NotSent) or error.may_pass
                if not passes or time.monotonic() + 0.1 > deadline:
                    raise
                again = True
                time.sleep(0.1)

    def send(self, message: Message, deadline: float) -> None:
        """Add a message to the open batch; blocks while too much is in flight. Raises NoAnswer, Rejected, TooLong."""
        if self._chunks:
            self._send_alone(message, deadline)
            return
        value = message.value or b""
        single = _Single(payload_size=len(value))
        if message.properties:
            single.properties.extend([_KeyValue(key=k, value=v) for k, v in message.properties.items()])
        if message.key:
            single.partition_key = message.key
        if message.event_time:
            single.event_time = message.event_time
        if message.value is None:
            single.null_value = True
        head = single.SerializeToString()
        size = 4 + len(head) + len(value)
        if self._count and self._bytes + size > self._batch_bytes:
            self.end_batch(deadline)
        if not self._count:
            self._first_key = message.key
        self._parts += (_SIZE.pack(len(head)), head, value)
        self._count += 1
        self._bytes += size
        if self._count == BATCH_ROWS:
            self.end_batch(deadline)

    def end_batch(self, deadline: float) -> None:
        """Send the open batch, if there is one."""
        if not self._count:
            return
        count, self._count, self._bytes = self._count, 0, 0
        payload = b"".join(self._parts)
        self._parts = []
        fields: dict[str, Any] = {"partition_key": self._first_key} if self._first_key else {}
        self._post(payload, count, deadline, num_messages_in_batch=count, **fields)

    def close(self, deadline: float) -> None:
        """What is not acknowledged stays unknown. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._connection.detach(self._number)
        with suppress(NoAnswer, Rejected):  # the connection is lost, and with it the producer
            self._connection.ask("close_producer", deadline, producer_id=self._number)

    # In the connection's thread.

    def received(self, sequence_id: int, ledger: int, entry: int) -> None:
        size = self._in_flight.pop(sequence_id, None)
        if size is None:
            return
        if ledger >= 1 << 63:  # -1: the broker takes it for a repeat, which it cannot be
            self._flow.fail(NoAnswer(f"message {sequence_id} of {self._name} was dropped as a repeat"))
        else:
            self.last = ledger, entry
        self._flow.give(size)

    def refused(self, error: Rejected) -> None:
        self._flow.fail(error)

    def lost(self, reason: str) -> None:
        if self._in_flight or not self._closed:
            self._flow.fail(NoAnswer(reason))

    # The frames.

    def _send_alone(self, message: Message, deadline: float) -> None:
        value = message.value or b""
        fields: dict[str, Any] = {
            "properties": [_KeyValue(key=k, value=v) for k, v in message.properties.items()],
            **({"partition_key": message.key} if message.key else {}),
            **({"event_time": message.event_time} if message.event_time else {}),
            **({"null_value": True} if message.value is None else {}),
        }
        packed = self._compress(value)
        room = self._connection.message_bytes_max
        room -= MESSAGE["MessageMetadata"](**fields).ByteSize() + 512  # names, numbers
        if len(packed) <= room:
            self._post(value, 1, deadline, packed=packed, **fields)
            return
        pieces = [packed[at : at + room] for at in range(0, len(packed), room)]
        fields |= {
            "uuid": f"{self._name}-{self._sequence}",
            "num_chunks_from_msg": len(pieces),
            "total_chunk_msg_size": len(packed),
        }
        for number, piece in enumerate(pieces):
            self._post(value, 1, deadline, packed=piece, chunk_id=number, **fields)

    def _post(
        self, payload: bytes, count: int, deadline: float, *, packed: bytes | None = None, **metadata: Any
    ) -> None:
        sequence_id, self._sequence = self._sequence, self._sequence + count
        newest = {"highest_sequence_id": sequence_id + count - 1} if count > 1 else {}
        body = self._compress(payload) if packed is None else packed
        in_transaction = {} if self._transaction is None else self._transaction.fields
        head = MESSAGE["MessageMetadata"](
            producer_name=self._name,
            sequence_id=sequence_id,
            publish_time=time.time_ns() // 1_000_000,
            **({"compression": self._kind, "uncompressed_size": len(payload)} if self._kind else {}),
            **({"schema_version": self._version} if self._version else {}),
            **newest,
            **in_transaction,
            **metadata,
        )
        frame = encode_send(
            head,
            body,
            producer_id=self._number,
            sequence_id=sequence_id,
            num_messages=count,
            **({"is_chunk": True} if "chunk_id" in metadata else {}),
            **newest,
            **in_transaction,
        )
        limit = self._connection.message_bytes_max
        if head.ByteSize() + len(body) > limit:
            raise TooLong(f"{head.ByteSize() + len(body):,} bytes, above maxMessageSize, {limit:,}")
        self._flow.take(len(frame), deadline)
        self._in_flight[sequence_id] = len(frame)
        self._connection.post(frame, deadline)
