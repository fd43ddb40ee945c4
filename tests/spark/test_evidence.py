"""Evidence of a pipeline's audits: each of two sinks has its own chain, and its own damage."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from tests.support.without_spark import deliver
from typer.testing import CliRunner

from delivered import Pipeline
from delivered.audit.evidence import Verdict
from delivered.audit.evidence_file import read_evidence
from delivered.audit.recheck import Again
from delivered.cli.main import app
from delivered.connectors.log import append

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 20
YAML = """
pipeline: orders
guarantee: at_least_once
checkpoint: {folder}/checkpoint
source: {{format: log, path: {folder}/log, startingOffsets: earliest}}
sinks:
  - {{format: sqlite, name: first, path: {folder}/first.db, table: orders, ifNotExists: true}}
  - {{format: sqlite, name: second, path: {folder}/second.db, table: orders, ifNotExists: true}}
"""


@dataclass
class Two:
    """A pipeline into two sinks, in batches of `ROWS`."""

    folder: Path
    sent: int = 0

    @property
    def file(self) -> Path:
        return self.folder / "orders.yaml"

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline.from_file(self.file)

    def run(self) -> None:
        rows = range(self.sent, self.sent + ROWS)
        table = pa.table({"key": [b"%d" % n for n in rows], "value": [b"%d" % n for n in rows]})
        append(str(self.folder / "log"), table, partition_by=2)
        self.sent += ROWS
        assert deliver(self.pipeline) == 1

    def sql(self, sink: str, statement: str) -> None:
        with closing(sqlite3.connect(self.folder / f"{sink}.db")) as connection, connection:
            assert connection.execute(statement).rowcount == 1

    def audit(self, spark: SparkSession | None) -> dict[str, Verdict]:
        return {sink: self.pipeline.audit(spark, sink=sink).verdict for sink in ("first", "second")}


@pytest.fixture
def two(tmp_path: Path) -> Two:
    (tmp_path / "orders.yaml").write_text(YAML.format(folder=tmp_path))
    return Two(tmp_path)


@pytest.mark.parametrize("where", ["here", pytest.param("spark", marks=pytest.mark.matrix)])
def test_evidence_of_two_sinks_and_what_was_changed_since(two: Two, where: str, request: pytest.FixtureRequest) -> None:
    spark = None if where == "here" else request.getfixturevalue(where)
    two.run()
    assert two.audit(spark) == {"first": Verdict.HELD, "second": Verdict.HELD}
    two.run()
    two.sql("second", "DELETE FROM orders WHERE value = CAST('25' AS BLOB)")
    assert two.audit(spark) == {"first": Verdict.HELD, "second": Verdict.BROKEN}
    file = str(two.folder / "evidence.json")
    assert CliRunner().invoke(app, ["evidence", str(two.file), "--out", file]).exit_code == 0
    evidence, faults = read_evidence(Path(file).read_bytes(), file)
    assert faults == ()
    assert {c.sink: [(r.state.value, r.batches) for r in c.sealed.ranges] for c in evidence.chains} == {
        "first": [("held", "0 to 1")],
        "second": [("held", "0"), ("broken", "1")],
    }
    two.run()
    if where == "here":
        checked = CliRunner().invoke(app, ["evidence", "check", file, str(two.file)])
        assert checked.exit_code == 0, checked.output
        assert "second: batches 0 to 1: verified again" in checked.stdout
    two.sql("first", "UPDATE orders SET value = CAST('x' AS BLOB) WHERE value = CAST('7' AS BLOB)")
    again = two.pipeline.recheck(evidence, spark)
    assert {sink: [(f.outcome, f.batches) for f in found] for sink, found in again.items()} == {
        "first": [(Again.DIFFERS, (0, 0)), (Again.VERIFIED, (1, 1))],
        "second": [(Again.VERIFIED, (0, 1))],
    }
    only = two.pipeline.recheck(evidence, spark, batches=range(1, 2))
    assert [f.batches for found in only.values() for f in found] == [(1, 1), (1, 1)]
    if where == "here":
        checked = CliRunner().invoke(app, ["evidence", "check", file, str(two.file), "--output", "json"])
        assert checked.exit_code == 1
        (fault,) = json.loads(checked.stdout)["faults"]
        assert (fault["kind"], fault["sink"]) == ("differs", "first")
        assert CliRunner().invoke(app, ["evidence", "check", file, str(two.file), "--recompute", "1"]).exit_code == 0
    assert [c.seals for c in two.pipeline.evidence().chains] == [c.seals for c in evidence.chains], "nothing was sealed"
