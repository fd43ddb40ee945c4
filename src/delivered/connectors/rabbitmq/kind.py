"""Finds the type of a queue.

AMQP does not report it; but when an existing queue is declared again, RabbitMQ names the first differing property. That
changes nothing.
"""

from __future__ import annotations

import contextlib
import re
from enum import StrEnum
from typing import Any

from delivered.connectors.rabbitmq.client import connect, explained, pika
from delivered.connectors.rabbitmq.options import Place

_TRIES_MAX = 40
_DIFFERS = re.compile(
    r"inequivalent arg '(?P<name>[^']+)' for .*: received .* but current is "
    r"(?P<none>none)?(the value )?('(?P<value>.*?)')?( of type '(?P<type>\w+)')?$"
)
_WHOLE = ("signedint", "unsignedint", "long", "short", "byte", "unsignedbyte", "unsignedshort", "timestamp")


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
                    arguments[name] = int(value) if differs["type"] in _WHOLE else value
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
