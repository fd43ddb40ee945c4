"""What a producer is to the writers, whichever client is below: librdkafka itself, or confluent-kafka."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from delivered.connectors.kafka.client_errors import says_more

POLL_MS = 5
"""How long a writer sleeps while the queue is full."""

TOO_LARGE = 10
"""MSG_SIZE_TOO_LARGE: the broker's code, which librdkafka uses for its own limit as well."""

_FENCED = {"_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH"}
_TOPIC_UNKNOWN = {"_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_OR_PART"}
_AWAY = {"_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "LEADER_NOT_AVAILABLE"}
_NO_PERMISSION = {
    "TOPIC_AUTHORIZATION_FAILED",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    "CLUSTER_AUTHORIZATION_FAILED",
    "_AUTHENTICATION",
    "SASL_AUTHENTICATION_FAILED",
}


class ProducerError(Exception):
    """A client's error. `name` as librdkafka calls it, without the prefix."""

    def __init__(self, name: str, reason: str, config: bool = False) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason
        self.config = config

    @property
    def fenced(self) -> bool:
        return self.name in _FENCED

    @property
    def topic_unknown(self) -> bool:
        return self.name in _TOPIC_UNKNOWN

    @property
    def away(self) -> bool:
        """No broker answered."""
        return self.name in _AWAY

    @property
    def no_permission(self) -> bool:
        return self.name in _NO_PERMISSION


@dataclass(frozen=True)
class ProducerId:
    """What a transactional producer is known by, besides its transactional id."""

    id: int
    epoch: int


_CONSEQUENCES = frozenset({"_PURGE_QUEUE", "_PURGE_INFLIGHT"})
"""What the client tells records that it dropped because of another one's failure."""


@dataclass
class Failures:
    """Records that could not be delivered: how many, and what the first was told that failed by itself.

    Attributes:
        largest: bytes of key and value of the largest of them.
        last_error: what the client last said about its connections, and why.
        fatal: name of the error after which the client sends nothing more; records then fail with "_FATAL" alone.
    """

    count: int = 0
    code: int = 0
    name: str = ""
    largest: int = 0
    last_error: str = ""
    fatal: str = ""
    by_name: dict[str, int] = field(default_factory=dict)

    def add(self, code: int, name: str, size: int) -> None:
        if self.count == 0 or self.name in _CONSEQUENCES:
            self.code, self.name = code, name
        self.count += 1
        self.largest = max(self.largest, size)
        self.by_name[name] = self.by_name.get(name, 0) + 1

    def note(self, name: str, said: str) -> None:
        """What the client says about its connections."""
        if says_more(name, self.last_error):
            self.last_error = f"{name}: {said}"

    def hint(self) -> str:
        return f" (last said: {self.last_error})" if self.last_error else ""

    def clear(self) -> None:
        self.count, self.code, self.name, self.largest, self.by_name = 0, 0, "", 0, {}


@dataclass(frozen=True)
class Rows:
    """Rows for one topic.

    Attributes:
        key, value: binary or large_binary; key None: every key is null.
        headers: list<struct<key: string, value: binary>>, or None.
        partition: int32, -1: by key; or None.
    """

    topic: str
    key: pa.Array | None
    value: pa.Array
    headers: pa.Array | None = None
    partition: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.value)

    def slice(self, start: int, length: int) -> Rows:
        if start == 0 and length >= len(self):
            return self
        return Rows(
            self.topic,
            None if self.key is None else self.key.slice(start, length),
            self.value.slice(start, length),
            None if self.headers is None else self.headers.slice(start, length),
            None if self.partition is None else self.partition[start : start + length],
        )


Headers = list[tuple[str, bytes | None]]


class Producer(Protocol):
    """Used by one thread at a time. Failures of single records are counted in `failures`, not raised."""

    failures: Failures

    def start(self, timeout_s: float) -> None: ...
    def begin(self) -> None: ...
    def abort(self, timeout_s: float) -> None: ...
    def send(self, rows: Rows) -> None: ...
    def send_one(
        self,
        topic: str,
        partition: int | None,
        key: bytes | None,
        value: bytes | None,
        headers: Headers | None = None,
    ) -> None: ...
    def flush(self, timeout_s: float) -> None: ...
    def partitions(self, topic: str, timeout_s: float) -> int: ...
    def close(self) -> None: ...


def spread(rows: Rows) -> Iterator[tuple[str, int | None, bytes | None, bytes | None, Headers | None]]:
    """Rows one by one, for what only goes one by one."""
    values = rows.value.to_pylist()
    keys = rows.key.to_pylist() if rows.key is not None else [None] * len(values)
    headers = rows.headers.to_pylist() if rows.headers is not None else [None] * len(values)
    partitions = rows.partition.tolist() if rows.partition is not None else [-1] * len(values)
    for key, value, header, partition in zip(keys, values, headers, partitions, strict=True):
        pairs = None if header is None else [(h["key"], h["value"]) for h in header]
        yield rows.topic, (None if partition < 0 else partition), key, value, pairs


def flush_pauses() -> Iterator[int]:
    """Milliseconds to wait in one call of flush: librdkafka notices an empty queue only when a call ends."""
    yield from (1,) * 100
    while True:
        yield 20


def timeout_error(what: str, failures: Failures) -> ProducerError:
    return ProducerError("_TIMED_OUT", what + failures.hint())
