"""ActiveMQ's queues: received from, checked over Artemis' management address, and sent to."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from delivered.connectors.activemq import DUPLICATE_ID, FRAME_HEADERS, ActivemqOptions, ActivemqSinkOptions, Place
from delivered.connectors.activemq.client import HEARTBEAT_MS, Session
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Finding, MessageBatch, Queue, Receiver
from delivered.kits.queue import COLUMNS, MessageSink, SendingWriter, check_names, check_types, column, sends, text
from delivered.ledger import Ledgers
from delivered.model.answers import JsonAnswer, UnexpectedAnswer
from delivered.model.capability import Guarantee, SinkCapability
from delivered.model.errors import BadRecord, DeliveredError, OutcomeUnknown, Refused, Unreachable, UsageError
from delivered.model.identity import Work
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.rows import check_lengths
from delivered.model.work import Ok, Outcome, Unknown
from delivered.source import intact, micros

# Checks an Artemis broker's queue over its management address.

_ADDRESS = "activemq.management"
_ANSWER_S = 5.0


class Management:
    """Management requests. Replies arrive in a temporary queue of this session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._replies = f"delivered.replies.{uuid.uuid4().hex}"  # a second subscription to one name is an error
        headers = {"subscription-type": "MULTICAST", "receipt": session.receipt()}
        session.transmit(session.frames.subscribe, self._replies, "replies", headers=headers)
        session.settle("answer the subscription")

    def attribute(self, resource: str, name: str) -> JsonAnswer:
        """Null: the resource does not exist."""
        return self._ask({"_AMQ_ResourceName": resource, "_AMQ_Attribute": name}, "")

    def call(self, resource: str, operation: str, *parameters: str) -> JsonAnswer:
        """Null: the resource does not exist, or rejected the call."""
        return self._ask({"_AMQ_ResourceName": resource, "_AMQ_OperationName": operation}, json.dumps(parameters))

    def _ask(self, headers: dict[str, str], body: str) -> JsonAnswer:
        session = self._session
        session.frames.auto_content_length = False  # the broker only reads text messages here
        sent = {**headers, "reply-to": self._replies}
        session.transmit(session.frames.send, _ADDRESS, body, headers=sent)
        session.wait(lambda: bool(session.arrived), _ANSWER_S, "answer a management request")
        answer = session.arrived.popleft()
        if answer.headers.get("_AMQ_OperationSucceeded") != "true":
            return JsonAnswer.of(None)
        return JsonAnswer.read(answer.body or b"[null]").only()


@dataclass(frozen=True)
class _Settings:
    """
    Attributes:
        creates: the broker creates the address's queues on first use.
        attempts: deliveries of a message.
        dead_letters: where it goes after them.
    """

    creates: bool
    attempts: int
    dead_letters: str
    when_full: str


def _settings(answer: JsonAnswer) -> _Settings:
    return _Settings(
        answer.take("autoCreateQueues", bool, True),
        answer.take("maxDeliveryAttempts", int, 10),
        answer.take("deadLetterAddress", str, ""),
        answer.take("addressFullMessagePolicy", str, ""),
    )


def findings(session: Session, place: Place, receives: bool) -> Iterator[Finding]:
    """Whether a queue is safe against loss. Nothing for Classic, which has no management over STOMP."""
    if not session.is_artemis:
        return
    try:
        management = Management(session)
        address, _, queue = place.queue.partition("::")
        queue = queue or address
        durable = management.attribute(f"queue.{queue}", "durable").value(bool, None)
        kinds = management.attribute(f"address.{address}", "routingTypes").value(list, None)
        text = management.call("broker", "getAddressSettingsAsJSON", address).value(str, None)
        settings = _settings(JsonAnswer.read((text or "{}").encode()))
        readers = management.attribute(f"queue.{queue}", "consumerCount").value(int, None)
        held = management.attribute(f"queue.{queue}", "deliveringCount").value(int, None)
    except (DeliveredError, UnexpectedAnswer) as error:
        detail = error.message if isinstance(error, DeliveredError) else str(error)
        yield Finding.build(
            "ACTIVEMQ_SETTINGS_UNKNOWN", refuses=False, place=place.place, queue=place.queue, detail=detail
        )
        if isinstance(error, Unreachable):
            return
        return
    yield from _judge(place.queue, queue, durable, kinds, settings, receives)
    if receives:
        yield from messages_without_consumer(queue, held, readers)


def messages_without_consumer(queue: str, held: int | None, readers: int | None) -> Iterator[Finding]:
    """
    Args:
        held: messages in delivery; None: unknown.
        readers: consumers of the queue; None: unknown.
    """
    if held and readers == 0:
        yield Finding.build("MESSAGES_STUCK", refuses=False, queue=queue, held=held)


def _judge(
    name: str, queue: str, durable: bool | None, kinds: list[Any] | None, settings: _Settings, receives: bool
) -> Iterator[Finding]:
    if "::" not in name and kinds == ["MULTICAST"]:
        yield Finding.build("QUEUE_IS_TOPIC", refuses=True, name=name)
    elif durable is None and not settings.creates:
        yield Finding.build("QUEUE_MISSING.ACTIVEMQ_START", refuses=True, queue=queue)
    elif durable is None:
        yield Finding.build("QUEUE_NOT_YET", refuses=False, queue=queue)
    elif durable is False:
        yield Finding.build("QUEUE_NOT_DURABLE.ACTIVEMQ", refuses=False, queue=queue)
    tries = settings.attempts
    if receives and tries > 0 and not settings.dead_letters:
        yield Finding.build("QUEUE_DROPS.DELIVERIES", refuses=True, queue=queue, tries=tries)
    if not receives and settings.when_full == "DROP":
        yield Finding.build("QUEUE_DROPS.FULL", refuses=True, queue=queue)


# Receives messages: one connection, one subscription, individual acknowledgements, a bounded window.

_LOG = logging.getLogger(__name__)
_SUBSCRIPTION = "delivered"


# Over STOMP, Artemis reads the body of every message that is not of bytes as a text. Of a map, an object or a stream
# that gives no text, or a wrong one, and nothing says so but what a message of AMQP was before.
_BEFORE = "JMS_AMQP_ORIGINAL_ENCODING"
_READABLE = frozenset({"1", "2", "4", "5", "6"})
"""No body, bytes, no value, a text, a value of bytes. Others are sequences, maps, lists and values of other types."""
_OBJECT = "application/x-java-serialized-object"
_EMPTY = (
    "a message in %s is empty. If its sender did not send an empty one, it is a map, object or stream message of JMS, "
    "whose content ActiveMQ does not deliver over STOMP: senders use bytes or text"
)

_DIGITS_MAX = 19
"""Of a time: a Java long."""


class ActivemqReceiver(Receiver):
    """Handles are (number of the connection, id for ACK), valid only on that connection."""

    _seen_empty = False

    def __init__(self, options: ActivemqOptions) -> None:
        self._options = options
        self._number = 0
        self._session = self._open()
        # Of two headers of one name the client keeps the first. Artemis writes its own ack, which is the message's id,
        # after a sender's header of that name.
        self._handle = "message-id" if self._session.is_artemis else "ack"

    def receive(self, count_max: int, wait_s: float) -> MessageBatch:
        session = self._session
        with session.changed:
            session.changed.wait_for(lambda: session.failed is not None or bool(count_max and session.arrived), wait_s)
            failed = session.failed
            messages = [session.arrived.popleft() for _ in range(min(count_max, len(session.arrived)))]
        if failed is not None:  # these messages are redelivered, and cannot be acknowledged here
            if isinstance(failed, UsageError | Unreachable):
                raise failed
            raise Unreachable("ACTIVEMQ_UNREACHABLE", failed.message, failed.next_step)
        return self._message_batch(messages)

    def acknowledge(self, handles: Sequence[Any]) -> Outcome[int]:
        """Ok: the broker confirmed the last acknowledgement; it processes them in order."""
        session = self._session
        own = [name for number, name in handles if number == self._number]
        try:
            for name in own[:-1]:
                session.transmit(session.frames.ack, name)
            if own:
                receipt = session.receipt()
                session.transmit(session.frames.ack, own[-1], receipt=receipt)
                session.wait(lambda: receipt not in session.unconfirmed, REQUEST_TIMEOUT_S, "answer an acknowledgement")
        except DeliveredError as error:
            return Unknown(error.message)
        if len(own) < len(handles):
            return Unknown(f"{len(handles) - len(own)} messages were requeued when their connection was lost")
        return Ok(len(handles))

    def give_back(self, handles: Sequence[Any]) -> None:
        """Requeue all messages by closing the connection: Artemis treats NACK as ACK, which deletes the message."""
        if any(number == self._number for number, _ in handles):
            self._session.close()
            self._session = self._open()

    def close(self) -> None:
        self._session.close()

    def _open(self) -> Session:
        options = self._options
        session = Session(options)
        self._number += 1
        headers = {
            "consumer-window-size": str(options.prefetch_bytes),
            # If this creates the address, it must be a queue, not a topic.
            **({} if "::" in options.queue else {"subscription-type": "ANYCAST"}),
            "receipt": session.receipt(),
        }
        try:
            subscribe = session.frames.subscribe
            session.transmit(subscribe, options.queue, _SUBSCRIPTION, ack="client-individual", headers=headers)
            session.settle("answer the subscription")
        except DeliveredError:
            session.close()
            raise
        return session

    def _message_batch(self, messages: Sequence[Any]) -> MessageBatch:
        """Column by column: this dominates a receiver's CPU time per message."""
        number, options = self._number, self._options
        headers = [frame.headers for frame in messages]
        id_header, key_header = options.id_header, options.key_header
        for frame in messages:
            self._check(frame.headers, frame.body)
        return MessageBatch(
            ids=[None if id_header is None else intact(h.get(id_header)) for h in headers],
            keys=[None if key_header is None or (k := h.get(key_header)) is None else k.encode() for h in headers],
            values=[frame.body for frame in messages],
            headers=[[(n, v.encode()) for n, v in h.items() if n not in FRAME_HEADERS] for h in headers],
            times_us=[_time_us(h.get("timestamp")) for h in headers],
            handles=[(number, h[self._handle]) for h in headers],
        )

    def _check(self, headers: dict[str, str], body: bytes) -> None:
        """Raise BadRecord if the body is known not to be what was sent."""
        if (before := headers.get(_BEFORE)) is not None:
            lost = before not in _READABLE or headers.get("JMS_AMQP_ContentType") == _OBJECT
        else:
            # A map of two entries or more begins so. So may bytes, whose length the broker puts before other headers.
            lost = body[:1] == b"\0" and next(reversed(headers)) == "content-length"
            if not body and "content-length" not in headers and not self._seen_empty:
                self._seen_empty = True
                _LOG.warning(_EMPTY, self._options.queue)
        if lost:
            number = headers.get("message-id", "").rpartition(",")[2]
            raise BadRecord(
                "MESSAGE_NOT_BYTES", message_number=number, queue=self._options.queue, place=self._options.place
            )


def _time_us(text: str | None) -> int | None:
    """None: not set, or no number of milliseconds."""
    if text is None or len(text) > _DIGITS_MAX or not text.isdecimal():
        return None
    return micros(int(text), 1_000) or None


# See `delivered.contract.source.Queue`.


@dataclass(frozen=True)
class ActivemqQueue(Queue):
    options: ActivemqOptions

    @property
    def name(self) -> str:
        return self.options.queue

    @property
    def without_ids(self) -> str | None:
        if self.options.id_header is not None:
            return None
        return (
            "without the option idHeader duplicates cannot be detected: ActiveMQ assigns a new id to a resent message, "
            "and its flag redelivered proves nothing"
        )

    @property
    def redelivers_after_s(self) -> float:
        """The broker closes a silent connection after two heart-beats."""
        return 2 * HEARTBEAT_MS / 1000

    def assumes(self) -> tuple[str, ...]:
        header = self.options.id_header
        again = f", and resend a message with the same {header}" if header is not None else ""
        return (
            f"senders wait until the broker has written a message (persistent, receipt or synchronous send){again}",
            f"the queue {self.options.queue} drops no messages: no expiry, ring size or delivery limit without a "
            "dead-letter address",
            "messages are bytes, or text without NUL, where STOMP truncates text; not JMS's map, object or stream "
            "messages, whose content STOMP loses",
        )

    def preflight(self) -> Sequence[Finding]:
        try:
            session = Session(self.options)
            try:
                return list(findings(session, self.options, receives=True))
            finally:
                session.close()
        except DeliveredError as error:
            return [Finding.refusal(error)]

    def receiver(self) -> Receiver:
        return ActivemqReceiver(self.options)


# The sink: at_least_once and at_most_once, with an external ledger.
#
# Executor side: rows to messages, many in flight. A receipt means that the broker has the message on disk.

IN_FLIGHT_MAX = 2_000
"""Unconfirmed messages per task."""


@dataclass(frozen=True)
class Message:
    body: bytes
    headers: dict[str, str]


class Publisher:
    """One connection. Any ERROR frame ends it, whichever message it refers to."""

    def __init__(self, options: ActivemqSinkOptions) -> None:
        self._queue = options.queue
        self._session = Session(options)

    @property
    def unconfirmed(self) -> int:
        """Number of messages sent but not confirmed."""
        return len(self._session.unconfirmed)

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages; blocks while too many are in flight. Raises if one was rejected."""
        session = self._session
        try:
            for message in messages:
                if len(session.unconfirmed) >= IN_FLIGHT_MAX:
                    self._wait(IN_FLIGHT_MAX // 2)
                headers = {**message.headers, "receipt": session.receipt()}
                session.transmit(session.frames.send, self._queue, message.body, headers=headers)
        except Unreachable as error:
            raise self._unknown(error) from error

    def flush(self) -> None:
        """Wait until every message is confirmed. Raises if one was rejected, or its outcome is unknown."""
        try:
            self._wait(0)
        except Unreachable as error:
            raise self._unknown(error) from error

    def close(self) -> None:
        """Idempotent."""
        self._session.close()

    def _wait(self, left: int) -> None:
        unconfirmed = self._session.unconfirmed
        self._session.wait(lambda: len(unconfirmed) <= left, REQUEST_TIMEOUT_S, "confirm messages")

    def _unknown(self, error: DeliveredError) -> OutcomeUnknown:
        return OutcomeUnknown("ACTIVEMQ_UNCONFIRMED", unconfirmed=self.unconfirmed, error=error.message)


class ActivemqWriter(SendingWriter[ActivemqSinkOptions, Message]):
    def _connect(self) -> Publisher:
        return Publisher(self._options)

    def _messages(self, rows: pa.RecordBatch) -> list[Message]:
        options = self._options
        columns = (column(rows, name, pa.binary()) for name in ("value", "message_id", "key"))
        kind = {} if "::" in options.queue else {"destination-type": "ANYCAST"}
        messages = []
        for value, chosen, key in zip(*columns, strict=True):
            own = self._next_id()
            message_id = text(chosen, "column 'message_id'") if chosen else own  # of an empty id, Artemis takes one
            check_lengths("activemq", key=key, message_id=message_id, value=value)
            check_header(key=key, message_id=message_id)
            headers = {**kind, "persistent": "true", options.id_header: message_id}
            if options.key_header is not None and key is not None:
                headers[options.key_header] = text(key, "column 'key'")
            # With a length, even 0, it is a bytes message: NUL truncates a text message.
            content = value or b""
            headers["content-length"] = str(len(content))
            messages.append(Message(content, headers))
        return messages


def check_header(**columns: str | bytes | None) -> None:
    """Raises BadRecord: a value has a zero byte, which ends a STOMP frame and cannot be escaped."""
    for name, value in columns.items():
        if value is not None and ("\0" in value if isinstance(value, str) else 0 in value):
            raise BadRecord("ZERO_BYTE", value=value, name=name)


_DROPS = (
    "Artemis drops a duplicate while its id is among the newest of its address (id-cache-size, 20,000 by default); "
    "older duplicates, and all on Classic, are delivered"
)


@dataclass(frozen=True)
class ActivemqSink(MessageSink):
    options: ActivemqSinkOptions
    ledgers: Ledgers

    def capability(self) -> SinkCapability:
        options = self.options
        drops = options.id_header == DUPLICATE_ID
        return sends(
            "activemq",
            mechanism="receipts",
            send=f"activemq {options.queue}: persistent, with a receipt for each message",
            assumes=(f"the ledger {options.ledger} is kept with the checkpoint",),
            limits=(_DROPS,) if drops else (),
            repeats=f"the header {options.id_header} is the same in a replayed batch (unless a column message_id "
            "overrides it), so consumers can detect duplicates",
        )

    def _look(self, guarantee: Guarantee) -> Iterator[Finding]:
        del guarantee
        session = Session(self.options)
        try:
            yield from findings(session, self.options, receives=False)
        finally:
            session.close()

    def _check_schema(self, schema: pa.Schema) -> None:
        known = set(COLUMNS) if self.options.key_header is not None else set(COLUMNS) - {"key"}
        action = "select these columns; a column key needs the option keyHeader"
        check_names("activemq", schema, {"value"}, known, action)
        check_types(schema)

    def _writer(self, work: Work, *, gives_up: bool) -> ActivemqWriter:
        return ActivemqWriter(self.options, work, gives_up)

    def scan(self) -> BoundedScan:
        raise Refused("NOT_READABLE.ACTIVEMQ", queue=self.options.queue)
