"""Commands of Pulsar's binary protocol: their fields, frames, and the brokers' errors.

Fields have the numbers and wire types that the protocol gives them; enumerations are written as numbers, which is the
same on the wire. Only fields that are used are described, the others are skipped when they are read.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from delivered.clients.kafka.record_batch import library
from delivered.model.limits import PULSAR_COMMAND_BYTES_MAX

PROTOCOL_VERSION = 21
CLIENT_VERSION = "delivered"

_PARTS = {
    "KeyValue": "1 key string, 2 value string",
    "MessageId": "1 ledger uint64, 2 entry uint64",
    "AuthData": "1 auth_method_name string, 2 auth_data bytes",
    "FeatureFlags": "1 supports_auth_refresh bool",
    "Schema": "1 name string, 3 schema_data bytes, 4 type int32",
    "MessageMetadata": (
        "1 producer_name string, 2 sequence_id uint64, 3 publish_time uint64, 4 properties KeyValue*, "
        "6 partition_key string, 8 compression int32, 9 uncompressed_size uint32, 11 num_messages_in_batch int32, "
        "12 event_time uint64, 16 schema_version bytes, 22 txnid_least_bits uint64, 23 txnid_most_bits uint64, "
        "24 highest_sequence_id uint64, 25 null_value bool, 26 uuid string, 27 num_chunks_from_msg int32, "
        "28 total_chunk_msg_size int32, 29 chunk_id int32"
    ),
    "SingleMessageMetadata": (
        "1 properties KeyValue*, 2 partition_key string, 3 payload_size int32, 5 event_time uint64, "
        "8 sequence_id uint64, 9 null_value bool"
    ),
}
"""Parts of commands, and what stands before a message's payload."""

_TXN = "2 txnid_least_bits uint64, 3 txnid_most_bits uint64"
_ERROR = "4 error int32, 5 message bytes"  # texts of brokers need not be UTF-8
_COMMANDS = {
    "connect": (
        2,
        "1 client_version string, 3 auth_data bytes, 4 protocol_version int32, 5 auth_method_name string, "
        "6 proxy_to_broker_url string, 10 feature_flags FeatureFlags",
    ),
    "connected": (3, "1 server_version bytes, 2 protocol_version int32, 3 max_message_size int32"),
    "producer": (
        5,
        "1 topic string, 2 producer_id uint64, 3 request_id uint64, 4 producer_name string, 7 schema Schema, "
        "9 user_provided_producer_name bool, 12 txn_enabled bool",
    ),
    "send": (
        6,
        "1 producer_id uint64, 2 sequence_id uint64, 3 num_messages int32, 4 txnid_least_bits uint64, "
        "5 txnid_most_bits uint64, 6 highest_sequence_id uint64, 7 is_chunk bool",
    ),
    "send_receipt": (7, "1 producer_id uint64, 2 sequence_id uint64, 3 message_id MessageId"),
    "send_error": (8, "1 producer_id uint64, 2 sequence_id uint64, 3 error int32, 4 message bytes"),
    "success": (13, "1 request_id uint64"),
    "error": (14, "1 request_id uint64, 2 error int32, 3 message bytes"),
    "close_producer": (15, "1 producer_id uint64, 2 request_id uint64"),
    "producer_success": (
        17,
        "1 request_id uint64, 2 producer_name string, 3 last_sequence_id int64, 4 schema_version bytes, "
        "6 producer_ready bool",
    ),
    "ping": (18, ""),
    "pong": (19, ""),
    "partitions": (21, "1 topic string, 2 request_id uint64, 6 metadata_auto_creation_enabled bool"),
    "partitions_response": (
        22,
        "1 partitions uint32, 2 request_id uint64, 3 response int32, 4 error int32, 5 message bytes",
    ),
    "lookup": (23, "1 topic string, 2 request_id uint64, 3 authoritative bool"),
    "lookup_response": (
        24,
        "1 url string, 2 url_tls string, 3 response int32, 4 request_id uint64, 5 authoritative bool, 6 error int32, "
        "7 message bytes, 8 proxy_through_service_url bool",
    ),
    "auth_challenge": (36, "2 challenge AuthData"),
    "auth_response": (37, "1 client_version string, 2 response AuthData, 3 protocol_version int32"),
    "new_txn": (50, "1 request_id uint64, 2 ttl_ms uint64, 3 tc_id uint64"),  # the protocol calls it txn_ttl_seconds
    "new_txn_response": (51, f"1 request_id uint64, {_TXN}, {_ERROR}"),
    "add_partitions": (52, f"1 request_id uint64, {_TXN}, 4 partitions string*"),
    "add_partitions_response": (53, f"1 request_id uint64, {_TXN}, {_ERROR}"),
    "end_txn": (56, f"1 request_id uint64, {_TXN}, 4 action int32"),
    "end_txn_response": (57, f"1 request_id uint64, {_TXN}, {_ERROR}"),
    "join_coordinator": (62, "1 request_id uint64, 2 tc_id uint64"),
    "join_coordinator_response": (63, "1 request_id uint64, 2 error int32, 3 message bytes"),
}
"""Name -> number of the command and of its field in `BaseCommand`, which are the same, and its fields."""

REDIRECT = 0
"""Kind of an answer to a lookup."""
FAILED = {"lookup_response": 2, "partitions_response": 1}
"""Kind of an answer that is an error."""
COMMIT, ABORT = 0, 1


class Error(IntEnum):
    """Errors of brokers that mean something to a caller."""

    AUTHENTICATION = 3
    AUTHORIZATION = 4
    SERVICE_NOT_READY = 6
    TOPIC_NOT_FOUND = 11
    TOO_MANY_REQUESTS = 14
    PRODUCER_BUSY = 16
    INCOMPATIBLE_SCHEMA = 18
    COORDINATOR_NOT_FOUND = 20
    INVALID_TXN_STATUS = 21
    NOT_ALLOWED = 22
    TXN_CONFLICT = 23
    TXN_NOT_FOUND = 24
    PRODUCER_FENCED = 25


ELSEWHERE = frozenset({0, 1, 2, Error.SERVICE_NOT_READY, Error.TOO_MANY_REQUESTS, Error.COORDINATOR_NOT_FOUND})
"""The request may succeed later, or at another broker. 0, 1, 2: unknown, metadata, persistence."""


class NoAnswer(Exception):
    """The connection broke, or no answer came in time: what was requested may have been done."""


class NotSent(NoAnswer):
    """There was no connection: what was requested was not done."""


class Rejected(Exception):
    """A broker's answer: it did not do what was requested.

    Attributes:
        code: see `Error`.
    """

    def __init__(self, code: int, text: str) -> None:
        name = Error(code).name if code in Error._value2member_map_ else "error"
        super().__init__(f"{name} ({code}): {text}" if text else f"{name} ({code})")
        self.code = code

    @property
    def may_pass(self) -> bool:
        return self.code in ELSEWHERE


class Unreadable(Exception):
    """Bytes that are no frame of the protocol."""


def _classes() -> dict[str, Any]:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="delivered_pulsar.proto", package="delivered", syntax="proto2")
    base = "1 type int32, " + ", ".join(f"{number} {name} {name}" for name, (number, _) in _COMMANDS.items())
    texts = {**_PARTS, **{name: fields for name, (_, fields) in _COMMANDS.items()}, "Base": base}
    for message, text in texts.items():
        described = file.message_type.add(name=message)
        for number, name, kind in (part.split() for part in text.split(", ") if part):
            plain, many = kind.rstrip("*"), kind.endswith("*")
            added = described.field.add(name=name, number=int(number))
            added.label = field.LABEL_REPEATED if many else field.LABEL_OPTIONAL
            if plain in texts:
                added.type, added.type_name = field.TYPE_MESSAGE, f".delivered.{plain}"
            else:
                added.type = field.Type.Value(f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {m: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"delivered.{m}")) for m in texts}


MESSAGE = _classes()
"""Message classes by name."""
_NAMES = {number: name for name, (number, _) in _COMMANDS.items()}
_SIZES = struct.Struct(">II")
_SIZE = struct.Struct(">I")
_CHECKED = struct.Struct(">HI")
_MAGIC = 0x0E01


def encode(name: str, **fields: Any) -> bytes:
    """The frame of a command without payload."""
    return _SIZES.pack(len(command := _command(name, fields)) + 4, len(command)) + command


def encode_send(metadata: Any, payload: bytes, **fields: Any) -> bytes:
    """The frame of `send`. Without the compiled part it has no checksum, which is optional."""
    command, head = _command("send", fields), metadata.SerializeToString()
    body = b"".join((_SIZE.pack(len(head)), head, payload))
    if (loaded := library()) is not None:
        body = _CHECKED.pack(_MAGIC, loaded.rb_crc32c(body, len(body), 0)) + body
    return b"".join((_SIZES.pack(4 + len(command) + len(body), len(command)), command, body))


def _command(name: str, fields: dict[str, Any]) -> bytes:
    number = _COMMANDS[name][0]
    return bytes(MESSAGE["Base"](type=number, **{name: MESSAGE[name](**fields)}).SerializeToString())


def frame_size(head: bytes) -> int:
    """Bytes that follow the first four of a frame. Raises Unreadable."""
    [size] = _SIZE.unpack(head)
    if not 4 < size <= PULSAR_COMMAND_BYTES_MAX:
        raise Unreadable(f"a command of {size} bytes: not a Pulsar broker, or a broken connection")
    return int(size)


def decode(frame: bytes) -> tuple[str, Any]:
    """Name and fields of a command, from what follows a frame's first four bytes; the name is empty for others.

    Raises:
        Unreadable
    """
    [size] = _SIZE.unpack(frame[:4])
    if size > len(frame) - 4:
        raise Unreadable(f"a command of {size} bytes in a frame of {len(frame)}")
    try:
        base = MESSAGE["Base"].FromString(frame[4 : 4 + size])
    except DecodeError:
        raise Unreadable("bytes that are no command") from None
    name = _NAMES.get(base.type, "")
    if name and not base.HasField(name):
        raise Unreadable(f"a command {name} without its fields")
    return name, getattr(base, name) if name else None


def words(text: bytes) -> str:
    """A broker's error text, shortened."""
    return " ".join(text.decode(errors="replace").split())[:300]
