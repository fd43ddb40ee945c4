"""`delivered.testing`: batches without Spark, and what a pipeline file and its source hold."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from delivered import DeliveredError, Pipeline
from delivered.connectors.log import append
from delivered.testing import Batches, Task, definition, first_records

VALUES = [f"v{n}".encode() for n in range(20)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    append(str(tmp_path / "log"), pa.table({"key": [b"k"] * len(VALUES), "value": VALUES}))
    path = tmp_path / "shop.yaml"
    pipeline = {
        "pipeline": "shop", "guarantee": "exactly_once", "checkpoint": "checkpoint",
        "source": {"format": "log", "path": str(tmp_path / "log"), "startingOffsets": "latest"},
        "transform": {"select": ["value"]},
        "sinks": [{"format": "sqlite", "path": str(tmp_path / "shop.db"), "table": "orders"}],
    }  # fmt: skip
    path.write_text(json.dumps(pipeline))
    return path


def test_the_first_records_are_read_wherever_the_pipeline_starts(file: Path) -> None:
    assert first_records(file, 100) == [(b"k", value) for value in VALUES]
    assert len(first_records(file, 3)) == 3


def test_a_file_is_data_without_defaults(file: Path) -> None:
    assert definition(file)["transform"] == {"select": ["value"]}
    assert "trigger" not in definition(file)


def test_a_failed_task_leaves_nothing_and_the_batch_runs_again(file: Path, tmp_path: Path) -> None:
    batches = Batches(Pipeline.from_file(file, {"source.startingOffsets": "earliest"}))
    batches.start("incarnation")
    start = batches.driver.initial()
    end = batches.driver.latest(start, None)

    def fail(tasks: list[Task]) -> Iterator[object]:
        yield tasks[0]()
        raise RuntimeError("a task failed")

    def rows() -> list[bytes]:
        with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
            return [value for (value,) in connection.execute("SELECT value FROM orders ORDER BY rowid")]

    with pytest.raises(RuntimeError, match="a task failed"):
        batches.run(0, json.dumps(end), None, start, end, fail)  # type: ignore[arg-type]
    assert rows() == []
    batches.run(0, json.dumps(end), None, start, end, lambda tasks: (task() for task in tasks))
    assert rows() == VALUES
    assert batches.accounts("incarnation")["decided"] == len(VALUES)


def test_what_only_spark_can_run_is_refused(file: Path) -> None:
    sql = json.loads(file.read_text()) | {"transform": {"sql": "SELECT value FROM source"}}
    file.write_text(json.dumps(sql))
    with pytest.raises(DeliveredError, match="LOOP_TRANSFORM"):
        Batches(Pipeline.from_file(file))
