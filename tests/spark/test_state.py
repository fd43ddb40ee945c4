"""A pipeline that keeps state between batches: it starts, goes on where it was, and counts every record once."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import delivered
from delivered_lab.verify.systems.log import Log
from delivered_lab.verify.workloads import WORKLOADS, records, windowed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_S = 180.0


@pytest.mark.usefixtures("small_shuffles")
def test_a_pipeline_with_state_starts_goes_on_and_appends_each_window_once(spark: SparkSession, tmp_path: Path) -> None:
    """Spark lets no sink written in Python update, whatever a transform with state would like: such a pipeline was once
    started with outputMode update, and failed before its first batch."""
    workload = WORKLOADS["windowed"]
    sent = records(workload, 1)
    log = Log(tmp_path / "in")
    made = delivered.Pipeline(
        name="windows",
        guarantee="exactly_once",
        checkpoint=tmp_path / "checkpoint",
        source=delivered.log(str(tmp_path / "in"), maxOffsetsPerTrigger=400),
        transform=delivered.transform(windowed, stateful=True, deterministic=True),
        sinks=[delivered.sqlite(str(tmp_path / "out.db"), "windows")],
        trigger="available_now",
    )
    for part in (sent[:700], sent[700:]):
        log.send(part)
        made.start(spark).awaitTermination(WAIT_S)
    assert workload.together is not None
    expected = Counter(workload.together([r.value for r in sent]))
    with sqlite3.connect(tmp_path / "out.db") as connection:
        found = Counter(value for (value,) in connection.execute("SELECT value FROM windows"))
    assert found == expected
