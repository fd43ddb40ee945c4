"""An outbox in PostgreSQL -> Kafka -> Kafka -> PostgreSQL: one audit finds what was damaged at each hop."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
import yaml
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from tests.kafka_tools import read_committed
from tests.support import without_spark

import delivered
from delivered.audit.evidence import Counts, Damage, Verdict
from delivered.audit.report import ChainReport
from delivered.checkpoint import sidecar
from delivered.connectors.log import append
from delivered.model.errors import UsageError
from delivered.patterns import outbox

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_S = 180
ORDERS = 40
ID = "CAST(filter(headers, h -> h.key = 'id')[0].value AS STRING)"


@dataclass(frozen=True)
class Chain:
    """
    Attributes:
        files: of the pipelines relay, clean and store.
        topics: that lie between them.
        table: that the last one writes to.
    """

    files: list[Path]
    url: str
    layout: outbox.Layout
    topics: list[str]
    table: str

    @property
    def pipelines(self) -> list[delivered.Pipeline]:
        return [delivered.Pipeline.from_file(f) for f in self.files]

    def put(self, numbers: range) -> list[str]:
        """In one transaction. Returns the messages' ids."""
        ids = [str(outbox.new_id()) for _ in numbers]
        with psycopg.connect(self.url) as connection:
            for n, id_ in zip(numbers, ids, strict=True):
                outbox.put(
                    connection, id=id_, aggregate_type="order", aggregate_id=str(n), type="placed", payload={"n": n},
                    layout=self.layout,
                )  # fmt: skip
        return ids

    def run(self, spark: SparkSession, *names: str) -> None:
        for pipeline in self.pipelines:
            if pipeline.name in names:
                assert pipeline.start(spark).awaitTermination(WAIT_S)

    def more_on_their_way(self, spark: SparkSession) -> None:
        """One more row waits before each pipeline."""
        self.put(range(100, 101))
        self.run(spark, "relay", "clean")
        self.put(range(101, 102))
        self.run(spark, "relay")
        self.put(range(102, 103))


@pytest.fixture
def chain(postgres: Any, kafka: Any, tmp_path: Path) -> Chain:
    topics = [kafka.topic(1), kafka.topic(1)]
    layout, table = outbox.Layout(table=f"chain_{topics[0]}"), f"rows_{topics[0]}"
    servers = {"kafka.bootstrap.servers": kafka.bootstrap}
    earliest = {"startingOffsets": "earliest", "includeHeaders": True}
    own = {"id": ID, "own": "exists(headers, h -> h.key = 'id')"}
    pipelines: list[dict[str, Any]] = [
        {
            "pipeline": "relay", "audit": own,
            "source": {"format": "outbox", "url": postgres.url, "dbtable": layout.table, "keep": True},
            "sinks": [{"format": "kafka", **servers, "topic": topics[0]}],
        },
        {
            "pipeline": "clean", "audit": own,
            "source": {"format": "kafka", **servers, "subscribe": topics[0], **earliest},
            "transform": {"sql": "SELECT key, value, headers FROM source WHERE value IS NOT NULL"},
            "sinks": [{"format": "kafka", **servers, "topic": topics[1]}],
        },
        {
            "pipeline": "store", "audit": {"id": "id", "own": "true"},
            "source": {"format": "kafka", **servers, "subscribe": topics[1], **earliest},
            "transform": {
                "sql": f"SELECT {ID} AS id, CAST(get_json_object(CAST(value AS STRING), '$.n') AS INT) AS n FROM source"
            },
            "sinks": [{"format": "postgres", "url": postgres.url, "dbtable": table, "ifNotExists": True}],
        },
    ]  # fmt: skip
    files = []
    for pipeline in pipelines:
        name = pipeline["pipeline"]
        pipeline |= {"guarantee": "exactly_once", "checkpoint": str(tmp_path / name), "trigger": "available_now"}
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(pipeline))
    postgres.execute(outbox.ddl("postgres", layout))
    relay = delivered.Pipeline.from_file(files[0])
    with closing(relay.sources["source"].source().driver()) as driver:  # makes the slot
        driver.latest(driver.initial(), None)
    return Chain(files, postgres.url, layout, topics, table)


def damage(bootstrap: str, topic: str, skipped: int, altered: bytes) -> None:
    """Behind so many records, lose one, alter one and double one. Kafka only deletes from the beginning."""
    first = read_committed(bootstrap, topic)[: skipped + 3]
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.delete_records([TopicPartition(topic, 0, first[skipped + 2].offset())]).values():
        future.result()
    _, changed, twice = first[skipped:]
    again = [*((m, m.value()) for m in first[:skipped]), (changed, altered), (twice, twice.value())]
    producer = Producer({"bootstrap.servers": bootstrap})
    for message, value in again:
        producer.produce(topic, key=message.key(), value=value, headers=message.headers())
    assert producer.flush(30) == 0


def counts_of(report: ChainReport) -> list[Counts]:
    return [s.report.counts for s in (*report.hops, *report.ends)]


def waiting_of(report: ChainReport) -> list[int | None]:
    return [s.under_way for s in (*report.hops, *report.ends)]


@pytest.mark.matrix
def test_a_whole_chain_holds_and_what_is_under_way_is_not_lost(spark: SparkSession, chain: Chain) -> None:
    chain.put(range(ORDERS))
    chain.run(spark, "relay", "clean", "store")
    chain.more_on_their_way(spark)
    report = delivered.audit_chain(chain.pipelines, spark)
    assert report.verdict is Verdict.HELD, str(report)
    n = ORDERS
    assert counts_of(report) == [Counts(n + 2, n + 2), Counts(n + 1, n + 1), Counts(n, n), Counts(n + 2, n)]
    assert waiting_of(report) == [1, 1, 1, 3]

    relay, _, store = chain.pipelines
    with pytest.raises(UsageError, match="not the same place"):
        delivered.audit_chain([relay, store], spark)


@pytest.mark.matrix
@pytest.mark.parametrize("more", [False, True])
def test_what_is_damaged_at_a_hop_is_found_there_and_from_end_to_end(
    more: bool, kafka: Any, spark: SparkSession, chain: Chain
) -> None:
    """Also with rows that wait before each pipeline."""
    ids = chain.put(range(ORDERS))
    chain.run(spark, "relay")
    damage(kafka.bootstrap, chain.topics[0], 0, b'{"n": -1}')
    chain.run(spark, "clean")
    damage(kafka.bootstrap, chain.topics[1], 1, b'{"n": -2}')
    chain.run(spark, "store")
    with psycopg.connect(chain.url) as connection:
        connection.execute(f"DELETE FROM {chain.table} WHERE id = %s", [ids[-1]])
        connection.execute(f"UPDATE {chain.table} SET n = -3 WHERE id = %s", [ids[-2]])
        connection.execute(f"INSERT INTO {chain.table} SELECT * FROM {chain.table} WHERE id = %s", [ids[-3]])
    if more:
        chain.more_on_their_way(spark)

    report = delivered.audit_chain(chain.pipelines, spark)
    assert (report.verdict, report.exit_code) == (Verdict.BROKEN, 1), str(report)
    one, n = {"lost": 1, "duplicated": 1, "altered": 1}, ORDERS
    sent, cleaned = (n + 2, n + 1) if more else (n, n)
    assert counts_of(report) == [
        Counts(sent, sent, **one), Counts(cleaned, cleaned, **one), Counts(n, n, **one),
        Counts(sent, n, lost=3, duplicated=3, altered=3),
    ]  # fmt: skip
    assert waiting_of(report) == ([1, 1, 1, 3] if more else [0, 0, 0, 0])
    named = {d: {s.id for s in report.ends[0].report.samples_of(d)} for d in (Damage.LOST, Damage.ALTERED)}
    assert named == {Damage.LOST: {ids[0], ids[3], ids[-1]}, Damage.ALTERED: {ids[1], ids[4], ids[-2]}}
    assert "from end to end: broken: 3 records are lost" in str(report)
    assert "one may have undone what the other one did; so the first source was compared" in " ".join(
        str(report).split()
    )


@pytest.mark.matrix
def test_seals_of_hops_say_what_a_comparison_of_the_ends_says(kafka: Any, spark: SparkSession, chain: Chain) -> None:
    """Two audits with a seal of each hop, and damage at one of them in between."""
    chain.put(range(ORDERS))
    chain.run(spark, "relay", "clean", "store")
    first = delivered.audit_chain(chain.pipelines, spark)
    assert first.verdict is Verdict.HELD, str(first)
    assert counts_of(first)[-1] == Counts(ORDERS, ORDERS)
    ids = chain.put(range(ORDERS, ORDERS + 10))
    chain.run(spark, "relay", "clean", "store")
    with psycopg.connect(chain.url) as connection:
        connection.execute(f"DELETE FROM {chain.table} WHERE id = %s", [ids[3]])
    chain.more_on_their_way(spark)
    second = delivered.audit_chain(chain.pipelines, spark)
    assert second.verdict is Verdict.BROKEN, str(second)
    assert [h.report.continuation.base.last for h in second.hops[:2]] == [0, 0]  # type: ignore[union-attr]
    assert [h.report.counts.sent for h in second.hops[:2]] == [12, 11], "what is new"
    assert "judged from the seals of the hops" in str(second)
    full = delivered.audit_chain(chain.pipelines, spark, full=True)
    assert "judged from the seals of the hops" not in str(full)
    n = ORDERS + 10
    assert counts_of(second)[-1] == counts_of(full)[-1] == Counts(n + 2, n - 1, lost=1)
    assert waiting_of(second)[-1] == waiting_of(full)[-1] == 3

    relay = chain.pipelines[0]
    chain.put(range(200, 201))
    chain.run(spark, "relay")
    relay.audit(spark, from_now=True)
    apart = delivered.audit_chain(chain.pipelines, spark)
    assert "the seals of the hops do not join: relay, batch 4: never audited" in str(apart)
    assert counts_of(apart)[-1] == Counts(n + 4, n - 1, lost=1)


@pytest.mark.matrix
def test_a_dead_letter_whose_cause_was_fixed_is_unknown_from_end_to_end(
    kafka: Any, spark: SparkSession, tmp_path: Path
) -> None:
    """Its hop sealed the batch before, and compares it no more."""
    topic, database = kafka.topic(1), tmp_path / "sink.db"
    servers = {"kafka.bootstrap.servers": kafka.bootstrap}
    append(str(tmp_path / "log"), pa.table({"key": [b"a", b"b", b"c"], "value": [b"{}", b"not", b'{"n": 1}']}))
    own: dict[str, Any] = {"audit": {"own": "true"}}
    send = delivered.Pipeline(
        name="send",
        guarantee="exactly_once",
        checkpoint=str(tmp_path / "send"),
        source=delivered.log(str(tmp_path / "log")),
        sinks=[delivered.endpoint("kafka", topic=topic, **servers)],
        **own,
    )
    store = delivered.Pipeline(
        name="store",
        guarantee="at_most_once",
        checkpoint=str(tmp_path / "store"),
        source=delivered.endpoint("kafka", subscribe=topic, startingOffsets="earliest", **servers),
        transform=delivered.arrow(select=["key", "value"]),
        sinks=[delivered.sqlite(str(database), "rows", ifNotExists=True)],
        on_bad_row="dead_letter",
        dead_letter=delivered.files(str(tmp_path / "letters"), fileFormat="parquet"),
        **own,
    )

    def run(*statements: str) -> None:
        with closing(sqlite3.connect(database)) as connection, connection:
            for statement in statements:
                connection.execute(statement)

    refusing = "CREATE INDEX refusing ON rows (json_extract(CAST(value AS TEXT), '$.n'))"
    run("CREATE TABLE rows (key BLOB, value BLOB)", refusing)
    for pipeline in (send, store):
        assert without_spark.deliver(pipeline) == 1
    assert delivered.audit_chain([send, store], spark).verdict is Verdict.HELD
    run("DROP INDEX refusing")
    (report,) = [end.report for end in delivered.audit_chain([send, store], spark, full=True).ends]
    assert (report.verdict, report.counts.lost) == (Verdict.UNKNOWN, 1), report
    assert "dead-letters list --all" in report.unknowns[-1]
    run("DELETE FROM rows WHERE key = CAST('c' AS BLOB)")
    assert delivered.audit_chain([send, store], spark, full=True).verdict is Verdict.BROKEN
    for names in (["another"], send.sink_names):
        sidecar.keep_modes(send.checkpoint, dict.fromkeys(names, "append"))
    (report,) = [end.report for end in delivered.audit_chain([send, store], spark, full=True).ends]
    assert (report.verdict, "did not have this sink up to batch 0" in str(report.unknowns)) == (Verdict.UNKNOWN, True)
