"""Dead letters of a failing transform go back through it, once: killed at every step, on SQLite without Spark."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from tests.support.sweeps import sweep
from typer.testing import CliRunner

from delivered.cli.main import app
from delivered.connectors.log import append
from delivered.model.capability import Guarantee
from delivered.model.step import RECOVERY, STEPS, Mechanism, Moment, StepId
from delivered_lab.verify.loop import Loop

CLEAN = """
import pyarrow as pa

KNOWN = {}

def number(value):
    return KNOWN[value] if value in KNOWN else int(value)

def clean(rows):
    numbers = [number(v) for v in rows.column("value").to_pylist()]
    return pa.record_batch({"key": rows.column("key"), "n": pa.array(numbers, pa.int64())})
"""
ALL = r"{b'two': 2, b'\xff': 5}"
VALUES = [b"1", b"two", b"3", b"4", b"\xff", b"6"]
POINTS = [
    f"{step}:{moment}"
    for step in (*RECOVERY[Guarantee.EXACTLY_ONCE], *STEPS[Mechanism.ONE_TRANSACTION])
    if step not in (StepId.SOURCE_READ, StepId.RECOVER_APPLY)
    for moment in Moment
]
KEPT_POINTS = ("write.prepare:after", "commit.decide:after")
SINK: dict[str, Any] = {"format": "sqlite", "path": "out.db", "table": "numbers", "ifNotExists": True}
LETTERS = {"format": "sqlite", "path": "out.db", "table": "letters", "ifNotExists": True}


def described(folder: Path, guarantee: str, *more: dict[str, Any], known: str = "{}") -> Path:
    """Two SQLite sinks cannot share a decision, so the pipeline itself runs under at_least_once here.

    Args:
        known: what the function knows of values that are no numbers. The module gets another name each time: this
            process keeps what it imported.
    """
    module = f"clean_{uuid.uuid4().hex}"
    (folder / f"{module}.py").write_text(CLEAN.replace("KNOWN = {}", f"KNOWN = {known}"))
    pipeline = {
        "pipeline": "numbers", "guarantee": guarantee, "checkpoint": "checkpoint", "trigger": "available_now",
        "source": {"format": "log", "path": "in"}, "transform": {"arrow": f"{module}:clean"},
        "sinks": [SINK, *more], "on_bad_row": "dead_letter", "dead_letter": LETTERS,
    }  # fmt: skip
    file = folder / "numbers.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    return file


def killed(folder: Path, point: str) -> None:
    """All letters are retried, in a process that is killed at a point."""
    hits = folder / "hits"
    hits.mkdir()
    env = {**os.environ, "DELIVERED_CRASH": f"{point}!kill", "DELIVERED_CRASH_DIR": str(hits)}
    call = ["delivered.cli.main", "dead-letters", "retry", str(folder / "numbers.yaml"), "--all"]
    done = subprocess.run([sys.executable, "-m", *call], env=env, capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


def letters(folder: Path, verb: str, *arguments: str) -> tuple[int, Any]:
    """Exit code, and what the command says as JSON."""
    done = CliRunner().invoke(app, ["dead-letters", verb, str(folder / "numbers.yaml"), *arguments, "-o", "json"])
    assert done.stdout, done.output
    return done.exit_code, json.loads(done.stdout)


def numbers(folder: Path, table: str = "numbers") -> list[int]:
    with closing(sqlite3.connect(folder / "out.db")) as connection:
        return [n for (n,) in connection.execute(f"SELECT n FROM {table} ORDER BY n")]


def made(folder: Path, *more: dict[str, Any]) -> Path:
    """A pipeline that ran: two letters."""
    append(str(folder / "in"), pa.table({"key": VALUES, "value": VALUES}))
    file = described(folder, "at_least_once", *more)
    Loop(file).run(takeover=False)
    assert numbers(folder) == [1, 3, 4, 6]
    return folder


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("ran"))


@pytest.fixture
def ran(template: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(template, tmp_path / "copy")
    described(folder, "exactly_once")
    return folder


def test_letters_go_back_once_the_function_is_mended(ran: Path) -> None:
    _, found = letters(ran, "list")
    assert [(n["sink"], json.loads(n["record"])["value"]) for n in found] == [
        ("(transform)", "two"), ("(transform)", {"base64": "/w=="}),
    ]  # fmt: skip
    described(ran, "exactly_once", known="{b'two': 2}")
    code, done = letters(ran, "retry", "--all")
    other = found[1]["id"]
    assert (code, done["retried"], list(done["rejected"])) == (1, {"numbers": 1}, [other])
    assert done["rejected"][other].startswith("ValueError: invalid literal for int()")
    assert numbers(ran) == [1, 2, 3, 4, 6]
    assert letters(ran, "drop", other) == (0, {"dropped": {"numbers": 1}, "rejected": {}, "left_out": 0, "more": False})
    assert letters(ran, "list") == (0, [])
    assert [n["status"] for n in letters(ran, "list", "--all")[1]] == ["retried", "dropped"]
    assert letters(ran, "retry", "--all")[1]["retried"] == {}
    assert numbers(ran) == [1, 2, 3, 4, 6]


@pytest.mark.parametrize("point", sweep(POINTS, lambda point: point in KEPT_POINTS))
def test_killed_at_each_step(ran: Path, point: str) -> None:
    described(ran, "exactly_once", known=ALL)
    killed(ran, point)
    there = numbers(ran)
    assert there in ([1, 3, 4, 6], [1, 2, 3, 4, 5, 6])  # all of the batch or nothing
    code, done = letters(ran, "retry", "--all")
    assert (code, done["retried"]) == (0, {} if len(there) == 6 else {"numbers": 2})
    assert numbers(ran) == [1, 2, 3, 4, 5, 6]


@pytest.mark.matrix
def test_a_server_that_is_down_leaves_letters_open(ran: Path) -> None:
    down = "type('Down', (), {'__contains__': lambda *_: open('/nowhere/at/all')})()"
    described(ran, "exactly_once", known=down)
    code, done = letters(ran, "retry", "--all")
    assert code == 1
    assert set(done["rejected"].values()) == {
        "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/at/all'"
    }


@pytest.mark.matrix
def test_what_needs_spark_stays_open_and_can_be_dropped(ran: Path) -> None:
    file = described(ran, "exactly_once", known=ALL)
    file.write_text(file.read_text().replace("table: numbers", "table: numbers\n  select: [n + 1 AS n]"))
    code, done = letters(ran, "retry", "--all")
    assert (code, done["retried"], len(done["rejected"])) == (1, {}, 2)
    assert all("'numbers' has expressions in select or where" in why for why in done["rejected"].values())
    assert letters(ran, "drop", "--all")[1]["dropped"] == {"numbers": 2}


@pytest.mark.matrix
@pytest.mark.parametrize("point", ["write.flush:after", "commit.record:after"])
def test_to_several_sinks(tmp_path: Path, point: str) -> None:
    """Under at_least_once: rows of a killed retry may be there twice, at both sinks, and none is lost."""
    copies = {**SINK, "table": "copies", "name": "copies"}
    folder = made(tmp_path, copies)
    described(folder, "at_least_once", copies, known=ALL)
    killed(folder, point)
    assert letters(folder, "retry", "--all")[0] == 0
    assert letters(folder, "list") == (0, [])
    for table in ("numbers", "copies"):
        assert sorted(set(numbers(folder, table))) == [1, 2, 3, 4, 5, 6]
