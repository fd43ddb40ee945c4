"""What a system must offer to be written to and read by the judge."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from delivered.verify.workloads import Record


@dataclass(frozen=True)
class Row:
    """A record, as a client found it.

    Attributes:
        partition: partition or table; position: grows within it.
        sink: which of several sinks of one batch holds it; empty: there is one.
    """

    partition: str
    position: int
    key: str | None
    value: str
    sink: str = ""


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
        """Partition -> end of a batch, from what the checkpoint says of this source."""

    def address(self) -> dict[str, Any]:
        """JSON values by which another process makes the same client: `system`, and the arguments of its class."""


@runtime_checkable
class Forgets(Protocol):
    """A source that holds nothing once it was read. `Feed.read` tells what is in the log that receivers fill."""

    log: Path
    patience_s: float
    """Nothing that a dead receiver held stays hidden for so long."""

    def arrived(self) -> frozenset[str]:
        """Ids of the records that are in the log."""

    def left(self) -> int | None:
        """Messages that the queue still holds, while nobody receives; None: it does not tell."""


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
        """Give space back. May be called again."""


class Disturbed(Exception):
    """What a reader had begun to read was taken away from under it."""


@runtime_checkable
class ReadAtLength(Protocol):
    """A sink whose readers need time, and must be left alone meanwhile."""

    def reading(self) -> AbstractContextManager[None]:
        """From its begin to its end, a reader is in the middle of reading what is there now.

        Raises:
            Disturbed: at the end, what was there at the begin cannot be read as it was.
        """


@runtime_checkable
class Lockable(Protocol):
    """A sink of which another program can hold what a writer must wait for."""

    def locked(self) -> AbstractContextManager[None]:
        """Another program holds it."""


@runtime_checkable
class Shared(Protocol):
    """A table to which others write too, none of whom reads or changes a row that is there."""

    def append_nothing(self) -> None:
        """A commit of another writer, without rows."""

    def compact(self) -> None:
        """A commit that puts the rows that are there into other files."""

    def describe(self, text: str) -> None:
        """A commit that changes what the table says of itself."""


@runtime_checkable
class Prepares(Protocol):
    """A server whose prepared transactions an operator can end by hand."""

    def roll_back_prepared(self) -> list[str]:
        """All of them; returns their ids."""


def as_row(partition: str, position: int, columns: Mapping[str, Any]) -> Row:
    """A row of a table. Of one with other columns than key and value, all of the row is its value."""
    if list(columns) == ["key", "value"]:
        return Row(partition, position, as_text(columns["key"]), as_text(columns["value"]) or "")
    return Row(partition, position, None, json.dumps({name: as_text(v) for name, v in columns.items()}))


def as_text(value: Any) -> str | None:
    if value is None:
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
