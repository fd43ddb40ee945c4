"""Rows that are sagas: the plan's words, and a job killed in the middle of a saga and before its batch is recorded."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

import delivered
from delivered.connectors.log import append
from delivered.model.step import LOG_FORMAT, is_line_of_ours
from delivered.patterns.saga import Log, Status
from delivered.patterns.saga.log import ENTRIES
from delivered.planner import Refusal
from delivered_lab import supervisor

APP = Path(__file__).parent / "apps" / "run_file.py"
ROWS = 20
SHOP = '''
import sqlite3
from delivered.patterns.saga import NO_UNDO, Rejected, Saga, Step

def effect(call):
    """At a service that honours keys."""
    with sqlite3.connect({effects!r}, timeout=60) as connection:
        connection.execute("INSERT INTO calls VALUES (?, ?, ?)", (call.id, call.step, call.verb))
        connection.execute("INSERT OR IGNORE INTO effects VALUES (?, ?, ?)", (call.key, call.verb, call.data["total"]))

def pay(call):
    effect(call)
    if call.verb == "do" and call.attempt == 1 and call.data["total"] == 7:
        raise TimeoutError("no answer")

def ship(call):
    if call.data["total"] % 5 == 0:
        raise Rejected("out of stock")
    effect(call)

quick = dict(backoff_s=0.01, timeout_s=1.0)
checkout = Saga("checkout", [
    Step("reserve", effect, undo=effect, takes_key=True, **quick),
    Step("pay", pay, undo=effect, takes_key=True, **quick),
    Step("ship", ship, undo=NO_UNDO, **quick),
])
'''


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A pipeline file's content; its shop can be imported here."""
    effects = str(tmp_path / "effects.db")
    with contextlib.closing(sqlite3.connect(effects)) as connection:
        connection.execute("CREATE TABLE calls (id TEXT, step TEXT, verb TEXT)")
        connection.execute("CREATE TABLE effects (key TEXT, verb TEXT, total INTEGER, PRIMARY KEY (key, verb))")
        connection.commit()
    (tmp_path / "saga_shop.py").write_text(SHOP.replace("{effects!r}", repr(effects)))
    monkeypatch.syspath_prepend(str(tmp_path))
    orders = [json.dumps({"id": f"order-{i}", "total": i}).encode() for i in range(ROWS)]
    append(str(tmp_path / "orders"), pa.table({"value": orders}), partition_by=2)
    sink = {
        "format": "saga", "saga": "saga_shop:checkout", "log": str(tmp_path / "sagas.db"), "threads": 2,
        "ledger": str(tmp_path / "ledger.db"),
    }  # fmt: skip
    sql = "SELECT get_json_object(v, '$.id') AS id, v AS data FROM (SELECT CAST(value AS STRING) AS v FROM source)"
    return {
        "pipeline": "checkout", "guarantee": "at_least_once", "checkpoint": str(tmp_path / "checkpoint"),
        "trigger": "available_now", "source": {"format": "log", "path": str(tmp_path / "orders")},
        "transform": {"sql": sql}, "sinks": [sink], "master": "local[2]",
    }  # fmt: skip


def test_the_plan_says_what_a_saga_promises(job: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    plan = str(delivered.Pipeline.from_file(file).plan())
    assert "a row is one saga, by its id; the task runs it until it is at rest" in plan
    assert "no saga is half done at rest" in plan
    assert "effects of a saga's steps happen at least once, unless the step takes its key" in plan
    assert "take no key and cannot be asked: ship" in plan
    for guarantee, code in (("exactly_once", "SINK_CANNOT_COMMIT"), ("at_most_once", "SINK_RESENDS")):
        refused = delivered.Pipeline.from_file(file, {"guarantee": guarantee}).plan()
        assert isinstance(refused, Refusal)
        assert refused.code == code
    job["sinks"][0]["saga"] = "saga_shop:nothing"
    file.write_text(yaml.safe_dump(job))
    assert "SAGA_NOT_FOUND" in str(delivered.Pipeline.from_file(file).plan())


@pytest.mark.matrix
@pytest.mark.parametrize(
    "crash", ["saga.call:after#9", pytest.param("saga.call:after#9,commit.record:before", marks=pytest.mark.matrix)]
)
def test_rows_are_sagas_and_every_saga_comes_to_rest_though_the_job_is_killed(
    job: dict[str, Any], crash: str, tmp_path: Path
) -> None:
    """F6a, F6b: in the middle of sagas; and when all are at rest, but their batch is not recorded."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    with (tmp_path / "output").open("wb") as output:
        done = supervisor.run(
            [sys.executable, str(APP), str(file)], crash, tmp_path / "hits",
            timeout_s=300, output=output,
            env={"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), LOG_FORMAT: "json"},
        )  # fmt: skip
    printed = (tmp_path / "output").read_text()
    assert (done.exit_code, len(done.kills)) == (0, crash.count(":")), printed[-4000:]
    (warned,) = {line for line in printed.splitlines() if is_line_of_ours(line) and "order-7" in line}
    place = {name: json.loads(warned).get(name) for name in ("logger", "level", "pipeline", "batch")}
    assert place == {"logger": "delivered.patterns.saga.worker", "level": "WARNING", "pipeline": "checkout", "batch": 0}
    with contextlib.closing(Log(str(tmp_path / "sagas.db")).open()) as log:
        ended = {row.id: row.status for row in log.rows(list(Status), ROWS * 2)}
    with contextlib.closing(sqlite3.connect(tmp_path / "sagas.db")) as connection:
        events = connection.execute(f"SELECT id, event FROM {ENTRIES} WHERE step = 'ship' AND verb = 'do'").fetchall()
    known = {id_ for id_, event in events if event in ("done", "rejected")}
    cut_off = {id_ for id_, _ in events} - known
    with contextlib.closing(sqlite3.connect(tmp_path / "effects.db")) as connection:
        effects: dict[str, set[tuple[str, str]]] = {}
        for key, verb in connection.execute("SELECT key, verb FROM effects"):
            _, id_, step = key.split("/")
            effects.setdefault(id_, set()).add((step, verb))
        calls = Counter(connection.execute("SELECT * FROM calls").fetchall())
    turned_back = {f"order-{i}" for i in range(0, ROWS, 5)} | cut_off  # a ship that may be done is not called again
    assert ended == {
        id_: Status.COMPENSATED if id_ in turned_back else Status.COMPLETE
        for id_ in (f"order-{i}" for i in range(ROWS))
    }
    taken_back = {(step, verb) for step in ("reserve", "pay") for verb in ("do", "undo")}
    for id_, found in effects.items():
        may_have = {("ship", "do")} if id_ in cut_off else set()
        expected = taken_back if id_ in turned_back else {("reserve", "do"), ("pay", "do"), ("ship", "do")}
        assert found - may_have == expected, id_
    assert effects.keys() == ended.keys()
    repeated = sum(n - 1 for n in calls.values())
    assert 1 <= repeated + len(cut_off) <= 4, "only what was under way when the tasks were killed"
