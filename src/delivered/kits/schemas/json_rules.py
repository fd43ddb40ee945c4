"""JSON Schema's rules within bounds: each record's checks are counted, patterns take linear time, numbers are exact.

jsonschema itself matches patterns by Python's `re`, which a pattern of ten characters can keep busy for years, and
compares the items of an array with each other.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import cache
from numbers import Rational
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.kits.schemas.bounds import Unmappable, Unreadable
from delivered.model.limits import RECORD_CHECKS_MAX

_CHECKS_PER_BYTE = 10
_UNICODE = re.compile(r"(?<!\\)((?:\\\\)*)\\u([0-9a-fA-F]{4})")
_VALUES = ("enum", "const", "default", "examples")
"""Keywords whose values are not schemas."""


class _Left(threading.local):
    checks = limit = 0


_left = _Left()


def start(size: int) -> None:
    """Begin with a record of this many bytes, in this thread."""
    _left.checks = _left.limit = max(RECORD_CHECKS_MAX, _CHECKS_PER_BYTE * size)


@cache
def bounded(validator: Any) -> Any:
    """A class of jsonschema's validators, with these rules."""
    import jsonschema

    own = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "multipleOf": _multiple_of,
        "uniqueItems": _unique_items,
    }
    rules = {**validator.VALIDATORS, **{k: v for k, v in own.items() if k in validator.VALIDATORS}}
    return jsonschema.validators.extend(validator, {k: _counted(v) for k, v in rules.items()})


def checked(node: Any) -> Any:
    """A schema's document as it may be used.

    A part that names its own `$schema` would be checked by that one's rules, without these bounds.

    Raises:
        Unmappable: a pattern without a bound.
    """
    if isinstance(node, list):
        return [checked(n) for n in node]
    if not isinstance(node, dict):
        return node
    patterns = node.get("patternProperties")
    if isinstance(patterns, dict):
        if "unevaluatedProperties" in node:
            raise Unmappable("it has unevaluatedProperties next to patternProperties, which is not supported")
        for pattern in patterns:
            _usable(pattern)
    if isinstance(node.get("pattern"), str):
        _usable(node["pattern"])
    return {
        k: v if k in _VALUES else checked(v) for k, v in node.items() if not (k == "$schema" and isinstance(v, str))
    }


def _usable(pattern: str) -> None:
    try:
        _matches(pattern, "")
    except pa.ArrowInvalid as error:
        why = str(error).removeprefix("Invalid regular expression: ")
        raise Unmappable(
            f"its pattern {pattern[:80]!r} cannot be matched in linear time, as RE2 does ({why[:100]})"
        ) from None


def _matches(pattern: str, text: str) -> bool:
    """RE2, which is part of Arrow."""
    found = pc.match_substring_regex(pa.scalar(text, pa.string()), _UNICODE.sub(r"\1\\x{\2}", pattern))
    return bool(found.as_py())


def _counted(rule: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        _left.checks -= 1 + (len(value) if isinstance(value, (list, dict)) else 0)
        if _left.checks < 0:
            raise Unreadable(f"its schema's rules need more checks of it than the {_left.limit:,} that are allowed")
        yield from rule(validator, value, instance, schema) or ()

    return check


def _pattern(validator: Any, pattern: str, instance: Any, _schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "string") and not _matches(pattern, instance):
        yield _error(f"{instance[:80]!r} does not match {pattern[:80]!r}")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], instance: Any, _schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "object"):
        for pattern, inner in patterns.items():
            for name, value in instance.items():
                if _matches(pattern, name):
                    yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    more = [n for n in instance if n not in known and not any(_matches(p, n) for p in patterns)]
    if validator.is_type(allowed, "object"):
        for name in more:
            yield from validator.descend(instance[name], allowed, path=name)
    elif not allowed and more:
        named = ", ".join(repr(n[:40]) for n in more[:5])
        yield _error(f"Additional properties are not allowed ({named})")


def _multiple_of(validator: Any, of: Any, instance: Any, _schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "number") and _exact(instance) % _exact(of):
        yield _error(f"{str(instance)[:40]} is not a multiple of {of}")


def _exact(number: Any) -> Fraction:
    """What its text says: 0.3 is a multiple of 0.1."""
    if isinstance(number, Rational):
        return Fraction(number)
    text = str(number)
    exponent = text.lower().partition("e")[2]
    if exponent and abs(int(exponent)) > 400:
        raise Unreadable(f"it has the number {text[:40]}, whose exponent is too large")
    return Fraction(text)


def _unique_items(validator: Any, unique: bool, instance: Any, _schema: Any) -> Iterator[Any]:
    if unique and validator.is_type(instance, "array"):
        known = {_key(v) for v in instance}
        if len(known) < len(instance):
            yield _error("it has non-unique elements")


def _key(value: Any) -> Any:
    """Equal for values that JSON Schema calls equal, and hashable."""
    match value:
        case dict():
            return ("object", frozenset((k, _key(v)) for k, v in value.items()))
        case list():
            return ("array", tuple(_key(v) for v in value))
    return ("truth" if isinstance(value, bool) else "", value)


def _error(text: str) -> Any:
    import jsonschema

    return jsonschema.ValidationError(text)
