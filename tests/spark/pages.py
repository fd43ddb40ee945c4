"""What each page takes for granted, and what its blocks must have done: run by test_pages.py."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import confluent_kafka
import pyarrow as pa
import pyarrow.dataset as ds
import yaml
from deltalake import DeltaTable
from pyspark.sql.functions import expr
from tests.kafka_tools import produce, read_committed
from tests.support.pages import Pages, Reader

import delivered
from delivered.connectors.log import append
from delivered_lab.brokers import cache_folder
from delivered_lab.brokers.servers import free_ports

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PAGES = Pages()
RECORDS, WAIT_S = 3, 120
BROKER = "localhost:9092"
TOPIC = (
    'subscribe="{}"', '"subscribe", "{}"', "subscribe '{}'", "subscribe: {}", '"topic", "{}"', '"topic": "{}"',
    "topic '{}'", 'NewTopic("{}"', '2)])["{}"]',
)  # fmt: skip
"""How pages name a topic."""


def log(path: Path, values: list[str], keys: list[str] | None = None) -> None:
    """Append to a local log; keys are 0, 1, ... if none are given."""
    keys = keys or [str(n) for n in range(len(values))]
    append(str(path), pa.table({"key": [k.encode() for k in keys], "value": [v.encode() for v in values]}))


def stream(r: Reader, *columns: str) -> DataFrame:
    """Three records, with key and value 0 to 2, as a stream."""
    log(r.folder / "given", [str(n) for n in range(RECORDS)])
    source = r.names["spark"].readStream.format("delivered_log").option("path", str(r.folder / "given")).load()
    return source.selectExpr(*columns or ("key", "value"))


def rows(database: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return sorted(connection.execute(query))


def run(pipeline: delivered.Pipeline, spark: Any) -> None:
    """All that its source holds now."""
    query = pipeline.start(spark)
    query.processAllAvailable()
    query.stop()


def topics(r: Reader, *names: str) -> list[str]:
    """Real topics in place of those of the page."""
    kafka = r.server("kafka")
    real = [kafka.topic(2) for _ in names]
    r.swap[BROKER] = kafka.bootstrap
    for name, topic in zip(names, real, strict=True):
        r.swap |= {pattern.format(name): pattern.format(topic) for pattern in TOPIC}
    return real


def fill(r: Reader, topic: str, values: list[str]) -> None:
    produce(r.server("kafka").bootstrap, topic, ((str(n).encode(), v.encode()) for n, v in enumerate(values)))


def arrived(r: Reader, topic: str) -> list[str]:
    return sorted(m.value().decode() for m in read_committed(r.server("kafka").bootstrap, topic))


@PAGES("docs/connectors/files.md")
def files(r: Reader) -> Iterator[None]:
    r.names["orders"] = stream(r)
    yield
    found = [ds.dataset(f).to_table() for f in (r.folder / "orders").glob("batch=*/*.parquet")]
    assert sum(t.num_rows for t in found) == RECORDS


@PAGES("docs/connectors/delta.md")
def delta(r: Reader) -> Iterator[None]:
    """A local table in place of one in S3."""
    table = r.folder / "lake" / "orders"

    def batches() -> str:
        log = "".join(f.read_text() for f in (table / "_delta_log").glob("*.json"))
        return re.findall(r'"appId":"([^"]+/batch/[^"]+)"', log)[0]

    r.names |= {"orders": stream(r, "'monday' AS day", "value"), "DeltaTable": DeltaTable}
    (r.folder / "secret").write_text("s")
    r.swap |= {
        "s3:/": str(r.folder),
        "env:LAKE_SECRET": f"file:{r.folder}/secret",
        'DeltaTable("orders")': f'DeltaTable("{table}")',
    }
    r.swap["delivered/<pipeline>/<sink>/batch/<incarnation>"] = batches
    yield
    assert DeltaTable(table).to_pyarrow_table().num_rows == RECORDS
    assert r.names["_"] == 0


@PAGES("docs/connectors/iceberg.md", matrix=True)
def iceberg(r: Reader) -> Iterator[None]:
    """A local catalog, then the options of a REST catalog."""
    from pyiceberg.catalog.sql import SqlCatalog

    served = r.server("rest_catalog")

    def table() -> Any:
        local = SqlCatalog("default", uri=f"sqlite:///{r.folder}/lake/catalog.db", warehouse=f"file://{r.folder}/lake")
        return local.load_table("shop.orders")

    def decided() -> str:
        r.names["table"] = table()
        return next(name for name in r.names["table"].properties if "/decided/" in name)

    r.names["orders"] = orders = stream(r, "'eu' AS region", "timestamp AS at", "value")
    options = {"guarantee": "exactly_once", "table": "shop.again", "pipeline": "again"}
    r.names["frame"] = orders.writeStream.format("delivered_iceberg").options(**options)
    (r.folder / "credential").write_text("id:secret")
    r.swap |= {
        "https://catalog.example": served.url, "env:CATALOG_CREDENTIAL": f"file:{r.folder}/credential",
        "delivered/<pipeline>/<sink>/decided/<incarnation>": decided,
    }  # fmt: skip
    yield
    assert table().scan().to_arrow().num_rows == RECORDS
    assert r.names["_"] == "0"
    again = r.names["frame"].option("checkpointLocation", str(r.folder / "checkpoints" / "again"))
    again.trigger(availableNow=True).start().awaitTermination(WAIT_S)
    assert served.catalog.load_table("shop.again").scan().to_arrow().num_rows == RECORDS


@PAGES("docs/connectors/kafka.md", "kafka", matrix=True)
def kafka(r: Reader) -> Iterator[None]:
    source, sink = topics(r, "orders", "orders-clean")
    r.swap['.option("subscribe"'] = '.option("startingOffsets", "earliest").option("subscribe"'
    fill(r, source, ["a", "b"])
    yield
    assert arrived(r, sink) == ["a", "b"]


@PAGES("docs/index.md", "kafka")
def index(r: Reader) -> Iterator[None]:
    (sink,) = topics(r, "orders-copy")
    r.names["orders"] = stream(r)
    yield
    assert arrived(r, sink) == ["0", "1", "2"]


@PAGES("docs/migrate.md", "kafka", "sparks_own_kafka", matrix=True)
def migrate(r: Reader) -> Iterator[None]:
    """Spark's own connector wrote three records; the page takes the checkpoint over, and three more follow."""
    source, sink = topics(r, "orders", "orders-clean")
    consumer = confluent_kafka.Consumer({"bootstrap.servers": r.swap[BROKER], "group.id": "billing"})
    consumer.commit(offsets=[confluent_kafka.TopicPartition(source, p, 0) for p in range(2)], asynchronous=False)
    consumer.close()
    at = {"kafka.bootstrap.servers": r.swap[BROKER]}
    checkpoint = str(r.folder / "checkpoints/orders")
    fill(r, source, ["0", "1", "2"])
    if r.server("sparks_own_kafka"):
        spark = r.names["spark"].readStream.format("kafka").options(**at, subscribe=source, startingOffsets="earliest")
        writer = spark.load().selectExpr("key", "value").writeStream.format("kafka").options(**at, topic=sink)
        writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination(WAIT_S)
    (r.folder / "orders.yaml").write_text(
        f"pipeline: adopted\nguarantee: exactly_once\ncheckpoint: adopted\n"
        f"source: {{format: kafka, kafka.bootstrap.servers: '{r.swap[BROKER]}', subscribe: {source}}}\n"
        f"sinks: [{{format: sqlite, path: adopted.db, table: orders, ifNotExists: true}}]\n"
    )
    fill(r, source, ["3", "4", "5"])
    yield
    assert arrived(r, sink) == [str(n) for n in range(6)]
    assert not (r.folder / "adopted").exists(), "without --yes nothing is written"


def database(r: Reader, server: str, columns: str, page_url: str, page_table: str) -> str:
    """A real table in place of that of the page."""
    url = r.server(server).url
    table = r.server(server).table(columns)
    r.swap[page_url], r.swap[f'"{page_table}"'] = url, f'"{table}"'
    r.swap['.option("user", "loader")'] = r.swap['.option("password", "env:SHOP_PASSWORD")'] = ""
    return str(table)


@PAGES("docs/connectors/postgres.md", "postgres", matrix=True)
def postgres(r: Reader) -> Iterator[None]:
    table = database(r, "postgres", "value text", "postgresql://db.example:5432/shop", "public.orders")
    r.names["orders"] = stream(r, "CAST(value AS STRING) AS value")
    yield
    assert r.server("postgres").execute(f"SELECT count(*) FROM {table}") == [(RECORDS,)]


@PAGES("docs/connectors/mysql.md", "mysql", matrix=True)
def mysql(r: Reader) -> Iterator[None]:
    table = database(r, "mysql", "value text", "mysql://db.example:3306/shop", "orders")
    r.names["orders"] = stream(r, "CAST(value AS STRING) AS value")
    yield
    assert r.server("mysql").execute(f"SELECT count(*) FROM {table}") == [(RECORDS,)]


@PAGES("docs/connectors/upserts.md", "postgres", matrix=True)
def upserts(r: Reader) -> Iterator[None]:
    """The second of three records deletes its key."""
    columns = "id int PRIMARY KEY, changed_at bigint"
    table = database(r, "postgres", columns, "postgresql://db.example:5432/shop", "customers")
    number = "CAST(CAST(value AS STRING) AS INT)"
    r.names["changes"] = stream(r, f"{number} AS id", "offset AS changed_at", f"{number} = 1 AS deleted")
    r.names["sql"] = lambda statement: r.server("postgres").execute(statement)
    yield
    assert r.server("postgres").execute(f"SELECT id FROM {table} ORDER BY id") == [(0,), (2,)]


@PAGES("docs/connectors/outbox.md", "postgres", matrix=True)
def outbox(r: Reader) -> Iterator[None]:
    """A relay, then changes of a table into a table."""
    orders = r.server("postgres").table("id int PRIMARY KEY, name text")
    copy = r.server("postgres").table("id int PRIMARY KEY, name text, version bigint")
    r.swap["postgresql://localhost/shop"] = r.server("postgres").url
    r.swap['"orders"'], r.swap['"copy"'] = f'"{orders}"', f'"{copy}"'
    yield
    assert r.said[0].count("outbox.event.order") == RECORDS
    pipeline = r.names["_"]
    run(pipeline, r.names["spark"])
    r.server("postgres").execute(f"INSERT INTO {orders} VALUES (1, 'ann'), (2, 'ben')")
    r.server("postgres").execute(f"DELETE FROM {orders} WHERE id = 1")
    run(pipeline, r.names["spark"])
    assert r.server("postgres").execute(f"SELECT id, name FROM {copy}") == [(2, "ben")]
    for (slot,) in r.server("postgres").execute("SELECT slot_name FROM pg_replication_slots WHERE NOT active"):
        if orders in slot:
            r.server("postgres").execute(f"SELECT pg_drop_replication_slot('{slot}')")


@PAGES("docs/dedup.md", "kafka", matrix=True)
def dedup(r: Reader) -> Iterator[None]:
    """Starts at the topic's end, and drops the second record of a key."""
    (source,) = topics(r, "orders")
    r.names["delivered"] = delivered
    yield
    query = r.names["_"].start(r.names["spark"])
    query.processAllAvailable()
    fill(r, source, ["first"])
    query.processAllAvailable()
    fill(r, source, ["again"])
    query.processAllAvailable()
    query.stop()
    assert rows(r.folder / "shop.db", "SELECT value FROM orders") == [(b"first",)]


@PAGES("docs/explanation.md", matrix=True)
def explanation(r: Reader) -> Iterator[None]:
    orders = stream(r)
    yield
    query = orders.writeStream.foreachBatch(r.names["write"])
    query.option("checkpointLocation", str(r.folder / "checkpoint")).trigger(
        availableNow=True
    ).start().awaitTermination(WAIT_S)
    assert rows(r.folder / "out.db", "SELECT count(*) FROM orders") == [(RECORDS,)]


@PAGES("docs/inbox.md", "kafka")
def inbox(r: Reader) -> Iterator[None]:
    """The loop gets a message twice, and ends once both are acknowledged."""
    kafka, topic = r.server("kafka"), r.server("kafka").topic(1)
    producer, mails = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap}), []
    for _ in range(2):
        producer.produce(topic, b"hello", headers={"id": b"order-8"})
    producer.flush()

    def acknowledged() -> bool:
        at = r.names["consumer"].committed([confluent_kafka.TopicPartition(topic, 0)])
        return bool(at[0].offset == 2)

    r.names |= {
        "confluent_kafka": confluent_kafka, "acknowledged": acknowledged,
        "send_mail": lambda _, body: mails.append(body),
    }  # fmt: skip
    r.swap |= {
        BROKER: kafka.bootstrap, "outbox.event.order": topic, "while True": "while not acknowledged()",
        '"enable.auto.commit"': '"auto.offset.reset": "earliest", "enable.auto.commit"',
    }  # fmt: skip
    yield
    r.names["consumer"].close()
    r.names["connection"].close()
    assert r.said[0] == "1 mail\n"
    assert mails == [b"hello"]


@PAGES("docs/dead-letters.md", "kafka")
def dead_letters(r: Reader) -> Iterator[None]:
    orders, letters = r.server("kafka").topic(2), r.server("kafka").topic(1)
    r.names |= {"started": {"kafka": r.server("kafka").broker}}
    r.swap |= {"brokers.start(": "started.get(", "delivered.session()": "spark"}
    r.swap |= {'"orders-dead"': f'"{letters}"', '"orders"': f'"{orders}"'}
    yield
    r.names["producer"].close()
    found = r.said[0].splitlines()
    assert rows(r.folder / "prices.db", "SELECT id, cents FROM prices") == [(1, 300)]
    assert sorted(line.split(" ", 3)[3].partition(":")[0] for line in found) == ["JSONDecodeError", "ZeroDivisionError"]


@PAGES("docs/schemas.md", "kafka", "registry", matrix=True)
def schemas(r: Reader) -> Iterator[None]:
    (topic,) = topics(r, "orders")
    r.server("kafka").admin().delete_topics([topic])[topic].result(30)  # the page makes it
    r.names |= {"started": {"kafka": r.server("kafka").broker, "registry": r.server("registry").broker}}
    r.swap |= {"brokers.start(": "started.get(", "delivered.session()": "spark"}
    yield
    assert r.said == ["held\n"]
    assert rows(r.folder / "orders.db", "SELECT id, city FROM orders") == [(n, f"city {n}") for n in (1, 2, 3)]


@PAGES("docs/sources.md", "kafka", matrix=True)
def sources(r: Reader) -> Iterator[None]:
    (orders,) = topics(r, "orders")
    fill(r, orders, ["10", "20"])
    log(r.folder / "refunds", ["5"])
    log(r.folder / "payments", ["x"], ["9"])
    r.names |= {"expr": expr, "delivered": delivered}
    r.swap['"payments")'] = f'"{r.folder}/payments")'
    yield
    delivered.Pipeline.from_file(r.folder / "shop.yaml").start(r.names["spark"]).awaitTermination(WAIT_S)
    found = rows(r.folder / "shop.db", "SELECT id, CAST(amount AS REAL) FROM bookings")
    assert found == [("0", -5.0), ("0", 10.0), ("1", 20.0)]
    run(r.names["_"], r.names["spark"])


@PAGES("docs/spark.md", "kafka")
def spark(r: Reader) -> Iterator[None]:
    orders, clean = topics(r, "orders", "orders-clean")
    fill(r, orders, ["a", "b"])
    log(r.folder / "given", ["x"])
    (r.folder / "orders.yaml").write_text(
        "pipeline: p\nguarantee: exactly_once\ncheckpoint: checkpoint\nsource: {format: log, path: given}\n"
        "sinks: [{format: sqlite, path: out.db, table: t}]\n"
    )
    r.names["delivered"] = delivered
    r.names["sql"] = lambda statement: r.names["spark"].sql(statement).collect()
    yield
    assert arrived(r, clean) == ["a", "b"]
    assert "count(1)=2" in "".join(r.said)
    assert rows(r.folder / "out.db", "SELECT value FROM t") == [(b"x",)]


@PAGES("docs/stateful.md", matrix=True)
def stateful(r: Reader) -> Iterator[None]:
    """The file twice, with more orders; then the same sums by `foreachBatch`."""
    spark, database = r.names["spark"], r.folder / "shop.db"
    for orders in ([("anna", "1.50"), ("ben", "2"), ("anna", "0.25")], [("ben", "0.10"), ("cleo", "7")]):
        log(r.folder / "orders", [v for _, v in orders], [k for k, _ in orders])
    source = spark.readStream.format("delivered_log").option("path", str(r.folder / "orders")).load()
    amount = expr("CAST(CAST(value AS STRING) AS DECIMAL(18, 2))").alias("amount")
    keyed = source.select(expr("CAST(key AS STRING)").alias("customer"), amount).groupBy("customer")
    r.names |= {"delivered": delivered, "totals": keyed.agg(expr("count(*) AS orders"), expr("sum(amount) AS revenue"))}
    r.swap['"checkpoint"'] = f'"{r.folder}/again"'
    r.swap['"shop.db"'] = f'"{r.folder}/again.db"'
    with closing(sqlite3.connect(r.folder / "again.db")) as made:
        made.execute("CREATE TABLE revenue (customer TEXT PRIMARY KEY, orders INTEGER, revenue)")
    yield
    delivered.Pipeline.from_file(r.folder / "totals.yaml").start(spark).awaitTermination(WAIT_S)
    expected = [("anna", 2, 1.75), ("ben", 2, 2.1), ("cleo", 1, 7.0)]
    for found in (database, r.folder / "again.db"):
        assert rows(found, "SELECT customer, orders, CAST(revenue AS REAL) FROM revenue") == expected


@PAGES("docs/saga.md", "postgres")
def saga(r: Reader) -> Iterator[None]:
    """A worker of the page's saga, declared in a module, over a log in PostgreSQL."""
    from delivered.patterns.saga import Log, begin

    url = r.server("postgres").url
    (r.folder / "shop").mkdir()
    (r.folder / "shop" / "sagas.py").write_text(
        "from delivered.patterns.saga import Saga, Step, NO_UNDO\n"
        'checkout = Saga("checkout", [Step("pay", lambda call: open("paid", "a").write(call.id), undo=NO_UNDO)])\n'
    )
    r.monkeypatch.syspath_prepend(str(r.folder))
    import importlib

    checkout = importlib.import_module("shop.sagas").checkout
    Log(url).create()
    import psycopg

    with psycopg.connect(url) as connection:
        begin(connection, checkout, id=r.folder.name, data={})
    r.swap |= {"postgresql://db/shop --password env:DB_PASSWORD": f"{url} --until-rest"}
    yield
    assert (r.folder / "paid").read_text() == r.folder.name
    assert r.said[0].endswith("1 complete, 1 compensated\n")


@PAGES("docs/connectors/rocketmq.md", "rocketmq", matrix=True)
def rocketmq(r: Reader) -> Iterator[None]:
    r.names["server"] = r.server("rocketmq").broker
    r.swap |= {'brokers.attach(brokers.default_folder("rocketmq"))': "server"}
    yield


@PAGES("docs/connectors/pulsar.md", matrix=True)
def pulsar(r: Reader) -> Iterator[None]:
    """A server of its own, with TLS."""
    yield
    r.names["server"].stop()


def _cache(r: Reader) -> None:
    """Servers that a page starts have a data folder of their own, and what was fetched is there."""
    cache = r.folder / "cache"
    cache.mkdir()
    for fetched in cache_folder().iterdir():
        if fetched.name != "data":
            (cache / fetched.name).symlink_to(fetched)
    r.environment["DELIVERED_CACHE"] = str(cache)


def described(r: Reader, name: str, **more: Any) -> Path:
    """A pipeline file from the log `given` into SQLite."""
    pipeline = {
        "pipeline": name, "guarantee": "exactly_once", "checkpoint": f"checkpoints/{name}", "trigger": "available_now",
        "source": {"format": "log", "path": "given"}, "master": "local[2]",
        "sinks": [{"format": "sqlite", "path": "out.db", "table": name}],
    }  # fmt: skip
    file = r.folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(pipeline | more))
    return file


@PAGES("docs/audit.md", "kafka", matrix=True)
def audit(r: Reader) -> Iterator[None]:
    """A chain, over a Kafka that the page starts. Then sinks with earlier records, a topic and a table."""
    _cache(r)
    (port,) = free_ports(1)
    bootstrap, topic = r.server("kafka").bootstrap, r.server("kafka").topic(1)
    fill(r, topic, ["earlier"] * 4)
    log(r.folder / "given", [str(n) for n in range(RECORDS)])
    kafka = described(r, "kafka", sinks=[{"format": "kafka", "kafka.bootstrap.servers": bootstrap, "topic": topic}])
    sqlite = described(r, "sqlite", transform={"sql": "SELECT CAST(value AS STRING) AS value FROM source"})
    with closing(sqlite3.connect(r.folder / "out.db")) as database:
        database.execute("CREATE TABLE sqlite (value TEXT)")
        database.execute("INSERT INTO sqlite VALUES ('earlier')")
        database.commit()
    for file in (kafka, sqlite):
        run(delivered.Pipeline.from_file(file), r.names["spark"])
    r.swap |= {
        "9092": str(port), '{"orders-clean": {"0": 1200, "1": 1187}}': json.dumps({topic: {"0": 4}}), "5001": "2",
        "audit orders.yaml": "audit kafka.yaml", "audit shop.yaml": "audit sqlite.yaml",
    }  # fmt: skip
    try:
        yield
    finally:
        r.run("delivered", "brokers", "stop", "kafka")
    assert all("held" in said for said in r.said), r.said


@PAGES("docs/receiver.md", "rabbitmq", "postgres", matrix=True)
def receiver(r: Reader) -> Iterator[None]:
    """Two receivers until all messages are in the log, then the pipeline until it has read them."""
    queue, table = r.server("rabbitmq").queue(), r.server("postgres").table("value bytea")
    r.server("rabbitmq").send(queue, ((f"m{n}", b"x") for n in range(RECORDS)))
    r.swap |= {
        "amqp://app@broker:5672/": r.server("rabbitmq").url, '  password: "${env:RABBIT}"\n': "",
        "queue: orders": f"queue: {queue}", "postgresql://db:5432/shop": r.server("postgres").url,
        "dbtable: orders": f"dbtable: {table}, select: [value]", "run orders.yaml": "run orders.yaml --available-now",
    }  # fmt: skip
    r.until = lambda: r.server("rabbitmq").left(queue) == 0 and (r.folder / "orders-log").exists()
    yield
    assert r.server("postgres").execute(f"SELECT count(*) FROM {table}") == [(RECORDS,)]


@PAGES("docs/replay.md", matrix=True)
def replay(r: Reader) -> Iterator[None]:
    yield
    assert "ann" in r.said[0]


def column(output: str, name: str) -> list[int]:
    """A column of the audits' last lines, `all`."""
    names = [c.strip() for c in re.findall(r"┃ (partition .*?) ┃$", output, re.MULTILINE)[0].split("┃")]
    found = [[c.strip() for c in row.split("│")[1:-1]] for row in re.findall(r"^│ all .*$", output, re.MULTILINE)]
    return [int(row[names.index(name)].replace(",", "")) for row in found]


@PAGES("docs/tutorial.md", matrix=True)
def tutorial(r: Reader) -> Iterator[None]:
    """All blocks in one shell."""
    r.one_shell = True
    yield
    output = "".join(r.said)
    assert output.count("killed\n") == 2
    assert "orders -> orders: exactly_once held" in output
    assert "again -> again: at_least_once held" in output
    assert column(output, "delivered")[0] == 1_000
    assert column(output, "lost") == [0, 0]
    exactly, at_least = column(output, "duplicated")
    assert exactly == 0
    assert at_least > 0


@PAGES("docs/deploy.md", matrix=True)
def deploy(r: Reader) -> Iterator[None]:
    """Doctor, plan and status of a pipeline that has read all there is; run.py takes it from there."""
    log(r.folder / "given", [str(n) for n in range(RECORDS)])
    file = described(r, "orders")
    run(delivered.Pipeline.from_file(file), r.names["spark"])
    r.names["sys"] = sys
    r.monkeypatch.setattr(sys, "argv", ["run.py", str(file)])
    r.swap["start()"] = "start(spark)"
    yield
    assert "exactly_once" in r.said[1]
