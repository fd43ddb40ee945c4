"""Connections, translation of the client's errors, and the type of a queue.

AMQP does not report the type; but when an existing queue is declared again, RabbitMQ names the first property that
differs. That changes nothing.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import struct
from enum import StrEnum
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

from delivered.connectors.rabbitmq import Place
from delivered.connectors.rabbitmq.properties import Properties
from delivered.model.errors import BadRecord, DeliveredError, MissingExtra, Refused, Unreachable, UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.options import resolve_secret

_HEADER_FRAME, _HEADER_SIZE = b"\x02", 19
"""Type of a frame with the properties of a message; bytes before them: the frame's header, class, weight, body size."""
HEARTBEAT_S = 30
BLOCKED_S = 60
_PASSING = (311, 506, 541)
"""Retriable reply codes: the server lacks a resource, or is electing a leader."""

_STARTING = ("down or inaccessible", "does not have a replica on the local node")
"""Reported of a queue or stream not yet available after a restart; the second also if it is on another node."""


def pika() -> Any:
    """The client library, imported on use. Raises MissingExtra."""
    try:
        import pika
    except ImportError:
        raise MissingExtra("rabbitmq") from None
    return pika


def parameters(options: Place) -> Any:
    """Connection parameters, including the password; do not keep."""
    client = pika()
    # The client accepts no user without a password in a url, so it gets the url without either.
    parts = urlsplit(options.url)
    settings = client.URLParameters(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
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
    settings.socket_timeout = settings.stack_timeout = CONNECT_TIMEOUT_S
    return settings


def connect(options: Place) -> Any:
    """An open connection. Raises Unreachable, Refused."""
    client = pika()
    try:
        return client.BlockingConnection(parameters(options), _impl_class=_connection_class())
    except (client.exceptions.AMQPError, OSError) as error:
        raise explained(error, options) from error


@cache
def _connection_class() -> Any:
    """The client's connection, with properties of messages decoded by `Properties`."""
    client = pika()
    from pika import frame, spec

    class Connection(client.SelectConnection):  # type: ignore[misc, name-defined]
        def _read_frame(self) -> Any:
            found = self._frame_buffer
            if len(found) >= spec.FRAME_HEADER_SIZE and found[:4] != b"AMQP":
                (size,) = struct.unpack_from(">L", found, 3)
                if size > spec.FRAME_MAX_SIZE:
                    raise client.exceptions.InvalidFrameError(f"a frame of {size:,} bytes")
            if found[:1] != _HEADER_FRAME or len(found) < _HEADER_SIZE:
                try:
                    return super()._read_frame()
                except client.exceptions.AMQPError:
                    raise
                except Exception as error:  # the client raises anything for bytes that are no such frame
                    raise client.exceptions.InvalidFrameError(f"a frame that cannot be read: {error!r:.200}") from None
            channel, size = struct.unpack_from(">HL", found, 1)
            end = spec.FRAME_HEADER_SIZE + size
            if len(found) <= end:
                return 0, None
            if found[end] != spec.FRAME_END:
                raise client.exceptions.InvalidFrameError("Invalid FRAME_END marker")
            try:
                properties = Properties(bytes(found[_HEADER_SIZE:end]))
            except struct.error as error:
                raise client.exceptions.InvalidFrameError(f"a message's properties end early: {error}") from None
            (body,) = struct.unpack_from(">Q", found, spec.FRAME_HEADER_SIZE + 4)
            return end + spec.FRAME_END_SIZE, frame.Header(channel, body, properties)

    return Connection


def explained(error: Exception, options: Place) -> DeliveredError:
    """Translate an error of the client."""
    if (refused := _certificate_error(error)) is not None:
        return options.untrusted(f"amqps://{options.place}", refused)
    kinds = pika().exceptions
    detail = str(error) or type(error).__name__
    if isinstance(error, kinds.ProbableAuthenticationError | kinds.AuthenticationError):
        return Refused("RABBITMQ_CREDENTIALS", place=options.place, detail=detail)
    code = getattr(error, "reply_code", None)
    if isinstance(error, kinds.ProbableAccessDeniedError) or code in (403, 530):
        return Refused("RABBITMQ_PERMISSION", place=options.place, detail=detail)
    starts = any(words in detail for words in _STARTING)
    if code == 404 and not starts:
        return UsageError("QUEUE_MISSING.RABBITMQ", target=options.target, place=options.place)
    if isinstance(error, kinds.AMQPConnectionError | socket.error) or code in _PASSING or starts:
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
    connection = connect(options)
    kinds = pika().exceptions
    try:
        connection.channel().queue_declare(queue, passive=True)
        arguments: dict[str, Any] = {"x-queue-type": Kind.QUORUM.value}
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
                    return Kind.TRANSIENT
                if name == "x-queue-type":
                    return _named(None if differs["none"] else value)
                if name in ("auto_delete", "exclusive"):
                    flags[name] = value == "true"
                else:  # as it is, to learn the next difference
                    arguments[name] = int(value) if differs["type"] in _INTEGERS else value
            else:
                return Kind.QUORUM
    except (kinds.AMQPError, OSError) as error:
        raise explained(error, options) from error
    finally:
        with contextlib.suppress(kinds.AMQPError, OSError):
            if connection.is_open:
                connection.close()
    return Kind.OTHER


def _named(value: str | None) -> Kind:
    """A queue declared without a type is classic."""
    if value is None:
        return Kind.CLASSIC
    return Kind(value) if value in list(Kind) else Kind.OTHER
