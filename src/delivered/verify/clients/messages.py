"""Sinks that are messages of a broker: read once, in the order of the broker, by readers that take nothing away."""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from delivered import brokers
from delivered.verify.clients.base import Look, Row

ANSWER_TIMEOUT_S = 60.0
_POLL_S = 0.05
_RETRY_S = 0.2


class Messages(ABC):
    """Rows hold values alone: where a message carries its key, if it does, is the broker's own way.

    Attributes:
        last: what the newest message of the judge's own holds; met: what those held that came.

    Args:
        server: that the judge may kill.
        name: of the case.
        ledger: a file of the driver's machine, for what the broker has no place for.
        pipeline_address: the address that the pipeline is given: the server's, or a proxy's.
    """

    system = "messages"
    batch_atomic = False

    def __init__(
        self,
        server: brokers.Broker,
        name: str,
        ledger: Path,
        pipeline_address: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.name = f"effects-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
        self._server = server
        self._ledger = ledger
        self._given = pipeline_address or server.bootstrap
        self._extra = extra or {}
        self._found: list[Row] = []
        self.last = ""
        self.met: set[str] = set()
        self._lock = threading.RLock()

    @abstractmethod
    def create(self) -> None:
        """Make it, empty."""

    @abstractmethod
    def take(self, after: int | None) -> list[Row]:
        """What has come behind this position, as far as it is at hand; None: from the first message on."""

    def mark(self) -> None:
        """Begin a look at everything. Where the end is known by a message of the judge's own, send it: `self.last`."""
        self.last = uuid.uuid4().hex

    @abstractmethod
    def all_taken(self) -> bool:
        """Whether everything that was there when `mark` was called is in what `take` gave until now."""

    @abstractmethod
    def disconnect(self) -> None:
        """Forget the connection, which may be broken. May be called again."""

    @abstractmethod
    def sink_options(self) -> dict[str, Any]:
        """Of the sink in the pipeline file, without the ledger."""

    def remove(self) -> None:
        self.disconnect()

    def options(self) -> dict[str, Any]:
        return {**self.sink_options(), "ledger": str(self._ledger), **self._extra}

    def read(self) -> list[Row]:
        """
        Raises:
            TimeoutError: not everything came within 60 s.
        """
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        said: Exception | None = None
        marked = False
        while time.monotonic() < deadline:
            try:
                with self._lock:
                    if not marked:
                        self.mark()
                        marked = True
                    self._take()
                    if self.all_taken():
                        return list(self._found)
            except Exception as error:
                said = error
                self._start_again()
        raise TimeoutError(f"{self.name} could not be read to its end within {ANSWER_TIMEOUT_S:.0f} s: {said}")

    def follow(self, seen: Callable[[Look], None], stop: threading.Event) -> None:
        """While the server is down, there is nothing to see. What a final reader took is seen here, too."""
        told = 0
        while True:
            last = stop.is_set()
            try:
                with self._lock:
                    self._take()
            except Exception:
                self._start_again()
            new = self._found[told:]
            if new:
                told += len(new)
                seen(Look(new, whole=False))
            if last:
                return
            stop.wait(_POLL_S)

    def open_transactions(self, pipeline: str) -> list[str]:
        """There are none: a message that was sent is there."""
        del pipeline
        return []

    def _take(self) -> None:
        self._found += self.take(self._found[-1].position if self._found else None)

    def _start_again(self) -> None:
        with self._lock, suppress(Exception):
            self.disconnect()
        time.sleep(_RETRY_S)
