"""JSON Schema: a document's Arrow type; documents are validated when read and written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa

from delivered.kits.schemas import json_rules
from delivered.kits.schemas.bounds import Budget, TypeCount, Unmappable, Unreadable, in_words
from delivered.kits.schemas.json_text import as_double, parsed
from delivered.kits.schemas.registry import Registered
from delivered.model.errors import DeliveredError, MissingExtra

_PLAIN = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
_LONG_MIN, _LONG_MAX = -(2**63), 2**63 - 1


class JsonSchema:
    """See `delivered.kits.schemas.schema.Schema`."""

    def __init__(self, registered: Registered) -> None:
        try:
            import jsonschema
            import referencing
            import referencing.jsonschema
        except ImportError:
            raise MissingExtra("schemas") from None
        try:
            document = json.loads(registered.text)
            made = jsonschema.validators.validator_for(document, default=jsonschema.Draft7Validator)
            made.check_schema(document, format_checker=None)  # patterns are not Python's
            document = json_rules.checked(document)
            known = [(name, json_rules.checked(json.loads(text))) for name, text in registered.references]
            specification = referencing.jsonschema.specification_with(made.META_SCHEMA["$schema"])
            resources = [
                (uri, specification.create_resource(each))
                for name, each in known
                for uri in {name, each.get("$id", name)}
            ]
            registry = referencing.Registry().with_resources(resources)
            self._validator = json_rules.bounded(made)(document, registry=registry)
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
        found = parsed(data)
        written.check(found, len(data))
        return _fitted(found, self.filled, "", Budget(len(data)))

    def check(self, document: Any, size: int = 0) -> None:
        """Raises Unreadable: the document, of so many bytes, does not match."""
        json_rules.start(size)
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
        if pa.types.is_float64(kind) and (found := as_double(value)) is not None:
            return found
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
        found = self._document if where in ("", self._document.get("$id")) else self._others.get(where)
        for part in inside.strip("/").split("/") if inside.strip("/") else ():
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        if found is None:
            raise Unmappable(f"field {path[1:]!r} refers to {reference!r}, which is not there")
        return found
