"""What happened in a run, in order: a JSON line for the start and end of each operation, and for each fault.

An operation ends ok, failed or unknown. Unknown: it may have taken effect, may still do so, or never will.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any


class End(StrEnum):
    """How an operation ended; BEGUN marks the line that opens it."""

    BEGUN = "begun"
    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Operation:
    """
    Attributes:
        at_s: seconds since the run began.
        process: the actor: "producer", "driver 2", "reader", "fault".
        name: the operation: "send", "run", "read", "kill".
        value: JSON values only.
    """

    at_s: float
    process: str
    name: str
    end: End
    value: Any = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=False, default=str)

    @classmethod
    def from_json(cls, text: str) -> Operation:
        data = json.loads(text)
        return cls(data["at_s"], data["process"], data["name"], End(data["end"]), data["value"])


class History(AbstractContextManager["History"]):
    """Append-only and thread-safe. With a file, every line is on disk before the call returns."""

    def __init__(self, path: Path | None = None) -> None:
        self._operations: list[Operation] = []
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._file = path.open("a", encoding="utf-8") if path is not None else None

    @property
    def now_s(self) -> float:
        return round(time.monotonic() - self._began, 3)

    def add(self, process: str, name: str, end: End, value: Any = None) -> Operation:
        with self._lock:
            found = Operation(self.now_s, process, name, end, value)
            self._operations.append(found)
            if self._file is not None:
                self._file.write(found.to_json() + "\n")
                self._file.flush()
        return found

    def __iter__(self) -> Iterator[Operation]:
        with self._lock:
            return iter(list(self._operations))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load(path: Path) -> list[Operation]:
    """Read a history back. A last line that a crash truncated is skipped.

    Raises:
        ValueError: a line before the last is not an operation.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    found: list[Operation] = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(Operation.from_json(line))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"line {number} of {path} is not an operation: {line[:80]!r}") from error
    return found


def fired(history: Iterable[Operation]) -> list[str]:
    """Names of the faults that fired, in order."""
    return [o.name for o in history if o.process == "fault" and o.end is End.OK]


def sends(history: Iterable[Operation]) -> dict[str, End]:
    """Record id -> outcome of its send. One that never ended is unknown; of several, ok beats unknown beats failed."""
    rank = {End.OK: 3, End.UNKNOWN: 2, End.BEGUN: 2, End.FAILED: 1}
    best: dict[str, End] = {}
    for o in history:
        if o.process.startswith("producer") and o.name == "send":
            end = End.UNKNOWN if o.end is End.BEGUN else o.end
            for record in o.value["ids"]:
                if record not in best or rank[end] > rank[best[record]]:
                    best[record] = end
    return best
