"""mode upsert: processes really killed, into PostgreSQL, MySQL and SQLite. The judge uses plain SQL.

A repeated upsert leaves the same table, so a trigger records every change in the same transaction: each version of each
key must be written, and deleted, at most once.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.databases import POINTS, TASK
from tests.support.embedded_pipeline import PIPELINE, TABLE, was
from tests.support.sinks import Rig, offsets
from tests.support.sweeps import sweep
from tests.support.upserts import rows
from tests.support.zygote import Child, Zygote

from delivered.connectors.log import CONNECTOR as LOG
from delivered.connectors.log import append
from delivered.engine.decide import commit_batch
from delivered.engine.shard import write_shard
from delivered.model.identity import Scope
from delivered.model.rows import Rows
from delivered.model.work import Decision, Ok
from delivered.pipeline.registry import find_sink

RECORDS, KEYS = 1_000, 97
VERSION = {"mode": "upsert", "keyColumns": "id", "versionColumn": "version"}
ARRIVAL = {"mode": "upsert", "keyColumns": "id"}
GONE = {"deleteColumn": "gone"}
LETTERS = {"onConflict": "dead_letter"}
INSERT = {"mode": "insert", "keyColumns": "id", **LETTERS}
EXPECT = {**VERSION, "expectedVersion": "was", **LETTERS}
State = dict[str, int]

_SQLITE = f"""
CREATE TABLE {TABLE} (id TEXT PRIMARY KEY, version INTEGER NOT NULL, text TEXT NOT NULL);
CREATE TABLE history (what TEXT, id TEXT, version INTEGER);
CREATE TRIGGER a AFTER INSERT ON {TABLE} BEGIN INSERT INTO history VALUES ('in', new.id, new.version); END;
CREATE TRIGGER b AFTER UPDATE ON {TABLE} BEGIN INSERT INTO history VALUES ('in', new.id, new.version); END;
CREATE TRIGGER c AFTER DELETE ON {TABLE} BEGIN INSERT INTO history VALUES ('out', old.id, old.version); END;
"""
_POSTGRES = """
CREATE TABLE {t} (id text PRIMARY KEY, version bigint NOT NULL, text text NOT NULL);
CREATE TABLE {t}_history (what text, id text, version bigint);
CREATE FUNCTION {t}_note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF TG_OP = 'DELETE' THEN INSERT INTO {t}_history VALUES ('out', old.id, old.version);
  ELSE INSERT INTO {t}_history VALUES ('in', new.id, new.version); END IF;
  RETURN NULL; END $$;
CREATE TRIGGER a AFTER INSERT OR UPDATE OR DELETE ON {t} FOR EACH ROW EXECUTE FUNCTION {t}_note();
"""


_MYSQL = (
    "CREATE TABLE {t} (id varchar(64) COLLATE utf8mb4_nopad_bin PRIMARY KEY, version bigint NOT NULL, text longtext)",
    "CREATE TABLE {t}_history (what text, id text, version bigint)",
    "CREATE TRIGGER {t}_a AFTER INSERT ON {t} FOR EACH ROW INSERT INTO {t}_history VALUES ('in', new.id, new.version)",
    "CREATE TRIGGER {t}_b AFTER UPDATE ON {t} FOR EACH ROW INSERT INTO {t}_history VALUES ('in', new.id, new.version)",
    "CREATE TRIGGER {t}_c AFTER DELETE ON {t} FOR EACH ROW INSERT INTO {t}_history VALUES ('out', old.id, old.version)",
)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 changes of 97 keys; a key is in one partition, its versions in order."""
    path = tmp_path_factory.mktemp("log") / "changes"
    keys = [f"id-{(i * 31) % KEYS}".encode() for i in range(RECORDS)]
    append(str(path), pa.table({"key": keys, "value": [str(i).encode() for i in range(RECORDS)]}), partition_by=2)
    return path


@dataclass
class World:
    log: Path
    folder: Path
    zygote: Zygote
    upsert: dict[str, str]
    sink: dict[str, Any]
    execute: Callable[[str], list[tuple[Any, ...]]]
    table: str
    history_table: str
    decisions: str
    whole: bool = True
    runs: int = 0
    errors: list[str] = field(default_factory=list)
    refused: list[tuple[str, int]] = field(default_factory=list)
    without: tuple[str, ...] = ()

    def spec(self, stop_at: str = "") -> dict[str, Any]:
        """Of the next run."""
        self.runs += 1
        return {
            "log": str(self.log), "checkpoint": str(self.folder / "checkpoint"), "guarantee": "exactly_once",
            "owner": f"owner-{self.runs}", "stop_at": stop_at, "upsert": self.upsert, "without": self.without,
            **self.sink,
        }  # fmt: skip

    def run(self, crash: str = "") -> int:
        code, error = self.zygote.run(self.spec(), self.folder, crash)
        self.errors.append(error)
        return code

    def stop(self, point: str) -> Child:
        """Start one that stops itself there, and wait for that."""
        zombie = self.zygote.start(self.spec(point), self.folder)
        zombie.wait_stopped()
        return zombie

    def state(self) -> State:
        found = self.execute(f"SELECT id, version, text FROM {self.table}")
        assert all(str(version) == text for _, version, text in found), "a row of two versions"
        return {key: version for key, version, _ in found}

    def history(self) -> Counter[tuple[Any, ...]]:
        return Counter(self.execute(f"SELECT what, id, version FROM {self.history_table}"))

    def decided(self) -> list[Decision]:
        try:
            return [Decision.from_json(text) for (text,) in self.execute(self.decisions)]
        except Exception as error:
            assert any(
                x in str(error) for x in ("no such table", "does not exist", "doesn't exist")
            )  # before the first claim
            return []

    def expected(self, end: str | None) -> State:
        """The table after applying the records up to these offsets one by one."""
        source = LOG.source({"path": str(self.log)})
        driver = source.driver()
        state: State = {}
        refused: list[tuple[str, int]] = []
        stop = json.loads(end) if end else driver.initial()
        for piece in driver.slices(driver.initial(), stop):
            for batch in source.read(piece):
                for row in batch.select(["key", "value"]).to_pylist():
                    key, version = row["key"].decode(), int(row["value"])
                    if "deleteColumn" in self.upsert and version % 5 == 0:
                        state.pop(key, None)
                    elif "onConflict" in self.upsert:
                        allowed = was(version) if "expectedVersion" in self.upsert else None
                        if state.get(key) == allowed:
                            state[key] = version
                        else:
                            refused.append((key, version))
                    else:
                        state[key] = version
        driver.close()
        self.refused = sorted(refused)
        return state

    def letters(self) -> list[tuple[str, int]]:
        """Dead letters; their number must match the ledger's count of skipped rows."""
        place = self.decisions.split(" FROM ")[1].split()[0].replace("decision", "{}")
        own = f"WHERE sink = '{self.table}'"
        kept = self.execute(f"SELECT record FROM {place.format('dead_letter')} {own}")
        ((total,),) = self.execute(f"SELECT coalesce(sum(total), 0) FROM {place.format('left_out')} {own}")
        assert int(total) == len(kept)
        return sorted((r["id"], r["version"]) for r in (json.loads(text) for (text,) in kept))

    def all(self) -> State:
        source = LOG.source({"path": str(self.log)})
        driver = source.driver()
        return self.expected(json.dumps(driver.latest(driver.initial(), None)))


def _loaded(request: pytest.FixtureRequest, system: str) -> Zygote:
    zygote: Zygote = request.getfixturevalue("zygote")
    zygote.load(system)
    return zygote


def _sqlite(request: pytest.FixtureRequest, upsert: dict[str, str]) -> World:
    folder: Path = request.getfixturevalue("tmp_path")
    database = folder / "sink.db"

    def execute(statement: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(database)) as connection:
            return connection.execute(statement).fetchall()

    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(_SQLITE)
    decisions = "SELECT decision FROM _delivered_decision ORDER BY batch"
    log: Path = request.getfixturevalue("log")
    return World(
        log,
        folder,
        _loaded(request, "sqlite"),
        upsert,
        {"database": str(database)},
        execute,
        TABLE,
        "history",
        decisions,
    )


def _postgres(request: pytest.FixtureRequest, upsert: dict[str, str], mechanism: str) -> World:
    server: Any = request.getfixturevalue("postgres")
    folder: Path = request.getfixturevalue("tmp_path")
    table = server.table(None)
    server.execute(_POSTGRES.format(t=table))
    sink = {"postgres": {"url": server.url, "dbtable": table, "mechanism": mechanism}}
    decisions = f"SELECT decision FROM delivered.decision WHERE sink = '{table}' ORDER BY batch"
    log: Path = request.getfixturevalue("log")
    whole = mechanism == "one_transaction"
    return World(
        log,
        folder,
        _loaded(request, "postgres"),
        upsert,
        sink,
        server.execute,
        table,
        f"{table}_history",
        decisions,
        whole,
    )


def _mysql(request: pytest.FixtureRequest, upsert: dict[str, str], mechanism: str) -> World:
    server: Any = request.getfixturevalue("mysql")
    folder: Path = request.getfixturevalue("tmp_path")
    table = server.table(None)
    for statement in _MYSQL:
        server.execute(statement.format(t=table))
    sink = {"mysql": {"url": server.url, "dbtable": table, "mechanism": mechanism}}
    decisions = f"SELECT decision FROM delivered.decision WHERE sink = '{table}' ORDER BY batch"
    log: Path = request.getfixturevalue("log")
    whole = mechanism == "one_transaction"
    return World(
        log,
        folder,
        _loaded(request, "mysql"),
        upsert,
        sink,
        server.execute,
        table,
        f"{table}_history",
        decisions,
        whole,
    )


WORLDS: dict[str, Callable[[pytest.FixtureRequest], World]] = {
    "sqlite-version-delete": lambda r: _sqlite(r, {**VERSION, **GONE}),
    "sqlite-arrival-delete": lambda r: _sqlite(r, {**ARRIVAL, **GONE}),
    "postgres-version-delete": lambda r: _postgres(r, {**VERSION, **GONE}, "one_transaction"),
    "postgres-arrival-delete": lambda r: _postgres(r, {**ARRIVAL, **GONE}, "one_transaction"),
    "postgres-two-phase": lambda r: _postgres(r, ARRIVAL, "two_phase"),
    "mysql-version-delete": lambda r: _mysql(r, {**VERSION, **GONE}, "one_transaction"),
    "mysql-arrival-delete": lambda r: _mysql(r, {**ARRIVAL, **GONE}, "one_transaction"),
    "mysql-two-phase": lambda r: _mysql(r, ARRIVAL, "two_phase"),
    "sqlite-insert": lambda r: _sqlite(r, INSERT),
    "sqlite-expected": lambda r: _sqlite(r, EXPECT),
    "postgres-insert": lambda r: _postgres(r, INSERT, "one_transaction"),
    "postgres-expected-two-phase": lambda r: _postgres(r, EXPECT, "two_phase"),
    "mysql-expected": lambda r: _mysql(r, EXPECT, "one_transaction"),
    "mysql-insert-two-phase": lambda r: _mysql(r, INSERT, "two_phase"),
}


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    return WORLDS[request.param](request)


@pytest.mark.parametrize("world", sweep(WORLDS, lambda w: w == "sqlite-version-delete"), indirect=True)
def test_a_kill_at_every_point_leaves_a_state_that_was_decided(world: World) -> None:
    """F4, F6, P1, P5, P6: killed at each crash point of one pipeline's life, started again each time."""
    crash = ",".join(f"{p}!kill" for p in POINTS)
    kills = 0
    while (code := world.run(crash)) == -signal.SIGKILL:
        kills += 1
        decided = world.decided()
        states = [world.expected(d.offsets) for d in decided[-2:]] or [{}]
        if world.whole:
            assert world.state() == states[-1], "not what was decided, right after a kill"
            if "onConflict" in world.upsert and decided:
                world.expected(decided[-1].offsets)
                assert world.letters() == world.refused, "other dead letters than were decided"
        assert max(world.history().values(), default=0) <= 1, "a change twice, right after a kill"
        assert kills <= len(POINTS)
    assert code == 0, world.errors[-1]
    assert kills == len(POINTS), sorted(p.name for p in (world.folder / "crashes").glob("*.hit.json"))
    assert world.state() == world.all()
    assert max(world.history().values()) == 1
    assert world.decided()[-1].total.count == RECORDS
    if "onConflict" in world.upsert:
        assert world.letters() == world.refused != []


@pytest.mark.parametrize(
    "world",
    sweep(WORLDS, lambda w: w in ("sqlite-version-delete", "postgres-two-phase", "mysql-two-phase")),
    indirect=True,
)
def test_zombie_cannot_bring_an_old_state_back(world: World) -> None:
    """F7: stopped right before it changes the table, resumed after another driver finished the stream."""
    stop_at = "commit.apply:before" if world.whole else "write.prepare:before"
    if "database" in world.sink:
        stop_at = "commit.decide:before"  # later it would hold SQLite's only write lock
    zombie = world.stop(stop_at)
    began = time.monotonic()
    assert world.run() == 0, world.errors[-1]
    assert time.monotonic() - began < 30
    done = world.state()
    assert done == world.all()
    code, error = zombie.go_on()
    assert code != 0, error
    for system in {"postgres", "mysql"} & world.sink.keys():  # as the next recovery: what the zombie prepared
        sink = find_sink(system, world.sink[system])
        with closing(sink.committer(Scope(PIPELINE, sink.name, "next"))) as committer:
            assert isinstance(committer.abort_orphans(()), Ok)
    assert world.state() == done
    assert max(world.history().values()) == 1


@pytest.mark.parametrize(
    "world",
    sweep(
        [w for w in WORLDS if "arrival" in w or w in ("postgres-two-phase", "mysql-two-phase")],
        lambda w: w == "postgres-two-phase",  # conformance/test_merge_schema.py has the others
    ),
    indirect=True,
)
def test_a_column_is_added_in_mid_stream(world: World) -> None:
    """Killed with a decided batch of the earlier transform, whose prepared transactions keep ALTER TABLE waiting; then
    with staged rows of the new one; then the earlier one runs again."""
    world.execute(f"ALTER TABLE {world.table} DROP COLUMN text")
    modes = world.upsert
    points = ["commit.decide:after@batch=0", "write.prepare:after@batch=1@shard=0"]
    points += ["commit.decide:after@batch=1", "commit.decide:after@batch=2"]

    def start(*, new: bool, dies: bool = True) -> None:
        world.upsert = {**modes, "mergeSchema": "true"} if new else {**modes}
        world.without = () if new else ("text",)
        if "database" not in world.sink:
            world.upsert["lockTimeout"] = "10"
        code = world.run(",".join(f"{p}!kill" for p in points))
        assert code == (-signal.SIGKILL if dies else 0), world.errors[-1]

    start(new=False)
    start(new=True)
    known = f"SELECT count(*) FROM {world.table} WHERE text IS NOT NULL"
    assert world.execute(known) == [(0,)], "decided rows are visible, those of the new transform are not"
    start(new=False)
    start(new=True)
    start(new=True, dies=False)
    assert world.state() == world.all()  # the last batch has every key
    assert max(world.history().values()) == 1
    assert world.decided()[-1].total.count == RECORDS


@pytest.mark.parametrize(
    "mechanism", sweep(["one_transaction", "two_phase"], lambda mechanism: mechanism == "two_phase")
)
@pytest.mark.parametrize("system", ["postgres", "mysql"])
def test_task_killed_after_its_promise_is_run_again(
    request: pytest.FixtureRequest, tmp_path: Path, system: str, mechanism: str
) -> None:
    """F6b: the dead attempt's prepared transaction locks its keys; the next attempt does not wait for them."""
    server: Any = request.getfixturevalue(system)
    name = server.table("region varchar(64), id bigint, version bigint, text text, UNIQUE (region, id)")
    rig = Rig(server.sink(name, mechanism=mechanism, lockTimeout="20", **ARRIVAL | {"keyColumns": "region, id"}))
    context = rig.context()
    plan = rig.plan(context, 0)
    batch = rows([("r", i % 10, i, f"t{i}", None) for i in range(50)], delete=False)
    work = tmp_path / "work"
    work.write_bytes(pickle.dumps((rig.sink, plan, 0, batch, batch.schema)))
    env = {**os.environ, "DELIVERED_CRASH": "write.prepare:after!kill", "DELIVERED_CRASH_DIR": str(tmp_path)}
    died = subprocess.run(
        [sys.executable, "-c", TASK, str(work)], env=env, capture_output=True, timeout=60, check=False
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    began = time.monotonic()
    message = write_shard(rig.sinks, plan, 0, 1, iter([Rows(batch)]), batch.schema)
    assert time.monotonic() - began < 15
    assert commit_batch(context, 0, offsets(0), [message]) is not None
    assert dict(server.execute(f"SELECT id, version FROM {name}")) == {i: 40 + i for i in range(10)}
    assert context.committers.abort_orphans(()) == Ok(0)
