"""JSON Schema: a document's Arrow type; documents are validated when read and written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from delivered.kits.schemas.avro import Unmappable, Unreadable
from delivered.kits.schemas.registry import Registered
from delivered.model.errors import MissingExtra

_PLAIN = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
_DEPTH_MAX = 32


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
            made.check_schema(document)
            known = [(name, json.loads(text)) for name, text in registered.references]
        except (ValueError, TypeError, jsonschema.SchemaError) as error:
            raise Unmappable(f"it is not a JSON Schema: {str(error)[:200]}") from None
        default = referencing.jsonschema.specification_with(made.META_SCHEMA["$schema"])
        resources = [
            (uri, referencing.Resource.from_contents(each, default))
            for name, each in known
            for uri in {name, each.get("$id", name)}
        ]
        self._validator = made(document, registry=referencing.Registry().with_resources(resources))
        self._kinds = _Kinds(document, {u: r.contents for u, r in resources})
        self.arrow = self.filled = self._kinds.of(document, "", 0)
        self._nullable = self._kinds.nullable
        self.required = tuple(
            n
            for n in document.get("required", ())
            if n in document.get("properties", ()) and f".{n}" not in self._nullable
        )

    def read(self, data: bytes, written: Any) -> Any:
        """Validated by the schema that it was written with."""
        if not isinstance(written, JsonSchema):
            raise Unreadable("it was not written with a JSON Schema")
        try:
            found = json.loads(data)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise Unreadable(f"it is not JSON: {error}") from None
        written.check(found)
        return found

    def check(self, document: Any) -> None:
        """Raises Unreadable: the document does not match."""
        error = next(self._validator.iter_errors(document), None)
        if error is not None:
            place = "".join(f".{p}" if isinstance(p, str) else f"[{p}]" for p in error.absolute_path)
            raise Unreadable(f"{f'field {place[1:]!r}' if place else 'the document'}: {str(error.message)[:200]}")

    def write(self, value: Any) -> bytes:
        document = self._without(value, "")
        self.check(document)
        return json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()

    def _without(self, value: Any, path: str) -> Any:
        """Without the null fields that may be absent but not null."""
        if isinstance(value, dict):
            return {
                k: self._without(v, f"{path}.{k}")
                for k, v in value.items()
                if v is not None or f"{path}.{k}" in self._nullable
            }
        if isinstance(value, list):
            return [self._without(v, f"{path}[]") for v in value]
        return value


class _Kinds:
    """Arrow types of a document's parts.

    Attributes:
        nullable: paths of parts that may be null.
    """

    def __init__(self, document: Any, others: Mapping[str, Any]) -> None:
        self._document, self._others = document, others
        self.nullable: set[str] = set()

    def of(self, node: Any, path: str, depth: int) -> pa.DataType:
        if depth > _DEPTH_MAX:
            raise Unmappable(f"field {path[1:]!r} is recursive, or nested more than {_DEPTH_MAX} deep")
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
