"""What a system must offer to be written to and read by the judge."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from delivered.verify.workloads import Record


@dataclass(frozen=True)
class Row:
    """A record, as a client found it.

    Attributes:
        lane: partition or table; position: grows within it.
    """

    lane: str
    position: int
    key: str | None
    value: str


@dataclass(frozen=True)
class Look:
    """What a reader that runs all along found in one step.

    Attributes:
        rows: new since the step before.
        whole: whether the step saw all of the sink at one moment.
    """

    rows: Sequence[Row]
    whole: bool


class Feed(Protocol):
    """Where the workload goes: the pipeline's source."""

    system: str

    def create(self) -> None:
        """Make it, empty."""

    def options(self) -> dict[str, Any]:
        """Of the source in the pipeline file."""

    def send(self, records: Sequence[Record]) -> None:
        """Write all of them; raise unless all are acknowledged."""

    def read(self) -> list[Row]:
        """All that is there."""

    def offsets(self, logged: Any) -> dict[str, int]:
        """Lane -> end of a batch, from what the checkpoint says of this source."""


class Drain(Protocol):
    """Where the effects go: the pipeline's sink."""

    system: str
    batch_atomic: bool

    def create(self) -> None:
        """Make it, empty, unless the pipeline does."""

    def options(self) -> dict[str, Any]:
        """Of the sink in the pipeline file."""

    def read(self) -> list[Row]:
        """All that a committed reader finds now."""

    def follow(self, seen: Callable[[Look], None], stop: threading.Event) -> None:
        """Read all along, in the calling thread, until `stop` is set and everything that is there was seen."""

    def open_transactions(self, pipeline: str) -> list[str]:
        """What blocks committed readers."""

    def remove(self) -> None:
        """Give space back."""
