"""Values in JSON for the types of an Avro schema: fields of Pulsar's JSON messages, and defaults."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Protocol

from delivered.kits.schemas.bounds import Unreadable
from delivered.kits.schemas.json_text import as_double

_BITS = {"int": 31, "long": 63}
_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
"""As Java writes them in JSON."""


class Reads(Protocol):
    """See `delivered.kits.schemas.avro.Shape`."""

    @property
    def of_json(self) -> Callable[[Any], Any]: ...

    @property
    def optional(self) -> bool: ...


def of_object(path: str, fields: Sequence[tuple[str, Reads]], defaults: Mapping[str, Any]) -> Callable[[Any], Any]:
    """
    Args:
        defaults: values of fields that a writer did not have.
    """

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong(path, value, "object")
        found = {}
        for name, shape in fields:
            if name in value:
                found[name] = shape.of_json(value[name])
            elif name in defaults:
                found[name] = defaults[name]
            elif shape.optional:
                found[name] = None
            else:
                raise Unreadable(f"the field {path[1:] + '.' + name if path else name!r} is missing")
        return found

    return read


def of_array(path: str, items: Reads) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise _wrong(path, value, "array")
        return [items.of_json(v) for v in value]

    return read


def of_map(path: str, values: Reads) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong(path, value, "map")
        return {k: values.of_json(v) for k, v in value.items()}

    return read


def of_enum(path: str, symbols: frozenset[str]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in symbols:
            raise _wrong(path, value, "one of the enum's symbols")
        return value

    return read


def of_plain(path: str, what: str) -> Callable[[Any], Any]:
    bits = _BITS.get(what)

    def read(value: Any) -> Any:
        kind = type(value)
        if bits is not None:
            if kind is int and -(1 << bits) <= value < 1 << bits:
                return value
        elif what in ("float", "double"):
            if kind in (int, float, Decimal):
                return _floating(path, value, what)
            if kind is str and value in _NOT_FINITE:
                return _NOT_FINITE[value]
        elif kind is (bool if what == "boolean" else str):
            return value
        raise _wrong(path, value, what)

    return read


def _floating(path: str, value: Any, what: str) -> float:
    found = as_double(value)
    if found is not None and what == "float":
        try:
            (single,) = struct.unpack("<f", struct.pack("<f", found))
        except OverflowError:
            found = None
        else:
            found = None if type(value) is int and single != value else found
    if found is None:
        raise Unreadable(f"{_where(path)} is the number {str(value)[:40]}, which a {what} cannot hold exactly")
    return found


def of_bytes(path: str, size: int | None) -> Callable[[Any], bytes]:
    def read(value: Any) -> bytes:
        try:
            found = value.encode("latin-1") if isinstance(value, str) else None
        except UnicodeEncodeError:
            found = None
        if found is None or size not in (None, len(found)):
            raise _wrong(path, value, "characters U+0000 to U+00FF" + ("" if size is None else f", {size} of them"))
        return found

    return read


def of_decimal(path: str, scale: int, size: int | None) -> Callable[[Any], Decimal]:
    raw = of_bytes(path, size)

    def read(value: Any) -> Decimal:
        unscaled = int.from_bytes(raw(value), "big", signed=True)
        return Decimal((int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -scale))

    return read


def _where(path: str) -> str:
    return f"field {path[1:]!r}" if path else "the value"


def _wrong(path: str, value: Any, wanted: str) -> Unreadable:
    return Unreadable(f"{_where(path)} is {type(value).__name__} {value!r:.40}; it must be {wanted}")
