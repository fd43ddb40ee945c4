"""A table made anew and put in the place of the old one, killed at every step, on SQLite without Spark."""

from __future__ import annotations

import contextlib
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

from delivered.checkpoint import sidecar
from delivered.connectors.log import append
from delivered.engine import context
from delivered.entry import Pipeline
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, Refused, UsageError
from delivered.model.step import RECOVERY, STEPS, Mechanism, Moment, StepId
from delivered.operate.dead_letters import retry
from delivered.operate.replay import Rebuild
from delivered_lab.verify.loop import Loop

ROWS = 90
FILL = [
    f"{step}:{moment}"
    for step in (*RECOVERY[Guarantee.EXACTLY_ONCE], *STEPS[Mechanism.ONE_TRANSACTION])
    if step is not StepId.RECOVER_APPLY
    for moment in Moment
]
KEPT = {"fill": ("commit.apply:after", "log:before"), "swap": ("commit.apply:after", "commit.decide:after")}
SWAP = [f"{step}:{moment}" for step in ("recover.claim", "commit.apply", "commit.decide") for moment in Moment]
WORKER = """
import sys
from delivered.entry import Pipeline
from delivered.crash import install_from_environment
from delivered_lab.verify.loop import Loop

made = Pipeline.from_file(sys.argv[1]).rebuild("fresh")
if sys.argv[2] == "fill":
    install_from_environment()
Loop(made.pipeline).run(takeover=False)
install_from_environment()
made.swap()
"""


def described(folder: Path, **sink: Any) -> Path:
    if not (folder / "in").exists():
        values = [b"%d" % n for n in range(ROWS)]
        append(str(folder / "in"), pa.table({"key": values, "value": values}), partition_by=2)
    pipeline = {
        "pipeline": "shop", "guarantee": "exactly_once", "checkpoint": "checkpoint", "trigger": "available_now",
        "source": {"format": "log", "path": "in", "maxOffsetsPerTrigger": 40},
        "transform": {"select": ["key", "value"]},
        "sinks": [{"format": "sqlite", "path": "out.db", "table": "orders", **sink}],
    }  # fmt: skip
    file = folder / "shop.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    return file


def values(folder: Path, table: str = "orders") -> Counter[bytes]:
    with closing(sqlite3.connect(folder / "out.db")) as connection:
        return Counter(v for (v,) in connection.execute(f"SELECT value FROM {table}"))


def tables(folder: Path) -> set[str]:
    with closing(sqlite3.connect(folder / "out.db")) as connection:
        found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {name for (name,) in found if not name.startswith("_delivered")}


def execute(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "out.db")) as connection:
        connection.executescript(statement)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ran")
    loop = Loop(described(folder))
    sidecar.keep_first(loop.pipeline.checkpoint, loop.batches.source.driver().initial)  # as Spark's reader does
    loop.run(takeover=False)
    return folder


@pytest.fixture
def ran(template: Path, tmp_path: Path) -> Path:
    """A folder in which the pipeline ran and stopped."""
    folder = shutil.copytree(template, tmp_path / "shop")
    described(folder)
    return folder


def rebuilt(folder: Path, into: str = "fresh") -> Rebuild[Pipeline]:
    """Filled, up to the pipeline's newest decision."""
    made = Pipeline.from_file(folder / "shop.yaml").rebuild(into)
    if not made.done:
        Loop(made.pipeline).run(takeover=False)
    return made


ALL = Counter(b"%d" % n for n in range(ROWS))


def test_the_new_table_takes_the_place_of_the_old(ran: Path) -> None:
    execute(ran, "CREATE VIEW seen AS SELECT * FROM orders")
    made = rebuilt(ran)
    assert made.compare().equal
    execute(ran, "INSERT INTO fresh (key, value) VALUES ('new', 'new')")  # tells the tables apart
    made.swap()
    assert tables(ran) == {"orders", made.kept}
    assert values(ran)["new"] == values(ran, "seen")["new"] == 1  # type: ignore[index]
    assert values(ran, made.kept) == ALL
    again = Pipeline.from_file(ran / "shop.yaml").rebuild("fresh")
    assert (again.done, again.kept) == (True, made.kept)
    append(str(ran / "in"), pa.table({"key": [b"later"], "value": [b"later"]}), partition_by=2)
    Loop(ran / "shop.yaml").run(takeover=False)  # goes on in the new table, where it was
    assert values(ran) == ALL + Counter(["new", b"later"])


@pytest.mark.parametrize(
    ("point", "step"),
    sweep([*((p, "fill") for p in FILL), *((p, "swap") for p in SWAP)], lambda p, step: p in KEPT[step]),
)
def test_killed_at_each_step(ran: Path, point: str, step: str) -> None:
    """The old table stays as it was until the new one is in its place; then the former rows are all there."""
    where = "@batch=1" if step == "fill" and not point.startswith(("recover", "source")) else ""
    killed(ran, step, f"{point}{where}!kill")
    made = rebuilt(ran)
    assert made.done is (point == "commit.decide:after" and step == "swap")
    assert values(ran) == ALL
    if not made.done:
        assert values(ran, "fresh") == ALL
        made.swap()
    assert tables(ran) == {"orders", made.kept}
    assert values(ran) == values(ran, made.kept) == ALL


def killed(folder: Path, step: str, crash: str) -> None:
    hits = folder / "hits"
    hits.mkdir()
    env = {**os.environ, "DELIVERED_CRASH": crash, "DELIVERED_CRASH_DIR": str(hits)}
    call = [sys.executable, "-c", WORKER, str(folder / "shop.yaml"), step]
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(call, env=env, stdout=said, stderr=said, start_new_session=True)
        code = process.wait(60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its task processes
    assert list(hits.glob("*.hit.json")), (folder / "said").read_text()
    assert code in (-signal.SIGKILL, 1)  # 1: a task's process was killed


def test_nothing_is_swapped_while_the_pipeline_goes_on(ran: Path) -> None:
    made = rebuilt(ran)
    append(str(ran / "in"), pa.table({"key": [b"later"], "value": [b"later"]}), partition_by=2)
    Loop(ran / "shop.yaml").run(takeover=False)
    for refused in (made.check_stopped, made.swap):
        with pytest.raises(Refused, match="REBUILD_BEHIND"):
            refused()
    assert tables(ran) == {"orders", "fresh"}
    again = rebuilt(ran)
    assert again.pipeline.name == made.pipeline.name
    again.swap()
    assert values(ran) == values(ran, again.kept) == ALL + Counter([b"later"])


def test_a_replay_that_was_stopped_is_not_swapped(ran: Path) -> None:
    made = Pipeline.from_file(ran / "shop.yaml").rebuild("fresh")
    with pytest.raises(Refused, match="REBUILD_BEHIND"):
        made.swap()


def test_a_running_pipeline_is_not_fenced(ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_own_processes", set)  # a child would count as this process
    made = rebuilt(ran)
    file = ran / "shop.yaml"
    code = f"""
import socket, sys
from dataclasses import replace
from pathlib import Path
from delivered_lab.verify.loop import Checkpoint, Loop

loop = Loop(Path({str(file)!r}))
context = loop.batches.runner(Checkpoint(Path(loop.pipeline.checkpoint)).incarnation).context
context.ledger.claim(replace(context.owner, host=socket.gethostname()))
print("claimed", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
        assert p.stdout is not None
        assert p.stdout.readline() == "claimed\n"
        with pytest.raises(Refused, match=rf"REBUILD_RUNNING.*process {p.pid}"):
            made.swap()
        p.kill()
    made.swap()
    assert values(ran) == ALL


def test_dead_letters_retried_after_the_comparison_are_not_left_behind(tmp_path: Path) -> None:
    file = described(tmp_path, onConstraint="dead_letter")
    execute(tmp_path, "CREATE TABLE orders (key, value); CREATE UNIQUE INDEX one ON orders (key)")
    append(str(tmp_path / "in"), pa.table({"key": [b"1"], "value": [b"second"]}), partition_by=2)
    loop = Loop(file)
    sidecar.keep_first(loop.pipeline.checkpoint, loop.batches.source.driver().initial)
    loop.run(takeover=False)
    execute(tmp_path, "CREATE TABLE fresh (key, value); CREATE UNIQUE INDEX two ON fresh (key); DROP INDEX one")
    made = rebuilt(tmp_path)
    assert made.compare().equal
    assert retry(Pipeline.from_file(file)).settled == {"orders": 1}
    with pytest.raises(DeliveredError, match="REBUILD_RETRIED"):
        made.swap()
    assert tables(tmp_path) == {"orders", "fresh"}
    assert values(tmp_path)[b"second"] == 1
    again = rebuilt(tmp_path)
    assert str(again.compare()) == "the old table has 91 rows, the new one 90"
    again.swap()  # as the operator wants it
    assert tables(tmp_path) == {"orders", again.kept}


def test_tables_that_differ_are_told(ran: Path) -> None:
    made = rebuilt(ran)
    execute(ran, "DELETE FROM orders WHERE value = x'37'")
    assert str(made.compare()) == "the old table has 89 rows, the new one 90"
    execute(ran, "INSERT INTO orders (key, value) VALUES (x'37', x'38')")
    told = made.compare()
    assert not told.equal
    assert str(told) == "both tables have 90 rows, with different content"


@pytest.mark.parametrize(
    ("into", "sink", "code"),
    [
        ("orders", {}, "REBUILD_INTO"),
        ("", {}, "REBUILD_INTO"),
        ("other.orders", {}, "REBUILD_INTO"),
        ("fresh", {"format": "files", "path": "files", "table": None}, "REBUILD_SINK"),
    ],
)
def test_bad_input(ran: Path, into: str, sink: dict[str, Any], code: str) -> None:
    file = described(ran, **sink)
    if sink:
        file.write_text(file.read_text().replace("    table: null\n", "").replace("  table: null\n", ""))
    with pytest.raises(DeliveredError, match=code):
        Pipeline.from_file(file).rebuild(into)


def test_nothing_to_rebuild(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="REBUILD_NOTHING"):
        Pipeline.from_file(described(tmp_path)).rebuild("fresh")


def test_records_that_are_gone(ran: Path) -> None:
    import deltalake

    deltalake.DeltaTable(str(ran / "in")).delete("offset < 4")
    with pytest.raises(Refused, match=r"REBUILD_RECORDS_GONE.*began at offset 0"):
        Pipeline.from_file(ran / "shop.yaml").rebuild("fresh")
    assert not Pipeline.from_file(ran / "shop.yaml").rebuild("snapshot", start="earliest").done
