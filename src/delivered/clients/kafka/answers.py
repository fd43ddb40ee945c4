"""Whether a broker's answer is what the protocol says: kafka-python takes null and empty lists for anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from delivered.clients.kafka.login import NoAnswer

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
