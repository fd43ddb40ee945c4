"""How far a running pipeline is, by its ledger: what is decided, not what was attempted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from delivered.contract import Ledger
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope
from delivered.model.patience import within
from delivered.spark.sinks import opened

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from delivered.spark.pipeline import Pipeline


_LOOK_S_MAX = 1.0


class Progress:
    """
    Attributes:
        batch: the newest decided batch; None: none yet.
        records: decided since `watch` began, at all sinks; given_up: the same, of at_most_once.
        rate: records per second between the last two looks at the ledger that differed.
        lag: what Spark says of the source, if it does.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._first: tuple[int, int, int] | None = None
        self._looked = 0.0
        self._changed = time.monotonic()
        self.batch: int | None = None
        self.batches = 0
        self.records = 0
        self.given_up = 0
        self.rate = 0.0

    def refresh(self, every_s: float = 0.0) -> None:
        """Look at the ledger, if the last look is `every_s` ago. A ledger that does not answer now changes nothing."""
        now = time.monotonic()
        if self._first is not None and now - self._looked < every_s:
            return
        self._looked = now
        try:
            with within(_LOOK_S_MAX):
                last = self._ledger.look().last
        except DeliveredError:
            return
        batch, records, given_up = -1, 0, 0
        if last is not None:  # several sinks: what each of them got
            batch = last.batch
            records = last.total.count + sum(a.total.count for a in last.others.values())
            given_up = last.given_up.count + sum(a.given_up.count for a in last.others.values())
        if self._first is None:
            self._first = (batch, records, given_up)
            self.batch = batch if batch >= 0 else None
            return
        if batch == self.batch or batch < 0:
            return
        delivered = records - self._first[1]
        self.rate = (delivered - self.records) / max(now - self._changed, 1e-3)
        self.batch, self.batches = batch, batch - self._first[0]
        self.records, self.given_up, self._changed = delivered, given_up - self._first[2], now

    @property
    def shown(self) -> tuple[Any, ...]:
        """Differs when there is something new to show."""
        return (self.batch, self.records, self.given_up)

    @property
    def totals(self) -> str:
        """For people: "4 batches, 10,000 records"."""
        lost = f", {self.given_up:,} given up" if self.given_up else ""
        return f"{self.batches:,} {_plural(self.batches, 'batch', 'batches')}, {self.records:,} records{lost}"

    @property
    def text(self) -> str:
        """One line for people."""
        if self.batches == 0:
            return "waiting for records"
        return f"batch {self.batch}  {self.totals}  {self.rate:,.0f} records/s"

    def to_json(self) -> dict[str, Any]:
        return {
            "event": "progress",
            "batch": self.batch,
            "batches": self.batches,
            "records": self.records,
            "given_up": self.given_up,
            "records_per_second": round(self.rate, 1),
        }


@contextlib.contextmanager
def watch(pipeline: Pipeline, query: StreamingQuery) -> Iterator[Progress]:
    """Progress of a query from `Pipeline.start`; counts from now."""
    name, sink = opened(pipeline)
    ledger = sink.ledger(Scope(pipeline.name, name, str(query.id)))
    try:
        progress = Progress(ledger)
        progress.refresh()
        yield progress
    finally:
        ledger.close()


def _plural(count: int, one: str, many: str) -> str:
    return one if count == 1 else many
