"""PostgreSQL and MySQL: processes and servers really killed under a sink. The judge uses plain SQL."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.support.databases import COLUMNS, POINTS, RECORDS, TASK
from tests.support.embedded_pipeline import PIPELINE
from tests.support.sinks import SCHEMA, SHARDS, Rig, offsets, rows
from tests.support.sweeps import sweep
from tests.support.zygote import Child, Zygote

from delivered.connectors.log import append
from delivered.engine.decide import commit_batch
from delivered.engine.shard import write_shard
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, Unreachable
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.rows import Rows
from delivered.model.work import Account, Action, Decision, Ok

if TYPE_CHECKING:
    from tests.support.servers import Mysql, Postgres

    Server = Mysql | Postgres

SYSTEMS = ["postgres", "mysql"]
MECHANISMS = ["one_transaction", "two_phase"]


@pytest.fixture(params=SYSTEMS)
def server(request: pytest.FixtureRequest) -> Server:
    shared: Server = request.getfixturevalue(request.param)
    return shared


@pytest.fixture(params=SYSTEMS)
def new_server(request: pytest.FixtureRequest) -> Callable[..., Server]:
    start: Callable[..., Server] = request.getfixturevalue(f"new_{request.param}")
    return start


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "events"
    table = pa.table(
        {"key": [f"id-{i}".encode() for i in range(RECORDS)], "value": [b"v" * (i % 7) for i in range(RECORDS)]}
    )
    append(str(path), table, partition_by=2)
    return path


@dataclass
class World:
    """One pipeline from a log to a table, in separate processes."""

    server: Server
    log: Path
    folder: Path
    mechanism: str
    zygote: Zygote
    guarantee: str = "exactly_once"
    table: str = ""
    runs: int = 0
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = self.server.table(COLUMNS[self.connector])
        self.zygote.load(self.connector)

    @property
    def connector(self) -> str:
        return "postgres" if self.server.system == "postgres" else "mysql"

    def spec(self, stop_at: str = "") -> dict[str, Any]:
        """Of the next run."""
        self.runs += 1
        options = {"url": self.server.url, "dbtable": self.table, "mechanism": self.mechanism}
        return {
            "log": str(self.log), self.connector: options, "checkpoint": str(self.folder / "checkpoint"),
            "guarantee": self.guarantee, "owner": f"owner-{self.runs}", "stop_at": stop_at,
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

    def seen(self) -> Counter[str]:
        return Counter(name for (name,) in self.server.execute(f"SELECT id FROM {self.table}"))

    def decided(self) -> list[Decision]:
        there = "SELECT 1 FROM information_schema.tables WHERE table_schema = 'delivered' AND table_name = 'decision'"
        if not self.server.execute(there):
            return []
        found = self.server.execute(
            "SELECT decision FROM delivered.decision WHERE sink = %s ORDER BY batch", self.table
        )
        return [Decision.from_json(text) for (text,) in found]

    def left(self) -> list[Any]:
        """Leftovers that must not outlive a pipeline: prepared transactions and staging tables of its sink."""
        sink = self.server.sink(self.table)
        committer = sink.committer(Scope(PIPELINE, sink.name, "judge"))
        found = committer.open_transactions()
        tables = committer._ask(committer._shards.staged)
        committer.close()
        return [*found, *tables]


@pytest.fixture
def world(server: Server, log: Path, zygote: Zygote, tmp_path: Path, request: pytest.FixtureRequest) -> World:
    return World(server, log, tmp_path, request.param, zygote)


@pytest.mark.parametrize(
    "world", [pytest.param("one_transaction", marks=pytest.mark.matrix), "two_phase"], indirect=True
)
def test_a_kill_at_every_point_loses_and_repeats_nothing(world: World) -> None:
    """F4, F6, P1, P5, P6: killed at each crash point of one pipeline's life, started again each time."""
    crash = ",".join(f"{p}!kill" for p in POINTS)
    kills = 0
    while (code := world.run(crash)) == -signal.SIGKILL:
        kills += 1
        seen, decided = world.seen(), world.decided()
        assert seen.total() == len(seen), "a record twice, right after a kill"
        whole = decided[-1].total.count if decided else 0
        if world.mechanism == "one_transaction":
            assert seen.total() == whole, "a torn batch, right after a kill"
        else:
            # P27: between the decision and the last COMMIT PREPARED a batch may be seen in part, never more than it.
            earlier = decided[-2].total.count if len(decided) > 1 else 0
            assert earlier <= seen.total() <= whole
        assert kills <= len(POINTS)
    assert code == 0, world.errors[-1]
    hit = {p.name.partition("-")[0] for p in (world.folder / "crashes").glob("*.hit.json")}
    assert len(hit) == kills == len(POINTS)
    assert world.seen() == Counter(f"id-{i}" for i in range(RECORDS))
    assert world.decided()[-1].total.count == RECORDS
    assert world.left() == []


@pytest.mark.parametrize(
    ("server", "world", "guarantee"),
    # What repeats and what is given up, the engine decides; MariaDB's kills are above.
    sweep(
        [(system, "two_phase", guarantee) for system in SYSTEMS for guarantee in ("at_least_once", "at_most_once")],
        lambda server, world, guarantee: server == "postgres",
    ),
    indirect=["server", "world"],
)
def test_the_weaker_guarantees_keep_their_word(world: World, guarantee: str) -> None:
    world.guarantee = guarantee
    assert world.run("write.flush:after@batch=1@shard=0!kill") == -signal.SIGKILL
    assert world.run() == 0, world.errors[-1]
    seen, last = world.seen(), world.decided()[-1]
    assert set(seen) <= {f"id-{i}" for i in range(RECORDS)}
    lost, repeats = RECORDS - len(seen), seen.total() - len(seen)
    if guarantee == "at_least_once":
        assert lost == 0
        assert repeats > 0  # shard 0 was committed, and repeats
        assert last.total.count == RECORDS
    else:
        assert repeats == 0
        assert 0 < lost <= last.given_up.count == 400


# Of two phases, test_upsert_kill.py has zombies in `make test`, and the next test.
@pytest.mark.parametrize("world", sweep(MECHANISMS, lambda world: world == "one_transaction"), indirect=True)
def test_zombie_driver_inside_its_decision_is_fenced(world: World) -> None:
    """F7: stopped while it holds the owner's row (or between two applies), then resumed after another one finished."""
    zombie = world.stop("commit.apply:before")
    began = time.monotonic()
    assert world.run() == 0, world.errors[-1]
    assert time.monotonic() - began < 30
    done = world.seen()
    assert done == Counter(f"id-{i}" for i in range(RECORDS))
    code, error = zombie.go_on()
    if world.mechanism == "one_transaction":  # the server rolled back its transaction
        assert code == 3
        assert any(x in error for x in ("FENCED", "terminated the connection", "closed the connection")), error
    else:  # its decision stood, and the other one applied it: nothing is left to do
        assert code == 0, error
    assert world.seen() == done
    assert world.left() == []


@pytest.mark.parametrize("world", ["two_phase"], indirect=True)
def test_zombie_that_prepares_after_orphans_were_aborted_changes_nothing(world: World) -> None:
    """F7, P9: its transaction is prepared late, under an id that no decision names; the next start rolls it back."""
    zombie = world.stop("write.prepare:before")
    assert world.run() == 0, world.errors[-1]
    done = world.seen()
    _, error = zombie.go_on()
    assert "FENCED" in error, error
    assert world.seen() == done == Counter(f"id-{i}" for i in range(RECORDS))
    assert len(world.left()) > 0
    assert world.run() == 0  # nothing new to read: no batch, no recovery
    sink = world.server.sink(world.table)
    assert isinstance(sink.committer(Scope(PIPELINE, sink.name, "next")).abort_orphans(()), Ok)
    assert world.left() == []
    assert world.seen() == done


# Of two phases, test_upsert_kill.py has it in `make test`.
@pytest.mark.parametrize(
    ("server", "mechanism", "point"),
    sweep(
        product(SYSTEMS, MECHANISMS, ("write.stage:after", "write.prepare:after")),
        lambda server, mechanism, point: point == "write.prepare:after" and mechanism == "one_transaction",
    ),
    indirect=["server"],
)
def test_task_killed_and_run_again(server: Server, tmp_path: Path, mechanism: str, point: str) -> None:
    """F6b: a task's process dies with its shard open or prepared; Spark's next attempt replaces it."""
    rig = Rig(server.sink(mechanism=mechanism))
    context = rig.context()
    plan = rig.plan(context, 0)
    work = tmp_path / "work"
    work.write_bytes(pickle.dumps((rig.sink, plan, 0, rows(0, 0), SCHEMA)))
    env = {**os.environ, "DELIVERED_CRASH": f"{point}!kill", "DELIVERED_CRASH_DIR": str(tmp_path)}
    died = subprocess.run(
        [sys.executable, "-c", TASK, str(work)], env=env, capture_output=True, timeout=60, check=False
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    messages = [
        write_shard(rig.sinks, plan, shard, attempt, iter([Rows(rows(0, shard))]), SCHEMA)
        for shard, attempt in ((0, 1), (1, 0))
    ]
    assert commit_batch(context, 0, offsets(0), messages) is not None
    assert rig.visible() == rig.expected(0)
    assert context.committers.abort_orphans(()) == Ok(0), "the driver gave back what the dead attempt had promised"


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_server_killed_with_shards_prepared(new_server: Callable[..., Server], mechanism: str) -> None:
    """F3, F4: kill -9 of the server between prepare and decide, then between decide and apply; nothing is forgotten."""
    server = new_server()
    rig = Rig(server.sink(mechanism=mechanism))
    context = rig.context("first")
    plan = rig.plan(context, 0)
    messages = rig.write(plan)
    server.broker.kill()
    with pytest.raises(DeliveredError):
        commit_batch(context, 0, offsets(0), messages)
    server.broker.restart()
    assert rig.visible() == Fingerprint()
    # The prepared transactions survived the server: the same messages can be decided now.
    decision = commit_batch(context, 0, offsets(0), messages)
    assert decision is not None
    assert rig.visible() == rig.expected(0)

    plan = rig.plan(context, 1, first=False)
    prepared = tuple(m.prepared for m in rig.write(plan) if m.prepared is not None)
    total = decision.total + sum((p.fingerprint for p in prepared), Fingerprint())
    second = Decision(
        rig.scope, "first", Guarantee.EXACTLY_ONCE, 1, plan.offsets, prepared, {rig.scope.sink: Account(total)}, 1
    )
    assert context.ledger.decide(second) == Ok(None)
    server.broker.kill()
    server.broker.restart()
    again = rig.context("second")
    assert rig.plan(again, 1).action is Action.SKIP
    assert rig.visible() == rig.expected(0, 1)
    assert all(again.committers.was_committed(Work(rig.scope, 1, p.shard), p) for p in prepared)
    assert len(prepared) == SHARDS


# `make test` kills the server under one transaction above.
@pytest.mark.parametrize("mechanism", sweep(MECHANISMS, lambda mechanism: mechanism == "two_phase"))
def test_connection_lost_under_an_open_shard(new_server: Callable[..., Server], mechanism: str) -> None:
    """The server dies under an open COPY or LOAD DATA: a clear error at once, nothing half-visible."""
    server = new_server()
    rig = Rig(server.sink(mechanism=mechanism))
    context = rig.context()
    plan = rig.plan(context, 0)
    writer = rig.sink.writer(Work(rig.scope, 0, 0), Guarantee.EXACTLY_ONCE, SCHEMA)
    writer.stage(rows(0, 0))
    server.broker.kill()
    began = time.monotonic()
    with pytest.raises(Unreachable) as caught:
        writer.stage(rows(0, 0))
        writer.prepare(Fingerprint(2 * rows(0, 0).num_rows))
    assert time.monotonic() - began < 15
    assert caught.value.next_step
    writer.abort()
    writer.abort()
    began = time.monotonic()
    with pytest.raises(Unreachable):
        rig.write(plan)
    assert time.monotonic() - began < 15
    server.broker.restart()
    assert rig.visible() == Fingerprint()
    rig.run(0)
    assert rig.visible() == rig.expected(0)


@pytest.mark.parametrize(
    "guarantee", sweep([Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE], lambda g: g is Guarantee.EXACTLY_ONCE)
)
def test_a_server_killed_under_an_upsert_starts_again_at_once(
    new_postgres: Callable[..., Postgres], guarantee: Guarantee
) -> None:
    """kill -9 of its first process: the others end their transactions by themselves; what they still log is lost.

    With unlogged tables created in such transactions, 16.14 often fails to restart at once: "could not create file:
    File exists" (docs/decisions/030).
    """
    server = new_postgres()
    table = server.table("key bytea PRIMARY KEY, value bytea")
    sink = server.sink(table, mechanism="two_phase", mode="upsert", keyColumns="key")
    rows = pa.record_batch({"key": [b"a", b"b"], "value": [b"1", b"2"]})
    scope = Scope("p", sink.name, "i")
    writers = [sink.writer(Work(scope, 0, shard), guarantee, rows.schema) for shard in range(8)]
    for writer in writers:
        writer.stage(rows)
    server.execute(f"INSERT INTO {server.table()} VALUES ('x', 'y')")  # flushes the earlier log to disk
    server.broker.kill()
    server.broker.restart()
    assert server.execute(f"SELECT count(*) FROM {table}") == [(0,)]
    for writer in writers:
        writer.abort()
