"""Dead letters of Kafka and PostgreSQL go back once, although the retry is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.kafka_tools import read_committed
from tests.support.sweeps import sweep

from delivered.connectors.log import append
from delivered.entry import Pipeline
from delivered.operate.dead_letters import dead_letters
from delivered.operate.transactions import end_transaction, open_transactions
from delivered_lab.supervisor import run
from delivered_lab.verify.loop import Loop

LONG = b"\xff" * 2_000
ROWS = [(b"1", b"a"), (b"2", LONG), (b"3", None), (b"4", LONG)]
KILLS = "write.prepare:after,commit.decide:after"


def described(folder: Path, sink: dict[str, Any], **more: Any) -> Path:
    pipeline = {
        "pipeline": "shop", "guarantee": "exactly_once", "checkpoint": str(folder / "checkpoint"),
        "source": {"format": "log", "path": str(folder / "log")}, "transform": {"select": ["key", "value"]},
        "sinks": [sink],
    } | more  # fmt: skip
    file = folder / "shop.yaml"
    file.write_text(json.dumps(pipeline))
    return file


def retried_with_kills(file: Path) -> None:
    """Killed before the decision; then after it, before the rows are visible; then to the end."""
    command = [sys.executable, "-m", "delivered.cli.main", "dead-letters", "retry", str(file), "--all"]
    done = run(command, KILLS, file.parent / "hits", timeout_s=60)
    assert (done.exit_code, done.runs, len(done.kills)) == (0, 3, 2)
    assert dead_letters(Pipeline.from_file(file)) == []


@pytest.mark.matrix  # the page docs/dead-letters.md, run by spark/test_pages.py, does
def test_letters_of_a_topic_go_back_to_a_topic(kafka: Any, tmp_path: Path) -> None:
    append(str(tmp_path / "log"), pa.table({"key": [k for k, _ in ROWS], "value": [v for _, v in ROWS]}))
    server = {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap}
    topic, letters = kafka.topic(1), {"dead_letter": {**server, "topic": kafka.topic(1)}, "on_bad_row": "dead_letter"}
    file = described(tmp_path, {**server, "topic": topic, "kafka.message.max.bytes": 1_500}, **letters)
    Loop(file).run(takeover=False)
    assert [json.loads(n.record)["key"] for n in dead_letters(Pipeline.from_file(file))] == ["2", "4"]
    retried_with_kills(described(tmp_path, {**server, "topic": topic}, **letters))
    assert Counter((m.key(), m.value()) for m in read_committed(kafka.bootstrap, topic)) == Counter(ROWS)


CLEAN = """
import pyarrow as pa

def clean(rows):
    numbers = [MENDED[v] if v in MENDED else int(v) for v in rows.column("value").to_pylist()]
    return pa.record_batch({"key": rows.column("key"), "value": pa.array([b"%d" % n for n in numbers], pa.binary())})
"""


@pytest.mark.matrix
@pytest.mark.parametrize("to", ["kafka", "postgres"])
def test_letters_of_a_failing_transform_go_back_through_it(kafka: Any, postgres: Any, tmp_path: Path, to: str) -> None:
    values = [b"1", b"two", b"3", b"two"]
    append(str(tmp_path / "log"), pa.table({"key": values, "value": values}))
    server = {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap}
    topic, table = kafka.topic(1), postgres.table("key bytea, value bytea")
    in_table = {"format": "postgres", "url": postgres.url, "dbtable": table, "mechanism": "two_phase"}
    more = {"dead_letter": {**server, "topic": kafka.topic(1)}, "on_bad_row": "dead_letter"}

    def made(mended: bool) -> Path:
        module = f"clean_{to}_{mended}"
        known = "{b'two': 2}" if mended else "{}"
        (tmp_path / f"{module}.py").write_text(f"MENDED = {known}\n{CLEAN}")
        sink = in_table if to == "postgres" else {**server, "topic": topic}
        return described(tmp_path, sink, **more, transform={"arrow": f"{module}:clean"})

    Loop(made(mended=False)).run(takeover=False)
    assert {n.sink for n in dead_letters(Pipeline.from_file(made(mended=False)))} == {"(transform)"}
    retried_with_kills(made(mended=True))
    found = (
        [(m.key(), m.value()) for m in read_committed(kafka.bootstrap, topic)]
        if to == "kafka"
        else postgres.execute(f"SELECT key, value FROM {table}")
    )
    assert Counter(found) == Counter([(b"1", b"1"), (b"3", b"3"), (b"two", b"2"), (b"two", b"2")])


@pytest.mark.parametrize("mechanism", sweep(["one_transaction", "two_phase"], lambda m: m == "two_phase"))
def test_letters_of_a_constraint_go_back_to_the_table(postgres: Any, tmp_path: Path, mechanism: str) -> None:
    table = postgres.table("key bytea, value bytea UNIQUE")
    append(str(tmp_path / "log"), pa.table({"key": [b"1", b"2", b"3"], "value": [b"a", b"a", b"b"]}))
    sink = {"format": "postgres", "url": postgres.url, "dbtable": table, "mechanism": mechanism}
    file = described(tmp_path, {**sink, "onConstraint": "dead_letter"})
    Loop(file).run(takeover=False)
    postgres.execute(f"ALTER TABLE {table} DROP CONSTRAINT {table}_value_key")
    if mechanism == "two_phase":
        own = Pipeline.from_file(file)
        command = [sys.executable, "-m", "delivered.cli.main", "dead-letters", "retry", str(file), "--all"]
        killed = {**os.environ, "DELIVERED_CRASH": "write.prepare:after!kill", "DELIVERED_CRASH_DIR": str(tmp_path)}
        subprocess.run(command, env=killed, check=False)
        (left,) = open_transactions(own)
        assert not left.decided
        end_transaction(own, left.id, commit=False)
        assert open_transactions(own) == []
    retried_with_kills(file)
    assert Counter(postgres.execute(f"SELECT key, value FROM {table}")) == Counter(
        [(b"1", b"a"), (b"2", b"a"), (b"3", b"b")]
    )
