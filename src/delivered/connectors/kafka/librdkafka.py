"""Direct calls into the librdkafka bundled with confluent-kafka's wheel: its functions, structs, and a client."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from delivered.connectors.kafka.errors import config_error
from delivered.model.errors import MissingExtra, UsageError

_POINTER, _TEXT, _INT, _SIZE = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t
_I32, _I64, _SSIZE = ctypes.c_int32, ctypes.c_int64, ctypes.c_ssize_t


class Message(ctypes.Structure):
    """rd_kafka_message_t"""

    _fields_ = (
        ("err", ctypes.c_int),
        ("rkt", ctypes.c_void_p),
        ("partition", ctypes.c_int32),
        ("payload", ctypes.c_void_p),
        ("len", ctypes.c_size_t),
        ("key", ctypes.c_void_p),
        ("key_len", ctypes.c_size_t),
        ("offset", ctypes.c_int64),
        ("private", ctypes.c_void_p),
    )


class Memory(ctypes.Structure):
    _fields_ = (("ptr", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Value(ctypes.Union):
    _fields_ = (
        ("cstr", ctypes.c_char_p),
        ("i32", ctypes.c_int32),
        ("integer", ctypes.c_int),
        ("mem", Memory),
        ("headers", ctypes.c_void_p),
        ("pad", ctypes.c_char * 64),
    )


class Argument(ctypes.Structure):
    """rd_kafka_vu_t"""

    _fields_ = (("vtype", ctypes.c_int), ("u", Value))


class _MetadataTopic(ctypes.Structure):
    _fields_ = (
        ("topic", ctypes.c_char_p),
        ("partition_cnt", ctypes.c_int),
        ("partitions", ctypes.c_void_p),
        ("err", ctypes.c_int),
    )


class Metadata(ctypes.Structure):
    """rd_kafka_metadata_t"""

    _fields_ = (
        ("broker_cnt", ctypes.c_int),
        ("brokers", ctypes.c_void_p),
        ("topic_cnt", ctypes.c_int),
        ("topics", ctypes.POINTER(_MetadataTopic)),
    )


DELIVERY_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(Message), ctypes.c_void_p)
ERROR_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
STATISTICS_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

_Signature = tuple[Any, ...]
"""Return type, then argument types."""

_FUNCTIONS: dict[str, _Signature] = {
    "rd_kafka_new": (_POINTER, _INT, _POINTER, _TEXT, _SIZE),
    "rd_kafka_conf_new": (_POINTER,),
    "rd_kafka_conf_set": (_INT, _POINTER, _TEXT, _TEXT, _TEXT, _SIZE),
    "rd_kafka_conf_destroy": (None, _POINTER),
    "rd_kafka_conf_set_error_cb": (None, _POINTER, ERROR_CALLBACK),
    "rd_kafka_conf_set_log_cb": (None, _POINTER, _POINTER),
    "rd_kafka_conf_set_opaque": (None, _POINTER, _POINTER),
    "rd_kafka_err2name": (_TEXT, _INT),
    "rd_kafka_err2str": (_TEXT, _INT),
    "rd_kafka_destroy_flags": (None, _POINTER, _INT),
    "rd_kafka_conf_set_dr_msg_cb": (None, _POINTER, DELIVERY_CALLBACK),
    "rd_kafka_topic_new": (_POINTER, _POINTER, _TEXT, _POINTER),
    "rd_kafka_topic_destroy": (None, _POINTER),
    "rd_kafka_produce_batch": (_INT, _POINTER, _I32, _INT, _POINTER, _INT),
    "rd_kafka_produceva": (_POINTER, _POINTER, ctypes.POINTER(Argument), _SIZE),
    "rd_kafka_poll": (_INT, _POINTER, _INT),
    "rd_kafka_flush": (_INT, _POINTER, _INT),
    "rd_kafka_purge": (_INT, _POINTER, _INT),
    "rd_kafka_outq_len": (_INT, _POINTER),
    "rd_kafka_init_transactions": (_POINTER, _POINTER, _INT),
    "rd_kafka_begin_transaction": (_POINTER, _POINTER),
    "rd_kafka_abort_transaction": (_POINTER, _POINTER, _INT),
    "rd_kafka_error_code": (_INT, _POINTER),
    "rd_kafka_error_string": (_TEXT, _POINTER),
    "rd_kafka_error_destroy": (None, _POINTER),
    "rd_kafka_fatal_error": (_INT, _POINTER, _TEXT, _SIZE),
    "rd_kafka_last_error": (_INT,),
    "rd_kafka_headers_new": (_POINTER, _SIZE),
    "rd_kafka_headers_destroy": (None, _POINTER),
    "rd_kafka_header_add": (_INT, _POINTER, _TEXT, _SSIZE, _POINTER, _SSIZE),
    "rd_kafka_metadata": (_INT, _POINTER, _INT, _POINTER, ctypes.POINTER(ctypes.POINTER(Metadata)), _INT),
    "rd_kafka_metadata_destroy": (None, ctypes.POINTER(Metadata)),
    "rd_kafka_destroy": (None, _POINTER),
    "rd_kafka_conf_set_stats_cb": (None, _POINTER, STATISTICS_CALLBACK),
    "rd_kafka_poll_set_consumer": (_INT, _POINTER),
    "rd_kafka_queue_get_consumer": (_POINTER, _POINTER),
    "rd_kafka_queue_destroy": (None, _POINTER),
    "rd_kafka_consume_batch_queue": (_SSIZE, _POINTER, _INT, _POINTER, _SIZE),
    "rd_kafka_message_destroy": (None, _POINTER),
    "rd_kafka_message_timestamp": (_I64, _POINTER, ctypes.POINTER(_INT)),
    "rd_kafka_message_headers": (_INT, _POINTER, ctypes.POINTER(_POINTER)),
    "rd_kafka_message_errstr": (_TEXT, _POINTER),
    "rd_kafka_header_get_all": (
        _INT, _POINTER, _SIZE, ctypes.POINTER(_TEXT), ctypes.POINTER(_POINTER), ctypes.POINTER(_SIZE),
    ),
    "rd_kafka_topic_name": (_TEXT, _POINTER),
    "rd_kafka_topic_partition_list_new": (_POINTER, _INT),
    "rd_kafka_topic_partition_list_add": (_POINTER, _POINTER, _TEXT, _I32),
    "rd_kafka_topic_partition_list_set_offset": (_INT, _POINTER, _TEXT, _I32, _I64),
    "rd_kafka_topic_partition_list_destroy": (None, _POINTER),
    "rd_kafka_assign": (_INT, _POINTER, _POINTER),
    "rd_kafka_consumer_close": (_INT, _POINTER),
}  # fmt: skip


@lru_cache(maxsize=1)
def library() -> Any:
    """librdkafka.

    Raises:
        MissingExtra: confluent-kafka is not installed. UsageError: its librdkafka cannot be called.
    """
    for path in _candidates():
        try:
            lib = ctypes.CDLL(path)
        except OSError:
            continue
        if all(hasattr(lib, name) for name in _FUNCTIONS):
            for name, (gives, *takes) in _FUNCTIONS.items():
                function = getattr(lib, name)
                function.restype, function.argtypes = gives, takes
            return lib
    raise UsageError(
        "KAFKA_LIBRARY",
        "confluent-kafka is installed, but the functions of its librdkafka are not accessible to this process.",
        next_step="pip install --force-reinstall --only-binary :all: confluent-kafka, whose wheels include librdkafka",
    )


def _candidates() -> list[str]:
    try:
        import confluent_kafka
    except ImportError:
        raise MissingExtra("kafka") from None
    beside = Path(confluent_kafka.__file__).parent
    found = [str(p) for p in sorted((beside.parent / "confluent_kafka.libs").glob("librdkafka*"))]
    found += [str(p) for p in sorted((beside / ".dylibs").glob("librdkafka*"))]
    found += [str(p) for p in sorted(beside.glob("cimpl*"))]
    system = ctypes.util.find_library("rdkafka")
    return [*found, *([system] if system else [])]


def name_of(code: int) -> str:
    """librdkafka's name of an error code, without the prefix: "_TRANSPORT"."""
    return str(library().rd_kafka_err2name(code).decode())


def text_of(code: int) -> str:
    return str(library().rd_kafka_err2str(code).decode())


def configuration(settings: Mapping[str, str], owner: str) -> int:
    """A rd_kafka_conf_t, which the caller must destroy. Raises UsageError: unknown setting, or invalid value."""
    lib, errstr = library(), ctypes.create_string_buffer(512)
    conf = lib.rd_kafka_conf_new()
    for name, value in settings.items():
        if lib.rd_kafka_conf_set(conf, name.encode(), value.encode(), errstr, len(errstr)) != 0:
            lib.rd_kafka_conf_destroy(conf)
            raise config_error(errstr.value.decode(errors="replace"), owner, name)
    return int(conf)


# Callbacks carry a number instead of a Python object, which may be gone by then.
_clients: dict[int, Client] = {}
_numbers = itertools.count(1)


class Client:
    """A librdkafka client. Not thread-safe; callbacks run while it is polled.

    Args:
        settings: librdkafka's names, secrets resolved.
        owner: of the options, for errors.

    Raises:
        UsageError: unknown setting, or invalid value.
    """

    PRODUCER, CONSUMER = 0, 1

    def __init__(self, kind: int, settings: Mapping[str, str], owner: str) -> None:
        self._lib = lib = library()
        self._number = next(_numbers)
        conf, errstr = configuration(settings, owner), ctypes.create_string_buffer(512)
        lib.rd_kafka_conf_set_error_cb(conf, _on_error)
        lib.rd_kafka_conf_set_log_cb(conf, None)  # relevant errors reach the callbacks
        lib.rd_kafka_conf_set_opaque(conf, self._number)
        if kind == self.PRODUCER:
            lib.rd_kafka_conf_set_dr_msg_cb(conf, _on_failed)
        else:
            lib.rd_kafka_conf_set_stats_cb(conf, _on_statistics)
        rk = lib.rd_kafka_new(kind, conf, errstr, len(errstr))
        if not rk:
            lib.rd_kafka_conf_destroy(conf)
            raise config_error(errstr.value.decode(errors="replace"), owner)
        self._rk: int | None = int(rk)
        _clients[self._number] = self

    def on_error(self, name: str, detail: str) -> None:
        """A connection error."""

    def on_failed(self, code: int, size: int) -> None:
        """A record of `size` bytes was not delivered."""

    def on_statistics(self, text: str) -> None: ...

    def _detach(self) -> int | None:
        """Detach the handle, which the caller frees; None: detached before."""
        rk, self._rk = self._rk, None
        _clients.pop(self._number, None)
        return rk


@ERROR_CALLBACK  # type: ignore[untyped-decorator]
def _on_error(_rk: int, code: int, reason: bytes, opaque: int) -> None:
    if (client := _clients.get(opaque)) is not None:
        client.on_error(name_of(code), reason.decode(errors="replace"))


@DELIVERY_CALLBACK  # type: ignore[untyped-decorator]
def _on_failed(_rk: int, message: Any, opaque: int) -> None:
    if (client := _clients.get(opaque)) is not None:
        client.on_failed(message.contents.err, message.contents.len + message.contents.key_len)


@STATISTICS_CALLBACK  # type: ignore[untyped-decorator]
def _on_statistics(_rk: int, text: int, length: int, opaque: int) -> int:
    if (client := _clients.get(opaque)) is not None:
        client.on_statistics(ctypes.string_at(text, length).decode())
    return 0


def check_settings(owner: str, client: Mapping[str, str]) -> None:
    """Check the user's settings on the driver, before anything runs. Opens no connection.

    Args:
        client: from `client_options`. Secrets are not resolved: that happens on other machines.

    Raises:
        UsageError: unknown setting, or invalid value.
    """
    known = {k: v for k, v in client.items() if k != "sasl.jaas.config" and not v.startswith(("env:", "file:"))}
    with suppress(MissingExtra):  # reported when a client is created
        library().rd_kafka_conf_destroy(configuration(known, owner))
