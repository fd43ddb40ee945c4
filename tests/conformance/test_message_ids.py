"""Every sink to a broker sends the id that a record was given: the same when its batch is sent again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.broker.receive_help import drained
from tests.broker.send_help import writer
from tests.kafka_tools import read_committed
from tests.support import pulsar, rocketmq

from delivered.model.errors import BadRecord, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.work import Promise
from delivered.pipeline.registry import find_received, find_sink

ROWS = 300
COORDINATES = "topic,partition,offset"
BATCH = pa.record_batch(
    {
        "value": pa.array([b"row %d" % n for n in range(ROWS)]),
        "topic": ["orders"] * ROWS,
        "partition": pa.array([n % 3 for n in range(ROWS)], pa.int32()),
        "offset": pa.array(range(ROWS), pa.int64()),
    }
)
IDS = {b"row %d" % n: f"orders-{n % 3}-{n}" for n in range(ROWS)}
Pairs = list[tuple[bytes, str]]


def of_kafka(kafka: Any, client: str) -> tuple[dict[str, str], Any]:
    topic = kafka.topic(1)

    def taken() -> Pairs:
        found = read_committed(kafka.bootstrap, topic)
        return [(m.value() or b"", dict(m.headers())["delivered.id"].decode()) for m in found]

    return {"kafka.bootstrap.servers": kafka.bootstrap, "topic": topic, "client": client}, taken


def of_pulsar(server: Any) -> tuple[dict[str, str], Any]:
    topic = server.topic()

    def taken() -> Pairs:
        found = pulsar.taken(server, topic)
        return list(zip((r["value"] for r in found), pulsar.ids(found), strict=True))

    return {**server.options, "topic": topic}, taken


def of_rocketmq(server: Any) -> tuple[dict[str, str], Any]:
    topic = server.topic()
    return {"endpoints": server.url, "topic": topic}, lambda: [(v, i) for i, _, v in rocketmq.taken(server, topic)]


def of_queue(system: str, server: Any, **ids: str) -> tuple[dict[str, str], Any]:
    """RabbitMQ and ActiveMQ, read by the source of the same connector."""
    queue = server.queue()
    options = {"url": server.url, "queue": queue, **ids}

    def taken() -> Pairs:
        receiver = find_received(system, {**options, "log": "/x"}).queue.receiver()
        return [pair for batch in drained(receiver) for pair in zip(batch.values, map(str, batch.ids), strict=True)]

    return {"routingKey": queue, "url": server.url} if system == "rabbitmq" else options, taken


@pytest.mark.parametrize("system", ["kafka", "kafka-librdkafka", "pulsar", "rabbitmq", "activemq", "rocketmq"])
def test_a_batch_that_is_sent_twice_has_the_same_ids(
    system: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Whatever the shard, and the order of its rows."""
    name, _, client = system.partition("-")
    server = request.getfixturevalue(name)
    options, taken = {
        "kafka": lambda: of_kafka(server, client or "arrow"),
        "pulsar": lambda: of_pulsar(server),
        "rocketmq": lambda: of_rocketmq(server),
        "rabbitmq": lambda: of_queue(name, server),
        "activemq": lambda: of_queue(name, server, idHeader="id"),
    }[name]()
    ledger = {} if name == "kafka" else {"ledger": str(tmp_path / "ledger.db")}
    made = find_sink(name, {**options, **ledger, "messageIdColumns": COORDINATES})
    made.check_schema(BATCH.schema)
    for batch, rows in ((0, BATCH), (1, BATCH.take(pa.array(range(ROWS - 1, -1, -1))))):
        task = writer(made, batch=batch)
        task.stage(rows.slice(0, 7))
        task.stage(rows.slice(7))
        assert task.prepare(Fingerprint()) == Promise()
    assert Counter(taken()) == Counter(dict.fromkeys(IDS.items(), 2))
    assert made.records(BATCH).num_rows == ROWS
    with pytest.raises(UsageError, match="messageIdColumns names 'offset', which is no column"):
        made.check_schema(BATCH.drop_columns(["offset"]).schema)
    task = writer(made, batch=2)
    with pytest.raises(BadRecord, match=r"no message id: \{'topic': 'orders', 'partition': 0, 'offset': None\}"):
        task.stage(BATCH.slice(0, 1).set_column(3, "offset", pa.array([None], pa.int64())))
    task.abort()
