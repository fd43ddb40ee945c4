"""`delivered run` as a user runs it: a process, signals, and the sink's content afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import sys
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
import yaml
from tests.spark.cli_help import WAIT_S, running, terminal, until

from delivered.checkpoint.history import runs, samples
from delivered.cli.run import RECORDS, write_example
from delivered.connectors.log import append


def rows(folder: Path) -> int:
    try:
        connection = sqlite3.connect(f"file:{folder / 'orders.db'}?mode=ro", uri=True)
        try:
            return int(connection.execute("SELECT count(*) FROM orders").fetchone()[0])
        finally:
            connection.close()
    except sqlite3.OperationalError:
        return 0  # neither file nor table before the first batch


@pytest.fixture
def example(tmp_path: Path) -> Path:
    return write_example(tmp_path / "example")[0]


@pytest.mark.matrix
def test_run_then_audit(example: Path) -> None:
    with running("run", str(example), "--output", "json") as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    last = json.loads(out.splitlines()[-1])
    assert (last["event"], last["records"], last["batches"]) == ("stopped", RECORDS, 4)
    with running("audit", str(example), "-o", "json") as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert rows(example.parent) == RECORDS
    # Removed rows are detected, with a matching exit code.
    with sqlite3.connect(example.parent / "orders.db") as connection:
        connection.execute("DELETE FROM orders WHERE id = 'order-0007'")
    with running("audit", str(example), "--full") as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1, err
    assert "order-0007" in out


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children of a killed process")
def test_a_killed_run_takes_its_jvm_along(example: Path) -> None:
    """Else a start right after it would take the pipeline for running. Halted, the JVM cannot notice by itself."""
    arguments = ["run", str(example), "-s", "trigger=0 seconds"]
    with running(*arguments, own_group=True) as process:
        until(lambda: rows(example.parent) == RECORDS, process)
        (java,) = (p for p in psutil.Process(process.pid).children() if p.name() == "java")
        java.suspend()
        try:
            process.kill()
            java.wait(10)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                java.kill()


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("Ctrl-C", marks=pytest.mark.matrix)])
def test_a_signal_lets_the_running_batch_finish(example: Path, how: str) -> None:
    """Ctrl-C reaches every process of the terminal's group, including Spark's workers, which must continue."""
    (example.parent / "slow.py").write_text(
        "import time\n\n\ndef slow(batch):\n    if batch.num_rows:\n        time.sleep(0.4)\n    return batch\n"
    )
    text = example.read_text()
    start, end = text.index("transform:"), text.index("sinks:")
    example.write_text(text[:start] + "transform: {arrow: slow:slow, select: [key, value]}\n\n" + text[end:])
    arguments = ["run", str(example), "-s", "source.maxOffsetsPerTrigger=20", "-s", "trigger=0 seconds"]
    with terminal() as (screen, seen), running(*arguments, own_group=True, stderr=screen) as process:
        until(lambda: rows(example.parent) >= 40 and "records/s" in seen(), process)
        (java,) = (p for p in psutil.Process(process.pid).children() if p.name() == "java")
        if how == "SIGTERM":
            process.send_signal(signal.SIGTERM)
        else:
            os.killpg(process.pid, signal.SIGINT)
        process.wait(WAIT_S)
        assert not java.is_running(), "else a start right after it would take the pipeline for running"
        out, _ = process.communicate(timeout=WAIT_S)
    err = seen()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    # The terminal shows records/s, lag and the step while it runs.
    assert re.search(r"batch \d+  \d+ batch(es)?, \d+ records  \d+ records/s  lag \d+  (plan|stage|apply|waiting)", err)
    assert "cut off" not in out
    checkpoint = example.parent / "checkpoint"
    offsets, commits = (
        {int(p.name) for p in (checkpoint / d).iterdir() if p.name.isdigit()} for d in ("offsets", "commits")
    )
    assert offsets == commits, "every batch that began is logged"
    assert 40 <= rows(example.parent) < RECORDS, "and it stopped before the end"
    (run,) = runs(str(checkpoint))
    assert run.ended_ms is not None and run.batch == max(commits) and not run.has_failed
    assert samples(str(checkpoint))[0].lag_total > 0


@pytest.mark.matrix
def test_rows_that_lost_are_counted(tmp_path: Path) -> None:
    """expectedVersion: three of ten rows expect another version than the table has."""
    with sqlite3.connect(tmp_path / "out.db") as connection:
        connection.execute("CREATE TABLE stock (id bigint NOT NULL, version bigint, UNIQUE (id))")
    expected = [b"7" if i < 3 else b"" for i in range(10)]
    append(str(tmp_path / "in"), pa.table({"key": [str(i).encode() for i in range(10)], "value": expected}))
    sql = "SELECT CAST(CAST(key AS STRING) AS BIGINT) AS id, 1L AS version, try_cast({0} AS BIGINT) AS was FROM source"
    pipeline = {
        "pipeline": "stock", "guarantee": "exactly_once", "checkpoint": "checkpoint", "trigger": "available_now",
        "source": {"format": "log", "path": "in"}, "transform": {"sql": sql.format("CAST(value AS STRING)")},
        "master": "local[1]",
        "sinks": [{
            "format": "sqlite", "path": "out.db", "table": "stock", "mode": "upsert", "keyColumns": "id",
            "versionColumn": "version", "expectedVersion": "was", "onConflict": "dead_letter",
        }],
    }  # fmt: skip
    file = tmp_path / "stock.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    with running("run", str(file)) as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert "records/s" not in err, "quiet without a terminal"
    assert "stock: 1 batch, 10 records, 3 not accepted by a table (3 conflict) in" in out
    with sqlite3.connect(tmp_path / "out.db") as connection:
        assert connection.execute("SELECT count(*) FROM stock").fetchone() == (7,)
    append(str(tmp_path / "in"), pa.table({"key": [b"5"], "value": [b"4"]}))
    with running("run", str(file), "--output", "json") as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    last = json.loads(out.splitlines()[-1])
    assert (last["records"], last["left_out"]) == (1, {"conflict": 1})


@pytest.mark.matrix
def test_a_query_that_fails_gives_one_clear_error(example: Path) -> None:
    text = example.read_text().replace("$.amount') AS DOUBLE) AS amount", "$.amount') AS DOUBLE) AS id")
    example.write_text(text)
    with running("run", str(example)) as process:
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode in (1, 2)
    assert "[DELIVERED_" in err
    assert "Traceback" not in err
    assert "\tat org.apache" not in err
    assert rows(example.parent) == 0


@pytest.mark.matrix
def test_the_log_of_a_failed_query_is_where_the_message_says(example: Path) -> None:
    text = example.read_text().replace("AS customer", "AS customer, CAST(raise_error('boom') AS STRING) AS why")
    example.write_text(text)
    with running("run", str(example)) as process:
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1, err
    named = re.search(r"read Spark's log in (\S+\.log);", err)
    assert named is not None, err
    log = Path(named.group(1))
    assert "boom" in log.read_text()
    log.unlink()
