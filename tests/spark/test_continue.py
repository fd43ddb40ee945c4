"""A continued audit in Spark jobs: what `tests/unit/test_continue.py` shows record by record."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.orders import COPY, DELETE, FOREIGN, ROWS, Orders, clean, states
from tests.support.sweeps import sweep

from delivered.audit.evidence import Counts, Damage, Verdict
from delivered.audit.spark.audit import in_spark
from delivered.connectors.sqlite.read import SqliteScan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def orders(spark: SparkSession, tmp_path: Path) -> Orders:
    return Orders(tmp_path, comparing=partial(in_spark, spark))


@pytest.mark.matrix  # the next one continues in Spark, unit/test_continue.py finds the damage
def test_each_audit_reads_what_is_new(orders: Orders) -> None:
    orders.run(2)
    assert orders.audit().counts == clean(2 * ROWS)
    orders.run()
    orders.sql(COPY.format(3), FOREIGN, DELETE.format(45))
    report = orders.audit()
    assert report.counts == Counts(ROWS, ROWS + 1, lost=1, duplicated=1, unexpected=1), report
    (copy,) = report.samples_of(Damage.DUPLICATED)
    assert copy.source is not None
    assert copy.source.startswith("log-")
    orders.run()
    assert orders.audit().counts == clean(ROWS)
    nothing = orders.audit()
    assert (nothing.verdict, nothing.counts) == (Verdict.HELD, Counts())
    assert [s[2] for s in states(orders)] == [Verdict.HELD, Verdict.BROKEN, Verdict.HELD]


@pytest.mark.parametrize("guarantee", sweep(["exactly_once", "at_least_once"], "exactly_once".__eq__))
def test_an_audit_continues_from_a_recomputation(orders: Orders, spark: SparkSession, guarantee: str) -> None:
    orders.guarantee = guarantee
    orders.run(2)
    assert orders.pipeline().audit(spark, recompute=True).counts == clean(2 * ROWS)
    orders.run()
    report = orders.audit()
    assert (report.verdict, report.counts) == (Verdict.HELD, clean(ROWS)), report
    assert states(orders) == [(0, 1, Verdict.HELD, True), (2, 2, Verdict.HELD, True)]


@pytest.mark.matrix
def test_rows_that_an_earlier_audit_has_read(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are decided while the cut is sought."""
    orders.run()
    position, left = SqliteScan.position, [6]

    def moving(self: SqliteScan) -> Any:
        at = position(self)
        if left[0]:
            left[0] -= 1
            orders.run()
        return at

    with monkeypatch.context() as patched:
        patched.setattr(SqliteScan, "position", moving)
        assert orders.audit().verdict is Verdict.HELD
    (seal,) = orders.seals()
    assert seal.settled < seal.last
    orders.sql(COPY.format(seal.last * ROWS))
    orders.run()
    report = orders.audit()
    batches = orders.sent // ROWS - seal.last - 1
    wanted = Counts(batches * ROWS, batches * ROWS + 1, duplicated=1, in_progress=report.counts.in_progress)
    assert report.counts.lost == report.counts.unexpected == 0
    assert report.counts.duplicated == wanted.duplicated
    assert report.counts.sent == wanted.sent
    assert report.breaches == ["1 records are duplicated; exactly_once promises none"]
