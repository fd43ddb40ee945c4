"""Everything outside the pipeline, in one object: inputs, with their source, visible rows, prepared shards, ledgers.

A world is looked up by name, within one process. A server's faults are methods here: prepared transactions expire,
replies get lost, requests arrive late.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import pyarrow as pa
from tests.support.memory import MemorySourceOptions

from delivered.contract.source import Finding, Offsets, Slice, Source, SourceDriver
from delivered.model.capability import SourceCapability
from delivered.model.errors import UsageError
from delivered.model.identity import Scope, Work
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision, Handle, Owner, Started

ROWS = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])


class State(StrEnum):
    OPEN = "open"
    PREPARED = "prepared"
    APPLIED = "applied"
    ABORTED = "aborted"


@dataclass
class Participant:
    """One writer's rows and their state.

    Attributes:
        opened_at: length of the world's marker log when it was opened.
    """

    id: int
    work: Work
    opened_at: int
    rows: list[pa.RecordBatch] = field(default_factory=list)
    state: State = State.OPEN


@dataclass(frozen=True)
class Opened(Handle):
    """Handle of a participant."""

    id: int
    rows: int


class Answer(StrEnum):
    """How a request can end without a reply."""

    LOST = "lost"
    """The request succeeded, its reply was lost."""
    NOT_SENT = "not_sent"
    """The request was lost."""
    LATE = "late"
    """The request is in flight, and takes effect when `World.land` is called, unless fenced."""


@dataclass
class Room:
    """The ledger of one sink of one pipeline, all incarnations. Decisions and started batches as text, as on a server;
    newest last."""

    owner: Owner | None = None
    epoch: int = 0
    decisions: list[str] = field(default_factory=list)
    started: dict[str, Started] = field(default_factory=dict)
    seals: dict[str, list[str]] = field(default_factory=dict)

    def of(self, incarnation: str) -> list[Decision]:
        decisions = [Decision.from_json(text) for text in self.decisions]
        return [d for d in decisions if d.scope.incarnation == incarnation]

    def newest(self) -> list[Decision]:
        """The newest decision of each incarnation, newest first."""
        decisions: dict[str, Decision] = {}
        for text in reversed(self.decisions):
            decision = Decision.from_json(text)
            decisions.setdefault(decision.scope.incarnation, decision)
        return list(decisions.values())


class World:
    """
    Attributes:
        inputs: partitions of the source; one list of rows each, (key, value).
        visible: what readers of the sink see, in commit order.
        log: markers in commit order: (pipeline, sink, shard, incarnation, batch).
        gate: called before every change; a simulation raises here for a dead process.
        answers: faults of the next calls, by method: "decide", "begin", "apply", "abort", "abort_orphans".
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.inputs: list[list[tuple[bytes | None, bytes | None]]] = []
        self.visible: list[tuple[Work, pa.RecordBatch]] = []
        self.log: list[tuple[str, str, int, str, int]] = []
        self.participants: dict[int, Participant] = {}
        self.rooms: dict[tuple[str, str], Room] = {}
        self.gate: Callable[[], None] = lambda: None
        self.answers: dict[str, deque[Answer]] = {}
        self._late: list[Callable[[], object]] = []
        self._ids = itertools.count(1)

    def room(self, scope: Scope) -> Room:
        return self.rooms.setdefault((scope.pipeline, scope.sink), Room())

    def open(self, work: Work) -> Participant:
        self.gate()
        with self.lock:
            participant = Participant(next(self._ids), work, len(self.log))
            self.participants[participant.id] = participant
            return participant

    def show(self, work: Work, rows: Sequence[pa.RecordBatch]) -> None:
        self.gate()
        with self.lock:
            self.visible += [(work, batch) for batch in rows]

    def settle(self, participant: Participant) -> None:
        """Make a participant and its marker visible."""
        with self.lock:
            scope = participant.work.scope
            self.show(participant.work, participant.rows)
            self.log.append(
                (scope.pipeline, scope.sink, participant.work.shard, scope.incarnation, participant.work.batch)
            )
            participant.state = State.APPLIED

    def unsettled(self) -> list[Participant]:
        """Participants that are neither committed nor aborted: they would block readers of a real broker."""
        return [p for p in self.participants.values() if p.state in (State.OPEN, State.PREPARED)]

    def expire(self) -> int:
        """Abort every participant that is still open, as a transaction timeout would."""
        with self.lock:
            expired = self.unsettled()
            for participant in expired:
                participant.state = State.ABORTED
            return len(expired)

    def marker(self, work: Work) -> tuple[str, int] | None:
        """(incarnation, batch) of the shard's newest marker before the oldest open participant, as a read_committed
        reader sees it."""
        with self.lock:
            stable = min((p.opened_at for p in self.unsettled()), default=len(self.log))
            own = (work.scope.pipeline, work.scope.sink, work.shard)
            markers = [(m[3], m[4]) for m in self.log[:stable] if m[:3] == own]
            return markers[-1] if markers else None

    def next_answer(self, method: str) -> Answer | None:
        waiting = self.answers.get(method)
        return waiting.popleft() if waiting else None

    def keep_under_way(self, request: Callable[[], object]) -> None:
        self._late.append(request)

    def land(self) -> None:
        """Let the requests in flight arrive."""
        late, self._late = self._late, []
        for request in late:
            request()


_worlds: dict[str, World] = {}


def make_world(name: str) -> World:
    """A new, empty world under this name, in this process."""
    _worlds[name] = World()
    return _worlds[name]


def world(name: str) -> World:
    """Raises UsageError: this process has no such world; memory is not shared between processes."""
    if name not in _worlds:
        raise UsageError("WORLD_UNKNOWN", f"This process holds no world {name!r}; it holds {sorted(_worlds)}.")
    return _worlds[name]


_ROWS_PER_BATCH = 1024


@dataclass(frozen=True)
class MemorySource(Source):
    options: MemorySourceOptions

    @property
    def rows_per_batch_max(self) -> int | None:
        return self.options.rows_max

    def capability(self) -> SourceCapability:
        return SourceCapability("memory", replayable=True, local=True)

    def preflight(self) -> Sequence[Finding]:
        world(self.options.world)
        return ()

    def schema(self) -> pa.Schema:
        return ROWS

    def driver(self) -> MemoryDriver:
        return MemoryDriver(self)

    def partitions(self) -> list[list[tuple[bytes | None, bytes | None]]]:
        return world(self.options.world).inputs

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        partition, start, end = piece.data
        rows = self.partitions()[partition][start:end]
        for i in range(0, len(rows), _ROWS_PER_BATCH):
            facts = {"partition": partition, "offset": start + i}
            reach(StepId.SOURCE_READ, Moment.BEFORE, **facts)
            part = rows[i : i + _ROWS_PER_BATCH]
            batch = pa.RecordBatch.from_pylist([{"key": k, "value": v} for k, v in part], schema=ROWS)
            reach(StepId.SOURCE_READ, Moment.AFTER, **facts)
            yield batch


class MemoryDriver(SourceDriver):
    """Offsets: partition, as text -> index of the next row."""

    def __init__(self, source: MemorySource) -> None:
        self._source = source
        self._frozen: Offsets | None = None

    def initial(self) -> Offsets:
        return {str(p): 0 for p in range(len(self._source.partitions()))}

    def newest(self) -> Offsets:
        return {str(p): len(rows) for p, rows in enumerate(self._source.partitions())}

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        end, left = self._frozen or self.newest(), rows_max
        if left is None:
            return end
        reached = {}
        for i, p in enumerate(sorted(end, key=int)):
            # Split the remainder evenly among the remaining partitions, rounded up so that the stream finishes.
            count = min(end[p] - start.get(p, 0), -(-left // (len(end) - i)))
            reached[p] = start.get(p, 0) + count
            left -= count
        return reached

    def freeze(self) -> None:
        self._frozen = self.newest()

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        return [Slice((int(p), start.get(p, 0), end[p])) for p in sorted(end, key=int)]

    def batch(self) -> tuple[Offsets, Offsets]:
        return self.initial(), self.newest()
