"""Every sink, and how to drive one as by Spark."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.memory import CONNECTOR as MEMORY
from tests.support.scans import scanned
from tests.support.toy import toy

from delivered.connectors.delta import CONNECTOR as DELTA
from delivered.connectors.files import CONNECTOR as FILES
from delivered.connectors.iceberg import CONNECTOR as ICEBERG
from delivered.connectors.sqlite import CONNECTOR as SQLITE
from delivered.contract.sink import Sink
from delivered.engine import Sinks
from delivered.engine.context import Committers, Context
from delivered.engine.decide import commit_batch
from delivered.engine.recover import plan_batch
from delivered.engine.shard import fingerprint_seed, write_shard
from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.identity import Scope
from delivered.model.rows import Rows
from delivered.model.work import (
    BatchPlan,
    CheckpointView,
    Decision,
    Owner,
    ShardMessage,
)
from delivered_lab.verify.services import wait_for

SHARDS = 2
ROWS = 50
SCHEMA = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])
EXACT = Guarantee.EXACTLY_ONCE
_names = itertools.count()


def alone(committers: Committers) -> Any:
    """The committer of the only sink."""
    (committer,) = committers.by_name.values()
    return committer


@dataclass
class Rig:
    """A sink, driven as by Spark: each call of `context` acts as a separate process."""

    sink: Sink
    pipeline: str = field(default_factory=lambda: f"p{next(_names)}")
    incarnation: str = "i0"
    schema: pa.Schema = field(default_factory=lambda: SCHEMA)

    def rows(self, batch: int, shard: int) -> pa.RecordBatch:
        """One value is empty, but where the system takes none."""
        return rows(batch, shard, 1 if self.sink.capability().system == "rocketmq" else 0)

    @property
    def sinks(self) -> Sinks:
        return self.sink if isinstance(self.sink, Sinks) else Sinks.one(self.sink)

    @property
    def scope(self) -> Scope:
        return Scope(self.pipeline, self.sinks.decider.name, self.incarnation)

    def context(self, owner: str = "first", guarantee: Guarantee = EXACT) -> Context:
        sinks = pickle.loads(pickle.dumps(self.sinks))
        return Context.open(sinks, self.scope, guarantee, Owner(owner))

    def plan(self, context: Context, batch: int, first: bool = True) -> BatchPlan:
        self.sinks.ready_target(self.schema)
        view = CheckpointView(self.incarnation, batch, offsets(batch), batch - 1 if batch else None)
        return plan_batch(context, view, first=first, add_columns=partial(self.sinks.add_columns, self.schema))

    def write(self, plan: BatchPlan, attempt: int = 0) -> list[ShardMessage]:
        messages = [
            write_shard(self.sinks, plan, shard, attempt, iter([Rows(self.rows(plan.batch, shard))]), SCHEMA)
            for shard in range(SHARDS)
        ]
        return pickle.loads(pickle.dumps(messages))

    def run(self, batch: int, context: Context | None = None) -> Decision | None:
        context = context or self.context()
        messages = self.write(self.plan(context, batch))
        return commit_batch(context, batch, offsets(batch), messages)

    def run_rows(self, batch: int, shards: Sequence[pa.RecordBatch], context: Context | None = None) -> None:
        """Write one batch; each shard's rows come in short record batches."""
        context, self.schema = context or self.context(), shards[0].schema
        plan = self.plan(context, batch)
        messages = [
            write_shard(
                self.sinks, plan, i, 0, map(Rows, [s.slice(a, 5) for a in range(0, s.num_rows, 5)]), self.schema
            )
            for i, s in enumerate(shards)
        ]
        commit_batch(context, batch, offsets(batch), messages)

    def visible(self) -> Fingerprint:
        """Fingerprint of all visible rows, once pending commits have completed."""
        self.settle()
        seed, names = fingerprint_seed(self.scope), self.sink.records(rows(0, 0)).schema.names
        return sum((fingerprint(batch, seed, names) for batch in scanned(self.sink)), Fingerprint())

    def settle(self) -> None:
        """Kafka replies to a commit before it has written the markers to all partitions."""
        if self.sink.capability().system != "kafka":
            return
        committer = self.sink.committer(self.scope)
        ending = ("PrepareCommit", "PrepareAbort")
        wait_for(
            lambda: not [t for t in committer.open_transactions() or () if t.state in ending], 60, "transactions end"
        )
        committer.close()

    def expected(self, *batches: int) -> Fingerprint:
        seed = fingerprint_seed(self.scope)
        return sum(
            (fingerprint(self.sink.records(self.rows(b, s)), seed) for b in batches for s in range(SHARDS)),
            Fingerprint(),
        )


def rows(batch: int, shard: int, shortest: int = 0) -> pa.RecordBatch:
    keys = [f"{batch}-{shard}-{i}".encode() if i % 10 else None for i in range(ROWS)]
    values = [b"v" * (shortest + i) for i in range(ROWS)]
    return pa.record_batch([pa.array(keys, pa.binary()), pa.array(values)], schema=SCHEMA)


def offsets(batch: int) -> str:
    return json.dumps({"0": (batch + 1) * ROWS})


def _memory(request: pytest.FixtureRequest, commit: str) -> Sink:
    from tests.support.memory.world import make_world

    make_world(request.node.nodeid)
    return MEMORY.sink({"world": request.node.nodeid, "commit": commit})


def _sqlite(request: pytest.FixtureRequest) -> Sink:
    folder: Path = request.getfixturevalue("tmp_path")
    return SQLITE.sink({"path": str(folder / "sink.db"), "table": "orders"})


def _delta(request: pytest.FixtureRequest) -> Sink:
    folder: Path = request.getfixturevalue("tmp_path")
    return DELTA.sink({"path": str(folder / "orders")})


def _delta_s3(request: pytest.FixtureRequest) -> Sink:
    s3: dict[str, str] = request.getfixturevalue("s3")
    return DELTA.sink({"path": f"s3://lake/t{next(_names)}", **s3})


def _iceberg(request: pytest.FixtureRequest) -> Sink:
    folder: Path = request.getfixturevalue("tmp_path")
    return ICEBERG.sink({"warehouse": str(folder / "lake"), "table": "shop.orders"})


def _iceberg_s3(request: pytest.FixtureRequest) -> Sink:
    s3: dict[str, str] = request.getfixturevalue("s3")
    folder: Path = request.getfixturevalue("tmp_path")
    catalog = {
        "catalog.uri": f"sqlite:///{folder}/catalog.db",
        "catalog.warehouse": f"s3://lake/w{next(_names)}",
        "catalog.s3.endpoint": s3["storage.aws_endpoint_url"],
        "catalog.s3.region": s3["storage.aws_region"],
        "catalog.s3.access-key-id": s3["storage.aws_access_key_id"],
        "catalog.s3.secret-access-key": s3["storage.aws_secret_access_key"],
    }
    return ICEBERG.sink({"table": "shop.orders", **catalog})


def _iceberg_rest(request: pytest.FixtureRequest) -> Sink:
    server: Any = request.getfixturevalue("rest_catalog")
    return ICEBERG.sink({"table": "shop.orders", "catalog.uri": server.url})


def _files(request: pytest.FixtureRequest, kind: str) -> Sink:
    folder: Path = request.getfixturevalue("tmp_path")
    return FILES.sink({"path": str(folder / "orders"), "fileFormat": kind})


def _kafka(request: pytest.FixtureRequest, client: str) -> Sink:
    from delivered.connectors.kafka import CONNECTOR as KAFKA

    kafka: Any = request.getfixturevalue("kafka")
    return KAFKA.sink({"kafka.bootstrap.servers": kafka.bootstrap, "topic": kafka.topic(), "client": client})


def _postgres(request: pytest.FixtureRequest, mechanism: str) -> Sink:
    postgres: Any = request.getfixturevalue("postgres")
    request.addfinalizer(postgres.roll_back_prepared)
    sink: Sink = postgres.sink(mechanism=mechanism)
    return sink


def _mysql(request: pytest.FixtureRequest, mechanism: str) -> Sink:
    mysql: Any = request.getfixturevalue("mysql")
    sink: Sink = mysql.sink(mechanism=mechanism)
    return sink


def _by_batch(request: pytest.FixtureRequest, system: str, mechanism: str) -> Sink:
    """With a column of the batch, in a table that the sink creates."""
    server: Any = request.getfixturevalue(system)
    if system == "postgres":
        request.addfinalizer(server.roll_back_prepared)
    options = {"mechanism": mechanism, "ifNotExists": "true", "batchColumn": "batch"}
    sink: Sink = server.sink(server.table(None), **options)
    return sink


def _rocketmq(request: pytest.FixtureRequest) -> Sink:
    from delivered.pipeline.registry import find_sink

    server: Any = request.getfixturevalue("rocketmq")
    folder: Path = request.getfixturevalue("tmp_path")
    return find_sink("rocketmq", server.transactions(server.topic("TRANSACTION"), folder))


def _pulsar(request: pytest.FixtureRequest) -> Sink:
    """With its ledger in Pulsar."""
    from delivered.connectors.pulsar import CONNECTOR as PULSAR

    pulsar: Any = request.getfixturevalue("pulsar")
    return PULSAR.sink({**pulsar.options, "topic": pulsar.topic()})


SINKS: dict[str, Callable[[pytest.FixtureRequest], Sink]] = {
    "memory-two-phase": lambda request: _memory(request, "two_phase"),
    "memory-one-transaction": lambda request: _memory(request, "one_transaction"),
    "sqlite": _sqlite,
    "delta": _delta,
    "iceberg": _iceberg,
    "iceberg-s3": _iceberg_s3,
    "iceberg-rest": _iceberg_rest,
    "files-parquet": lambda request: _files(request, "parquet"),
    "files-json": lambda request: _files(request, "json"),
    "toy": lambda request: toy(request.getfixturevalue("tmp_path")),
    "delta-s3": _delta_s3,
    "kafka": lambda request: _kafka(request, "arrow"),
    "kafka-librdkafka": lambda request: _kafka(request, "librdkafka"),
    "postgres-one-transaction": lambda request: _postgres(request, "one_transaction"),
    "postgres-two-phase": lambda request: _postgres(request, "two_phase"),
    "mysql-one-transaction": lambda request: _mysql(request, "one_transaction"),
    "pulsar": _pulsar,
    "rocketmq": _rocketmq,
    "mysql-two-phase": lambda request: _mysql(request, "two_phase"),
    **{
        f"{system}-{mechanism.replace('_', '-')}-by-batch": partial(_by_batch, system=system, mechanism=mechanism)
        for system in ("postgres", "mysql")
        for mechanism in ("one_transaction", "two_phase")
    },
}
