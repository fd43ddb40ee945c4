"""Checkpoints in S3 and in HDFS: Spark writes them, and Python reads them with the same settings."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.spark.log_to_sqlite import produce
from tests.support.hadoop import Hdfs, s3a_jars, s3a_settings
from tests.support.halted import killed

import delivered
from delivered.checkpoint import open_folder, read, read_logged

RECORDS, AT_ONCE = 3_000, 600
CRASHES = "commit.decide:before@batch=1,commit.apply:before@batch=2,log:before@batch=3"
ROOT = Path(__file__).parents[2]


def _pipeline(folder: Path, checkpoint: str, conf: dict[str, str]) -> Path:
    file = folder / "orders.yaml"
    made = {
        "pipeline": "orders",
        "guarantee": "exactly_once",
        "checkpoint": checkpoint,
        "master": "local[2]",
        "trigger": "available_now",
        "spark": {"spark.driver.memory": "512m", **conf},
        "source": {
            "format": "log", "path": str(folder / "in"), "startingOffsets": "earliest", "maxOffsetsPerTrigger": AT_ONCE,
        },
        "sinks": [{"format": "sqlite", "path": str(folder / "out.db"), "table": "orders"}],
    }  # fmt: skip
    file.write_text(json.dumps(made))
    return file


def _run(file: Path, env: dict[str, str]) -> None:
    done = subprocess.run(_command(file), capture_output=True, text=True, timeout=900, check=False, env=env)
    assert done.returncode == 0, done.stderr[-6000:]


def _command(file: Path) -> list[str]:
    return [sys.executable, str(ROOT / "tests" / "spark" / "apps" / "run_file.py"), str(file)]


def _written_once(folder: Path) -> None:
    with sqlite3.connect(folder / "out.db") as connection:
        found = connection.execute("SELECT count(*), count(DISTINCT value) FROM orders").fetchone()
    assert found == (RECORDS, RECORDS)


def _without_logins() -> dict[str, str]:
    """Nothing but Hadoop's settings says how to reach a store."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "HADOOP_"))}


@pytest.mark.matrix
@pytest.mark.timeout(1_800)
def test_a_checkpoint_in_s3_with_sparks_settings(s3: dict[str, str], tmp_path: Path, monkeypatch: Any) -> None:
    checkpoint = f"s3a://lake/{tmp_path.name}/orders"
    conf = {f"spark.hadoop.{k}": v for k, v in s3a_settings(s3).items()} | {"spark.driver.extraClassPath": s3a_jars()}
    file = _pipeline(tmp_path, checkpoint, conf)
    produce(tmp_path / "in", 0, RECORDS)
    killed(_command(file), CRASHES, tmp_path, _without_logins())
    _run(file, _without_logins())
    _written_once(tmp_path)
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    status = delivered.Pipeline.from_file(file).status()  # without Spark
    assert status.problems == () and read_logged(checkpoint)[1] == RECORDS // AT_ONCE - 1, status


@pytest.mark.matrix
@pytest.mark.timeout(1_800)
def test_settings_that_code_gave_to_hadoop(s3: dict[str, str], tmp_path: Path) -> None:
    produce(tmp_path / "in", 0, RECORDS)
    app = ROOT / "tests" / "spark" / "apps" / "own_store.py"
    settings = json.dumps(s3a_settings(s3))
    command = [sys.executable, str(app), str(tmp_path), f"s3a://lake/{tmp_path.name}", s3a_jars(), settings]
    env = {**_without_logins(), "PYSPARK_PYTHON": sys.executable}  # the user's session is told by nobody else
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=env)
    assert done.returncode == 0, done.stderr[-6000:]
    for name in ("out", "own"):
        with sqlite3.connect(tmp_path / f"{name}.db") as connection:
            found = connection.execute("SELECT count(*), count(DISTINCT value) FROM orders").fetchone()
        assert found == (RECORDS, RECORDS), name


@pytest.mark.matrix
@pytest.mark.timeout(1_800)
def test_a_checkpoint_in_hdfs(tmp_path: Path) -> None:
    with Hdfs(tmp_path) as hdfs:
        checkpoint = f"{hdfs.url}/checkpoints/orders"
        file = _pipeline(tmp_path, checkpoint, {})
        produce(tmp_path / "in", 0, RECORDS)
        killed(_command(file), CRASHES, tmp_path, _without_logins())
        _run(file, _without_logins())
        _written_once(tmp_path)
        status = delivered.Pipeline.from_file(file).status()
        assert status.problems == () and read_logged(checkpoint)[1] == RECORDS // AT_ONCE - 1, status
        filesystem, path = open_folder(checkpoint)
        assert filesystem.get_file_info(f"{path}/metadata").is_file and read(checkpoint, "offsets/0")


@pytest.mark.matrix
@pytest.mark.timeout(1_800)
def test_a_path_without_a_scheme_is_on_the_default_file_system(tmp_path: Path) -> None:
    with Hdfs(tmp_path) as hdfs:
        file = _pipeline(tmp_path, "/checkpoints/orders", {"spark.hadoop.fs.defaultFS": hdfs.url})
        made = json.loads(file.read_text())
        made["source"]["path"], made["sinks"][0]["path"] = f"file://{tmp_path}/in", str(tmp_path / "out.db")
        file.write_text(json.dumps(made))
        produce(tmp_path / "in", 0, RECORDS)
        _run(file, _without_logins())
        _written_once(tmp_path)
        assert read_logged(f"{hdfs.url}/checkpoints/orders")[1] == RECORDS // AT_ONCE - 1
        assert not Path("/checkpoints").exists()
