"""Logs as JSON lines."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from delivered.cli.main import app
from delivered.model import step
from delivered.model.errors import Refused
from delivered.model.step import LOG_FORMAT, JsonLines, Moment, StepId, is_line_of_ours, reach


@pytest.fixture
def lines() -> list[str]:
    """What a logger of this package writes."""
    written: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(self.format(record))

    handler = Kept()
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("delivered.test_logs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    step.work_for(None)
    return written


def test_a_line_names_its_place_in_the_batch(lines: list[str]) -> None:
    log = logging.getLogger("delivered.test_logs")
    log.info("at rest")
    step.work_for("orders", batch=3, shard=1)
    log.info("in a task")
    reach(StepId.WRITE_PREPARE, Moment.BEFORE, batch=3, shard=1, attempt=0, sink="main")
    log.info("preparing")
    reach(StepId.WRITE_PREPARE, Moment.AFTER, batch=3, shard=1, attempt=0, sink="main")
    log.info("prepared")
    step.work_for(None)
    found = [json.loads(line) for line in lines]
    places = [
        {k: v for k, v in line.items() if k not in ("time", "level", "logger", "process", "message")} for line in found
    ]
    task = {"pipeline": "orders", "batch": 3, "shard": 1}
    written = {**task, "attempt": 0, "sink": "main"}
    assert places == [{}, task, {**written, "step": "write.prepare"}, written]
    assert all(is_line_of_ours(line) for line in lines)
    assert {line["logger"] for line in found} == {"delivered.test_logs"}


def test_an_error_names_its_code_and_the_next_step(lines: list[str]) -> None:
    log = logging.getLogger("delivered.test_logs")
    for error in (Refused("NO_ROOM", "The disk is full.", next_step="df -h"), ZeroDivisionError("one\ntwo")):
        try:
            raise error
        except ArithmeticError:
            log.exception("the batch failed")
        except Refused:
            log.exception("the batch was refused")
    refused, failed = (json.loads(line) for line in lines)
    assert (refused["code"], refused["next"]) == ("DELIVERED_NO_ROOM", "df -h")
    assert "ZeroDivisionError" in failed["exception"]
    assert "code" not in failed


def test_a_refused_start_logs_what_to_run_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_FORMAT, "text")
    done = CliRunner().invoke(app, ["run", str(tmp_path / "none.yaml"), "--log-format", "json"])
    assert done.exit_code == 2
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (line["level"], line["code"]) == ("ERROR", "DELIVERED_FILE_UNREADABLE")
    assert line["next"]
