"""Protobuf schemas, compiled by protoc: a message's Arrow type, and its decoding by field number."""

from __future__ import annotations

import base64
import importlib
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from delivered.kits.schemas.registry import Registered
from delivered.kits.schemas.values import Budget, TypeCount, Unmappable, Unreadable, in_words
from delivered.model.errors import DeliveredError, extra

_MAIN = "delivered_schema.proto"
_INDEXES_MAX = 32
"""Of a message within messages."""
_TIMESTAMP = "google.protobuf.Timestamp"
_WRAPPERS = tuple(
    f"google.protobuf.{n}Value"
    for n in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
_NAME_LENGTH_MAX = 200
_SECOND, _NANOS = 1_000_000, 1_000
_SECONDS_MIN, _SECONDS_MAX = -62_135_596_800, 253_402_300_799
"""Of a Timestamp, by its definition: years 1 to 9999."""
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,9}")


@dataclass(frozen=True)
class _Node:
    """One type.

    Attributes:
        read: a value of the message class -> of `kind`, within a budget; write: the inverse.
    """

    kind: pa.DataType
    read: Callable[[Any, Budget], Any]
    write: Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _as_it_is(value: Any, _budget: Budget) -> Any:
    return value


class ProtobufSchema:
    """See `delivered.kits.schemas.formatted.Schema`."""

    def __init__(self, registered: Registered, record: str | None) -> None:
        with extra("schemas"):
            from google.protobuf import message_factory
        try:
            self._file = _compiled(registered)
            self._message = self._chosen(record)
            self._class = message_factory.GetMessageClass(self._message)
            self._indexes = _indexes_text(_path_to(self._message))
            node = _message(self._message, "", 0, TypeCount())
        except (Unmappable, DeliveredError, OSError):
            raise
        except Exception as error:  # a schema is anybody's, and the library raises anything
            raise Unmappable(f"it is not a Protobuf schema: {in_words(error)[:200]}") from None
        self._node = node
        self.arrow = self.filled = node.kind
        self.required = tuple(f.name for f in self._message.fields if not f.has_presence)

    def read(self, data: bytes, written: Any) -> Any:
        """Protobuf needs no schema but the reader's; the writer's says which message it is."""
        if not isinstance(written, ProtobufSchema):
            raise Unreadable("it was not written with a Protobuf schema")
        indexes, payload = _split(data)
        name = written._named(indexes)
        if name != self._message.full_name:
            raise Unreadable(f"it is a {name}; {self._message.full_name} is read")
        return self._node.read(self._class.FromString(payload), Budget(len(payload)))

    def write(self, value: Any) -> bytes:
        message = self._node.write(value)
        return self._indexes + message.SerializeToString(deterministic=True)  # type: ignore[no-any-return]

    def _chosen(self, record: str | None) -> Any:
        names = [m.full_name for m in self._file.message_types_by_name.values()]
        if not names:
            raise Unmappable("it has no message")
        if record is None:
            return next(iter(self._file.message_types_by_name.values()))
        try:
            message = self._file.pool.FindMessageTypeByName(record)
        except KeyError:
            message = None
        if message is None or message.file.name != self._file.name:
            raise Unmappable(f"it has no message {record!r}; it has {', '.join(names)}")
        return message

    def _named(self, indexes: Sequence[int]) -> str:
        """Full name of the message at these indexes, at least one."""
        message: Any = None
        for index in indexes:
            of = list(self._file.message_types_by_name.values()) if message is None else message.nested_types
            if not 0 <= index < len(of):
                raise Unreadable(f"it names the message {list(indexes)}, which its schema does not have")
            message = of[index]
        return str(message.full_name)


def _compiled(registered: Registered) -> Any:
    """The file's descriptor, in a pool of its own."""
    with extra("schemas"):
        import grpc_tools
        from google.protobuf import descriptor_pb2, descriptor_pool
        from grpc_tools import (
            _protoc_compiler,  # noqa: F401 - part of the wheel
            protoc,
        )
    serialized = {name: _serialized(text) for name, text in (*registered.references, (_MAIN, registered.text))}
    if serialized[_MAIN] is not None:
        return _pooled(serialized)
    with tempfile.TemporaryDirectory(prefix="delivered-proto-") as folder:
        work = Path(folder)
        for name, text in (*registered.references, (_MAIN, registered.text)):
            path = (work / name).resolve()
            if not path.is_relative_to(work.resolve()):
                raise Unmappable(f"it imports {name!r}, which is not a relative path")
            if len(name) > _NAME_LENGTH_MAX:
                raise Unmappable(
                    f"it imports {name[:40]!r}..., a name of {len(name)} characters, of at most {_NAME_LENGTH_MAX}"
                )
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            except (FileExistsError, IsADirectoryError, NotADirectoryError):
                raise Unmappable(f"it imports {name!r}, which another import has as a folder") from None
        own = Path(str(grpc_tools.__file__)).parent / "_proto"
        output = work / "compiled"
        arguments = ["protoc", f"-I{work}", f"-I{own}", "--include_imports", f"--descriptor_set_out={output}", _MAIN]
        if protoc.main(arguments) != 0:
            raise Unmappable(f"protoc refuses it; it begins with {registered.text[:80]!r}")
        files = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for each in files.file:
        pool.AddSerializedFile(each.SerializeToString())
    return pool.FindFileByName(_MAIN)


def _serialized(text: str) -> Any:
    """A file's descriptor in base64, which is what Confluent's Python serializer registers; None: it is source text."""
    from google.protobuf import descriptor_pb2
    from google.protobuf.message import DecodeError

    try:
        return descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
    except (ValueError, DecodeError):
        return None


def _pooled(files: Mapping[str, Any]) -> Any:
    """The descriptor of `_MAIN`, with all that it imports, in a pool of its own.

    Args:
        files: by the name that others import; without those of protobuf itself.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool

    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(name: str) -> None:
        if name in added:
            return
        added.add(name)
        file = files.get(name)
        if file is None and name in files:
            raise Unmappable(f"it is a serialized descriptor, but the imported {name!r} is source text")
        if file is None and re.fullmatch(r"google/protobuf/\w+\.proto", name):
            try:
                module = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
            except ImportError:
                raise Unmappable(f"it imports {name!r}, which Protobuf does not have") from None
            file = descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        if file is None:
            raise Unmappable(f"it imports {name!r}, which is not among its references")
        for imported in file.dependency:
            add(imported)
        file.name = name
        pool.AddSerializedFile(file.SerializeToString())

    add(_MAIN)
    return pool.FindFileByName(_MAIN)


def _message(of: Any, path: str, depth: int, types: TypeCount) -> _Node:
    types.add(path, depth)
    from google.protobuf import message_factory

    message_class = message_factory.GetMessageClass(of)
    if of.full_name == _TIMESTAMP:
        return _timestamp(message_class, path)
    if of.full_name in _WRAPPERS:
        inner = _scalar(of.fields_by_name["value"], path)
        return _Node(
            inner.kind, lambda v, budget: inner.read(v.value, budget), lambda v: message_class(value=inner.write(v))
        )
    fields = [(f, _field(f, f"{path}.{f.name}", depth + 1, types)) for f in of.fields]

    def read(value: Any, budget: Budget) -> dict[str, Any]:
        budget.spend(len(fields))
        return {
            f.name: None if f.has_presence and not value.HasField(f.name) else node.read(getattr(value, f.name), budget)
            for f, node in fields
        }

    def write(row: Any) -> Any:
        members = {}
        for f, node in fields:
            one = row.get(f.name)
            if one is not None:
                members[f.name] = node.write(one)
            elif not f.has_presence:
                raise ValueError(f"field {path[1:] + '.' if path else ''}{f.name} is null, and has no presence")
        return message_class(**members)

    return _Node(pa.struct([pa.field(f.name, node.kind) for f, node in fields]), read, write)


def _timestamp(message_class: Any, path: str) -> _Node:
    def read(value: Any, _budget: Budget) -> int:
        if not (_SECONDS_MIN <= value.seconds <= _SECONDS_MAX and 0 <= value.nanos < _NANOS * _SECOND):
            raise Unreadable(
                f"field {path[1:]!r} is a Timestamp of {value.seconds} seconds and {value.nanos} nanoseconds, which is "
                "not in the years 1 to 9999"
            )
        return int(value.seconds * _SECOND + value.nanos // _NANOS)

    def write(us: int) -> Any:
        if not _SECONDS_MIN <= us // _SECOND <= _SECONDS_MAX:
            raise Unreadable(f"field {path[1:]!r} is {us} microseconds since 1970, which is not in the years 1 to 9999")
        return message_class(seconds=us // _SECOND, nanos=us % _SECOND * _NANOS)

    return _Node(pa.timestamp("us", "UTC"), read, write)


def _field(field: Any, path: str, depth: int, types: TypeCount) -> _Node:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        keys, values = (field.message_type.fields_by_name[n] for n in ("key", "value"))
        if keys.cpp_type != keys.CPPTYPE_STRING:
            raise Unmappable(f"field {path[1:]!r} is a map whose keys are not text")
        inner = _single(values, f"{path}{{}}", depth, types)
        return _Node(
            pa.map_(pa.string(), inner.kind),
            lambda v, budget: [(k, inner.read(v[k], budget)) for k in sorted(v)],
            lambda v: {k: inner.write(x) for k, x in v.items()},
        )
    inner = _single(field, path, depth, types)
    if not field.is_repeated:
        return inner
    return _Node(
        pa.list_(inner.kind),
        lambda v, budget: [inner.read(x, budget) for x in v],
        lambda v: [inner.write(x) for x in v],
    )


def _single(field: Any, path: str, depth: int, types: TypeCount) -> _Node:
    if field.message_type is not None:
        return _message(field.message_type, path, depth, types)
    types.add(path, depth)
    return _scalar(field, path)


def _enum(kind: Any, path: str) -> _Node:
    names: dict[int, str] = {}
    for each in kind.values:
        names.setdefault(each.number, each.name)  # later names of a number are its aliases
    numbers: dict[str, int] = {v.name: v.number for v in kind.values}

    def write(name: str) -> int:
        number = numbers.get(name)
        if number is None and _NUMBER.fullmatch(name):
            number = int(name)  # as an open enum's unknown value is read
        if number is None or not -(2**31) <= number < 2**31:
            raise Unreadable(f"field {path[1:]!r} is {name[:40]!r}, which is no value of {kind.full_name}")
        if names.get(number, name) != name:
            raise Unreadable(
                f"field {path[1:]!r} is {name[:40]!r}, which is the number {number} of {kind.full_name}, as is "
                f"{names[number]!r}, which would be read back"
            )
        return number

    return _Node(pa.string(), lambda v, _budget: names.get(v, str(v)), write)


def _scalar(field: Any, path: str) -> _Node:
    if field.enum_type is not None:
        return _enum(field.enum_type, path)
    kinds = {
        field.CPPTYPE_INT32: pa.int32(),
        field.CPPTYPE_INT64: pa.int64(),
        field.CPPTYPE_UINT32: pa.int64(),
        field.CPPTYPE_UINT64: pa.decimal128(20, 0),  # Spark has no unsigned numbers
        field.CPPTYPE_FLOAT: pa.float32(),
        field.CPPTYPE_DOUBLE: pa.float64(),
        field.CPPTYPE_BOOL: pa.bool_(),
        field.CPPTYPE_STRING: pa.binary() if field.type == field.TYPE_BYTES else pa.string(),
    }
    kind = kinds.get(field.cpp_type)
    if kind is None:
        raise Unmappable(f"field {path[1:]!r} has a type without a column")
    if pa.types.is_decimal(kind):
        return _Node(kind, _as_it_is, int)
    return _Node(kind, _as_it_is, _same)


def _path_to(message: Any) -> list[int]:
    """Indexes of a message in its file, from the outermost one."""
    indexes: list[int] = []
    while message.containing_type is not None:
        indexes.insert(0, [m.full_name for m in message.containing_type.nested_types].index(message.full_name))
        message = message.containing_type
    top = [m.full_name for m in message.file.message_types_by_name.values()]
    return [top.index(message.full_name), *indexes]


def _indexes_text(indexes: Sequence[int]) -> bytes:
    """As the registry's clients write them: one byte 0 for the first message."""
    if list(indexes) == [0]:
        return b"\0"
    return b"".join(_varint(n) for n in (len(indexes), *indexes))


def _varint(number: int) -> bytes:
    """Zigzag."""
    number, encoded = number << 1, bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _split(data: bytes) -> tuple[list[int], bytes]:
    """Message indexes and payload. Raises Unreadable."""
    count, at = _number(data, 0)
    if count == 0:
        return [0], data[at:]
    if not 0 < count <= _INDEXES_MAX:
        raise Unreadable("its message indexes are damaged")
    indexes = []
    for _ in range(count):
        index, at = _number(data, at)
        indexes.append(index)
    return indexes, data[at:]


def _number(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    for place in range(at, min(len(data), at + 5)):
        number |= (data[place] & 0x7F) << shift
        shift += 7
        if not data[place] & 0x80:
            return (number >> 1) ^ -(number & 1), place + 1
    raise Unreadable("its message indexes are damaged")
