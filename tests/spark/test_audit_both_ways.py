"""An audit without Spark reports what one in Spark does, of the same pipeline."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.support.sweeps import sweep
from tests.support.without_spark import deliver

import delivered
from delivered import Pipeline
from delivered.audit.evidence import Damage, Verdict
from delivered.audit.local import audit_here
from delivered.audit.report import AuditReport
from delivered.audit.spark.audit import audit_sink
from delivered.connectors.log import append
from delivered.testing import Task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.servers import Kafka

ROWS = 60


def orders(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A third of the rows, and columns of several types; fails for the values 7 and 47."""
    value = pc.cast(pc.cast(batch.column("value"), pa.string()), pa.int64())
    if pc.any(pc.is_in(value, pa.array([7, 47]))).as_py():
        raise ValueError("seven")
    columns = {
        "id": value,
        "key": batch.column("key"),
        "amount": pc.divide(pc.cast(value, pa.float64()), 3.0),
        "text": pc.cast(batch.column("value"), pa.string()),
        "at": batch.column("timestamp"),
    }
    rows = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    return rows.filter(pc.not_equal(pc.bit_wise_and(value, 3), 3))


def plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    value = pc.cast(pc.cast(batch.column("value"), pa.string()), pa.int64())
    return pa.RecordBatch.from_arrays([value, batch.column("key")], names=["id", "key"])


def other(batch: pa.RecordBatch) -> pa.RecordBatch:
    moved = pc.add(plain(batch).column("id"), 1_000)
    return pa.RecordBatch.from_arrays([moved, batch.column("key")], names=["id", "key"])


class Case:
    """A log of `ROWS` records in two partitions, and a pipeline that reads a third of them per batch."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.guarantee = folder, "exactly_once"
        self.transform: Any = delivered.arrow(plain)
        self.sinks = [delivered.sqlite(str(folder / "sink.db"), table="rows")]
        self.options: dict[str, Any] = {"audit": {"id": "id"}}
        self.add(ROWS)

    def add(self, count: int, first: int = 0) -> None:
        log, numbers = self.folder / "log", range(first, first + count)
        values = [str(n).encode() for n in numbers]
        keys = [f"k{n % 5}".encode() if n % 11 else None for n in numbers]
        append(str(log), pa.table({"key": pa.array(keys, pa.binary()), "value": values}), partition_by=2)

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(
            name="ways",
            guarantee=self.guarantee,
            checkpoint=str(self.folder / "checkpoint"),
            source=delivered.endpoint("log", path=str(self.folder / "log"), maxOffsetsPerTrigger=ROWS // 3),
            transform=self.transform,
            sinks=self.sinks,
            **self.options,
        )

    def sql(self, *statements: str) -> None:
        with closing(sqlite3.connect(self.folder / "sink.db")) as connection:
            for statement in statements:
                assert connection.execute(statement).rowcount != 0
            connection.commit()


def clean(case: Case) -> None:
    deliver(case.pipeline)


def damaged(case: Case) -> None:
    deliver(case.pipeline)
    case.sql(
        "DELETE FROM rows WHERE id IN (5, 6)",
        "INSERT INTO rows SELECT * FROM rows WHERE id IN (8, 9)",
        "UPDATE rows SET key = 'other' WHERE id = 10",
        "INSERT INTO rows VALUES (999, 'k1'), (NULL, NULL)",
        "UPDATE rows SET rowid = 1000 WHERE id = 12",
    )


def without_id(case: Case) -> None:
    case.options = {}
    damaged(case)


def ahead(case: Case) -> None:
    """Rows of a batch that started are in the sink, under a guarantee that shows them before the decision."""
    case.guarantee = "at_least_once"
    deliver(case.pipeline)
    case.add(ROWS)
    deliver(case.pipeline, only_plan=True)
    case.sql("INSERT INTO rows VALUES (0, 'k0'), (1, 'k1'), (2, 'k2'), (2, 'k2'), (2, 'k2')")


def given_up(case: Case) -> None:
    case.guarantee = "at_most_once"

    def dies(tasks: Sequence[Task]) -> Iterator[object]:
        yield tasks[0]()
        raise InterruptedError

    with pytest.raises(InterruptedError):
        deliver(case.pipeline, dies)
    deliver(case.pipeline)


def transformed(case: Case) -> None:
    """Rows that fail become dead letters; several types; records are identified by all their columns."""
    case.guarantee = "at_least_once"
    case.transform, case.options = delivered.arrow(orders), {"on_bad_row": "dead_letter"}
    letters = delivered.sqlite(str(case.folder / "sink.db"), table="letters")
    case.options["dead_letter"] = letters
    deliver(case.pipeline)
    case.sql("UPDATE rows SET amount = amount + 1e-9 WHERE id = 20", "DELETE FROM rows WHERE id = 21")


def several(case: Case) -> None:
    case.guarantee = "at_least_once"
    case.sinks = [*case.sinks, delivered.delta(str(case.folder / "delta"), name="delta")]
    deliver(case.pipeline)
    case.sql("DELETE FROM rows WHERE id = 5")


def another_transform(case: Case) -> None:
    """Half of the batches ran with another one."""
    deliver(case.pipeline)
    case.add(ROWS)
    case.transform = delivered.arrow(other)
    deliver(case.pipeline)
    case.sql("DELETE FROM rows WHERE id = 1008")


def nothing_decided(case: Case) -> None:
    deliver(case.pipeline, only_plan=True)


def sink_missing(case: Case) -> None:
    deliver(case.pipeline)
    case.sql("ALTER TABLE rows RENAME TO other")


def source_missing(case: Case) -> None:
    deliver(case.pipeline)
    shutil.rmtree(case.folder / "log")


def columns_missing(case: Case) -> None:
    deliver(case.pipeline)
    case.sql("ALTER TABLE rows DROP COLUMN key")


CASES: dict[str, Callable[[Case], None]] = {
    f.__name__: f
    for f in (
        *(clean, damaged, without_id, ahead, given_up, transformed, several, another_transform, nothing_decided),
        *(sink_missing, source_missing, columns_missing),
    )
}
UNREADABLE = ("sink_missing", "source_missing")


def continued(case: Case) -> None:
    """Batches are sealed; of them, one row is there again, and one is missing that was there."""
    clean(case)
    assert case.pipeline.audit().verdict is Verdict.HELD
    case.add(ROWS, ROWS)
    deliver(case.pipeline)
    case.sql("INSERT INTO rows SELECT * FROM rows WHERE id = 8 LIMIT 1", "DELETE FROM rows WHERE rowid = 70")


def continued_ahead(case: Case) -> None:
    """Rows of sealed batches may lie behind the position where the last audit stopped."""
    ahead(case)
    assert case.pipeline.audit().counts.in_progress
    case.sql("DELETE FROM rows WHERE rowid = 65")
    case.add(ROWS)
    deliver(case.pipeline)


def continued_restored(case: Case) -> None:
    """A row that the sealed batches had lost is there now, twice; and a copy of one that they had not."""
    clean(case)
    case.sql("CREATE TABLE kept AS SELECT * FROM rows WHERE id = 8", "DELETE FROM rows WHERE id = 8")
    assert case.pipeline.audit().verdict is Verdict.BROKEN
    case.add(ROWS, ROWS)
    deliver(case.pipeline)
    case.sql(*["INSERT INTO rows SELECT * FROM kept"] * 2, "INSERT INTO rows SELECT * FROM rows WHERE id = 9")


def continued_equal(case: Case) -> None:
    """As `continued_restored`; the new batches have equal rows."""
    clean(case)
    case.sql("CREATE TABLE kept AS SELECT * FROM rows WHERE id = 8", "DELETE FROM rows WHERE id = 8")
    assert case.pipeline.audit().verdict is Verdict.BROKEN
    case.add(ROWS)
    deliver(case.pipeline)
    case.sql("INSERT INTO rows SELECT * FROM kept", "INSERT INTO rows SELECT * FROM rows WHERE id = 9 LIMIT 1")


CASES |= {f.__name__: f for f in (continued, continued_ahead, continued_restored, continued_equal)}


@pytest.mark.matrix
@pytest.mark.parametrize("name", sweep(CASES, lambda name: name == "damaged"))
def test_both_ways_report_the_same(spark: SparkSession, tmp_path: Path, name: str) -> None:
    case = Case(tmp_path / "first")
    CASES[name](case)
    for sink in case.pipeline.sink_names:
        shutil.copytree(case.folder, tmp_path / "second", dirs_exist_ok=True)
        said: list[str] = []
        here = case.pipeline.audit(sink=sink, progress=said.append)
        assert "pyspark" not in here.versions, said
        shutil.rmtree(case.folder)
        (tmp_path / "second").rename(case.folder)  # without a seal of the other
        there = case.pipeline.audit(spark, sink=sink)
        assert "pyspark" in there.versions
        if name in UNREADABLE:
            assert (here.verdict, there.verdict) == (Verdict.UNKNOWN, Verdict.UNKNOWN)
            assert len(here.unknowns) == len(there.unknowns) == 1
            assert here.counts == there.counts
        else:
            assert content(here) == content(there)
        match name:
            case "damaged":
                assert here.verdict is Verdict.BROKEN
                assert all(here.counts.of(d) for d in Damage)
            case "given_up":
                assert here.counts.lost
                assert here.verdict is Verdict.HELD
            case "ahead":
                assert here.counts.in_progress
                assert here.counts.duplicated
            case "continued_restored":
                assert (here.counts.earlier, here.counts.duplicated, here.counts.unexpected) == (1, 2, 0)
            case "continued_equal":
                assert (here.counts.earlier, here.counts.duplicated, here.counts.unexpected) == (1, 1, 0)
            case "continued":
                assert here.counts.sent == ROWS
                assert (here.counts.duplicated, here.counts.lost) == (1, 1)


@pytest.mark.matrix
def test_both_ways_report_the_same_of_kafka(spark: SparkSession, kafka: Kafka, tmp_path: Path) -> None:
    """Offsets, headers and keys without text; damage by another producer. Without seals."""
    from confluent_kafka import Producer

    source, sink = kafka.topic(2), kafka.topic(2)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})

    def send(topic: str, numbers: Iterable[int]) -> None:
        for n in numbers:
            key = None if n % 7 == 0 else b"\xff%d" % (n % 5)
            producer.produce(topic, key=key, value=b"%d" % n, partition=n % 2, headers={"n": b"%d" % n})
        assert producer.flush(30) == 0

    send(source, range(ROWS))
    servers = {"kafka.bootstrap.servers": kafka.bootstrap, "includeHeaders": "true"}
    pipeline = Pipeline(
        name="ways",
        guarantee="exactly_once",
        checkpoint=str(tmp_path / "checkpoint"),
        source=delivered.endpoint("kafka", subscribe=source, startingOffsets="earliest", **servers),
        transform=delivered.arrow(select=["key", "value", "headers"]),
        sinks=[delivered.endpoint("kafka", topic=sink, **{"kafka.bootstrap.servers": kafka.bootstrap})],
    )
    deliver(pipeline)
    send(sink, (3, 4, 7, 1_000, 1_007))
    here = audit_here(pipeline, None, 20, None, None)
    assert (here.counts.duplicated, here.counts.unexpected) == (3, 2)
    assert content(here) == content(audit_sink(pipeline, spark, None, 20, None, None))


def content(report: AuditReport) -> dict[str, Any]:
    """Without what differs between two runs of one audit."""
    changing = ("seconds", "versions", "sha256", "sealed_at_ms")
    text = json.dumps(report.to_dict())
    kept: dict[str, Any] = json.loads(
        text, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if k not in changing}
    )
    return kept
