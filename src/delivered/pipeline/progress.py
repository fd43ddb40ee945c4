"""Progress of a running pipeline, from its ledger: what is decided, not what was attempted."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from delivered.contract.powers import CountsLeftOut
from delivered.contract.sink import Member, SinkGroup
from delivered.engine.context import open_ledger
from delivered.ledger.ledger import Ledger
from delivered.model.errors import DeliveredError
from delivered.model.patience import within
from delivered.pipeline.definition import Definition
from delivered.source.lag import lag

_RATE_OVER_S = 10.0
_LOOK_S_MAX = 1.0


class Progress:
    """
    Attributes:
        batch: the newest decided batch; None: none yet.
        records: decided since `watch` began, at all sinks; given_up: the same, for at_most_once.
        left_out: of these, rows that a table did not take, by kind: "conflict", "constraint".
        rate: records per second over the last ten seconds: 0 when nothing arrives.
        lag: offsets between what the last batch read and the end of its sources; None: a source does not count them.
    """

    def __init__(
        self,
        ledger: Ledger,
        sources: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
        left_out: Callable[[], Counter[str]] = Counter,
    ) -> None:
        self._ledger = ledger
        self._sources = sources
        self._left_out = left_out
        self._window: deque[tuple[float, int]] = deque()
        self.lag: int | None = None
        self._first: tuple[int, int, int, Counter[str]] | None = None
        self._looked = 0.0
        self.batch: int | None = None
        self.batches = 0
        self.records = 0
        self.given_up = 0
        self.left_out = Counter[str]()
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
        behind = [lag(s) for s in self._sources()]
        self.lag = sum(n for n in behind if n is not None) if behind and None not in behind else None

    def _look_at_ledger(self) -> None:
        try:
            with within(_LOOK_S_MAX):
                last = self._ledger.look().last
                newest = last.batch if last is not None else -1
                counted = self._left_out() if self._first is None or newest != self.batch else self.left_out
        except DeliveredError:
            return
        batch, records, given_up = -1, 0, 0
        if last is not None:  # several sinks: what each of them got
            batch = last.batch
            records = last.total.count + sum(a.total.count for a in last.others.values())
            given_up = last.given_up.count + sum(a.given_up.count for a in last.others.values())
        if self._first is None:
            self._first = (batch, records, given_up, counted)
            self.batch = batch if batch >= 0 else None
            return
        if batch == self.batch or batch < 0:
            return
        self.batch, self.batches = batch, batch - self._first[0]
        self.records, self.given_up = records - self._first[1], given_up - self._first[2]
        self.left_out = counted - self._first[3]

    @property
    def shown(self) -> tuple[Any, ...]:
        """Differs when there is something new to show."""
        return (self.batch, self.records, self.given_up, round(self.rate), self.lag)

    @property
    def totals(self) -> str:
        """For display: "4 batches, 10,000 records"."""
        lost = f", {self.given_up:,} given up" if self.given_up else ""
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in sorted(self.left_out.items()))
        lost += f", {self.left_out.total():,} not taken by a table ({kinds})" if kinds else ""
        return f"{self.batches:,} {_plural(self.batches, 'batch', 'batches')}, {self.records:,} records{lost}"

    @property
    def text(self) -> str:
        """One line for display."""
        behind = f"  lag {self.lag:,}" if self.lag is not None else ""
        if self.batches == 0:
            return f"waiting for records{behind}"
        return f"batch {self.batch}  {self.totals}  {self.rate:,.0f} records/s{behind}"

    def to_json(self) -> dict[str, Any]:
        return {
            "event": "progress",
            "batch": self.batch,
            "batches": self.batches,
            "records": self.records,
            "given_up": self.given_up,
            "left_out": dict(self.left_out),
            "records_per_second": round(self.rate, 1),
            "lag": self.lag,
        }


@contextlib.contextmanager
def watch(pipeline: Definition, query: Any) -> Iterator[Progress]:
    """Progress of a query from `Pipeline.start`; counts from now.

    Args:
        query: Spark's StreamingQuery.
    """
    spec = pipeline.spec
    sink = spec.open()
    scope = spec.scope(sink, str(query.id))
    ledger = open_ledger(sink, scope)
    members = sink.members if isinstance(sink, SinkGroup) else (Member(sink.name, sink),)
    conditional = [m for m in members if m.sink.capability().write.conditional]
    committers = [m.sink.committer(replace(scope, sink=m.name)) for m in conditional]

    def left_out() -> Counter[str]:
        return sum((Counter(c.left_out()) for c in committers if isinstance(c, CountsLeftOut)), Counter())

    try:
        progress = Progress(ledger, lambda: _reported(query), left_out)
        progress.refresh()
        yield progress
    finally:
        ledger.close()
        for committer in committers:
            committer.close()


def _reported(query: Any) -> Sequence[Mapping[str, Any]]:
    """Spark's status of the sources, from its last report: at least every ten seconds."""
    with contextlib.suppress(Exception):  # the query may have ended meanwhile
        progress = query.lastProgress
        if progress is not None:
            return list(json.loads(progress.json if hasattr(progress, "json") else json.dumps(progress))["sources"])
    return ()


def _plural(count: int, one: str, many: str) -> str:
    return one if count == 1 else many
