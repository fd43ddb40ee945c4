"""JSON Schema: a document's Arrow type; documents are validated when read and written, within bounds.

Each record's checks are counted, patterns take linear time, and numbers are exact. jsonschema itself matches patterns
by Python's `re`, which a pattern of ten characters can keep busy for years, and compares the items of an array with
each other.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import cache
from math import isfinite
from numbers import Rational
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.kits.schemas.registry import Registered
from delivered.kits.schemas.values import Budget, TypeCount, Unmappable, Unreadable, in_words
from delivered.model.errors import DeliveredError, extra
from delivered.model.limits import RECORD_CHECKS_MAX

_EXACT_LENGTH = 16
"""A number of so many characters has at most 15 digits, which every double holds."""
_NUMBER_LENGTH_MAX = 1_000
"""Characters. The longest exact double has 767 digits."""
_SMALL, _LARGE = 1e-290, 1e300


def parsed(data: bytes) -> Any:
    """The document. A number with a fraction or an exponent is a float if that says the same, else a Decimal.

    Raises:
        Unreadable
    """
    try:
        return json.loads(data, parse_float=_number, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise Unreadable(f"it is not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not JSON: {in_words(error)}") from None
    except Unreadable:
        raise
    except ValueError:  # Python's limit for integers
        raise Unreadable("it has an integer of more than 4,300 digits") from None
    except RecursionError:
        raise Unreadable("it is not JSON that can be read: it is nested too deeply") from None


def as_double(value: Any) -> float | None:
    """A number of a document as a double; None: no double says the same."""
    if type(value) is float:
        return value
    if type(value) is int:
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if int(number) == value else None
    return None


def _number(text: str) -> float | Decimal:
    value = float(text)
    if len(text) <= _EXACT_LENGTH and _SMALL < abs(value) < _LARGE:
        return value
    if len(text) > _NUMBER_LENGTH_MAX:
        raise Unreadable(f"it has a number of {len(text):,} characters, of at most {_NUMBER_LENGTH_MAX:,}")
    try:
        exact = Decimal(text)
    except ArithmeticError:
        raise Unreadable(f"it has the number {text[:40]}, whose exponent is too large") from None
    # The double's own digits, as many as are written: 0.1 stands for its nearest double, 2^53 + 1.0 for none.
    digits = max(0, len(exact.as_tuple().digits) - 1)
    return value if isfinite(value) and Decimal(f"{value:.{digits}e}") == exact else exact


def _no_number(text: str) -> Any:
    raise Unreadable(f"it is not JSON: {text} is no number there")


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
    matched = pc.match_substring_regex(pa.scalar(text, pa.string()), _UNICODE.sub(r"\1\\x{\2}", pattern))
    return bool(matched.as_py())


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


_PLAIN = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
_LONG_MIN, _LONG_MAX = -(2**63), 2**63 - 1


class JsonSchema:
    """See `delivered.kits.schemas.formatted.Schema`."""

    def __init__(self, registered: Registered) -> None:
        with extra("schemas"):
            import jsonschema
            import referencing
            import referencing.jsonschema
        try:
            document = json.loads(registered.text)
            kind = jsonschema.validators.validator_for(document, default=jsonschema.Draft7Validator)
            kind.check_schema(document, format_checker=None)  # patterns are not Python's
            document = checked(document)
            known = [(name, checked(json.loads(text))) for name, text in registered.references]
            specification = referencing.jsonschema.specification_with(kind.META_SCHEMA["$schema"])
            resources = [
                (uri, specification.create_resource(each))
                for name, each in known
                for uri in {name, each.get("$id", name)}
            ]
            registry = referencing.Registry().with_resources(resources)
            self._validator = bounded(kind)(document, registry=registry)
            self._kinds = _Kinds(document, {u: r.contents for u, r in resources})
            self.arrow = self.filled = self._kinds.of(document, "", 0)
            required = [n for n in document.get("required", ()) if n in document.get("properties", ())]
        except (Unmappable, DeliveredError):
            raise
        except jsonschema.SchemaError as error:
            raise Unmappable(f"it is not a JSON Schema: {str(error)[:200]}") from None
        except Exception as error:  # a schema is anybody's, and the libraries raise anything
            raise Unmappable(f"it is not a JSON Schema: {in_words(error)[:200]}") from None
        self._nullable = self._kinds.nullable
        self.required = tuple(n for n in required if f".{n}" not in self._nullable)

    def read(self, data: bytes, written: Any) -> Any:
        """Validated by the schema that it was written with."""
        if not isinstance(written, JsonSchema):
            raise Unreadable("it was not written with a JSON Schema")
        document = parsed(data)
        written.check(document, len(data))
        return _fitted(document, self.filled, "", Budget(len(data)))

    def check(self, document: Any, size: int = 0) -> None:
        """Raises Unreadable: the document, of so many bytes, does not match."""
        start(size)
        error = next(self._validator.iter_errors(document), None)
        if error is not None:
            place = "".join(f".{p}" if isinstance(p, str) else f"[{p}]" for p in error.absolute_path)
            raise Unreadable(f"{f'field {place[1:]!r}' if place else 'the document'}: {str(error.message)[:200]}")

    def write(self, value: Any) -> bytes:
        document = self._without(value, self.arrow, "")
        self.check(document)
        return json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()

    def _without(self, value: Any, kind: pa.DataType, path: str) -> Any:
        """Without the null fields that may be absent but not null. A map keeps its keys, whatever the schema says."""
        if isinstance(value, dict) and pa.types.is_map(kind):
            return {k: self._without(v, kind.item_type, f"{path}{{}}") for k, v in value.items()}
        if isinstance(value, dict):
            kinds = {f.name: f.type for f in kind}
            return {
                k: self._without(v, kinds[k], f"{path}.{k}")
                for k, v in value.items()
                if v is not None or f"{path}.{k}" in self._nullable
            }
        if isinstance(value, list):
            return [self._without(v, kind.value_type, f"{path}[]") for v in value]
        return value


def _fitted(value: Any, kind: pa.DataType, path: str, budget: Budget) -> Any:
    """What a column of the type holds of a value: no number becomes another one. Other mismatches are Arrow's errors.

    Raises:
        Unreadable
    """
    if isinstance(value, dict):
        if pa.types.is_struct(kind):
            budget.spend(len(kind))
            return {f.name: _fitted(value[f.name], f.type, f"{path}.{f.name}", budget) for f in kind if f.name in value}
        if pa.types.is_map(kind):
            budget.spend(len(value))
            return {k: _fitted(v, kind.item_type, f"{path}{{}}", budget) for k, v in value.items()}
    elif isinstance(value, list):
        if pa.types.is_list(kind):
            budget.spend(len(value))
            return [_fitted(v, kind.value_type, f"{path}[]", budget) for v in value]
    elif isinstance(value, (int, float, Decimal)) and not isinstance(value, bool):
        if pa.types.is_float64(kind) and (number := as_double(value)) is not None:
            return number
        if pa.types.is_int64(kind) and _LONG_MIN <= value <= _LONG_MAX and value % 1 == 0:
            return int(value)
        if pa.types.is_float64(kind) or pa.types.is_int64(kind):
            what = "a double" if pa.types.is_float64(kind) else "a long"
            raise Unreadable(f"field {path[1:]!r} is the number {str(value)[:40]}, which {what} cannot hold exactly")
    return value


class _Kinds:
    """Arrow types of a document's parts.

    Attributes:
        nullable: paths of parts that may be null.
    """

    def __init__(self, document: Any, others: Mapping[str, Any]) -> None:
        self._document, self._others, self._types = document, others, TypeCount()
        self.nullable: set[str] = set()

    def of(self, node: Any, path: str, depth: int) -> pa.DataType:
        self._types.add(path, depth)
        if not isinstance(node, dict):
            raise Unmappable(f"field {path[1:]!r} may be anything")
        if "$ref" in node:
            return self.of(self._resolved(node["$ref"], path), path, depth + 1)
        for word in ("oneOf", "anyOf"):
            if word in node:
                return self._union(node[word], path, depth)
        kind = node.get("type")
        if isinstance(kind, list):
            return self._union([{**node, "type": k} for k in kind], path, depth)
        if kind is None and "enum" in node:
            texts = [v for v in node["enum"] if v is not None]
            self._note(path, len(texts) < len(node["enum"]))
            if all(isinstance(v, str) for v in texts):
                return pa.string()
        if kind in _PLAIN:
            return _PLAIN[kind]
        if kind == "array":
            return pa.list_(self.of(node.get("items", True), f"{path}[]", depth + 1))
        if kind == "object" and node.get("properties"):
            fields = node["properties"].items()
            return pa.struct([pa.field(n, self.of(each, f"{path}.{n}", depth + 1)) for n, each in fields])
        if kind == "object" and isinstance(node.get("additionalProperties"), dict):
            return pa.map_(pa.string(), self.of(node["additionalProperties"], f"{path}{{}}", depth + 1))
        raise Unmappable(
            f"field {path[1:]!r} has no column type: {json.dumps(node)[:80]}" if path else "it is no object"
        )

    def _union(self, kinds: list[Any], path: str, depth: int) -> pa.DataType:
        others = [k for k in kinds if not (isinstance(k, dict) and k.get("type") == "null")]
        self._note(path, len(others) < len(kinds))
        if len(others) != 1:
            raise Unmappable(f"field {path[1:]!r} has several types; only null and one other type have a column")
        return self.of(others[0], path, depth + 1)

    def _note(self, path: str, nullable: bool) -> None:
        if nullable:
            self.nullable.add(path)

    def _resolved(self, reference: str, path: str) -> Any:
        where, _, inside = reference.partition("#")
        node = self._document if where in ("", self._document.get("$id")) else self._others.get(where)
        for part in inside.strip("/").split("/") if inside.strip("/") else ():
            name = part.replace("~1", "/").replace("~0", "~")
            node = node.get(name) if isinstance(node, dict) else None
        if node is None:
            raise Unmappable(f"field {path[1:]!r} refers to {reference!r}, which is not there")
        return node
