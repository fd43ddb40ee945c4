"""Versions of Spark: what is asked of an earlier one, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.spark.log_to_sqlite import WAIT_S, produce, rows

from delivered.model.errors import InvariantBroken
from delivered.spark import internals, parsed


@pytest.mark.parametrize(
    ("version", "expected"),
    [("4.3.0", (4, 3)), ("4.1.4-amzn-0", (4, 1)), ("4.10.0.dev1", (4, 10)), ("4.0.0.dbr", (4, 0))],
)
def test_versions_of_vendors_are_read(version: str, expected: tuple[int, int]) -> None:
    assert parsed(version) == expected


@pytest.mark.parametrize("entry", ["delivered.register", "delivered.session", "delivered.write_batch"])
def test_an_early_spark_is_refused_by_its_version(tmp_path: Path, entry: str) -> None:
    """As 3.4 is installed: a package without `pyspark.sql.datasource`."""
    package = tmp_path / "pyspark"
    (package / "sql").mkdir(parents=True)
    (package / "__init__.py").write_text("from pyspark.version import __version__\n")
    (package / "version.py").write_text("__version__: str = '3.4.4'\n")
    (package / "sql" / "__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import delivered; {entry}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "[DELIVERED_SPARK_VERSION] This Python has pyspark 3.4.4" in done.stderr
    assert "pip install" not in done.stderr


class Reader:
    """A source with positions 0 to 9, three at a time."""

    def __init__(self, checkpoint: str | None = None) -> None:
        self.query_checkpoint = checkpoint

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return {"at": 0}

    def getDefaultReadLimit(self) -> internals.ReadLimit:  # noqa: N802
        return internals.ReadMaxRows(3)

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:  # noqa: N802
        return {"at": min(9, start["at"] + limit.max_rows)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[Any]:
        return [start, end]


class Asked(internals._Remembering, Reader):  # type: ignore[misc]
    """As Spark before 4.2 asks it."""


def test_a_new_query_starts_where_its_source_does_and_goes_on_by_the_limit() -> None:
    reader = Asked()
    assert [reader.latestOffset()["at"] for _ in range(4)] == [3, 6, 9, 9]


def test_a_restarted_query_goes_on_behind_the_batch_that_spark_names_first() -> None:
    reader = Asked()
    reader.partitions({"at": 3}, {"at": 6})
    assert reader.latestOffset() == {"at": 9}


def test_a_position_that_nothing_names_stops_a_query_with_batches(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "metadata").write_text('{"id": "5b2f"}')
    reader = Asked(str(tmp_path))
    assert reader.latestOffset() == {"at": 3}
    (tmp_path / "offsets" / "0").write_text("v1\n{}\n{}")
    with pytest.raises(InvariantBroken, match="DELIVERED_START_UNKNOWN"):
        Asked(str(tmp_path)).latestOffset()


@pytest.mark.matrix
@pytest.mark.parametrize("end", ["source", "sink"])
def test_available_now_reads_batch_after_batch_what_a_limit_divides(spark: Any, tmp_path: Path, end: str) -> None:
    """Whichever end of the query names the checkpoint; and again after a restart."""
    checkpoint = {"checkpointLocation": str(tmp_path / "checkpoint")}
    for start, count in ((0, 100), (100, 50)):
        produce(tmp_path / "in", start, count)
        source = spark.readStream.format("delivered_log").option("path", str(tmp_path / "in"))
        source = source.option("maxOffsetsPerTrigger", "30").options(**checkpoint if end == "source" else {})
        sink = source.load().select("key", "value").writeStream.format("delivered_sqlite").options(**checkpoint)
        sink = sink.option("path", str(tmp_path / "out.db")).option("table", "orders").queryName(f"orders-{end}")
        query = sink.option("guarantee", "exactly_once").trigger(availableNow=True).start()
        assert query.awaitTermination(WAIT_S) and query.exception() is None
        assert rows(tmp_path) == start + count
    assert {path.name for path in (tmp_path / "checkpoint" / "commits").glob("[0-9]*")} == {*"012345"}
