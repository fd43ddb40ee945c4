"""What `tests/broker/test_audit_expired.py` shows without Spark, in Spark jobs: `Pipeline.audit` with a session."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.orders import ROWS, states
from tests.support.topic_orders import DAY_MS, TopicOrders

from delivered.audit.evidence import Counts, Verdict
from delivered.connectors.kafka import reader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOST = b"%d" % (3 * ROWS + 7)


@pytest.fixture
def a_day_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the audit: the topics' retention may have removed what was just written."""
    monkeypatch.setattr(reader, "_now_ms", lambda: time.time_ns() // 1_000_000 + DAY_MS)


@pytest.mark.matrix
@pytest.mark.usefixtures("a_day_later")
def test_batches_that_retention_reached_are_unknown_and_the_others_are_judged(
    kafka: Any, spark: SparkSession, tmp_path: Path
) -> None:
    orders = TopicOrders(tmp_path, kafka=kafka)
    orders.run(4)
    orders.expire(1)
    report = orders.pipeline().audit(spark)
    assert "pyspark" in report.versions
    assert (report.verdict, report.breaches) == (Verdict.UNKNOWN, []), report
    assert (report.counts.sent, report.counts.lost, report.counts.unexpected) == (2 * ROWS, 0, 0)
    assert report.counts.earlier == report.counts.delivered - 2 * ROWS > 0
    assert states(orders) == [(0, 1, Verdict.UNKNOWN, False), (2, 3, Verdict.HELD, True)]
    orders.run()
    assert orders.pipeline().audit(spark).verdict is Verdict.HELD


@pytest.mark.matrix
@pytest.mark.usefixtures("a_day_later")
def test_retention_hides_no_loss_behind_it(kafka: Any, spark: SparkSession, tmp_path: Path) -> None:
    orders = TopicOrders(tmp_path, kafka=kafka, named={"name": "orders"})
    orders.run(4)
    orders.lose(LOST)
    orders.expire(1)
    report = orders.pipeline().audit(spark)
    assert (report.verdict, report.counts.lost) == (Verdict.BROKEN, 1), report
    assert report.continuation is not None
    added = [(s.first, s.last, s.verdict, s.audited) for s in report.continuation.seals]
    assert added == [(0, 1, Verdict.UNKNOWN, False), (2, 3, Verdict.BROKEN, True)]


@pytest.mark.matrix
def test_what_is_too_young_for_retention_is_lost(kafka: Any, spark: SparkSession, tmp_path: Path) -> None:
    orders = TopicOrders(tmp_path, kafka=kafka)
    orders.run(3)
    orders.expire(1)
    report = orders.pipeline().audit(spark)
    assert report.verdict is Verdict.BROKEN and report.counts.lost > 0, report
    assert report.counts == Counts(3 * ROWS, 3 * ROWS - report.counts.lost, lost=report.counts.lost)
