"""`python -m benchmarks.capacity`: what pipelines ask of their servers, counted there; into build/capacity.json.

Connections, by tasks at a time and shards of a batch: the most at any time of six batches from Kafka. Open
transactions: while the fourth batch waits before its decision, every shard prepared. PostgreSQL and MySQL list their
sessions; of Kafka, the established sockets of its port are counted, and its coordinator lists transactions.

Ledgers: bytes that a batch of two shards, each of one row, adds, by engine and sink without Spark. PostgreSQL and MySQL
tell the sizes of the ledger's tables, with indexes and dead rows; Kafka's partitions are files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import yaml

from benchmarks import origin
from benchmarks.__main__ import create_topic
from delivered.crash import CRASH, CRASH_DIR, HIT_SUFFIX
from delivered.engine import Sinks
from delivered.kits.sql.table import LEDGER_SCHEMA_DEFAULT
from delivered.model.rows import Rows
from delivered_lab import brokers
from delivered_lab.supervisor import release

LAYOUTS = ((2, 2), (2, 8), (4, 8))
"""Tasks at a time, shards of a batch."""
SINKS = ("kafka", "postgres one_transaction", "postgres two_phase", "mysql one_transaction", "mysql two_phase")
BATCHES = 6
WAITS = "commit.decide:before@batch=3!wait"
SAMPLES = 20
_LEDGER_SHARDS = 2


@dataclass
class Server:
    """
    Attributes:
        sessions: clients that are connected, this process not counted.
        transactions: open or prepared now.
    """

    sessions: Callable[[], int]
    transactions: Callable[[], int] = lambda: 0


def of_kafka(address: str) -> Server:
    from kafka.admin import KafkaAdminClient

    admin = KafkaAdminClient(bootstrap_servers=address)
    port, own = int(address.rpartition(":")[2]), os.getpid()

    def sessions() -> int:
        found = [c for c in psutil.net_connections(kind="tcp") if c.status == psutil.CONN_ESTABLISHED and c.pid != own]
        return sum(c.raddr[1] == port for c in found if c.raddr)

    def transactions() -> int:
        listed = admin.list_transactions(state_filters=["Ongoing", "PrepareCommit", "PrepareAbort"])
        return sum(map(len, listed.values()))

    return Server(sessions, transactions)


def of_postgres(url: str) -> Server:
    import psycopg

    connection = psycopg.connect(url, autocommit=True)

    def number(query: str) -> int:
        return int(connection.execute(query).fetchall()[0][0])

    clients = "FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    prepared = "(SELECT count(*) FROM pg_prepared_xacts)"
    return Server(
        lambda: number(f"SELECT count(*) {clients}"),
        lambda: number(f"SELECT {prepared} + count(*) {clients} AND backend_xid IS NOT NULL"),
    )


def of_mysql(url: str) -> Server:
    import pymysql

    host, _, port = url.partition("://")[2].rpartition("@")[2].partition("/")[0].partition(":")
    connection: Any = pymysql.connect(host=host, port=int(port), user="delivered", autocommit=True)

    def number(query: str) -> int:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT count(*) FROM information_schema.{query}")
            return int(cursor.fetchall()[0][0])

    return Server(
        lambda: number("processlist WHERE id <> connection_id() AND user NOT IN ('system user', 'event_scheduler')"),
        lambda: number("innodb_trx"),
    )


def counted(command: list[str], servers: Mapping[str, Server], folder: Path) -> dict[str, int]:
    """Run a pipeline to its end, and look at its servers meanwhile."""
    points, output = folder / "points", folder / "output"
    points.mkdir()
    found = dict.fromkeys([*(f"{n} connections" for n in servers), "transactions"], 0)
    left = SAMPLES
    with output.open("wb") as said:
        env = {**os.environ, CRASH: WAITS, CRASH_DIR: str(points)}
        process = subprocess.Popen(command, stdout=said, stderr=said, env=env)
        while process.poll() is None:
            for name, server in servers.items():
                found[f"{name} connections"] = max(found[f"{name} connections"], server.sessions())
            hit = next(points.glob(f"*{HIT_SUFFIX}"), None)
            if hit is not None and left:
                found["transactions"] = max(found["transactions"], *(s.transactions() for s in servers.values()))
                left -= 1
                if not left:
                    release(hit)
    if process.returncode or left:
        raise RuntimeError(f"{command} ended with {process.returncode}:\n{output.read_text()[-4000:]}")
    return found


def fill(bootstrap: str, topic: str, partitions: int) -> None:
    from confluent_kafka import Producer

    create_topic(bootstrap, topic, partitions)
    producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0})
    for number in range(100 * partitions * BATCHES):
        producer.produce(topic, value=b"%d" % number, partition=number % partitions)
    producer.flush()


def connections(folder: Path, only: str, batches: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """One row per sink and layout, and one per ledger. The source is a broker of its own."""
    sinks = [s for s in SINKS if only in s]
    more: dict[str, dict[str, str]] = {"postgres": {"max_prepared_transactions": "64"}}
    started = {
        s: brokers.start(s, folder / s, properties=more.get(s, {}), dies_with_parent=True)
        for s in dict.fromkeys(k.partition(" ")[0] for k in sinks)
    }
    source = brokers.start("kafka", folder / "source", dies_with_parent=True)
    found = []
    try:
        for shards in {s for _, s in LAYOUTS}:
            fill(source.bootstrap, f"in{shards}", shards)
        looks = {"postgres": of_postgres, "mysql": of_mysql}
        ends = {s: looks[s](b.url) if s in looks else of_kafka(b.bootstrap) for s, b in started.items()}
        read_from = of_kafka(source.bootstrap)
        for kind in sinks:
            system, _, mechanism = kind.partition(" ")
            server = started[system]
            for tasks, shards in LAYOUTS:
                name = f"p{uuid.uuid4().hex[:8]}"
                if system == "kafka":
                    create_topic(server.bootstrap, name, shards)
                    to = {"kafka.bootstrap.servers": server.bootstrap, "topic": name}
                else:
                    to = {"url": server.url, "dbtable": name, "ifNotExists": "true", "mechanism": mechanism}
                (folder / name).mkdir()
                pipeline = {
                    "pipeline": name, "guarantee": "exactly_once", "checkpoint": "checkpoint",
                    "trigger": "available_now", "master": f"local[{tasks}]",
                    "source": {"format": "kafka", "kafka.bootstrap.servers": source.bootstrap,
                               "subscribe": f"in{shards}", "startingOffsets": "earliest",
                               "maxOffsetsPerTrigger": 100 * shards},
                    "transform": {"sql": "SELECT key, value FROM source"},
                    "sinks": [{"format": system, **to}],
                }  # fmt: skip
                file = folder / name / "pipeline.yaml"
                file.write_text(yaml.safe_dump(pipeline), encoding="utf-8")
                command = [sys.executable, "-m", "delivered.cli.main", "run", str(file)]
                looked = counted(command, {"source": Server(read_from.sessions), "sink": ends[system]}, folder / name)
                found.append({"sink": kind, "tasks": tasks, "shards": shards, **looked})
                print(found[-1], flush=True)
        ledgers = [grown(s, broker, folder / s, batches) for s, broker in started.items()]
    finally:
        for broker in (source, *started.values()):
            broker.stop()
    return found, ledgers


def grown(system: str, server: brokers.Broker, folder: Path, batches: int) -> dict[str, Any]:
    """Bytes per batch of a server's ledger that has held batches before."""
    from delivered.pipeline.registry import find_sink

    sizes = [size_of_ledger(system, server, folder)]
    for count in (batches // 4, batches):
        name = f"l{uuid.uuid4().hex[:8]}"
        if system == "kafka":
            create_topic(server.bootstrap, name, 1)
            to = {"kafka.bootstrap.servers": server.bootstrap, "topic": name}
        else:
            to = {"url": server.url, "dbtable": name, "ifNotExists": "true"}
        decide(find_sink(system, to), count)
        sizes.append(size_of_ledger(system, server, folder))
    return {"ledger": system, "bytes_per_batch": round((sizes[2] - sizes[1]) / batches)}


def size_of_ledger(system: str, server: brokers.Broker, folder: Path) -> int:
    if system == "kafka":
        return sum(p.stat().st_size for p in folder.glob("data/__delivered_*/*.log"))
    if system == "postgres":
        import psycopg

        tables = "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0) FROM pg_class c JOIN pg_namespace n"
        where = f"ON n.oid = relnamespace WHERE nspname = '{LEDGER_SCHEMA_DEFAULT}' AND relkind = 'r'"
        with psycopg.connect(server.url) as connection:
            return int(connection.execute(f"{tables} {where}").fetchall()[0][0])
    import pymysql

    host, _, port = server.url.partition("://")[2].rpartition("@")[2].partition("/")[0].partition(":")
    tables = f"FROM information_schema.tables WHERE table_schema = '{LEDGER_SCHEMA_DEFAULT}'"
    with pymysql.connect(host=host, port=int(port), user="delivered", autocommit=True) as of, of.cursor() as cursor:
        cursor.execute(f"SELECT table_schema, table_name {tables}")
        for name in cursor.fetchall():
            cursor.execute("ANALYZE TABLE `{}`.`{}`".format(*name))
        cursor.execute(f"SELECT coalesce(sum(data_length + index_length), 0) {tables}")
        return int(cursor.fetchall()[0][0])


def decide(sink: Any, batches: int) -> None:
    """As many batches of a new checkpoint, by one driver."""
    from delivered.engine.context import Context
    from delivered.engine.decide import commit_batch
    from delivered.engine.recover import plan_batch
    from delivered.engine.shard import write_shard
    from delivered.model.capability import Guarantee
    from delivered.model.identity import Scope
    from delivered.model.work import CheckpointView, Owner

    rows = pa.RecordBatch.from_pydict({"key": [b"k"], "value": [b"v"]})
    sink.ready_target(rows.schema)
    sinks, scope = Sinks.one(sink), Scope("orders", sink.name, uuid.uuid4().hex)
    context = Context.open(sinks, scope, Guarantee.EXACTLY_ONCE, Owner("driver"))
    since = None
    for batch in range(batches):
        offsets = json.dumps({"orders": {"0": batch, "1": batch}})
        view = CheckpointView(context.scope.incarnation, batch, offsets, batch - 1 if batch else None)
        plan = plan_batch(context, view, first=batch == 0, since=since)
        since = plan.epoch
        said = [write_shard(sinks, plan, n, 0, iter([Rows(rows)]), rows.schema) for n in range(_LEDGER_SHARDS)]
        commit_batch(context, batch, offsets, said)
    context.close()


def files(folder: Path, pattern: str) -> dict[str, int]:
    sizes = {p: p.stat().st_size for p in folder.rglob(pattern) if p.is_file()}
    newest = max(sizes, key=lambda p: p.stat().st_mtime)
    return {"files": len(sizes), "bytes": sum(sizes.values()), "newest": sizes[newest]}


def iceberg(folder: Path, batches: int) -> dict[str, Any]:
    """What is in the table's folder `metadata` after these batches, and after all but the newest snapshot expired."""
    from datetime import UTC, datetime

    from pyiceberg.catalog.sql import SqlCatalog

    from delivered.pipeline.registry import find_sink

    decide(find_sink("iceberg", {"table": "db.t", "warehouse": str(folder)}), batches)
    metadata = folder / "db" / "t" / "metadata"

    def look() -> dict[str, Any]:
        return {
            "metadata.json": files(metadata, "*.metadata.json"),
            "manifests": files(metadata / "delivered", "*.avro"),
        }

    before = look()
    catalog = SqlCatalog("default", uri=f"sqlite:///{folder}/catalog.db", warehouse=str(folder))
    catalog.load_table("db.t").maintenance.expire_snapshots().older_than(datetime.now(UTC)).commit()
    return {"ledger": "iceberg", "batches": batches, "before": before, "after expiry": look()}


def local(folder: Path, batches: int) -> list[dict[str, Any]]:
    """Bytes per batch of the ledgers in local files, rows and data files left out where they lie apart."""
    from delivered.pipeline.registry import find_sink

    kinds = {
        "sqlite": ({"path": "t.db", "table": "t", "ifNotExists": "true"}, "t.db"),
        "files": ({"path": "files"}, "**/*.json"),
        "delta": ({"path": "delta"}, "delta/_delta_log/*"),
    }
    found = []
    for name, (options, pattern) in kinds.items():
        sizes = []
        for count in (batches // 4, batches):
            place = folder / name / str(count)
            place.mkdir(parents=True)
            decide(find_sink(name, {**options, "path": str(place / options["path"])}), count)
            sizes.append(sum(p.stat().st_size for p in place.glob(pattern) if p.is_file()))
        found.append({"ledger": name, "bytes_per_batch": round((sizes[1] - sizes[0]) / (batches - batches // 4))})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    parser.add_argument("--only", default="", help="sinks whose name contains this; or ledgers")
    parser.add_argument("--batches", type=int, default=200, help="of the ledger")
    parser.add_argument("--out", type=Path, default=Path("build/capacity.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="capacity-") as folder:
        found, ledgers = [], []
        if any(given.only in s for s in SINKS):
            found, ledgers = connections(Path(folder), given.only, given.batches)
        if given.only in "ledgers":
            ledgers += [*local(Path(folder), given.batches), iceberg(Path(folder, "lake"), given.batches)]
        report = {"origin": origin(), "ledgers": ledgers, "connections": found}
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report["ledgers"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
