"""Answers of brokers: what a request may come to, whether an answer is what the protocol says, parts read by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

# What a request to a broker may come to, besides its answer.


class NoAnswer(Exception):
    """No response to a request; it is unknown whether it took effect."""


class NotSent(NoAnswer):
    """The request was not sent in full, so it had no effect."""


class NoCredentials(NotSent):
    """No token or ticket can be had now: its server does not answer."""


class Rejected(NotSent):
    """TLS or authentication failed, which no retry fixes.

    Attributes:
        tls: the certificate or the protocol of the server, not the credentials.
    """

    def __init__(self, text: str, tls: bool = False) -> None:
        super().__init__(text)
        self.tls = tls


class CredentialsRefused(Rejected):
    """No token or ticket can be had with these settings."""


# Whether a broker's answer is what the protocol says: kafka-python takes null and empty lists for anything.

T = TypeVar("T")


def complete(message: Any) -> Any:
    """A message of kafka-python's, or a part of it, without null where the protocol has none. Raises ValueError."""
    version = message._version
    for field in message._struct.fields.values():
        if version is not None and not field.for_version_q(version):
            continue
        value = getattr(message, field.name, None)
        if value is None:
            if (field.is_array() or field.is_struct_array()) and not field.nullable_for_version_q(version):
                raise ValueError(f"{field.name} is null")
        elif field.is_struct_array():
            for each in value:
                complete(each)
        elif field.is_struct():
            complete(value)
    return message


def only(rows: Sequence[T] | None, what: str) -> T:
    """The one that was asked for. Raises NoAnswer: the broker answers about none, or about several."""
    if rows is None or len(rows) != 1:
        raise NoAnswer(f"an answer with {0 if rows is None else len(rows)} {what}, where 1 was asked for")
    return rows[0]


# Parts of Kafka's frames that are read by hand.


def header_bytes(frame: memoryview, flexible: bool) -> int:
    """Length of a response's header: the correlation id and, if flexible, tagged fields."""
    at = 4
    if flexible:
        count, at = varint(frame, at)
        for _ in range(count):
            _, at = varint(frame, at)
            size, at = varint(frame, at)
            at += size
    if at > len(frame):
        raise ValueError(f"a header of {at} bytes in {len(frame)}")
    return at


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """An unsigned number of 32 bits, and where it ends. Raises IndexError, ValueError."""
    value = 0
    for place in range(5):
        value |= (data[at + place] & 127) << 7 * place
        if data[at + place] < 128 and value < 1 << 32:
            return value, at + place + 1
    raise ValueError("a number of more than 32 bits")
