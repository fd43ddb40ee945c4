"""What happened in a run, in order, and everything a judge may look at.

The history has a JSON line for the start and end of each operation, and for each fault. An operation ends ok, failed or
unknown. Unknown: it may be in effect, may still come into effect, or never will.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

from delivered import Guarantee


class End(StrEnum):
    """How an operation ended; STARTED marks the line that opens it."""

    STARTED = "begun"
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
    rank = {End.OK: 3, End.UNKNOWN: 2, End.STARTED: 2, End.FAILED: 1}
    best: dict[str, End] = {}
    for o in history:
        if o.process.startswith("producer") and o.name == "send":
            end = End.UNKNOWN if o.end is End.STARTED else o.end
            for record in o.value["ids"]:
                if record not in best or rank[end] > rank[best[record]]:
                    best[record] = end
    return best


@dataclass(frozen=True)
class Seen:
    """One effect, as a reader of the sink found it.

    Attributes:
        effect: its identity: the record's id and a digest of its content.
        partition: the part of the sink that keeps order: a partition, a table.
        position: grows within a partition in the order in which effects became visible.
        key, number: the record's key, and its position in the key's sequence; None: the workload has no sequences.
        at_s: when this reader saw it, in seconds since the run began.
    """

    effect: str
    partition: str = ""
    position: int = 0
    key: str | None = None
    number: int | None = None
    at_s: float = 0.0


@dataclass(frozen=True)
class Stop:
    """How a run of the pipeline had to end, and how it did.

    Attributes:
        wanted: codes of the errors that are correct here, without prefix; empty: it had to run to the end.
        got: code of the run's error; None: it succeeded. "?" if it failed without a code.
        when: the moment in the case.
    """

    wanted: tuple[str, ...] = ()
    got: str | None = None
    when: str = ""

    @property
    def right(self) -> bool:
        return self.got in self.wanted if self.wanted else self.got is None


@dataclass
class Evidence:
    """
    Attributes:
        expected: effect -> copies, from the source as read at the end. A record that is in the source twice is
            expected twice.
        wanted: for an operator, key -> the effect its newest row must be; None: rows have no such keys.
        states: for an operator whose rows replace others, the effects present after each batch, from the first one on;
            None: all rows stay.
        acknowledged: ids of records whose sends were confirmed.
        in_source: ids found in the source.
        offered: ids ever sent, whatever the outcome.
        seen: by the continuous reader, in its order.
        final: by the last reader, after everything ended; None: there was no final read.
        snapshots: moments at which the reader saw all of the sink at once, as (seconds, effects visible).
        batches: effects of each batch, from the checkpoint and the source; None: unknown.
        batch_atomic: whether the sink claims that a batch becomes visible atomically.
        ordered: whether effects of one key must become visible in the order in which they were sent.
        given_up: records that the product reports as given up; None: it reports none.
        audit_verdict: of the product's own audit, "held", "broken" or "unknown"; None: it was not run.
        open_transactions: what blocks readers after the end; None: not checked.
        required, fired: names of faults.
        stops: ends of the runs whose outcome matters; the last one is the end of the case.
        stays_down: the pipeline is right to stay stopped: what it did not reach is not lost.
        recovery_s: seconds from each restart after a SIGKILL to the first new effect; plain_s: of a plain restart.
    """

    guarantee: Guarantee
    expected: Counter[str] = field(default_factory=Counter)
    wanted: Mapping[str, str] | None = None
    states: Sequence[frozenset[str]] | None = None
    acknowledged: frozenset[str] = frozenset()
    in_source: Counter[str] = field(default_factory=Counter)
    offered: frozenset[str] | None = None
    seen: Sequence[Seen] = ()
    final: Sequence[Seen] | None = None
    snapshots: Sequence[tuple[float, frozenset[str]]] = ()
    batches: Mapping[int, frozenset[str]] | None = None
    batch_atomic: bool = False
    ordered: bool = False
    given_up: int | None = None
    audit_verdict: str | None = None
    open_transactions: Sequence[str] | None = None
    required: Sequence[str] = ()
    fired: Sequence[str] = ()
    stops: Sequence[Stop] = ()
    stays_down: bool = False
    recovery_s: Sequence[float] = ()
    plain_s: float | None = None

    @property
    def found(self) -> Counter[str]:
        """Effect -> copies in the final read. Raises ValueError: there was none."""
        if self.final is None:
            raise ValueError("nobody read the sink at the end")
        return Counter(s.effect for s in self.final)
