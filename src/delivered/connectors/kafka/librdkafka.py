"""librdkafka's functions and structs, as the wheel of confluent-kafka brings them along: what ctypes must know of them.

One table says what each function takes and gives; what is in the table of a role is what that role needs to work.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import lru_cache
from pathlib import Path
from typing import Any

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
"""What a function gives, then what it takes."""

_BOTH: dict[str, _Signature] = {
    "rd_kafka_new": (_POINTER, _INT, _POINTER, _TEXT, _SIZE),
    "rd_kafka_conf_new": (_POINTER,),
    "rd_kafka_conf_set": (_INT, _POINTER, _TEXT, _TEXT, _TEXT, _SIZE),
    "rd_kafka_conf_destroy": (None, _POINTER),
    "rd_kafka_conf_set_error_cb": (None, _POINTER, ERROR_CALLBACK),
    "rd_kafka_conf_set_log_cb": (None, _POINTER, _POINTER),
    "rd_kafka_conf_set_opaque": (None, _POINTER, _POINTER),
    "rd_kafka_err2name": (_TEXT, _INT),
    "rd_kafka_err2str": (_TEXT, _INT),
}
PRODUCER: dict[str, _Signature] = {
    **_BOTH,
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
    "rd_kafka_commit_transaction": (_POINTER, _POINTER, _INT),
    "rd_kafka_error_code": (_INT, _POINTER),
    "rd_kafka_error_string": (_TEXT, _POINTER),
    "rd_kafka_error_is_retriable": (_INT, _POINTER),
    "rd_kafka_error_destroy": (None, _POINTER),
    "rd_kafka_fatal_error": (_INT, _POINTER, _TEXT, _SIZE),
    "rd_kafka_last_error": (_INT,),
    "rd_kafka_headers_new": (_POINTER, _SIZE),
    "rd_kafka_headers_destroy": (None, _POINTER),
    "rd_kafka_header_add": (_INT, _POINTER, _TEXT, _SSIZE, _POINTER, _SSIZE),
    "rd_kafka_metadata": (_INT, _POINTER, _INT, _POINTER, ctypes.POINTER(ctypes.POINTER(Metadata)), _INT),
    "rd_kafka_metadata_destroy": (None, ctypes.POINTER(Metadata)),
}
CONSUMER: dict[str, _Signature] = {
    **_BOTH,
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
def producer_library() -> Any | None:
    """librdkafka with all that a producer needs, or None: then confluent-kafka itself must do."""
    return _load(PRODUCER)


@lru_cache(maxsize=1)
def consumer_library() -> Any | None:
    """librdkafka with all that a consumer needs, or None. Structs are read as a 64-bit machine lays them out."""
    return _load(CONSUMER) if ctypes.sizeof(ctypes.c_void_p) == 8 else None


def _load(functions: dict[str, _Signature]) -> Any | None:
    for path in _candidates():
        try:
            lib = ctypes.CDLL(path)
        except OSError:
            continue
        if all(hasattr(lib, name) for name in functions):
            for name, (gives, *takes) in functions.items():
                function = getattr(lib, name)
                function.restype, function.argtypes = gives, takes
            return lib
    return None


def _candidates() -> list[str]:
    try:
        import confluent_kafka
    except ImportError:
        return []
    beside = Path(confluent_kafka.__file__).parent
    found = [str(p) for p in sorted((beside.parent / "confluent_kafka.libs").glob("librdkafka*"))]
    found += [str(p) for p in sorted((beside / ".dylibs").glob("librdkafka*"))]
    found += [str(p) for p in sorted(beside.glob("cimpl*"))]
    system = ctypes.util.find_library("rdkafka")
    return [*found, *([system] if system else [])]
