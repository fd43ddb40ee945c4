"""What `tests/broker/test_audit_expired.py` shows without Spark, in Spark jobs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.orders import ROWS, states
from tests.support.topic_orders import DAY_MS, TopicOrders

from delivered.audit.evidence import Verdict
from delivered.audit.spark.comparison import in_spark
from delivered.connectors.kafka import retention

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def select(frames: Mapping[str, DataFrame]) -> DataFrame:
    (frame,) = frames.values()
    return frame.select("key", "value")


@pytest.mark.matrix
def test_batches_that_retention_reached_are_unknown_and_the_others_are_judged(
    kafka: Any, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_now_ms", lambda: time.time_ns() // 1_000_000 + DAY_MS)
    orders = TopicOrders(tmp_path, kafka=kafka, transform=select, comparing=partial(in_spark, spark))
    orders.run(4)
    orders.expire(1)
    report = orders.audit()
    assert (report.verdict, report.breaches) == (Verdict.UNKNOWN, []), report
    assert (report.counts.sent, report.counts.lost, report.counts.unexpected) == (2 * ROWS, 0, 0)
    assert report.counts.earlier == report.counts.delivered - 2 * ROWS > 0
    assert states(orders) == [(0, 1, Verdict.UNKNOWN, False), (2, 3, Verdict.HELD, True)]
