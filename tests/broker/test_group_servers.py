"""Atomic batches across Kafka, Pulsar, PostgreSQL, SQLite and Delta: real servers, a pipeline killed at every step."""

from __future__ import annotations

import signal
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.kafka_tools import read_committed
from tests.support.pulsar import native
from tests.support.servers import Kafka, Postgres, Pulsar
from tests.support.sweeps import sweep
from tests.support.zygote import Zygote

from delivered.connectors.log import append
from delivered.engine import Sinks
from delivered.engine.context import Context, open_committers, open_shared_ledger
from delivered.engine.decide import commit_batch
from delivered.engine.recover import plan_batch
from delivered.engine.shard import write_shard
from delivered.model.capability import Guarantee
from delivered.model.identity import Scope
from delivered.model.rows import Rows
from delivered.model.work import CheckpointView, Decision, Ok, Owner
from delivered.pipeline.registry import find_sink

RECORDS = 1_000
COLUMNS = "id text, payload bytea, position bigint, at timestamptz"
GROUPS = {
    "kafka and postgres, both prepare": ("kafka", "postgres two_phase"),
    "kafka, and postgres as the last resource": ("kafka", "postgres one_transaction"),
    "kafka and postgres, sqlite as the last resource": ("kafka", "postgres two_phase", "sqlite"),
    "kafka, pulsar and postgres, all prepare": ("kafka", "pulsar", "postgres two_phase"),
    "pulsar and postgres, both prepare": ("pulsar", "postgres two_phase"),
    "kafka, pulsar and postgres, delta as the last resource": ("kafka", "pulsar", "postgres two_phase", "delta"),
}
DEFAULT = "kafka and postgres, sqlite as the last resource"


@dataclass
class World:
    """One pipeline from a log to several sinks, in separate processes."""

    kafka: Kafka
    postgres: Postgres
    folder: Path
    zygote: Zygote
    group: tuple[str, ...]
    pulsar: Pulsar | None = None
    guarantee: str = "exactly_once"
    runs: int = 0
    sinks: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def __post_init__(self) -> None:
        log = self.folder / "events"
        ids = {"key": [f"id-{i}".encode() for i in range(RECORDS)], "value": [b"v" * (i % 7) for i in range(RECORDS)]}
        append(str(log), pa.table(ids), partition_by=2)
        self.topic, self.table = self.kafka.topic(3), self.postgres.table(COLUMNS)
        self.topic_pulsar = "" if self.pulsar is None else self.pulsar.topic(2)
        # Servers are shared: a new checkpoint of a pipeline that wrote there before would be refused.
        self.pipeline = f"group-{self.table}"
        for named in self.group:
            system, _, mechanism = named.partition(" ")
            options: dict[str, dict[str, str]] = {
                "kafka": {"kafka.bootstrap.servers": self.kafka.bootstrap, "topic": self.topic},
                "postgres": {"url": self.postgres.url, "dbtable": self.table, "mechanism": mechanism},
                "sqlite": {"path": str(self.folder / "out.db"), "table": "events"},
                "delta": {"path": str(self.folder / "table")},
            }
            if self.pulsar is not None:
                options["pulsar"] = {**self.pulsar.options, "topic": self.topic_pulsar}
            self.sinks.append({"name": system, "format": system, "options": options[system]})

    def run(self, crash: str = "") -> int:
        self.runs += 1
        spec = {
            "log": str(self.folder / "events"), "sinks": self.sinks, "checkpoint": str(self.folder / "checkpoint"),
            "guarantee": self.guarantee, "owner": f"owner-{self.runs}", "pipeline": self.pipeline,
        }  # fmt: skip
        self.zygote.load(*(s["format"] for s in self.sinks))
        code, self.error = self.zygote.run(spec, self.folder, crash)
        return code

    def seen(self, sink: str) -> Counter[str]:
        """Read by an independent client."""
        match sink:
            case "kafka":
                found = read_committed(self.kafka.bootstrap, self.topic)
                return Counter((m.key() or b"").decode() for m in found)
            case "postgres":
                return Counter(name for (name,) in self.postgres.execute(f"SELECT id FROM {self.table}"))
            case "pulsar":
                assert self.pulsar is not None
                names = [f"{self.topic_pulsar}-partition-{n}" for n in range(2)]
                return Counter(m.partition_key() for name in names for m in native(self.pulsar, name))
            case "delta":
                if not DeltaTable.is_deltatable(str(self.folder / "table")):
                    return Counter()
                return Counter(DeltaTable(str(self.folder / "table")).to_pyarrow_table().column("id").to_pylist())
        path = self.folder / "out.db"
        connection = sqlite3.connect(path)
        try:
            return Counter(name for (name,) in connection.execute("SELECT id FROM events"))
        except sqlite3.OperationalError:
            return Counter()
        finally:
            connection.close()

    @property
    def opened(self) -> Sinks:
        return Sinks.of([(s["name"], find_sink(s["format"], s["options"]), None) for s in self.sinks])

    @property
    def scope(self) -> Scope:
        incarnation = (self.folder / "checkpoint" / "metadata").read_text()
        return Scope(self.pipeline, self.opened.decider.name, incarnation)

    def decided(self) -> list[Decision]:
        if not (self.folder / "checkpoint" / "metadata").exists():
            return []
        ledger = open_shared_ledger(self.opened, self.scope)
        try:
            return list(ledger.history()) if ledger.look().last is not None else []
        finally:
            ledger.close()

    def abort_orphans(self) -> object:
        committer = open_committers(self.opened, self.scope, Guarantee.EXACTLY_ONCE)
        try:
            return committer.abort_orphans(())
        finally:
            committer.close()


def points(group: tuple[str, ...]) -> list[str]:
    """One kill before and after every step of a batch at every sink, over three batches."""
    found = ["recover.claim:after", "recover.abort_orphans:before", "write.stage:after#3@batch=0"]
    names = [named.split()[0] for named in group]
    for name in names:
        found += [f"write.prepare:{m}@batch=0@shard={s}@sink={name}" for m, s in (("before", 0), ("after", 1))]
    found += ["commit.decide:before@batch=1", "commit.decide:after@batch=1", "recover.apply:after"]
    for name in names:
        found += [f"commit.apply:before@batch=2@shard=0@sink={name}", f"recover.apply:after@shard=1@sink={name}"]
        found += [f"commit.apply:after@batch={b}@shard={s}@sink={name}" for b, s in ((0, 0), (1, 1))]
    return [*found, "log:before@batch=2"]


@pytest.fixture
def world(request: pytest.FixtureRequest, kafka: Kafka, postgres: Postgres, zygote: Zygote, tmp_path: Path) -> World:
    group = GROUPS[request.param]
    pulsar = request.getfixturevalue("pulsar") if "pulsar" in group else None
    return World(kafka, postgres, tmp_path, zygote, group, pulsar)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "world",
    sweep(GROUPS, lambda g: g == DEFAULT),
    indirect=True,
)
def test_a_kill_at_every_step_leaves_all_or_none_at_every_sink(world: World) -> None:
    """F3, F6, P5, P6, P27: killed for real at each step of a batch, started again each time."""
    names = [s["name"] for s in world.sinks]
    crash = ",".join(f"{p}!kill" for p in points(world.group))
    kills = partly = 0
    while (code := world.run(crash)) == -signal.SIGKILL:
        kills += 1
        decided = world.decided()
        whole = decided[-1].total.count if decided else 0
        before = decided[-2].total.count if len(decided) > 1 else 0
        counts = {}
        for name in names:
            seen = world.seen(name)
            counts[name] = seen.total()
            assert seen.total() == len(seen), f"a record twice at {name}, right after a kill"
            assert before <= seen.total() <= whole, f"{name} shows what nobody decided, or lacks an earlier batch"
        deciding = world.opened.decider
        if deciding.sink.capability().commit == "one_transaction":
            assert counts[deciding.name] == whole, "the last resource shows a batch when it is decided, whole"
        partly += len(set(counts.values())) > 1
        assert kills <= len(points(world.group))
    assert code == 0, world.error
    assert partly > 0, "no kill fell between two applies: this run showed nothing"
    hits = {p.name.partition("-")[0] for p in (world.folder / "crashes").glob("*.hit.json")}
    assert len(hits) == kills >= len(names) * 4
    expected = Counter(f"id-{i}" for i in range(RECORDS))
    for name in names:
        assert world.seen(name) == expected, name
        assert world.decided()[-1].projected(name).total.count == RECORDS
    assert world.abort_orphans() == Ok(0), "a participant outlived its batch"


@pytest.mark.parametrize("world", ["kafka and postgres, both prepare"], indirect=True)
@pytest.mark.parametrize("guarantee", sweep(("at_least_once", "at_most_once"), lambda g: g == "at_least_once"))
def test_the_weaker_guarantees_keep_their_word_at_every_sink(world: World, guarantee: str) -> None:
    world.guarantee = guarantee
    assert world.run("write.flush:after@batch=1@shard=0@sink=kafka!kill") == -signal.SIGKILL
    assert world.run() == 0, world.error
    last = world.decided()[-1]
    for name in ("kafka", "postgres"):
        seen, account = world.seen(name), last.projected(name)
        lost, repeats = RECORDS - len(seen), seen.total() - len(seen)
        assert set(seen) <= {f"id-{i}" for i in range(RECORDS)}
        if guarantee == "at_least_once":
            assert lost == 0
            assert account.total.count == RECORDS
            # Shard 0 had reached Kafka, and repeats there; PostgreSQL had not committed it.
            assert (repeats > 0) == (name == "kafka")
        else:
            assert repeats == 0
            assert lost <= account.given_up.count == 400
            assert (lost < 400) == (name == "kafka")


def test_p4_markers_of_a_sink_beside_the_ledger_stay_bounded(
    kafka: Kafka, postgres: Postgres, zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P4: Kafka decides, so no decision in PostgreSQL forgets the markers there."""
    monkeypatch.setattr("delivered.engine.context.FORGET_EVERY", 2)
    world = World(kafka, postgres, tmp_path, zygote, GROUPS["kafka and postgres, both prepare"])
    sink = world.opened
    scope = Scope("bounded", sink.decider.name, "i")
    context = Context.open(sink, scope, Guarantee.EXACTLY_ONCE, Owner("o"))
    postgres.execute(f"ALTER TABLE {world.table} ADD COLUMN key text, ADD COLUMN value bytea")
    schema = pa.schema([pa.field("key", pa.string()), pa.field("value", pa.binary())])
    for batch in range(7):
        plan = plan_batch(
            context, CheckpointView("i", batch, f"o{batch}", batch - 1 if batch else None), first=batch == 0
        )
        rows = [pa.record_batch([[f"{batch}-{s}"], [b"v"]], schema=schema) for s in range(2)]
        messages = [write_shard(sink, plan, s, 0, iter([Rows(rows[s])]), schema) for s in range(2)]
        commit_batch(context, batch, f"o{batch}", messages)
    markers = postgres.execute("SELECT batch FROM delivered.marker WHERE pipeline = 'bounded' ORDER BY batch")
    assert [b for (b,) in markers] == [6, 6]
    assert postgres.execute(f"SELECT count(*) FROM {world.table}") == [(14,)]
    context.ledger.close()
    context.committers.close()
