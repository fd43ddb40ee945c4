"""Shared by brokers: sinks whose messages are read once, in the broker's order, by readers that remove nothing; and
queues that drop acknowledged messages, whose receivers store them in a log."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from delivered import Guarantee
from delivered_lab.verify.systems.base import Poll, Row, SinkKind, SinkPlace, SourceClient, digest, polling
from delivered_lab.verify.systems.log import Log
from delivered_lab.verify.workloads import PARTITIONS, source_id

ANSWER_TIMEOUT_S = 60.0
CONFIRM_TIMEOUT_S = 30.0
APPEND_MAX = 40
"""Messages per append: few, so that a receiver reaches its crash points often."""
END = "delivered-verify-end"
"""Identifies the judge's own message, behind everything that it has to read."""
_RETRY_S = 0.2


class Messages(ABC):
    """Rows hold only values: each broker carries keys in its own way, if at all. The judge may kill the server; what
    the broker cannot store is in a file on the driver's machine, the ledger.

    Attributes:
        last: content of the judge's newest own message; met: contents of those that arrived.
    """

    system = "messages"
    batch_atomic = False

    def __init__(self, kind: SinkKind, place: SinkPlace) -> None:
        del kind
        self.name = f"effects-{digest(place.name)}"
        self._server, self._ledger, self._extra = place.server, place.disk / "ledger.db", place.extra
        self._address = place.pipeline_address or self._server.bootstrap
        self._found: list[Row] = []
        self.last = ""
        self.met: set[str] = set()
        self._lock = threading.RLock()

    @abstractmethod
    def create(self) -> None:
        """Create it, empty."""

    @abstractmethod
    def take(self, after: int | None) -> list[Row]:
        """Available messages after this position; None: from the first message on."""

    def mark(self) -> None:
        """Begin a full read. Where the end is marked by a message of the judge's own, send it: `self.last`."""
        self.last = uuid4().hex

    def all_received(self) -> bool:
        """Whether `take` has returned everything that was there when `mark` was called."""
        return self.last in self.met

    @abstractmethod
    def disconnect(self) -> None:
        """Drop the connection, which may be broken. May be called again."""

    @abstractmethod
    def place(self) -> dict[str, Any]:
        """Sink options in the pipeline file, without the ledger."""

    def remove(self) -> None:
        self.disconnect()

    def options(self) -> dict[str, Any]:
        return {"format": self.system, **self.place(), "ledger": str(self._ledger), **self._extra}

    def read(self) -> list[Row]:
        """Raises TimeoutError: not everything came within 60 s."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        failure: Exception | None = None
        marked = False
        while time.monotonic() < deadline:
            try:
                with self._lock:
                    if not marked:
                        self.mark()
                        marked = True
                    self._take()
                    if self.all_received():
                        return list(self._found)
            except Exception as error:
                failure = error
                self._start_again()
        raise TimeoutError(f"{self.name} could not be read to its end within {ANSWER_TIMEOUT_S:.0f} s: {failure}")

    def follow(self, seen: Callable[[Poll], None], stop: threading.Event) -> None:
        """While the server is down, there is nothing to see. Messages received by a final reader are seen here too."""
        count = 0
        for _ in polling(stop):
            try:
                with self._lock:
                    self._take()
            except Exception:
                self._start_again()
            new = self._found[count:]
            if new:
                count += len(new)
                seen(Poll(new, snapshot=False))

    def open_transactions(self, pipeline: str) -> list[str]:
        """There are none: a sent message is visible."""
        del pipeline
        return []

    def _take(self) -> None:
        self._found += self.take(self._found[-1].position if self._found else None)

    def _start_again(self) -> None:
        with self._lock, suppress(Exception):
            self.disconnect()
        time.sleep(_RETRY_S)


def sending(client: type[Messages], absent: Mapping[str, str] | None = None, ordered: bool = True) -> SinkKind:
    """A broker that cannot hold messages back."""
    system = client.system
    no_reader = {"F5": "its readers take messages one by one, so there is no read to interrupt"}
    weaker = (Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE)
    absent = {**no_reader, **(absent or {})}
    return SinkKind(system, system, client, system, absent=absent, guarantees=weaker, sends=True, ordered=ordered)


@dataclass
class Queue(SourceClient):
    """A queue as source. Only a comparison with what was sent shows what the log lacks: the judge never reads
    the queue itself.

    Attributes:
        name: of the queue, or topic.
        log: folder of the log that receivers fill.
        connector: another connector for the same queues, in the pipeline file.
    """

    system = "queue"
    patience_s = 15.0
    name: str
    log: Path
    _: KW_ONLY
    connector: str | None = None
    _arrived: tuple[int, frozenset[str]] = field(default=(-1, frozenset()), init=False, repr=False)

    def __post_init__(self) -> None:
        self.log = Path(self.log)

    def place(self) -> dict[str, Any]:
        """Queue options in the pipeline file, without the log."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        return {
            "format": self.connector or self.system,
            **self.place(),
            "log": str(self.log),
            "logPartitions": PARTITIONS,
            "receiveMessagesMax": APPEND_MAX,
            "receiveLingerMs": 20,
        }

    def read(self) -> list[Row]:
        return Log(self.log).read()

    def offsets(self, logged: Any) -> dict[str, int]:
        return Log(self.log).offsets(logged)

    def arrived(self) -> frozenset[str]:
        """Reread only when the log has a new commit."""
        commits = len(list((self.log / "_delta_log").glob("*.json")))
        if commits != self._arrived[0]:
            self._arrived = (commits, frozenset(source_id(r.value) for r in self.read()))
        return self._arrived[1]


def not_confirmed(system: str, failed: Sequence[Any], count: int) -> ConnectionError:
    return ConnectionError(f"{system} did not confirm {len(failed)} of {count} messages: {failed[0]}")
