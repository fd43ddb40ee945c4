"""A queue that forgets what was acknowledged: receivers keep its messages in a log, which the judge reads as any other.

What the log lacks is seen only by who knows what was sent: the judge never asks the queue what it held.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from delivered.verify.clients.base import Row
from delivered.verify.clients.log import Log
from delivered.verify.workloads import PARTITIONS, Record, source_id

ANSWER_TIMEOUT_S = 30.0
APPEND_MAX = 40
"""Messages in one append: few, so that a receiver comes by its points often."""


class Queue(ABC):
    """
    Args:
        name: of the queue, or topic.
        log: folder of the log that receivers fill.
        connector: another one of the same queues, in the pipeline file.
    """

    system = "queue"
    patience_s = 15.0

    def __init__(self, name: str, log: Path | str, connector: str | None = None) -> None:
        self.name = name
        self.log = Path(log)
        self._connector = connector or self.system
        self._arrived: tuple[int, frozenset[str]] = (-1, frozenset())

    @abstractmethod
    def create(self) -> None:
        """Make it, empty."""

    @abstractmethod
    def send(self, records: Sequence[Record]) -> None:
        """Write all of them, each with its id; raise unless all are acknowledged."""

    @abstractmethod
    def place(self) -> dict[str, Any]:
        """Of the queue in the pipeline file, without the log."""

    @abstractmethod
    def left(self) -> int | None:
        """As `Forgets.left`."""

    @abstractmethod
    def address(self) -> dict[str, Any]:
        """As `Feed.address`."""

    def options(self) -> dict[str, Any]:
        return {
            "format": self._connector,
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
        """Read anew only when the log has a new commit."""
        commits = len(list((self.log / "_delta_log").glob("*.json")))
        if commits != self._arrived[0]:
            self._arrived = (commits, frozenset(source_id(r.value) for r in self.read()))
        return self._arrived[1]
