"""Audits beside a running pipeline: in `delivered run`, and in `delivered audit --follow`."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import yaml
from tests.spark.cli_help import WAIT_S, running, until
from tests.spark.log_to_sqlite import produce

from delivered.checkpoint.history import audits


def written(folder: Path, **more: object) -> Path:
    """A pipeline from a log to SQLite, as a file."""
    produce(folder / "in", 0, 40)
    pipeline = {
        "pipeline": "orders", "guarantee": "exactly_once", "checkpoint": "checkpoint", "trigger": "1 second",
        "source": {"format": "log", "path": "in"}, "master": "local[2]",
        "transform": {"sql": "SELECT key, value FROM source"},
        "sinks": [{"format": "sqlite", "path": "out.db", "table": "orders"}], **more,
    }  # fmt: skip
    file = folder / "orders.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    return file


def held(folder: Path) -> list[int]:
    """How many records each audit found that held."""
    found = audits(str(folder / "checkpoint"))
    return [a["counts"]["delivered"] for a in found if a["verdict"] == "held"]


def test_a_running_pipeline_audits_itself_and_both_stop_together(tmp_path: Path) -> None:
    file = written(tmp_path, audit={"every": "1 s", "share": "100 %"})
    with running("run", str(file), "--output", "json") as process:
        until(lambda: 40 in held(tmp_path), process)
        produce(tmp_path / "in", 40, 40)
        until(lambda: 80 in held(tmp_path), process)
        produce(tmp_path / "in", 80, 40)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert json.loads(out.splitlines()[-1])["between_batches"] is True
    assert {line["verdict"] for line in audits(str(tmp_path / "checkpoint"))} == {"held"}, "none is half"
