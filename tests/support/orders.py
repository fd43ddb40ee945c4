"""Pipelines without a transform, and their audits: from a log into SQLite."""

from __future__ import annotations

import json
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from tests.support.compared import by_record
from tests.support.without_spark import deliver

import delivered
from delivered import Pipeline
from delivered.audit.account import Comparing, account, guarded
from delivered.audit.evidence import Counts, Verdict
from delivered.audit.report import AuditReport
from delivered.audit.request import AuditRequest, Sealing
from delivered.audit.seal import Seal, chain_faults
from delivered.checkpoint.history import add_audit
from delivered.checkpoint.sidecar import keep_first
from delivered.connectors.log import append
from delivered.engine.context import open_ledger
from delivered.model.capability import Guarantee
from delivered.model.identity import Scope
from delivered.testing import Task

ROWS = 20


def _keys(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(["key"])


@dataclass
class Audited(ABC):
    """A pipeline and its audits. `transform` maps record batches of the source, for `by_record`."""

    folder: Path
    sent: int = 0
    checkpoint: str = "checkpoint"
    guarantee: str = "exactly_once"
    comparing: Comparing = by_record
    transform: Any = None

    @abstractmethod
    def pipeline(self, **changes: Any) -> Pipeline: ...

    @abstractmethod
    def send(self) -> None:
        """Give the source `ROWS` more records."""

    def run(self, batches: int = 1, *, latest: bool = False) -> None:
        """
        Args:
            latest: a new checkpoint starts at the end of the source.
        """
        pipeline = self.pipeline(**{"new_checkpoint": True} if latest else {})
        if latest:
            keep_first(pipeline.checkpoint, pipeline.sources["source"].source().driver().newest)
        for _ in range(batches):
            self.send()
            assert deliver(pipeline) == 1

    def audit(self, **how: Any) -> AuditReport:
        pipeline = self.pipeline()
        request = AuditRequest(
            pipeline=pipeline.name,
            guarantee=Guarantee(self.guarantee),
            checkpoint=pipeline.checkpoint,
            sources={n: e.source().planned() for n, e in pipeline.sources.items()},
            sink=pipeline.sinks[0].sink(),
            transform=self.transform,
            transform_version="",
            sealing=Sealing(**how),
        )
        return guarded(request, lambda: account(request, self.comparing, lambda _: None), {})

    def record(self, report: AuditReport) -> None:
        """As `Pipeline.audit` does, next to the checkpoint."""
        add_audit(str(self.folder / self.checkpoint), report.summary())

    def seals(self) -> list[Seal]:
        sink = self.pipeline().sinks[0].sink()
        with closing(open_ledger(sink, Scope(self.pipeline().name, sink.name, "any"))) as ledger:
            texts = list(ledger.seals(sink.name))
        assert list(chain_faults(texts)) == []
        return [Seal.parse(t) for t in texts]


@dataclass
class Orders(Audited):
    """From a log into SQLite."""

    def pipeline(self, **changes: Any) -> Pipeline:
        return Pipeline(
            **changes,
            name="orders",
            guarantee=self.guarantee,
            checkpoint=self.folder / self.checkpoint,
            source=delivered.log(str(self.folder / "log"), startingOffsets="earliest"),
            sinks=[delivered.sqlite(str(self.folder / "orders.db"), "orders", ifNotExists=True)],
        )

    def send(self) -> None:
        rows = range(self.sent, self.sent + ROWS)
        table = pa.table({"key": [b"%d" % (n % 5) for n in rows], "value": [b"%d" % n for n in rows]})
        append(str(self.folder / "log"), table, partition_by=2)
        self.sent += ROWS

    def drop(self, batch: int) -> None:
        """The log drops what batches up to this one read."""
        ends = json.loads((self.folder / self.checkpoint / "offsets" / str(batch)).read_text().splitlines()[2])
        table = DeltaTable(str(self.folder / "log"))
        for partition, end in ends["offsets"].items():
            table.delete(f"partition = {partition} AND offset < {end}")
        table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)

    def sql(self, *statements: str) -> None:
        with closing(sqlite3.connect(self.folder / "orders.db")) as connection, connection:
            for statement in statements:
                assert connection.execute(statement).rowcount


@dataclass
class Keys(Orders):
    """The keys alone: batches hold equal rows, which nothing tells apart."""

    transform: Any = staticmethod(_keys)

    def pipeline(self, **changes: Any) -> Pipeline:
        return super().pipeline(transform=delivered.arrow(select=["key"]), **changes)


COPY = "INSERT INTO orders SELECT * FROM orders WHERE value = CAST('{}' AS BLOB)"
DELETE = "DELETE FROM orders WHERE value = CAST('{}' AS BLOB)"
FOREIGN = "INSERT INTO orders (key, value) VALUES (CAST('k' AS BLOB), CAST('foreign' AS BLOB))"


def clean(rows: int) -> Counts:
    return Counts(rows, rows)


def states(orders: Audited) -> list[tuple[int, int, Verdict, bool]]:
    return [(s.first, s.last, s.verdict, s.audited) for s in orders.seals()]


def half(tasks: Sequence[Task]) -> Iterator[object]:
    yield tasks[0]()
    raise RuntimeError("half of a batch")
