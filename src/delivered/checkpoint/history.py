"""What happened to a pipeline, kept next to its checkpoint, for people on call and never evidence.

What its batches took, its lag, its state and what its audits found: one line each, on a local disk only. Lines are not
synced, and a batch that a later start finished has none.

The starts, ends and errors of its driver: the newest ones, wherever the checkpoint is. A driver that is killed leaves a
run without an end, and two drivers at once may lose each other's line. With them, what an operator has looked at.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from pyarrow import fs

from delivered import checkpoint
from delivered.model.errors import DeliveredError
from delivered.model.work import BatchReport, without_format
from delivered.source import lag_by_partition

log = logging.getLogger(__name__)

R = TypeVar("R", "BatchReport", "Totals", "Sample", "State")

FILE = "delivered/batches.jsonl"
AUDITS = "delivered/audits.jsonl"
SAMPLES = "delivered/lag.jsonl"
STATES = "delivered/state.jsonl"
SAMPLE_EVERY_S = 5.0
BYTES_MAX = 1 << 20
"""Of a file; then it becomes `<file>.1`, in place of the one before. About 4,000 batches each."""
_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class Totals:
    """Since the checkpoint's first batch with a line.

    Attributes:
        rewritten: shards.
        seconds: by step.
        bytes: of the rows written, in memory.
    """

    batches: int = 0
    rewritten: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes: int = 0

    def after(self, report: BatchReport) -> Totals:
        seconds = Counter(self.seconds) + Counter(report.seconds)
        return Totals(
            self.batches + 1,
            self.rewritten + report.rewritten,
            {step: round(s, 4) for step, s in seconds.items()},
            self.bytes + report.bytes,
        )


def add(location: str, report: BatchReport) -> None:
    """Append a batch. Never raises: a full disk must not stop a batch that is already visible."""
    try:
        if location not in _totals:
            _totals[location] = totals(location)
        _totals[location] = now = _totals[location].after(report)
        _append(location, FILE, {**report.to_json(), "totals": now.__dict__})
    except Exception as error:
        log.debug("batch %d: its report was not kept: %s", report.batch, error)


def batches(location: str, newest: int = 1000) -> list[BatchReport]:
    """The newest reports, oldest first."""
    return _known(BatchReport, _lines(location, FILE, newest))


def records_since(location: str, at_ms: int, batch: int | None = None, newest: int = 1000) -> dict[str, int]:
    """Records by sink of the batches that were decided since then, or of one of them, as far as reports are kept."""
    found = Counter[str]()
    for report in batches(location, newest):
        if report.decided_at_ms >= at_ms and batch in (None, report.batch):
            found.update(report.records)
    return dict(found)


def totals(location: str) -> Totals:
    """Since the first batch with a line, also of batches whose lines are no longer kept."""
    found = _known(Totals, (line.get("totals") for line in _lines(location, FILE, 1)))
    return found[0] if found else Totals()


@dataclass(frozen=True)
class Sample:
    """A source when a batch was planned.

    Attributes:
        lag: partition -> offsets that waited.
        read: partition -> offsets that were delivered since the sample before it, of the same process.
    """

    at_ms: int
    source: str
    lag: Mapping[str, int]
    read: Mapping[str, int]

    @property
    def lag_total(self) -> int:
        return sum(self.lag.values())

    @property
    def read_total(self) -> int:
        return sum(self.read.values())


class Samples:
    """Of one stream, kept by the process that plans its batches.

    Args:
        location: of the checkpoint; None: unknown, and nothing is kept.
    """

    def __init__(self, location: str | None, source: str) -> None:
        self._location, self._source = location, source
        self._kept_s = float("-inf")
        self._before: Any = None

    def keep(self, start: Any, newest: Any) -> None:
        """Append one, unless the last one is younger than `SAMPLE_EVERY_S`. Never raises.

        Args:
            start: where the next batch starts. newest: the source's end.
        """
        if self._location is None or time.monotonic() - self._kept_s < SAMPLE_EVERY_S:
            return
        try:
            lag = lag_by_partition({"endOffset": start, "latestOffset": newest})
            before = start if self._before is None else self._before
            read = lag_by_partition({"endOffset": before, "latestOffset": start})
            if lag is not None and read is not None:
                line = Sample(time.time_ns() // 1_000_000, self._source, lag, read)
                _append(self._location, SAMPLES, line.__dict__)
                self._before, self._kept_s = start, time.monotonic()
        except Exception as error:
            log.debug("the lag was not kept: %s", error)


def samples(location: str, newest: int = 200) -> list[Sample]:
    """The newest samples of all sources, oldest first."""
    return _known(Sample, _lines(location, SAMPLES, newest))


@dataclass(frozen=True)
class State:
    """Of a stateful query, as Spark reported it with a batch.

    Attributes:
        rows, bytes: in the state stores, by operator; bytes of memory.
        late: rows of that batch that were older than the watermark, by operator.
    """

    at_ms: int
    batch: int
    rows: Mapping[str, int]
    bytes: Mapping[str, int]
    late: Mapping[str, int]

    @classmethod
    def of(cls, progress: Mapping[str, Any]) -> Self | None:
        """Args: progress: Spark's, as JSON. None: the query has no state."""
        operators = {f"{n} {o['operatorName']}": o for n, o in enumerate(progress.get("stateOperators") or ())}
        if not operators:
            return None

        def each(name: str) -> dict[str, int]:
            return {operator: int(o.get(name, 0)) for operator, o in operators.items()}

        at_ms, batch = time.time_ns() // 1_000_000, int(progress["batchId"])
        return cls(at_ms, batch, each("numRowsTotal"), each("memoryUsedBytes"), each("numRowsDroppedByWatermark"))


class States:
    """Of one query, kept by the process that waits for its end."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._batch: int | None = None

    def keep(self, progress: Mapping[str, Any] | None) -> None:
        """Append one for each batch that is seen. Never raises.

        Args:
            progress: Spark's newest; None: there is none yet.
        """
        try:
            state = State.of(progress or {})
            if state is not None and state.batch != self._batch:
                _append(self._location, STATES, state.__dict__)
                self._batch = state.batch
        except Exception as error:
            log.debug("the size of the state was not kept: %s", error)


def states(location: str, newest: int = 200) -> list[State]:
    """Oldest first."""
    return _known(State, _lines(location, STATES, newest))


def add_audit(location: str, report: Mapping[str, Any]) -> None:
    """Append an audit, as `audits` returns it. Never raises."""
    try:
        _append(location, AUDITS, report)
    except Exception as error:
        log.debug("the audit was not kept: %s", error)


def audits(location: str, newest: int = 100) -> list[dict[str, Any]]:
    """The newest audits, oldest first: sink, at_ms, seconds, verdict, breaches, unknowns, counts; keys."""
    return _lines(location, AUDITS, newest)


def last_audits(location: str) -> dict[str, dict[str, Any]]:
    """The last audit of each sink. One that held and compared a share of the keys says nothing of the others."""
    found: dict[str, dict[str, Any]] = {}
    for audit in audits(location):
        if "keys" not in audit or audit["verdict"] != "held":
            found[audit["sink"]] = audit
    return found


def last_seal(location: str, sink: str) -> dict[str, Any] | None:
    """Number and hash of the newest seal of a sink that its last audit knew; None: none is recorded."""
    newest = (a["seal"] for a in reversed(audits(location)) if a["sink"] == sink and "seal" in a)
    return next(newest, None)


def _append(location: str, name: str, line: Mapping[str, Any]) -> None:
    path = _path(location, name)
    if path is None:
        return
    path.parent.mkdir(exist_ok=True)
    if path.is_file() and path.stat().st_size > BYTES_MAX:
        path.replace(_older(path))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _lines(location: str, name: str, newest: int) -> list[dict[str, Any]]:
    path = _path(location, name)
    files = () if path is None else (path, _older(path))
    return [*islice(chain.from_iterable(map(_newest_first, files)), newest)][::-1]


def _known(kind: type[R], lines: Iterable[Any]) -> list[R]:
    """Lines of other versions, too: unknown fields are ignored, and a line that lacks one is skipped."""
    found = []
    names = [f.name for f in fields(kind)]
    for line in lines:
        with contextlib.suppress(TypeError):
            found.append(kind(**{name: line[name] for name in names if name in line}))
    return found


def _newest_first(path: Path) -> Iterator[dict[str, Any]]:
    for line in _backwards(path):
        try:
            yield json.loads(line)
        except ValueError:  # a crash tore it
            continue


def _backwards(path: Path) -> Iterator[bytes]:
    """The lines of a file, from its end: a status wants the newest few of a large one."""
    try:
        with path.open("rb") as file:
            left, rest = file.seek(0, os.SEEK_END), b""
            while left:
                size = min(_BLOCK_BYTES, left)
                left -= size
                file.seek(left)
                first, *lines = (file.read(size) + rest).split(b"\n")
                yield from reversed(lines)
                rest = first
            yield rest
    except OSError:
        return


def _path(location: str, name: str) -> Path | None:
    if checkpoint.SCHEME.match(location) and not location.startswith("file:"):
        return None  # without a client for its store: this is asked for every batch
    filesystem, path = checkpoint.open_folder(location)
    return Path(path) / name if isinstance(filesystem, fs.LocalFileSystem) else None


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


_totals: dict[str, Totals] = {}
"""By location, of the checkpoints whose batches this process commits."""


# Starts, ends and errors of drivers.

RUNS = "delivered/runs.json"
RUNS_MAX = 50
_TEXT_LENGTH_MAX = 2_000


@dataclass(frozen=True)
class Run:
    """
    Attributes:
        id: of Spark's run; empty: it ended before there was one.
        started_ms, ended_ms: since 1970; ended_ms None: it runs, or was killed.
        batch: the newest one that Spark had logged when it ended.
        code, message, next_step: of the error that ended it; empty: it was stopped.
    """

    id: str
    host: str
    process: int
    started_ms: int
    ended_ms: int | None = None
    batch: int | None = None
    code: str = ""
    message: str = ""
    next_step: str = ""

    @classmethod
    def new(cls, run_id: str) -> Self:
        return cls(run_id, socket.gethostname(), os.getpid(), _now_ms())

    @property
    def has_failed(self) -> bool:
        return bool(self.code)

    def ended(self, batch: int | None, error: DeliveredError | None) -> Self:
        now = replace(self, ended_ms=_now_ms(), batch=batch)
        if error is None:
            return now
        return replace(
            now,
            code=error.code,
            message=error.message[:_TEXT_LENGTH_MAX],
            next_step=(error.next_step or "")[:_TEXT_LENGTH_MAX],
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


def keep_run(location: str, run: Run) -> None:
    """Add a run, or replace it by its end. Never raises: a full disk must not end a query, nor hide its error."""
    try:
        others = [r for r in runs(location) if (r.id, r.started_ms) != (run.id, run.started_ms)]
        kept = sorted([*others, run], key=lambda r: r.started_ms)[-RUNS_MAX:]
        checkpoint.write_record(location, RUNS, {"runs": [r.to_json() for r in kept]})
    except Exception as error:
        log.debug("the run was not kept: %s", error)


@contextlib.contextmanager
def keeping_failed_start(location: str) -> Iterator[None]:
    """Add a run if the body raises before its query started. A checkpoint that holds nothing of ours stays as it is:
    it may be another connector's."""
    try:
        yield
    except DeliveredError as error:
        with contextlib.suppress(DeliveredError):
            if checkpoint.holds(location, "delivered", ""):
                _, batch = checkpoint.read_logged(location)
                keep_run(location, Run.new("").ended(batch, error))
        raise


def runs(location: str) -> list[Run]:
    """Oldest first; of a file that cannot be read, none."""
    try:
        text = checkpoint.read(location, RUNS)
        found = without_format(json.loads(text), "runs")["runs"] if text is not None else []
        return [Run.from_json(r) for r in found]
    except (DeliveredError, ValueError, KeyError, TypeError) as error:
        log.debug("runs cannot be read: %s", error)
        return []


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


# Which dead letters an operator has looked at: those since then are a problem.

LOOKS_FILE = "delivered/looked-at.json"


@dataclass(frozen=True)
class NewDeadLetters:
    """
    Attributes:
        count: since the last look. since_ms: when that was, in milliseconds since 1970; None: never.
    """

    count: int
    since_ms: int | None


class _Counted(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def records(self) -> int | None: ...
    @property
    def dead_letters(self) -> bool: ...


def new_dead_letters(location: str, sinks: Iterable[_Counted]) -> dict[str, NewDeadLetters]:
    """By sink that holds dead letters, and whose ledger answered."""
    queues = {s.name: s.records for s in sinks if s.dead_letters and s.records is not None}
    seen = _read_looks(location) if queues else {}
    found: dict[str, NewDeadLetters] = {}
    for name, records in queues.items():
        at = seen.get(name)
        # More were seen than there are: the checkpoint is a new one.
        before = at["records"] if at is not None and at["records"] <= records else 0
        found[name] = NewDeadLetters(records - before, at["at_ms"] if before and at is not None else None)
    return found


def looked_at(location: str, sinks: Iterable[_Counted]) -> None:
    """Remember that an operator has seen what there is. Never raises: one who may only read looks, too."""
    now = _now_ms()
    counts = {s.name: {"records": s.records, "at_ms": now} for s in sinks if s.dead_letters and s.records is not None}
    try:
        checkpoint.write_record(location, LOOKS_FILE, {"dead_letters": {**_read_looks(location), **counts}})
    except DeliveredError as error:
        log.debug("the look was not kept: %s", error)


def _read_looks(location: str) -> Mapping[str, Any]:
    try:
        text = checkpoint.read(location, LOOKS_FILE)
        return {} if text is None else dict(without_format(json.loads(text), "looks")["dead_letters"])
    except (DeliveredError, ValueError, KeyError, TypeError) as error:
        log.debug("earlier looks cannot be read: %s", error)
        return {}
