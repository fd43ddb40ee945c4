"""A small `make totals`, killed, and the audit that recomputes it."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from examples import totals
from tests.support.halted import killed

import delivered
from delivered.audit.evidence import Counts, Damage, Verdict

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.matrix
@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_totals_equal_a_recomputation_to_the_cent(
    alone: bool, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after a decision; by itself, a second time before Spark logs the batch."""
    table, decided = totals.events(6_000), "commit.decide:after@batch=1"
    if alone:
        result = totals.run("update", table, (decided, "log:before@batch=7"), tmp_path, print)
    else:
        monkeypatch.setattr(totals, "BATCHES", 4)
        file = totals.described("update", table, tmp_path)
        killed([sys.executable, "-m", "delivered.cli.main", "run", str(file)], decided, tmp_path)
        assert delivered.Pipeline.from_file(file).start(spark).awaitTermination(180)
        result = totals.compared("update", table, tmp_path, kills=1)
    assert (result.missing, result.extra, result.different) == (0, 0, 0)
    assert result.recomputed_equal
    assert result.rows > 100
    _recompute_finds_every_damage(spark, tmp_path, result.rows)


def _recompute_finds_every_damage(spark: SparkSession, folder: Path, rows: int) -> None:
    pipeline = delivered.Pipeline.from_file(folder / "totals.yaml")
    report = pipeline.audit(spark, recompute=True)
    assert report.verdict is Verdict.HELD, str(report)
    assert report.counts == Counts(rows, rows)
    with closing(sqlite3.connect(folder / "revenue.db")) as connection, connection:
        (cent, gone) = connection.execute("SELECT carrier, day, revenue FROM revenue ORDER BY 1, 2 LIMIT 2").fetchall()
        more = str(round(float(cent[2]) + 0.01, 2))
        connection.execute("UPDATE revenue SET revenue = ? WHERE carrier = ? AND day = ?", (more, *cent[:2]))
        connection.execute("DELETE FROM revenue WHERE carrier = ? AND day = ?", gone[:2])
        connection.execute("INSERT INTO revenue SELECT 'XX', day, flights, revenue FROM revenue LIMIT 1")
    report = pipeline.audit(spark, recompute=True)
    assert report.verdict is Verdict.BROKEN
    assert report.counts == Counts(rows, rows, lost=1, altered=1, unexpected=1)
    assert report.continuation is not None
    (seal,) = report.continuation.seals
    assert (seal.number, seal.first, seal.verdict, seal.total.counts) == (1, 0, Verdict.BROKEN, report.counts)
    named = {d: [json.loads(s.id) for s in report.samples_of(d)] for d in (Damage.ALTERED, Damage.LOST)}
    assert named == {
        Damage.ALTERED: [{"carrier": cent[0], "day": cent[1]}],
        Damage.LOST: [{"carrier": gone[0], "day": gone[1]}],
    }
    assert [json.loads(s.id)["carrier"] for s in report.samples_of(Damage.UNEXPECTED)] == ["XX"]
    assert "rows differ in: revenue (1)" in report.notes
    # A row that nobody sent may be somebody else's; what proves nothing is no breach.
    assert any("possibly foreign" in reason for reason in report.unknowns)
    assert replace(report, counts=replace(report.counts, lost=0, altered=0)).verdict is Verdict.UNKNOWN
    assert not replace(report, uncertain=(Damage.LOST, Damage.ALTERED)).breaches
