"""Connections, translation of the client's errors, the type of a queue, and a message's properties and headers.

AMQP does not report the type; but when an existing queue is declared again, RabbitMQ names the first property that
differs. That changes nothing.

Properties are read whatever bytes the sender gave. The client's own decoder (pika 1.4) makes text of what is UTF-8 and
leaves the rest bytes, cuts off the fractions of numbers, and raises on NaN, on a time after the year 9999, and on
tables nested a thousand deep: a receiver could neither take such a message nor pass it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from functools import cache, partial
from typing import Any
from urllib.parse import unquote, urlsplit

from delivered.connectors.rabbitmq import EXAMPLE, Place
from delivered.model.errors import BadRecord, DeliveredError, Refused, Unreachable, UsageError, extra
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.options import resolve_secret
from delivered.model.patience import left_s
from delivered.model.rows import bytes_as_json
from delivered.source import header_name

_HEADER_FRAME, _HEADER_SIZE = b"\x02", 19
"""Type of a frame with the properties of a message; bytes before them: the frame's header, class, weight, body size."""
HEARTBEAT_S = 30
BLOCKED_S = 60
_PASSING = (311, 320, 506, 541)
"""Retriable reply codes: the server lacks a resource, stops, or is electing a leader; or a vhost has not started."""
_CLOSED_WITH = re.compile(r"ConnectionClosedByBroker: \((\d+)\)")
_AT_LIMIT = re.compile(r"limit \(\d+\) is reached|maximum allowed limit")
"""Of connections or channels, reported as forbidden (530)."""

_STARTING = ("down or inaccessible", "does not have a replica on the local node")
"""Reported of a queue or stream not yet available after a restart; the second also if it is on another node."""


def pika() -> Any:
    """The client library, imported on use. Raises MissingExtra."""
    with extra("rabbitmq"):
        import pika
    return pika


def parameters(options: Place) -> Any:
    """Connection parameters, including the password; do not keep."""
    client = pika()
    # The client accepts no user without a password in a url, so it gets the url without either.
    parts = urlsplit(options.url)
    try:
        settings = client.URLParameters(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
    except (ValueError, TypeError, SyntaxError) as error:  # of a parameter's value
        why = f"has a parameter that pika does not read: {error}"
        raise UsageError("OPTION_VALUE.URL", name="The url of RabbitMQ", error=why, example=EXAMPLE) from None
    password = unquote(parts.password or "")
    if options.password is not None:
        password = resolve_secret("password", options.password)
    if parts.username or options.password is not None:
        settings.credentials = client.PlainCredentials(unquote(parts.username or "guest"), password)
    if options.tls:
        settings.ssl_options = client.SSLOptions(options.tls_context(), options.host)
    settings.heartbeat = HEARTBEAT_S
    settings.blocked_connection_timeout = BLOCKED_S
    settings.connection_attempts = 1
    settings.socket_timeout = settings.stack_timeout = left_s(CONNECT_TIMEOUT_S)
    return settings


def connect(options: Place) -> Any:
    """An open connection. Raises Unreachable, Refused."""
    client = pika()
    from pika.adapters.utils.connection_workflow import AMQPConnectorException

    try:
        return client.BlockingConnection(parameters(options), _impl_class=_connection_class())
    except AMQPConnectorException as error:  # the server accepted the connection, and then answered nothing
        raise Unreachable("RABBITMQ_UNREACHABLE.CONNECT", place=options.place, detail=error) from error
    except (client.exceptions.AMQPError, OSError) as error:
        raise explained(error, options) from error


@contextlib.contextmanager
def opened(options: Place) -> Iterator[Any]:
    """A connection for a few requests. Its end may meet a server that is no longer there, which changes no answer.

    Raises:
        Unreachable: the server does not answer.
        Refused: it refuses.
    """
    connection = connect(options)
    errors = (pika().exceptions.AMQPError, OSError)
    try:
        yield connection
    except errors as error:
        raise explained(error, options) from error
    finally:
        with contextlib.suppress(*errors):
            if connection.is_open:
                connection.close()


@cache
def _connection_class() -> Any:
    """The client's connection, with properties of messages decoded by `Properties`."""
    client = pika()
    from pika import frame, spec

    class Connection(client.SelectConnection):  # type: ignore[misc, name-defined]
        def _read_frame(self) -> Any:
            buffer = self._frame_buffer
            if len(buffer) >= spec.FRAME_HEADER_SIZE and buffer[:4] != b"AMQP":
                (size,) = struct.unpack_from(">L", buffer, 3)
                if size > spec.FRAME_MAX_SIZE:
                    raise client.exceptions.InvalidFrameError(f"a frame of {size:,} bytes")
            if buffer[:1] != _HEADER_FRAME or len(buffer) < _HEADER_SIZE:
                try:
                    return super()._read_frame()
                except client.exceptions.AMQPError:
                    raise
                except Exception as error:  # the client raises anything for bytes that are no such frame
                    raise client.exceptions.InvalidFrameError(f"a frame that cannot be read: {error!r:.200}") from None
            channel, size = struct.unpack_from(">HL", buffer, 1)
            end = spec.FRAME_HEADER_SIZE + size
            if len(buffer) <= end:
                return 0, None
            if buffer[end] != spec.FRAME_END:
                raise client.exceptions.InvalidFrameError("Invalid FRAME_END marker")
            try:
                properties = Properties(bytes(buffer[_HEADER_SIZE:end]))
            except struct.error as error:
                raise client.exceptions.InvalidFrameError(f"a message's properties end early: {error}") from None
            (body,) = struct.unpack_from(">Q", buffer, spec.FRAME_HEADER_SIZE + 4)
            return end + spec.FRAME_END_SIZE, frame.Header(channel, body, properties)

    return Connection


def explained(error: Exception, options: Place) -> DeliveredError:
    """Translate an error of the client."""
    if (refused := _certificate_error(error)) is not None:
        return options.untrusted(f"amqps://{options.place}", refused)
    kinds = pika().exceptions
    cause = error.args[-1] if error.args else None  # of a connection that was refused, whose own text is empty
    detail = str(error) or str(getattr(cause, "exception", cause) or type(error).__name__)
    # By when the connection ended the client guesses why; a server that refuses says so (since 3.2).
    closed = _CLOSED_WITH.search(detail)
    refused_by_server = closed is not None
    code = getattr(error, "reply_code", int(closed[1]) if closed else None)
    if code in _PASSING or _AT_LIMIT.search(detail):
        return Unreachable("RABBITMQ_UNREACHABLE.CONNECT", place=options.place, detail=detail)
    if isinstance(error, kinds.AuthenticationError) or (
        isinstance(error, kinds.ProbableAuthenticationError) and refused_by_server
    ):
        return Refused("RABBITMQ_CREDENTIALS", place=options.place, detail=detail)
    if (isinstance(error, kinds.ProbableAccessDeniedError) and refused_by_server) or code in (403, 530):
        return Refused("RABBITMQ_PERMISSION", place=options.place, detail=detail)
    starts = any(words in detail for words in _STARTING)
    if code == 404 and not starts:
        return UsageError("QUEUE_MISSING.RABBITMQ", target=options.target, place=options.place)
    if isinstance(error, kinds.AMQPConnectionError | socket.error) or starts:
        return Unreachable("RABBITMQ_UNREACHABLE.CONNECT", place=options.place, detail=detail)
    if code == 406 and "message size" in detail:
        return BadRecord("MESSAGE_TOO_LARGE.RABBITMQ", place=options.place, detail=detail)
    return DeliveredError("RABBITMQ_CLIENT", place=options.place, detail=detail)


def _certificate_error(error: BaseException) -> ssl.SSLCertVerificationError | None:
    """Why the server's certificate was not accepted, which the client wraps."""
    seen: list[Any] = [error]
    for each in seen:
        if isinstance(each, ssl.SSLCertVerificationError):
            return each
        more = [getattr(each, "exception", None), getattr(each, "__cause__", None), *getattr(each, "args", ())]
        seen += [m for m in more if isinstance(m, BaseException) and not any(m is s for s in seen)]
    return None


_TRIES_MAX = 40
_DIFFERS = re.compile(
    r"inequivalent arg '(?P<name>[^']+)' for .*: received .* but current is "
    r"(?P<none>none)?(the value )?('(?P<value>.*?)')?( of type '(?P<type>\w+)')?$"
)
_INTEGERS = ("signedint", "unsignedint", "long", "short", "byte", "unsignedbyte", "unsignedshort", "timestamp")


class Kind(StrEnum):
    QUORUM = "quorum"
    CLASSIC = "classic"
    STREAM = "stream"
    TRANSIENT = "transient"
    """Not durable, of any type."""
    OTHER = "other"


def kind(options: Place, queue: str) -> Kind:
    """
    Raises:
        UsageError: the queue does not exist.
        DeliveredError: the server did not answer, or denied access.
    """
    return _declared(options, queue, Kind.QUORUM)[0]


def queue_arguments(options: Place, queue: str, declared: Kind) -> Mapping[str, Any]:
    """What a queue of this type was declared with. AMQP 0-9-1 does not say what a policy sets. Raises as `kind`."""
    return _declared(options, queue, declared)[1]


def stream_arguments(options: Place, stream: str) -> Mapping[str, Any]:
    """What a stream was declared with: x-max-age, x-max-length-bytes ... AMQP 0-9-1 does not say what a policy sets.

    Raises as `kind`.
    """
    return _declared(options, stream, Kind.STREAM)[1]


def _declared(options: Place, queue: str, guess: Kind) -> tuple[Kind, Mapping[str, Any]]:
    """The type of a queue; and its arguments, if it is of the type that was guessed."""
    kinds = pika().exceptions
    arguments: dict[str, Any] = {"x-queue-type": guess.value}
    with opened(options) as connection:
        connection.channel().queue_declare(queue, passive=True)
        flags: dict[str, bool] = {"durable": True}
        for _ in range(_TRIES_MAX):
            try:
                connection.channel().queue_declare(queue, arguments=arguments, **flags)
            except kinds.ChannelClosedByBroker as error:
                differs = _DIFFERS.search(str(error.reply_text))
                if error.reply_code != 406 or differs is None:
                    raise
                name, value = differs["name"], differs["value"]
                if name == "durable":
                    return Kind.TRANSIENT, {}
                if name == "x-queue-type":
                    return _named(None if differs["none"] else value), {}
                if name in ("auto_delete", "exclusive"):
                    flags[name] = value == "true"
                else:  # as it is, to learn the next difference
                    arguments[name] = int(value) if differs["type"] in _INTEGERS else value
            else:
                return guess, arguments
    return Kind.OTHER, {}


def _named(value: str | None) -> Kind:
    """A queue declared without a type is classic."""
    if value is None:
        return Kind.CLASSIC
    return Kind(value) if value in list(Kind) else Kind.OTHER


OFFSET = "x-stream-offset"
"""Header with which RabbitMQ says a message's place in a stream."""
UNREADABLE = "amqp.headers"
"""Header that holds a table of headers as it was sent, if it is none."""
_DEPTH_MAX = 64
"""Of tables and arrays within a header; one that is nested deeper stays encoded."""
_FLAGS = (
    *("content_type", "content_encoding", "table", "delivery_mode", "priority", "correlation_id", "reply_to"),
    *("expiration", "message_id", "timestamp", "type", "user_id", "app_id", "cluster_id"),
)
"""In the order of their flags, from the highest bit."""
_NUMBERS = {"delivery_mode": ">B", "priority": ">B", "timestamp": ">Q"}
_HEADERS = tuple((n, f"amqp.{n}") for n in ("content_type", "correlation_id", "type", "reply_to", "app_id"))
"""Properties that become headers."""

_NESTED = (b"F", b"A")


class Unreadable(ValueError):
    """Bytes that are no field of AMQP, or one nested too deeply."""


class Properties:
    """Attributes are None if the sender did not set them.

    Attributes:
        table: the headers, encoded.
        timestamp: seconds since 1970.
    """

    __slots__ = ("app_id", "content_type", "correlation_id", "message_id", "reply_to", "table", "timestamp", "type")

    def __init__(self, encoded: bytes) -> None:
        """Raises struct.error if the bytes end early."""
        self.content_type: bytes | None = None
        self.table: bytes | None = None
        self.correlation_id: bytes | None = None
        self.reply_to: bytes | None = None
        self.message_id: bytes | None = None
        self.timestamp: int | None = None
        self.type: bytes | None = None
        self.app_id: bytes | None = None
        (flags,) = struct.unpack_from(">H", encoded)
        at, bit = 2, 15
        if flags & 1:
            raise struct.error("more flags than AMQP 0-9-1 has properties")
        for name in _FLAGS:
            if flags >> bit & 1:
                value, at = _property(name, encoded, at)
                if name in self.__slots__:
                    setattr(self, name, value)
            bit -= 1

    @property
    def headers(self) -> Table | None:
        """Names and values in the sender's order; None: its table is unreadable."""
        try:
            return Table() if self.table is None else _table(self.table, _header)
        except (Unreadable, struct.error):
            return None


def headers(properties: Properties, but: str | None = None) -> list[tuple[str, bytes | None]]:
    """A message's headers, and AMQP's properties as `amqp.*`. Args: but: name of a header to leave out."""
    texts: list[tuple[str, bytes | None]] = []
    if properties.table is not None:
        pairs, skipped = properties.headers, but and but.encode()
        if pairs is None:
            texts.append((UNREADABLE, properties.table))
        else:
            texts += [(header_name(name), _bytes(value)) for name, value in pairs if name != skipped]
    for name, header in _HEADERS:
        value = getattr(properties, name)
        if value is not None:
            texts.append((header, value))
    return texts


def routing_key(method: Any) -> bytes:
    """A delivery's. The client gives text if it is UTF-8, else bytes."""
    key = method.routing_key
    return key if isinstance(key, bytes) else key.encode()


def _property(name: str, encoded: bytes, at: int) -> tuple[Any, int]:
    if name == "table":
        return _long(encoded, at)
    if kind := _NUMBERS.get(name):
        return struct.unpack_from(kind, encoded, at)[0], at + struct.calcsize(kind)
    return _short(encoded, at)


def _short(encoded: bytes, at: int) -> tuple[bytes, int]:
    return _cut(encoded, at + 1, struct.unpack_from(">B", encoded, at)[0])


def _long(encoded: bytes, at: int) -> tuple[bytes, int]:
    return _cut(encoded, at + 4, struct.unpack_from(">I", encoded, at)[0])


def _cut(encoded: bytes, start: int, length: int) -> tuple[bytes, int]:
    if start + length > len(encoded):
        raise struct.error(f"{length} bytes, but {len(encoded) - start} are left")
    return encoded[start : start + length], start + length


def _table(encoded: bytes, read: Callable[[bytes, int], tuple[Any, int]]) -> Table:
    """Args: read: a value at a place; it returns the value and the place after it."""
    table, at = Table(), 0
    while at < len(encoded):
        name, at = _short(encoded, at)
        value, at = read(encoded, at)
        table.append((name, value))
    return table


def _header(encoded: bytes, at: int) -> tuple[Any, int]:
    """As `_value`; a table or an array that is unreadable stays encoded."""
    try:
        return _value(encoded, at, _DEPTH_MAX)
    except Unreadable:
        if encoded[at : at + 1] not in _NESTED:
            raise
        return _long(encoded, at + 1)


def _value(encoded: bytes, at: int, depth: int) -> tuple[Any, int]:
    """A field's value: a table as `Table`, an array as a list."""
    kind, at = encoded[at : at + 1], at + 1
    if (number := _FIXED.get(kind)) is not None:
        layout, size, convert = number
        return convert(*layout.unpack_from(encoded, at)), at + size
    if kind in (b"S", b"x"):
        return _long(encoded, at)
    if kind == b"V":
        return None, at
    if kind not in _NESTED or depth == 0:
        raise Unreadable(f"a field of type {kind!r}")
    inner, at = _long(encoded, at)
    if kind == b"F":
        return _table(inner, partial(_value, depth=depth - 1)), at
    items, place = [], 0
    while place < len(inner):
        item, place = _value(inner, place, depth - 1)
        items.append(item)
    return items, at


class Table(list[tuple[bytes, Any]]):
    """A table within headers."""


def _fixed(kind: str, convert: Callable[..., Any] = lambda number: number) -> tuple[struct.Struct, int, Any]:
    layout = struct.Struct(f">{kind}")
    return layout, layout.size, convert


def _time(seconds: int) -> datetime | int:
    """A number if Python has no such time."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return seconds


_FIXED = {
    b"t": _fixed("B", bool),
    b"b": _fixed("b"),
    b"B": _fixed("B"),
    b"U": _fixed("h"),
    b"s": _fixed("h"),
    b"u": _fixed("H"),
    b"I": _fixed("i"),
    b"i": _fixed("I"),
    b"L": _fixed("q"),
    b"l": _fixed("q"),
    b"f": _fixed("f"),
    b"d": _fixed("d"),
    b"D": _fixed("Bi", lambda scale, number: Decimal(number).scaleb(-scale)),
    b"T": _fixed("Q", _time),
}
"""Numbers, as RabbitMQ encodes them."""


def _bytes(value: Any) -> bytes | None:
    """Bytes as they are, null as null, any other value as JSON."""
    if value is None or isinstance(value, bytes):
        return value
    return json.dumps(_plain(value), default=str).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Table):
        return {header_name(name): _plain(inner) for name, inner in value}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, bytes):
        return bytes_as_json(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def stream_offset(properties: Properties) -> int | None:
    """A message's place in its stream; None: it came from a queue."""
    offsets = [value for name, value in properties.headers or () if name == OFFSET.encode() and isinstance(value, int)]
    return offsets[0] if offsets else None
