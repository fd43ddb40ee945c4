"""Dead letters go back once: `delivered dead-letters`, killed at every step of a batch, on SQLite without Spark."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
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
from delivered.engine import runner
from delivered.entry import Pipeline
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, InvariantBroken, UsageError
from delivered.model.step import RECOVERY, STEPS, Mechanism, Moment, StepId
from delivered.operate import dead_letters as operated
from delivered.operate.dead_letters import DeadLetterQueue, Status, dead_letters, drop, retry
from delivered_lab.verify.loop import Loop

KEPT = (b"1", b"2", b"3")
TWICE = (b"a", b"b")
"""Values that the table's index refuses until it is dropped."""
POINTS = [
    f"{step}:{moment}"
    for step in (*RECOVERY[Guarantee.EXACTLY_ONCE], *STEPS[Mechanism.ONE_TRANSACTION])
    if step not in (StepId.SOURCE_READ, StepId.RECOVER_APPLY)
    for moment in Moment
]
KEPT_POINTS = ("write.prepare:after", "commit.apply:after", "commit.decide:after")


def pipeline(folder: Path, **changes: Any) -> Path:
    """Keys 1 to 3, then the values a and b twice more, in two batches."""
    if not (folder / "in").exists():
        rows = [*KEPT, b"a", b"b", b"a", b"b"]
        append(str(folder / "in"), pa.table({"key": rows, "value": rows}))
        append(str(folder / "in"), pa.table({"key": TWICE, "value": TWICE}))
    sink = {"format": "sqlite", "path": "out.db", "table": "orders"}
    described = {
        "pipeline": "shop", "guarantee": "exactly_once", "checkpoint": "checkpoint", "trigger": "available_now",
        "source": {"format": "log", "path": "in"}, "transform": {"select": ["key", "value"]}, "sinks": [sink],
    }  # fmt: skip
    described |= {k: v for k, v in changes.items() if k in described or k in ("on_bad_row", "dead_letter")}
    sink |= changes.get("sink", {"onConstraint": "dead_letter"})
    file = folder / "shop.yaml"
    file.write_text(yaml.safe_dump(described))
    return file


def query(folder: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(folder / "out.db")) as connection:
        rows = connection.execute(statement).fetchall()
        connection.commit()
        return rows


def values(folder: Path) -> Counter[bytes]:
    return Counter(v for (v,) in query(folder, "SELECT value FROM orders"))


def constrained(folder: Path, guarantee: str = "exactly_once") -> Pipeline:
    """A pipeline that ran: four letters, as the table refuses a value that it has."""
    query(folder, "CREATE TABLE orders (key BLOB, value BLOB)")
    query(folder, "CREATE UNIQUE INDEX once ON orders (value)")
    file = pipeline(folder, guarantee=guarantee)
    Loop(file).run(takeover=False)
    assert values(folder) == Counter((*KEPT, *TWICE))
    return Pipeline.from_file(file)


@pytest.fixture
def ran(tmp_path: Path) -> Pipeline:
    return constrained(tmp_path)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ran")
    constrained(folder)
    query(folder, "DROP INDEX once")
    return folder


def command(folder: Path, *arguments: str, crash: str = "") -> tuple[int, str]:
    hits = folder / "hits"
    hits.mkdir(exist_ok=True)
    env = {**os.environ, "DELIVERED_CRASH": crash, "DELIVERED_CRASH_DIR": str(hits)}
    call = [sys.executable, "-m", "delivered.cli.main", "dead-letters", *arguments]
    done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def mended(folder: Path) -> None:
    query(folder, "DROP INDEX once")


def test_letters_go_back_once(ran: Pipeline, tmp_path: Path) -> None:
    found = dead_letters(ran)
    assert Counter(json.loads(n.record)["value"] for n in found) == {"a": 2, "b": 2}
    assert len({n.id for n in found}) == 4
    assert {n.reason for n in found} == {"UNIQUE constraint failed: orders.value"}
    mended(tmp_path)
    one = next(n for n in found if json.loads(n.record)["value"] == "a")
    assert retry(ran, [one.id]).settled == {"orders": 1}
    assert values(tmp_path) == Counter({**dict.fromkeys((*KEPT, *TWICE), 1), b"a": 2})
    with pytest.raises(UsageError, match=f"DEAD_LETTER_SETTLED.*{one.id}.*retried"):
        retry(ran, [one.id])
    assert retry(ran).settled == {"orders": 3}
    assert retry(ran).settled == {}
    assert values(tmp_path) == Counter({**dict.fromkeys(KEPT, 1), b"a": 3, b"b": 3})
    assert dead_letters(ran) == []
    assert {n.status for n in dead_letters(ran, settled=True)} == {Status.RETRIED}


def test_a_letter_that_the_table_refuses_again_is_a_new_one(ran: Pipeline, tmp_path: Path) -> None:
    done = retry(ran)
    assert (done.settled, done.skipped) == ({"orders": 4}, 4)
    again = dead_letters(ran)
    assert len(again) == 4
    assert all(n.again for n in again)
    mended(tmp_path)
    assert retry(ran).skipped == 0
    assert values(tmp_path) == Counter({**dict.fromkeys(KEPT, 1), b"a": 3, b"b": 3})


def test_a_dropped_letter_stays_dropped(ran: Pipeline, tmp_path: Path) -> None:
    first, *_ = dead_letters(ran)
    assert drop(ran, [first.id]).settled == {"orders": 1}
    mended(tmp_path)
    assert retry(ran).settled == {"orders": 3}
    assert sum(values(tmp_path).values()) == 8
    assert Counter(n.status for n in dead_letters(ran, settled=True)) == {Status.DROPPED: 1, Status.RETRIED: 3}
    with pytest.raises(UsageError, match=r"DEAD_LETTER_SETTLED.*dropped"):
        retry(ran, [first.id])


@pytest.mark.parametrize("point", sweep(POINTS, lambda point: point in KEPT_POINTS))
def test_killed_at_each_step(template: Path, tmp_path: Path, point: str) -> None:
    folder = shutil.copytree(template, tmp_path / "copy")
    file = pipeline(folder)
    code, said = command(folder, "retry", str(file), "--all", crash=f"{point}!kill")
    assert code == -signal.SIGKILL, said
    there = sum(values(folder).values())
    assert there in (5, 9)  # all of the batch or nothing
    own = Pipeline.from_file(file)
    assert len(dead_letters(own)) == 9 - there
    assert retry(own).settled == ({"orders": 4} if there == 5 else {})
    assert values(folder) == Counter({**dict.fromkeys(KEPT, 1), b"a": 3, b"b": 3})


@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
@pytest.mark.parametrize(
    "point",
    sweep(
        ["batch.begin:after", "write.flush:after", "commit.record:after"], lambda point: point == "write.flush:after"
    ),
)
def test_killed_under_a_weaker_guarantee(tmp_path: Path, guarantee: str, point: str) -> None:
    own = keyless(tmp_path, guarantee)
    code, said = command(tmp_path, "retry", str(tmp_path / "shop.yaml"), "--all", crash=f"{point}!kill")
    assert code == -signal.SIGKILL, said
    if point != "commit.record:after":
        assert {n.status for n in dead_letters(own)} == {Status.STARTED}
    retry(own)
    assert dead_letters(own) == []
    found = values(tmp_path)[b"\xff"]
    assert found >= 1 if guarantee == "at_least_once" else found <= 1


def test_a_stricter_guarantee_says_how_to_finish_a_killed_retry(tmp_path: Path) -> None:
    keyless(tmp_path, "at_least_once")
    file = tmp_path / "shop.yaml"
    assert command(tmp_path, "retry", str(file), "--all", crash="batch.begin:after!kill")[0] == -signal.SIGKILL
    stricter = (str(file), "--all", "--set", "guarantee=exactly_once")
    code, said = command(tmp_path, "retry", *stricter)
    assert (code, "DELIVERED_BATCH_BEGUN" in said, "repeated_batch: accept" in said) == (2, True, True)
    assert command(tmp_path, "retry", *stricter, "--set", "repeated_batch=accept")[0] == 0
    assert dead_letters(Pipeline.from_file(file)) == []


@pytest.mark.parametrize("settle", [retry, drop])
@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_a_retry_that_another_started_meanwhile_is_finished_first(
    tmp_path: Path, monkeypatch: Any, guarantee: str, settle: Any
) -> None:
    own = keyless(tmp_path, guarantee)
    honest = operated._chosen

    def late(*given: Any) -> Any:
        monkeypatch.setattr(operated, "_chosen", honest)
        chosen = honest(*given)
        crash = "batch.begin:after!kill"
        assert command(tmp_path, "retry", str(tmp_path / "shop.yaml"), "--all", crash=crash)[0] == -signal.SIGKILL
        return chosen

    monkeypatch.setattr(operated, "_chosen", late)
    assert settle(own).settled == {}
    assert {n.status for n in dead_letters(own, settled=True)} == {Status.RETRIED}
    assert values(tmp_path)[b"\xff"] == (1 if guarantee == "at_least_once" else 0)


def test_what_is_settled_while_it_is_listed_is_no_older_checkpoint(
    ran: Pipeline, tmp_path: Path, monkeypatch: Any
) -> None:
    """The other process deletes the file that the ledger named."""
    mended(tmp_path)
    first, second, *_ = dead_letters(ran)
    retry(ran, [first.id])
    honest = DeadLetterQueue._file

    def late(*given: Any) -> Any:
        monkeypatch.setattr(DeadLetterQueue, "_file", honest)
        retry(ran, [second.id])
        return honest(*given)

    monkeypatch.setattr(DeadLetterQueue, "_file", late)
    assert len(dead_letters(ran)) == 2


def test_a_retry_that_was_fenced_changes_nothing(ran: Pipeline, tmp_path: Path, monkeypatch: Any) -> None:
    """F7: another process retries the same letters between the choice and the batch of this one."""
    mended(tmp_path)
    honest = runner.plan_batch

    def late(*given: Any, **more: Any) -> Any:
        monkeypatch.setattr(runner, "plan_batch", honest)
        assert command(tmp_path, "retry", str(tmp_path / "shop.yaml"), "--all")[0] == 0
        return honest(*given, **more)

    monkeypatch.setattr(runner, "plan_batch", late)
    with pytest.raises(DeliveredError, match="FENCED"):
        retry(ran)
    assert values(tmp_path) == Counter({**dict.fromkeys(KEPT, 1), b"a": 3, b"b": 3})
    assert retry(ran).settled == {}


def test_an_older_checkpoint_is_noticed(ran: Pipeline, tmp_path: Path) -> None:
    """F8: without the record of what was retried, nothing is retried again."""
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "older")
    mended(tmp_path)
    retry(ran)
    shutil.rmtree(tmp_path / "checkpoint")
    (tmp_path / "older").rename(tmp_path / "checkpoint")
    with pytest.raises(InvariantBroken, match="DEAD_LETTERS_MISSING"):
        retry(ran)
    assert sum(values(tmp_path).values()) == 9


def keyless(folder: Path, guarantee: str, **sink: str) -> Pipeline:
    """A pipeline that ran: two letters, without the key of an upsert; mended by appending instead, unless `sink`."""
    append(str(folder / "in"), pa.table({"key": [b"1", None, None], "value": [b"a", b"\xff", None]}))
    letters = {"format": "sqlite", "path": str(folder / "letters.db"), "table": "letters"}
    own = {"guarantee": guarantee, "on_bad_row": "dead_letter", "dead_letter": letters}
    Loop(pipeline(folder, sink={"mode": "upsert", "keyColumns": "key"}, **own)).run(takeover=False)
    return Pipeline.from_file(pipeline(folder, sink=sink, **own))


def test_letters_of_a_sink_of_their_own(tmp_path: Path) -> None:
    keyless(tmp_path, "at_least_once", mode="upsert", keyColumns="key")
    file = str(tmp_path / "shop.yaml")
    invoke = CliRunner().invoke
    shown = json.loads(invoke(app, ["dead-letters", "list", file, "-o", "json"]).output)
    assert [(n["batch"], n["sink"], n["status"]) for n in shown] == [(0, "orders", "open")] * 2
    again = invoke(app, ["dead-letters", "retry", file, "--all", "-o", "json"])
    assert again.exit_code == 1
    assert set(json.loads(again.output)["rejected"]) == {n["id"] for n in shown}
    dropped = next(n["id"] for n in shown if json.loads(n["record"])["value"] is None)
    assert "1 dropped at orders" in invoke(app, ["dead-letters", "drop", file, dropped]).output
    Path(file).write_text(Path(file).read_text().replace("keyColumns: key", "").replace("mode: upsert", ""))
    done = invoke(app, ["letters", "retry", file, "--all"])
    assert done.exit_code == 0, done.output
    assert query(tmp_path, "SELECT key, value FROM orders") == [(b"1", b"a"), (None, b"\xff")]
    assert "no dead letters are open" in invoke(app, ["dead-letters", "list", file]).output


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["retry"], "DEAD_LETTER_IDS"),
        (["drop", "x", "--all"], "DEAD_LETTER_IDS"),
        (["drop", "x"], "DEAD_LETTER_UNKNOWN"),
        (["list", "--set", "pipeline=other"], ""),
    ],
)
def test_bad_input(ran: Pipeline, tmp_path: Path, arguments: list[str], code: str) -> None:
    verb, *more = arguments
    done = CliRunner().invoke(app, ["dead-letters", verb, str(tmp_path / "shop.yaml"), *more])
    assert (done.exit_code == 0) is (code == ""), done.output
    assert len(dead_letters(ran)) == 4


def test_a_pipeline_without_dead_letters(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="DEAD_LETTERS_NONE"):
        dead_letters(Pipeline.from_file(pipeline(tmp_path, sink={})))
