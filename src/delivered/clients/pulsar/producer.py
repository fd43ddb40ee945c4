"""Messages to one topic of one partition: batched, compressed, many in flight, in a transaction or without.

In a transaction a producer never sends anything twice: if its connection breaks, it is lost, with what was in flight.
Its transaction can then only be aborted. Without one it may open another connection and send again, under the same
sequence ids, what was not acknowledged.
"""

from __future__ import annotations

import struct
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

import pyarrow as pa

from delivered.clients.pulsar.connection import (
    MESSAGE,
    Cluster,
    Connection,
    Error,
    NoAnswer,
    NotSent,
    Rejected,
    encode_send,
)
from delivered.clients.pulsar.transactions import TransactionId
from delivered.model.limits import PULSAR_IN_FLIGHT_BYTES_MAX

BATCH_ROWS = 1_000
BATCH_BYTES = 1 << 20
_PAUSE_S = 0.1
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


class Resend(Enum):
    """What a producer does with messages that were not acknowledged when its connection broke."""

    NEVER = "never"
    """They are lost, and so is the producer."""
    WHERE_DROPPED = "where dropped"
    """Sends them again if the broker knows this producer, so that it drops what it has; else they stay unknown."""
    ALWAYS = "always"


class _Sent(NamedTuple):
    """A frame that is not acknowledged.

    Attributes:
        messages: that its acknowledgement completes: none before the last chunk of one.
        parts: what it is made of; None: it is never sent again.
    """

    size: int
    messages: int
    parts: tuple[Any, bytes, dict[str, Any]] | None

    @property
    def is_chunk(self) -> bool:
        return self.parts is not None and "is_chunk" in self.parts[2]


class Flow:
    """What the producers of one task have in flight, bounded. Thread-safe.

    Attributes:
        acknowledged: number of messages.
    """

    def __init__(self, bytes_max: int = PULSAR_IN_FLIGHT_BYTES_MAX) -> None:
        self.acknowledged = 0
        self._bytes_max = bytes_max
        self._changed = threading.Condition()
        self._bytes = 0
        self._error: Exception | None = None
        self._broken: list[Callable[[float], None]] = []

    def take(self, size: int, deadline: float) -> None:
        """Wait for room. One message above the bound is sent alone. Raises what went wrong, NoAnswer: in time."""
        self._wait(lambda: self._bytes == 0 or self._bytes + size <= self._bytes_max, deadline)
        with self._changed:
            self._bytes += size

    def give(self, size: int, acknowledged: int = 0) -> None:
        with self._changed:
            self._bytes -= size
            self.acknowledged += acknowledged
            self._changed.notify_all()

    def broken(self, mend: Callable[[float], None]) -> None:
        """Have `mend` called with a deadline, by the thread that sends or waits."""
        with self._changed:
            self._broken.append(mend)
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
        while True:
            with self._changed:
                while not (self._error is not None or self._broken or ready()):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise NoAnswer(f"{self._bytes} bytes were not acknowledged in time")
                    self._changed.wait(left)
                broken, self._broken = self._broken, []
            self.check()
            if not broken:
                return
            for mend in broken:
                mend(deadline)


class _Link:
    """A producer on one connection, as that connection's thread sees it.

    Attributes:
        lost_by: why it is no longer there; None: it is.
    """

    def __init__(self, producer: Producer, connection: Connection) -> None:
        self.connection = connection
        self.lost_by: str | None = None
        self._producer = producer
        self.number = connection.attach(self)

    def received(self, sequence_id: int, ledger: int, entry: int) -> None:
        self._producer._received(sequence_id, ledger, entry)

    def refused(self, error: Rejected) -> None:
        self._producer._refused(self, error)

    def lost(self, reason: str) -> None:
        self.lost_by = reason
        self._producer._lost(self)

    def leave(self) -> None:
        self.connection.detach(self.number)


class Producer:
    """One thread sends, and opens another connection if need be. Acknowledgements arrive in the connection's.

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
        resend: Resend = Resend.NEVER,
        schema: tuple[str, str] | None = None,
        compression: str = "none",
        chunks: bool = False,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        """
        Args:
            topic: of one partition; a transaction holds it already.
            resend: never in a transaction.
            schema: kind and text of already encoded values, registered if missing; None: bytes.
            chunks: messages above the broker's limit are split, and none is batched.

        Raises:
            NoAnswer, Rejected, ssl.SSLError
        """
        self.last: tuple[int, int] | None = None
        self._cluster, self._topic, self._flow = cluster, topic, flow
        self._transaction, self._resend, self._schema = transaction, resend, schema
        self._kind, self._compress = COMPRESSIONS[compression]
        self._chunks, self._batch_bytes = chunks, batch_bytes
        self._parts: list[bytes] = []
        self._count = self._bytes = 0
        self._first_key: str | None = None
        self._sequence = 0
        self._in_flight: dict[int, _Sent] = {}
        self._closed = False
        self._name = f"delivered-{uuid.uuid4().hex}"  # unique: the broker remembers its sequence
        self._link: _Link | None = None
        answer = self._open(deadline)
        self._name, self._version = answer.producer_name, answer.schema_version

    def _open(self, deadline: float) -> Any:
        """Open it, once more after its connection broke, and return the broker's answer."""
        fields: dict[str, Any] = {}
        if self._schema is not None:
            kind, text = self._schema
            fields["schema"] = MESSAGE["Schema"](name=kind, schema_data=text.encode(), type=SCHEMA_KINDS[kind])
        again = before = self._link is not None
        while True:
            try:
                link = _Link(self, self._cluster.serving(self._topic, deadline, again=again))
                try:
                    answer = link.connection.ask(
                        "producer",
                        deadline,
                        topic=self._topic,
                        producer_id=link.number,
                        producer_name=self._name,
                        user_provided_producer_name=False,
                        txn_enabled=self._transaction is not None,
                        **fields,
                    )
                except BaseException:
                    link.leave()
                    raise
                self._link, self._connection = link, link.connection
                if link.lost_by is not None:
                    self._lost(link)
                return answer
            except (NoAnswer, Rejected) as error:
                passes = isinstance(error, NotSent) or (before and isinstance(error, NoAnswer))
                if isinstance(error, Rejected):  # where it was before, the broker may not have closed it yet
                    passes = error.may_pass or (before and error.code == Error.PRODUCER_BUSY)
                if not passes or time.monotonic() + _PAUSE_S > deadline:
                    raise
                again = True
                time.sleep(_PAUSE_S)

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
        if (link := self._link) is None or link.lost_by is not None:
            return
        link.leave()
        with suppress(NoAnswer, Rejected):  # the connection is lost, and with it the producer
            link.connection.ask("close_producer", deadline, producer_id=link.number)

    # In the connection's thread.

    def _received(self, sequence_id: int, ledger: int, entry: int) -> None:
        sent = self._in_flight.pop(sequence_id, None)
        if sent is None:
            return
        if ledger < 1 << 63:
            self.last = ledger, entry
        elif self._resend is Resend.NEVER:  # -1: the broker takes it for a repeat, which it cannot be
            self._flow.fail(NoAnswer(f"message {sequence_id} of {self._name} was dropped as a repeat"))
        self._flow.give(sent.size, sent.messages)

    def _refused(self, link: _Link, error: Rejected) -> None:
        if self._resend is Resend.NEVER or not error.may_pass:
            self._flow.fail(error)
        else:  # and what came after it as well
            link.leave()
            link.lost(str(error))

    def _lost(self, link: _Link) -> None:
        if link is not self._link:
            return  # it was never used, or is no longer
        if self._resend is not Resend.NEVER:
            self._flow.broken(self._mend)
        elif self._in_flight or not self._closed:
            self._flow.fail(NoAnswer(link.lost_by or ""))

    # In the thread that sends.

    def _mend(self, deadline: float) -> None:
        """Open it again, and send what is in flight once more."""
        if self._closed or self._link is None or self._link.lost_by is None:
            return
        time.sleep(_PAUSE_S)
        answer = self._open(deadline)
        unanswered = [*self._in_flight.items()]
        if not (answer.HasField("last_sequence_id") and answer.last_sequence_id >= 0):  # it would take repeats
            if self._resend is Resend.WHERE_DROPPED:
                for number, sent in unanswered:
                    if self._in_flight.pop(number, None) is not None:
                        self._flow.give(sent.size)
                return
            if any(sent.is_chunk for _, sent in unanswered):  # readers drop a message of which a chunk comes twice
                raise NoAnswer(f"{self._connection.name}: the connection broke between chunks of a message")
        with suppress(NotSent):  # broken again: `_lost` was called
            for _, sent in unanswered:
                self._transmit(sent, deadline)

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
        command = {
            "sequence_id": sequence_id,
            "num_messages": count,
            **({"is_chunk": True} if "chunk_id" in metadata else {}),
            **newest,
            **in_transaction,
        }
        limit = self._connection.message_bytes_max
        size = head.ByteSize() + len(body)
        if size > limit:
            raise TooLong(f"{size:,} bytes, above maxMessageSize, {limit:,}")
        self._flow.take(size, deadline)
        messages = 0 if metadata.get("chunk_id", -1) + 1 < metadata.get("num_chunks_from_msg", 0) else count
        sent = _Sent(size, messages, (head, body, command))
        if self._resend is Resend.NEVER:
            self._in_flight[sequence_id] = sent._replace(parts=None)
            self._transmit(sent, deadline)
        else:
            self._in_flight[sequence_id] = sent
            with suppress(NotSent):  # the connection broke: it is sent again by who waits next
                self._transmit(sent, deadline)

    def _transmit(self, sent: _Sent, deadline: float) -> None:
        link = self._link
        if link is None or link.lost_by is not None:
            raise NotSent(f"{self._topic}: {'' if link is None else link.lost_by}")
        if sent.parts is not None:
            head, body, command = sent.parts
            link.connection.post(encode_send(head, body, producer_id=link.number, **command), deadline)
