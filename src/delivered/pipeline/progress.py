"""Progress of a running pipeline, from its ledger: what is decided, not what was attempted."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from delivered.checkpoint import is_done
from delivered.engine.context import open_shared_ledger
from delivered.ledger import Ledger
from delivered.model.errors import DeliveredError
from delivered.model.patience import within
from delivered.pipeline.definition import Definition
from delivered.source import lag

_RATE_OVER_S = 10.0
_LOOK_S_MAX = 1.0
WAITING = "waiting"
Reports = Callable[[Any], Iterator[Mapping[str, Any]]]
_IDLE = ("Waiting", "Stopped", "Terminated")


class Progress:
    """
    Attributes:
        batch: the newest decided batch; None: none yet.
        records: decided since `watch` began, at all sinks; given_up: the same, for at_most_once.
        skipped: of these, rows that a table did not accept, by kind: "conflict", "constraint".
        late: rows that Spark dropped as older than the watermark; an aggregation counts them after it grouped a task's.
        rate: records per second over the last ten seconds: 0 when nothing arrives.
        lag: offsets between what the last batch read and the end of its sources; None: a source does not count them.
        step: what the running batch does, as seen from outside: "plan", "stage" (until it is decided), "apply"; or
            "waiting".
    """

    def __init__(
        self,
        ledger: Ledger,
        reports: Callable[[str], Sequence[Mapping[str, Any]]] = lambda _: (),
        skipped: Callable[[], Counter[str]] = Counter,
        step: Callable[[int | None], str] = lambda _: WAITING,
    ) -> None:
        self._ledger = ledger
        self._step = step
        self.step = WAITING
        self._reports = reports
        self._skipped = skipped
        self._window: deque[tuple[float, int]] = deque()
        self.lag: int | None = None
        self._first: tuple[int, int, int, Counter[str]] | None = None
        self._looked = 0.0
        self.batch: int | None = None
        self.batches = 0
        self.records = 0
        self.given_up = 0
        self.skipped = Counter[str]()
        self.late = 0
        self._reported = ""
        self.rate = 0.0

    def refresh(self, every_s: float = 0.0) -> None:
        """Read the ledger, unless it was read less than `every_s` ago. If it does not answer, nothing changes."""
        now = time.monotonic()
        if self._first is not None and now - self._looked < every_s:
            return
        self._looked = now
        self._look_at_ledger()
        self._window.append((now, self.records))
        while len(self._window) > 2 and now - self._window[1][0] >= _RATE_OVER_S:
            self._window.popleft()
        first_at, first = self._window[0]
        self.rate = (self.records - first) / max(now - first_at, 1.0)
        self._read_reports()
        self.step = self._step(self.batch)

    def _read_reports(self) -> None:
        reports = self._reports(self._reported)
        for report in reports:
            self.late += sum(int(o.get("numRowsDroppedByWatermark", 0)) for o in report["stateOperators"])
        if reports:
            self._reported = reports[-1]["timestamp"]
            behind = [lag(s) for s in reports[-1]["sources"]]
            self.lag = sum(n for n in behind if n is not None) if behind and None not in behind else None

    def _look_at_ledger(self) -> None:
        try:
            with within(_LOOK_S_MAX):
                last = self._ledger.look().last
                newest = last.batch if last is not None else -1
                counted = self._skipped() if self._first is None or newest != self.batch else self.skipped
        except DeliveredError:
            return
        batch, records, given_up = -1, 0, 0
        if last is not None:  # several sinks: what each of them got
            batch = last.batch
            records = sum(a.total.count for a in last.accounts.values())
            given_up = sum(a.given_up.count for a in last.accounts.values())
        if self._first is None:
            self._first = (batch, records, given_up, counted)
            self.batch = batch if batch >= 0 else None
            return
        if batch == self.batch or batch < 0:
            return
        self.batch, self.batches = batch, batch - self._first[0]
        self.records, self.given_up = records - self._first[1], given_up - self._first[2]
        self.skipped = counted - self._first[3]

    @property
    def shown(self) -> tuple[Any, ...]:
        """Differs when there is something new to show."""
        return (self.batch, self.records, self.given_up, round(self.rate), self.lag)

    @property
    def totals(self) -> str:
        """For display: "4 batches, 10,000 records"."""
        lost = f", {self.given_up:,} given up" if self.given_up else ""
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(self.skipped.items()))
        lost += f", {self.skipped.total():,} not accepted by a table ({kinds})" if kinds else ""
        lost += f", {self.late:,} rows dropped as late" if self.late else ""
        return f"{self.batches:,} {'batch' if self.batches == 1 else 'batches'}, {self.records:,} records{lost}"

    @property
    def text(self) -> str:
        """One line for display."""
        behind = f"  lag {self.lag:,}" if self.lag is not None else ""
        if self.batches == 0:
            return f"{'waiting for records' if self.step == WAITING else self.step}{behind}"
        return f"batch {self.batch}  {self.totals}  {self.rate:,.0f} records/s{behind}  {self.step}"

    def to_json(self) -> dict[str, Any]:
        return {
            "event": "progress",
            "batch": self.batch,
            "batches": self.batches,
            "records": self.records,
            "given_up": self.given_up,
            "left_out": dict(self.skipped),
            "late": self.late,
            "records_per_second": round(self.rate, 1),
            "lag": self.lag,
            "step": self.step,
        }


@contextlib.contextmanager
def watch(pipeline: Definition, query: Any, recent: Reports) -> Iterator[Progress]:
    """Progress of a query from `Pipeline.start`; counts from now.

    Args:
        query: Spark's StreamingQuery.
        recent: its reports, newest first.
    """
    spec = pipeline.spec
    sinks = spec.open()
    scope = spec.scope(sinks, str(query.id))
    ledger = open_shared_ledger(sinks, scope)
    conditional = [m for m in sinks.members if m.sink.capability().write.conditional]
    committers = [m.sink.committer(replace(scope, sink=m.name)) for m in conditional]

    def skipped() -> Counter[str]:
        return sum((Counter(c.skipped()) for c in committers), Counter())

    try:
        step = partial(_step, query, pipeline.checkpoint)
        progress = Progress(ledger, lambda since: _reported(query, recent, since), skipped, step)
        progress.refresh()
        yield progress
    finally:
        ledger.close()
        for committer in committers:
            committer.close()


def _step(query: Any, checkpoint: str, decided: int | None) -> str:
    """By Spark's message, and by the newest decided batch, which Spark has not logged while it is applied."""
    with contextlib.suppress(Exception):  # the query may have ended meanwhile
        doing = query.status["message"]
        if not doing.startswith(_IDLE):
            if decided is not None and not is_done(checkpoint, decided):
                return "apply"
            return "stage" if doing.startswith("Processing") else "plan"
    return WAITING


def _reported(query: Any, recent: Reports, since: str) -> Sequence[Mapping[str, Any]]:
    """Spark's reports later than this time: the last one; of a query with state, all that Spark keeps (100)."""
    with contextlib.suppress(Exception):  # the query may have ended meanwhile
        last = plain_report(query.lastProgress)
        if last["timestamp"] == since or not last["stateOperators"]:
            return [last] * (last["timestamp"] != since)
        return list(takewhile(lambda report: report["timestamp"] > since, recent(query)))[::-1]
    return ()


def plain_report(report: Any) -> Mapping[str, Any]:
    """Spark's report on a batch, as JSON has it: Connect's are dicts."""
    plain: Mapping[str, Any] = json.loads(report.json if hasattr(report, "json") else json.dumps(report))
    return plain
