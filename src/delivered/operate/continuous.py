"""Audits that go on: of a running pipeline, on a thread beside its query; and of pipeline files, in a process of its
own. Each goes on from the last seal, so a restart loses nothing, and several at once do no harm: one seals first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from delivered.checkpoint import read_logged
from delivered.checkpoint.history import add_audit
from delivered.engine.context import open_shared_ledger
from delivered.model.errors import DeliveredError
from delivered.model.patience import within
from delivered.operate.asking import ASK_S_MAX, files
from delivered.operate.status import SealStatus, read_seals
from delivered.pipeline.definition import Cadence, Definition

log = logging.getLogger(__name__)

STOP_S_MAX = 30.0
"""How long a stop waits for a running audit to notice."""
_GAP_S = 10.0
"""How long an audit that is due waits for a moment between two batches."""
_POLL_S = 0.5
_CANCEL_EVERY_S = 0.2
_ERROR_LENGTH_MAX = 2_000


def seals_now(pipeline: Definition) -> dict[str, SealStatus]:
    """By sink, the last seal and what is not sealed; empty: the ledger does not answer, and an audit says why."""
    spec = pipeline.spec
    try:
        with within(ASK_S_MAX):
            incarnation, _ = read_logged(pipeline.checkpoint)
            sinks = spec.open()
            with contextlib.closing(open_shared_ledger(sinks, spec.scope(sinks, incarnation))) as ledger:
                names = [m.name for m in sinks.members if not m.dead_letters]
                sealed = {name: read_seals(ledger, name, newest=1) for name in names}
                last = ledger.look().last
        return {name: SealStatus.of(seals, last, name) for name, seals in sealed.items()}
    except Exception as error:
        log.debug("%s: its last seal is not known: %s", pipeline.name, error)
        return {}


def sealed_s(seals: Mapping[str, SealStatus]) -> float | None:
    """Seconds since the last seal of the sink that was sealed longest ago; None: one has none, or none is known."""
    ages = [s.age_s for s in seals.values()]
    known = [age for age in ages if age is not None]
    return max(known) if known and len(known) == len(ages) else None


def unsealed(pipeline: Definition) -> list[str]:
    """The sinks for which batches wait to be sealed; all, if the ledger does not answer."""
    seals = seals_now(pipeline)
    return [name for name in pipeline.sink_names if name not in seals or seals[name].unsealed_batches]


def record_failure(pipeline: Definition, sinks: Sequence[str], error: object) -> None:
    """Log an audit that could not run, and keep it for status and page: of each sink, until one of it runs."""
    reason = str(error)[:_ERROR_LENGTH_MAX]
    log.warning("%s: %s could not be audited: %s", pipeline.name, ", ".join(sinks), reason)
    line = {"at_ms": time.time_ns() // 1_000_000, "seconds": 0.0, "verdict": "unknown"}
    line |= {"breaches": [], "unknowns": [reason], "counts": {}, "error": reason}
    for sink in sinks:
        add_audit(pipeline.checkpoint, {"sink": sink, **line})


@dataclass(frozen=True)
class Load:
    """What the query does now.

    Attributes:
        idle: it is between two batches.
        behind: more records wait than its last batch took; None: its source does not count.
    """

    idle: bool
    behind: bool | None = None


class Schedule:
    """When audits start. Times are seconds of one steady clock.

    Args:
        sealed_s: seconds since the last seal, at most; None: there is none, and the first audit is due at once.
    """

    def __init__(self, cadence: Cadence, now_s: float, sealed_s: float | None = None) -> None:
        self._cadence = cadence
        self.due_s = now_s if sealed_s is None else now_s + max(0.0, cadence.every_s - max(0.0, sealed_s))

    def may_start(self, now_s: float, load: Load) -> bool:
        """An audit is due, and takes nothing from a batch that waits: a query that is behind has no audits."""
        if now_s < self.due_s or load.behind:
            return False
        return load.idle or (load.behind is False and now_s >= self.due_s + _GAP_S)

    def ended(self, started_s: float, ended_s: float) -> None:
        """An audit ran, and found something or failed."""
        self.due_s = self._cadence.after(started_s, ended_s)


class ContinuousAudit:
    """Audits one after the other, on a thread of its own, until `stop`. Its errors end no audit but their own.

    Args:
        audit: one audit.
        load: what the query does now.
        cancel: makes a running audit end soon; called again and again.
        clock: seconds, steady.
    """

    def __init__(
        self,
        schedule: Schedule,
        audit: Callable[[], None],
        load: Callable[[], Load] = lambda: Load(idle=True, behind=False),
        cancel: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule, self._audit, self._load, self._cancel, self._clock = schedule, audit, load, cancel, clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def step(self) -> bool:
        """Run an audit if one may start; whether one ran."""
        started = self._clock()
        try:
            if not self._schedule.may_start(started, self._load()):
                return False
            self._audit()
        except Exception as error:
            if not self.stopping:
                log.warning("an audit could not run: %s", error)
        self._schedule.ended(started, self._clock())
        return True

    def start(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="delivered-audit", daemon=True)
        self._thread.start()
        return self

    def stop(self, timeout_s: float = STOP_S_MAX) -> bool:
        """Start no more audits, and cut a running one off: the last seal stands. Returns whether it has ended. May be
        called again."""
        self._stop.set()
        thread, deadline = self._thread, time.monotonic() + timeout_s
        while thread is not None and thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(Exception):  # its session has ended
                self._cancel()
            thread.join(_CANCEL_EVERY_S)
        return thread is None or not thread.is_alive()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            self.step()


# Audits of pipeline files, beside their drivers.


@dataclass(frozen=True)
class Audited:
    """What one audit of a file said.

    Attributes:
        reports: by sink, as JSON.
        error: why there are none; empty: there are.
    """

    reports: tuple[dict[str, Any], ...] = ()
    error: str = ""


class Follower:
    """Audits pipeline files, each at its own interval, one after the other.

    Files are read again before each round: a new one is followed, an invalid one is reported and tried again.

    Args:
        paths: files, and folders of them.
        audit: of one file.
        say: called with a line for each audit, and once for a file that is not followed.
        every: instead of the files' own.
        waiting: the sinks of a pipeline for which an audit has something to do.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        audit: Callable[[Path], Audited],
        say: Callable[[str], None],
        every: Cadence | None = None,
        waiting: Callable[[Definition], Sequence[str]] = unsealed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths, self._audit, self._say, self._every, self._clock = paths, audit, say, every, clock
        self._waiting = waiting
        self._schedules: dict[Path, tuple[Cadence, Schedule]] = {}
        self._said: dict[Path, str] = {}

    def step(self, stopped: Callable[[], bool] = lambda: False) -> int:
        """Audit every file that is due; how many."""
        audited = 0
        for path in self._files():
            if stopped():
                break
            audited += self._step_of(path)
        return audited

    def _files(self) -> list[Path]:
        try:
            return files(self._paths)
        except (DeliveredError, OSError) as error:
            self._once(Path(), str(error))
            return []

    def _step_of(self, path: Path) -> bool:
        try:
            pipeline = Definition.from_file(path)
        except DeliveredError as error:
            self._once(path, f"{path}: {error}")
            return False
        cadence = self._every or pipeline.audit_every
        if cadence is None:
            self._once(path, f"{path}: not followed; write audit: {{every: 15 min}}, or give --every")
            self._schedules.pop(path, None)
            return False
        self._said.pop(path, None)
        known = self._schedules.get(path)
        if known is None or known[0] != cadence:
            known = cadence, Schedule(cadence, self._clock(), sealed_s(seals_now(pipeline)))
            self._schedules[path] = known
        started = self._clock()
        if not known[1].may_start(started, Load(idle=True, behind=False)):
            return False
        if not self._waiting(pipeline):
            known[1].ended(started, started)
            return False
        done = self._audit(path)
        known[1].ended(started, self._clock())
        if done.error:
            record_failure(pipeline, pipeline.sink_names, done.error)
        for report in done.reports:
            self._say(_line(report))
        return True

    def _once(self, path: Path, text: str) -> None:
        if self._said.get(path) != text:
            self._said[path] = text
            self._say(text)


def _line(report: dict[str, Any]) -> str:
    reasons = "; ".join([*report.get("breaches", ()), *report.get("unknowns", ())])
    found = f"{report['verdict']}: {reasons}" if reasons else str(report["verdict"])
    return f"{report['pipeline']} {report['sink']}: {found}, in {report.get('seconds', 0.0):.1f} s"


class AuditProcess:
    """`delivered audit` of one file in a process of its own: pipelines differ in Spark's configuration and in modules,
    and none keeps memory between two audits."""

    def __init__(self, more: Sequence[str] = ()) -> None:
        self._more = tuple(more)
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._ended = False

    def __call__(self, path: Path) -> Audited:
        command = [sys.executable, "-m", "delivered.cli.main", "audit", str(path), "-o", "json", *self._more]
        with self._lock:
            if self._ended:
                return Audited()
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, errors = self._process.communicate()
        if self._ended:
            return Audited()
        try:
            found = json.loads(out)
        except ValueError:
            return Audited(error=out.strip() or errors.strip() or f"exit code {self._process.returncode}")
        if isinstance(found, dict) and (failed := found.get("error")):
            return Audited(error=f"[{failed['code']}] {failed['message']} Next: {failed['next']}")
        return Audited(tuple(found if isinstance(found, list) else [found]))

    def end(self) -> None:
        """Cut a running audit off, for good: the last seal stands."""
        with self._lock:
            self._ended = True
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
