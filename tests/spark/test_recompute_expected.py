"""Compare-and-set, recomputed: `expectedVersion`, judged row by row in the order of arrival."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import delivered
from delivered.audit.evidence import Counts, Verdict
from delivered.connectors.log import append

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from delivered.audit.report import AuditReport

Row = tuple[str, int, int | None]
"""Key, version, and the version that it expects."""
SQL = """
SELECT CAST(key AS STRING) AS k, CAST(t[0] AS BIGINT) AS version, CAST(nullif(t[1], '') AS BIGINT) AS was
FROM (SELECT key, split(CAST(value AS STRING), ',') AS t FROM source)
"""
PER_BATCH = 12
CHAIN: list[Row] = [(f"k{k}", v, v - 1 or None) for v in range(1, 10) for k in range(4)]
"""Versions 1 to 9 of four keys, three of each key in a batch."""
MISSING: list[Row] = [*CHAIN[:20], ("k0", 9, 3), ("k1", 9, None), ("k9", 2, 1), ("k2", 3, 5), *CHAIN[20:]]
"""Three rows that do not find what they expect; the fourth sets a version back, so that what follows misses, too."""


def after(rows: Sequence[Row]) -> tuple[dict[str, int], int]:
    """The oracle: the table, and how many rows missed."""
    table: dict[str, int] = {}
    missed = 0
    for key, version, was in rows:
        if table.get(key) == was:
            table[key] = version
        else:
            missed += 1
    return table, missed


class Table:
    def __init__(self, spark: SparkSession, folder: Path, rows: Sequence[Row], sql: str = SQL, **sink: Any) -> None:
        keys = [key.encode() for key, *_ in rows]
        values = [f"{version},{was or ''}".encode() for _, version, was in rows]
        append(str(folder / "in"), pa.table({"key": keys, "value": values}))
        self.spark, self.database = spark, folder / "out.db"
        mode = {"mode": "upsert", "keyColumns": "k", "versionColumn": "version", "expectedVersion": "was"}
        self.pipeline = delivered.Pipeline(
            name="versions",
            guarantee="exactly_once",
            checkpoint=folder / "checkpoint",
            source=delivered.log(str(folder / "in"), maxOffsetsPerTrigger=PER_BATCH),
            transform=sql,
            sinks=[delivered.sqlite(str(self.database), "rows", **mode, **sink)],
            trigger="available_now",
        )

    def change(self, statement: str) -> None:
        with closing(sqlite3.connect(self.database)) as connection, connection:
            connection.execute(statement)

    def run(self) -> dict[str, int]:
        self.pipeline.start(self.spark).awaitTermination(120)
        with closing(sqlite3.connect(self.database)) as connection:
            return dict(connection.execute("SELECT k, version FROM rows"))

    def audit(self) -> AuditReport:
        return self.pipeline.audit(self.spark, recompute=True)


@pytest.mark.matrix
def test_rows_that_all_met_their_version_leave_nothing_open(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(spark, tmp_path, CHAIN)
    assert table.run() == after(CHAIN)[0]
    report = table.audit()
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts(4, 4)), str(report)
    assert any("in the ledger's 3 batches" in note for note in report.notes)
    table.change("UPDATE rows SET version = 8 WHERE k = 'k1'")
    table.change("DELETE FROM rows WHERE k = 'k2'")
    report = table.audit()
    assert (report.verdict, report.counts) == (Verdict.BROKEN, Counts(4, 3, lost=1, altered=1)), str(report)


@pytest.mark.matrix
def test_rows_that_missed_their_version_are_recomputed_and_damage_is_unknown(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The greatest version of a key is not what stays. Another writer explains damage as well."""
    expected, missed = after(MISSING)
    assert missed > 3 and expected != {k: max(v for n, v, _ in MISSING if n == k) for k in expected}
    table = Table(spark, tmp_path, MISSING, onConflict="dead_letter")
    assert table.run() == expected
    report = table.audit()
    assert (report.verdict, report.counts) == (Verdict.HELD, Counts(4, 4)), str(report)
    table.change("UPDATE rows SET version = version + 1 WHERE k = 'k0'")
    report = table.audit()
    assert (report.verdict, report.counts.altered, report.breaches) == (Verdict.UNKNOWN, 1, []), str(report)
    assert any(f"{missed} rows did not find their was" in reason for reason in report.unknowns), report.unknowns


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("before", "rows", "counts", "says"),
    [
        pytest.param(5, [("k1", 6, 5)], Counts(1, 2, unexpected=1), "counts 0 rows", id="another row"),
        pytest.param(6, [("k1", 6, None)], Counts(2, 2), "counts 1 rows", id="nothing differs"),
    ],
)
def test_a_row_that_stood_before_makes_the_verdict_unknown(
    spark: SparkSession, before: int, rows: list[Row], counts: Counts, says: str, tmp_path: Path
) -> None:
    """Whether a row was right to be written depends on that row, which is not in the source."""
    table = Table(spark, tmp_path, [("k0", 1, None), *rows, ("k1", 7, 6)], onConflict="dead_letter")
    table.change("CREATE TABLE rows (k TEXT PRIMARY KEY, version BIGINT)")
    table.change(f"INSERT INTO rows VALUES ('k1', {before})")
    assert table.run() == {"k0": 1, "k1": 7}
    report = table.audit()
    assert (report.verdict, report.breaches, report.counts) == (Verdict.UNKNOWN, [], counts), str(report)
    assert any(says in u for u in report.unknowns), report.unknowns


@pytest.mark.recompute(
    "`expectedVersion`",
    "in batches, row by row in the order of arrival",
    "everything, if a shuffle may have changed the order of a key's rows",
)
@pytest.mark.matrix
def test_a_shuffle_may_change_the_order_of_a_keys_rows(spark: SparkSession, tmp_path: Path) -> None:
    table = Table(spark, tmp_path, CHAIN, f"SELECT /*+ REPARTITION(2, k) */ * FROM ({SQL})")
    table.run()
    report = table.audit()
    assert report.verdict is Verdict.HELD, str(report)
    table.change("UPDATE rows SET version = 8 WHERE k = 'k1'")
    report = table.audit()
    assert (report.verdict, report.counts.altered, report.breaches) == (Verdict.UNKNOWN, 1, []), str(report)
    assert any("several rows have the same k" in u for u in report.unknowns), report.unknowns
