"""Each operator of the verifier in one Spark: what it leaves in a table is what its oracle says, over two starts."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import delivered
from delivered.audit.evidence import Counts, Verdict
from delivered.pipeline.transform import load_function
from delivered_lab.verify.systems.log import Log
from delivered_lab.verify.workloads import TABLE, WORKLOADS, records

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_S = 240.0
OPERATORS = [n for n, w in WORKLOADS.items() if w.oracle is not None]


@pytest.mark.recompute("sessions; aggregates of aggregates", "in batches", "")
@pytest.mark.recompute(
    "`dropDuplicates`, `dropDuplicatesWithinWatermark`",
    "in batches",
    "everything, if copies in one batch differ: which one stays depends on their order",
)
@pytest.mark.recompute(
    "`transformWithState`, `applyInPandasWithState`",
    "in batches",
    "everything, unless you declare `deterministic: true`: a function may depend on the order of rows. "
    "Processing-time timers",
)
@pytest.mark.matrix
@pytest.mark.parametrize("name", OPERATORS)
def test_a_transform_gives_what_its_oracle_says(
    spark: SparkSession, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = WORKLOADS[name]
    assert workload.oracle is not None
    assert workload.python is not None
    sent = records(workload, 1)
    log = Log(tmp_path / "in")
    monkeypatch.setenv(TABLE, str(tmp_path / "table"))
    before = {k: spark.conf.get(k, None) for k in workload.spark}
    for k, v in workload.spark.items():
        spark.conf.set(k, v)
    made = delivered.Pipeline(
        name=name,
        guarantee="exactly_once",
        checkpoint=tmp_path / "checkpoint",
        source=delivered.log(str(tmp_path / "in"), maxOffsetsPerTrigger=workload.rows_per_batch),
        transform=delivered.transform(load_function(workload.python, Path()), stateful=True, deterministic=True),
        sinks=[delivered.sqlite(str(tmp_path / "out.db"), "rows", **workload.sink_options(upserts=True))],
        output_mode=workload.output_mode,
        trigger="available_now",
    )
    try:
        for number, part in enumerate((sent[:400], sent[400:]), 1):
            log.send(part)
            if workload.table is not None:
                workload.table(tmp_path / "table", number)
            made.start(spark).awaitTermination(WAIT_S)
    finally:
        for k, old in before.items():
            spark.conf.unset(k) if old is None else spark.conf.set(k, old)
    with sqlite3.connect(tmp_path / "out.db") as connection:
        rows = connection.execute("SELECT key, value FROM rows").fetchall()
    wanted, found = workload.oracle([r.value for r in sent]), dict(rows)
    assert len(found) == len(rows)
    accepted = workload.accepts or str.__eq__
    wrong = [
        (k, wanted.get(k), found.get(k)) for k in wanted | found if not accepted(wanted.get(k, ""), found.get(k, ""))
    ]
    assert wrong == []
    report = made.audit(spark, recompute=True)
    if workload.table is not None:
        assert report.verdict is Verdict.UNKNOWN
        assert any("a table that is not a stream" in u for u in report.unknowns), report.unknowns
        return
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts(len(rows), len(rows))), str(report)
    replays = name != "totals"
    assert any("in the ledger's" in n for n in report.notes) == replays, report.notes
    with sqlite3.connect(tmp_path / "out.db") as connection:
        gone, altered, copied = connection.execute("SELECT rowid FROM rows ORDER BY 1 LIMIT 3").fetchall()
        connection.execute("DELETE FROM rows WHERE rowid = ?", gone)
        connection.execute("UPDATE rows SET value = '-1 -1' WHERE rowid = ?", altered)
        connection.execute("INSERT INTO rows SELECT 'more', value FROM rows WHERE rowid = ?", copied)
    report = made.audit(spark, recompute=True)
    assert report.verdict is Verdict.BROKEN, str(report)
    by_key = workload.output_mode == "update"
    damage = Counts(lost=1, altered=1, unexpected=1) if by_key else Counts(lost=2, unexpected=2)
    assert replace(report.counts, sent=0, delivered=0) == damage
