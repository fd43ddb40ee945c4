"""Spark's JVM is killed under `delivered run`, as the system does when memory runs out."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from tests.spark.cli_help import WAIT_S, running, until

from delivered.checkpoint import history
from delivered.checkpoint.history import runs
from delivered.cli.run import write_example


@pytest.mark.matrix
def test_a_killed_jvm_is_one_error_with_what_to_do(tmp_path: Path) -> None:
    example = write_example(tmp_path / "example")[0]
    checkpoint = str(example.parent / "checkpoint")
    with running("run", str(example), "-s", "trigger=1 second", "-s", "source.maxOffsetsPerTrigger=20") as process:
        until(lambda: len(history.batches(checkpoint)) > 1, process)
        (java,) = [c for c in psutil.Process(process.pid).children(recursive=True) if c.name() == "java"]
        os.kill(java.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1, out + err
    assert "[DELIVERED_SPARK_ENDED]" in err, err
    assert "spark.driver.memory" in err and "Next:" in err
    assert "py4j" not in err and "Traceback" not in err
    assert len(err.splitlines()) < 12, err
    (run,) = runs(checkpoint)
    assert (run.code, run.ended_ms is not None) == ("DELIVERED_SPARK_ENDED", True)
    with running("status", str(example)) as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1 and "[DELIVERED_RUN_FAILED]" in out, out
    with running("run", str(example), "--available-now") as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert [r.has_failed for r in runs(checkpoint)] == [True, False]
