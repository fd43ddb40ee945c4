"""The Kafka sink against a real broker: every kind of record, every bad input, the two weaker guarantees."""

from __future__ import annotations

import pickle
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from tests.broker.sink_help import EXACT, SCHEMA, Child, Rig, rows, wait_for
from tests.broker.source_help import limit_clients
from tests.kafka_tools import read_committed
from tests.support.scans import scanned_table
from tests.support.sweeps import KAFKA_CLIENTS, sweep

from delivered.clients.kafka import sender
from delivered.clients.kafka.record_batch import Rows as KafkaRows
from delivered.connectors.kafka import CONNECTOR
from delivered.connectors.kafka import sink as warm
from delivered.engine.shard import write_shard
from delivered.model import patience
from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, DeliveredError, Refused, Unreachable, UsageError
from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.rows import Rows
from delivered.model.work import Ok, Owner, Prepared, Promise
from delivered.source import HEADERS

WEAKER = [Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE]


@pytest.fixture(params=KAFKA_CLIENTS)
def rig(kafka: Any, request: pytest.FixtureRequest) -> Rig:
    return Rig(kafka, kafka.topic(3), options={"client": request.param})


def send(rig: Rig, guarantee: Guarantee, *batches: pa.RecordBatch, batch: int = 0) -> Promise:
    """Write one shard and make it visible."""
    work = rig.work(batch)
    if guarantee is EXACT:
        rig.ledger().claim(Owner("me"))
    writer = rig.sink.writer(work, guarantee, batches[0].schema)
    try:
        for one in batches:
            writer.stage(one)
        promise: Promise = writer.prepare(Fingerprint())
    except BaseException:
        writer.abort()
        raise
    if guarantee is EXACT and promise.handle is not None:
        assert rig.committer().commit(work, Prepared.of(work, Fingerprint(), promise)) == Ok(None)
    return promise


ACKNOWLEDGED = sweep(Guarantee, lambda guarantee: guarantee is not Guarantee.AT_MOST_ONCE)
"""At most once sends the same batches, and may not send one again."""


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_every_kind_of_record_reads_back_with_the_same_fingerprint(rig: Rig, guarantee: Guarantee) -> None:
    header = [
        [{"key": "a", "value": b"1"}, {"key": "a", "value": None}],
        [],
        None,
        [{"key": "ü", "value": b""}],
        None,
        None,
    ]
    batch = pa.record_batch(
        [
            pa.array(["k", None, "", "ключ", "k", "after"], pa.string()),
            pa.array([b"v", b"tombstone has a null key", None, b"", None, b"\x00\xff" * 500], pa.binary()),
            pa.array(header, HEADERS.type),
        ],
        names=["key", "value", "headers"],
    )
    plain = pa.record_batch([pa.array([b"%d" % i for i in range(5000)], pa.large_binary())], names=["value"])
    sliced = plain.slice(1000, 300)
    sink = rig.sink
    send(rig, guarantee, batch, batch.slice(2, 3), sliced)
    wanted = [sink.records(b) for b in (batch, batch.slice(2, 3), sliced)]
    back = scanned_table(sink).select(["key", "value", "headers"]).combine_chunks()
    assert back.num_rows == 6 + 3 + 300
    total = sum((fingerprint(b, 7) for b in wanted), Fingerprint())
    assert sum((fingerprint(b, 7) for b in back.to_batches()), Fingerprint()) == total
    assert Counter(back.column("value").to_pylist())[None] == 4


def test_keys_lie_where_the_java_client_puts_them(kafka: Any) -> None:
    """Hashes from the tests of Kafka's own Utils.murmur2."""
    java = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    rig = Rig(kafka, kafka.topic(97))
    send(rig, Guarantee.AT_LEAST_ONCE, *[rows([b"v"], key=k) for k in java])
    found = {m.key(): m.partition() for m in read_committed(kafka.bootstrap, rig.topic)}
    assert found == {k: (h & 0x7FFFFFFF) % 97 for k, h in java.items()}


def test_null_keys_are_spread(rig: Rig) -> None:
    for n in range(30):
        send(rig, Guarantee.AT_LEAST_ONCE, rows([b"v"] * 3000), batch=n)
    assert len({m.partition() for m in read_committed(rig.kafka.bootstrap, rig.topic)}) > 1


def test_rows_may_name_topic_and_partition(kafka: Any) -> None:
    one, two = kafka.topic(2), kafka.topic(3)
    rig = Rig(kafka, one)
    sink = CONNECTOR.sink({"kafka.bootstrap.servers": kafka.bootstrap})
    batch = pa.record_batch(
        [
            pa.array([b"0", b"1", b"2", b"3"]),
            pa.array([one, two, one, two]),
            pa.array([1, 2, 0, None], pa.int32()),
        ],
        names=["value", "topic", "partition"],
    )
    sink.check_schema(batch.schema)
    writer = sink.writer(rig.work(0), Guarantee.AT_LEAST_ONCE, batch.schema)
    writer.stage(batch)
    writer.prepare(Fingerprint())
    found = {m.value(): (m.topic(), m.partition()) for t in (one, two) for m in read_committed(kafka.bootstrap, t)}
    assert found.pop(b"3")[0] == two
    assert found == {b"0": (one, 1), b"1": (two, 2), b"2": (one, 0)}
    # The option wins over the column, as in Spark's own sink.
    send(rig, Guarantee.AT_LEAST_ONCE, batch.slice(1, 1).set_column(2, "partition", pa.array([0], pa.int32())))
    assert sorted(m.value() for m in read_committed(kafka.bootstrap, one)) == [b"0", b"1", b"2"]


def test_a_scan_reads_every_topic_that_rows_may_name(kafka: Any) -> None:
    """Not the ledger's, and not those that a cluster's own services write all the time."""
    ledger, mine = kafka.topic(1), kafka.topic(1, name=f"_mine-{uuid.uuid4().hex}")
    others = kafka.topic(1, name=f"_schemas-{uuid.uuid4().hex}")
    sink = CONNECTOR.sink({"kafka.bootstrap.servers": kafka.bootstrap, "ledgerTopic": ledger})
    there = {piece.data[0][0] for piece in sink.scan().slices()} | set(sink.scan().position())
    assert mine in there and not {ledger, others} & there


@pytest.mark.parametrize("partition", [3, -1, 2**31, 2**40])
def test_a_partition_that_does_not_exist_is_a_bad_record(rig: Rig, partition: int) -> None:
    batch = pa.record_batch([pa.array([b"v"]), pa.array([partition], pa.int64())], names=["value", "partition"])
    with pytest.raises(BadRecord, match=f"PARTITION_UNKNOWN.*partition {partition}"):
        send(rig, EXACT, batch)
    assert rig.visible() == []


def test_a_row_without_topic_is_a_bad_record(kafka: Any) -> None:
    sink = CONNECTOR.sink({"kafka.bootstrap.servers": kafka.bootstrap})
    batch = pa.record_batch([pa.array([b"v", b"v"]), pa.array(["t", None])], names=["value", "topic"])
    writer = sink.writer(Rig(kafka, "x").work(0), Guarantee.AT_LEAST_ONCE, batch.schema)
    with pytest.raises(BadRecord, match=r"Row 1 .*topic"):
        writer.stage(batch)


def test_a_topic_that_is_missing_is_one_clear_error_soon(rig: Rig) -> None:
    rig.topic = "not-there"
    started = time.monotonic()
    with pytest.raises(UsageError, match=r"TOPIC_UNKNOWN.*'not-there'.*create it"):
        send(rig, EXACT, rows([b"v"]))
    assert time.monotonic() - started < 15
    (finding,) = [f for f in rig.sink.preflight(EXACT) if f.refuses]
    assert finding.code == "TOPIC_UNKNOWN"


@pytest.mark.parametrize("guarantee", [EXACT, Guarantee.AT_LEAST_ONCE])
def test_a_record_too_large_is_a_bad_record_with_size_and_limit(rig: Rig, guarantee: Guarantee) -> None:
    with pytest.raises(BadRecord, match=r"RECORD_TOO_LARGE.*3000000 bytes.*1048588"):
        send(rig, guarantee, rows([b"fine", b"x" * 3_000_000, b"fine"]))
    # The broker's own limit, below the client's.
    small = Rig(rig.kafka, rig.kafka.topic(1, max_message_bytes=1000))
    with pytest.raises(BadRecord, match=r"RECORD_TOO_LARGE.*5000 bytes"):
        send(small, guarantee, rows([b"x" * 5000]))
    if guarantee is EXACT:
        assert rig.visible() == small.visible() == []


def test_records_of_a_megabyte(rig: Rig) -> None:
    values = [bytes([i]) * 1_000_000 for i in range(8)]
    send(rig, EXACT, rows(values))
    assert rig.visible() == values


@pytest.mark.parametrize("guarantee", ACKNOWLEDGED)
def test_many_batches_of_one_partition_arrive_once_and_in_order(rig: Rig, guarantee: Guarantee) -> None:
    """A batch with a sequence that the broker knows already would be dropped as a repetition."""
    values = [b"%0100d" % i for i in range(80_000)]
    send(rig, guarantee, *(rows(values[i : i + 10_000], key=b"one") for i in range(0, len(values), 10_000)))
    assert [m.value() for m in read_committed(rig.kafka.bootstrap, rig.topic)] == values


@pytest.mark.parametrize("guarantee", ACKNOWLEDGED)
def test_a_topic_with_a_low_limit_gets_smaller_batches(kafka: Any, guarantee: Guarantee) -> None:
    """The broker rejects the client's batches of a megabyte; their records are sent in smaller ones."""
    rig = Rig(kafka, kafka.topic(1, max_message_bytes=50_000), options={"client": "arrow", "compression": "none"})
    values = [b"%0100d" % i for i in range(30_000)]
    assert send(rig, guarantee, rows(values)).given_up in (None, {})
    found = [m.value() for m in read_committed(kafka.bootstrap, rig.topic)]
    assert found == values if guarantee is not Guarantee.AT_MOST_ONCE else sorted(found) == values  # no sequences


@pytest.mark.matrix
def test_a_throttled_client_waits_and_resends_nothing(
    new_kafka: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker reads nothing from a client above its quota: a request sent meanwhile would time out."""
    monkeypatch.setattr(sender, "REQUEST_TIMEOUT_S", 1.0)
    kafka = new_kafka()
    rig = Rig(kafka, kafka.topic(1), options={"client": "arrow", "compression": "none"})
    producer = warm.borrow(rig.sink.options, Guarantee.AT_LEAST_ONCE)
    assert isinstance(producer, sender.Sender)
    limit_clients(kafka, "producer_byte_rate", 400_000)
    cluster = producer._cluster

    def send_some() -> dict[int, float]:
        producer.send(KafkaRows(rig.topic, None, pa.array([bytes(900_000)] * 2, pa.binary())))
        producer.flush(60)
        return cluster.throttled

    wait_for(send_some)
    send_some()  # after the pause
    assert producer.failures.last_error == ""


def test_an_empty_batch_writes_nothing(rig: Rig) -> None:
    for guarantee in Guarantee:
        assert send(rig, guarantee, rows([])) == Promise()
    assert rig.visible("read_uncommitted") == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"topc": "t"}, "OPTION_UNKNOWN.*write 'topic'"),
        ({"topic": "größe"}, "TOPIC_INVALID.*größe"),
        ({"topic": "t", "kafka.transactional.id": "mine"}, "OPTION_RESERVED"),
        ({"topic": "t", "kafka.acks": "0"}, "OPTION_VALUE.*all or, with at_most_once, 1"),
        ({"topic": "t", "transactionTimeout": "soon"}, "OPTION_VALUE.*integer"),
        ({"topic": "t", "compression": "rar"}, "OPTION_VALUE.*zstd"),
    ],
)
def test_bad_options_are_refused_with_the_way_out(options: dict[str, str], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        CONNECTOR.sink({"kafka.bootstrap.servers": "localhost:9092", **{k.lower(): v for k, v in options.items()}})


def test_a_client_setting_that_does_not_exist_is_refused(rig: Rig) -> None:
    rig.options["kafka.lingr.ms"] = "5"
    with pytest.raises(UsageError, match=r"OPTION_UNKNOWN.*kafka sink.*lingr"):
        send(rig, Guarantee.AT_LEAST_ONCE, rows([b"v"]))


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        (pa.schema([("key", pa.binary())]), "COLUMN_MISSING"),
        (pa.schema([("value", pa.int64())]), "COLUMN_TYPE.*int64"),
        (pa.schema([("value", pa.binary()), ("amount", pa.int64())]), "COLUMN_UNKNOWN.*amount"),
        (pa.schema([("value", pa.binary()), ("headers", pa.string())]), "COLUMN_TYPE.*headers"),
        (pa.schema([("value", pa.binary()), ("partition", pa.string())]), "COLUMN_TYPE.*partition"),
    ],
)
def test_rows_that_fit_no_record_are_refused(schema: pa.Schema, error: str) -> None:
    sink = CONNECTOR.sink({"kafka.bootstrap.servers": "localhost:9092", "topic": "t"})
    with pytest.raises(UsageError, match=error):
        sink.check_schema(schema)


def test_no_broker_is_one_clear_error_in_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default within 15 s: tests/unit/test_limits.py."""
    monkeypatch.setattr(patience, "CONNECT_TIMEOUT_S", 1.0)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        rig.options["kafka.bootstrap.servers"] = f"127.0.0.1:{port}"
        started = time.monotonic()
        with ThreadPoolExecutor() as pool:
            asked = [
                pool.submit(lambda: rig.sink.preflight(EXACT)),
                pool.submit(lambda: rig.ledger().claim(Owner("me"))),
                pool.submit(lambda: send(rig, Guarantee.AT_LEAST_ONCE, rows([b"v"]))),
            ]
        for one in asked:
            with pytest.raises(Unreachable, match=f"KAFKA_UNREACHABLE.*{port}"):
                one.result()
        assert time.monotonic() - started < 15


def test_p12_a_timeout_above_the_brokers_limit_is_found_before_the_start(rig: Rig) -> None:
    assert [f for f in rig.sink.preflight(EXACT) if f.refuses] == []
    assert [f.code for f in rig.sink.preflight(EXACT)] == ["ONE_COPY"]
    compacted = replace(rig, topic=rig.kafka.topic(1, cleanup_policy="compact"))
    assert [f.code for f in compacted.sink.preflight(EXACT)] == ["ONE_COPY", "TOPIC_COMPACTED"]
    rig.options["transactionTimeout"] = "901"
    (finding,) = [f for f in rig.sink.preflight(EXACT) if f.refuses]
    assert finding.code == "TRANSACTION_TIMEOUT_TOO_LONG"
    assert "901 s" in finding.message and "900 s" in finding.message
    assert [f for f in rig.sink.preflight(Guarantee.AT_LEAST_ONCE) if f.refuses] == []


@pytest.mark.parametrize("guarantee", sweep(Guarantee, lambda g: g is Guarantee.EXACTLY_ONCE))
def test_p26_memory_does_not_grow_with_the_batch(rig: Rig, guarantee: Guarantee) -> None:
    rig.ledger().claim(Owner("me"))
    with Child("grow", rig.sink, rig.work(0), guarantee, 10_000, 1000, 60) as child:
        early, late = child.say(), child.say()
    assert late - early < 200_000, f"kB after a tenth and at the end: {early}, {late}"


def test_a_sink_travels_without_secrets_or_connections(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINK_PASSWORD", "hunter2")
    rig.options |= {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.password": "env:SINK_PASSWORD"}
    sink = rig.sink
    sent = pickle.dumps(sink)
    assert b"hunter2" not in sent and "hunter2" not in repr(sink)
    assert pickle.loads(sent) == sink
    assert sink.options.resolved()["sasl.password"] == "hunter2"


@pytest.mark.parametrize("client", KAFKA_CLIENTS)
def test_at_least_once_a_broker_that_restarts_loses_nothing(mortal_kafka: Any, client: str) -> None:
    kafka = mortal_kafka
    rig = Rig(kafka, kafka.topic(2), options={"client": client})
    values = [b"%0100d" % i for i in range(60_000)]
    writer = rig.sink.writer(rig.work(0), Guarantee.AT_LEAST_ONCE, SCHEMA)
    writer.stage(rows(values[:30_000]))
    kafka.broker.kill()
    writer.stage(rows(values[30_000:]))
    kafka.broker.restart()
    assert writer.prepare(Fingerprint()) == Promise()
    assert set(rig.visible()) == set(values)


@pytest.mark.parametrize("client", KAFKA_CLIENTS)
def test_at_most_once_a_broker_that_dies_doubles_nothing_and_the_loss_is_counted(
    mortal_kafka: Any, client: str
) -> None:
    kafka = mortal_kafka
    rig = Rig(kafka, kafka.topic(2), options={"kafka.message.timeout.ms": "1500", "client": client})
    values = [b"%0100d" % i for i in range(60_000)]
    plan = replace(rig.bare_plan(0), guarantee=Guarantee.AT_MOST_ONCE)

    def batches() -> Iterator[pa.RecordBatch]:
        yield rows(values[:30_000])
        wait_for(rig.visible)
        kafka.broker.kill()
        yield rows(values[30_000:])

    message = write_shard(rig.sinks, plan, 0, 0, map(Rows, batches()), SCHEMA)
    kafka.broker.restart()
    found = Counter(rig.visible())
    assert max(found.values()) == 1, "no record twice"
    lost = len(values) - len(found)
    assert lost > 0
    given_up = message.given_up[rig.scope.sink].count
    assert lost <= given_up <= len(values), "what was given up is an upper bound of what was lost"


@pytest.mark.matrix
@pytest.mark.parametrize("client", KAFKA_CLIENTS)
def test_credentials_and_permissions(new_kafka: Callable[..., Any], client: str) -> None:
    """TLS and SCRAM: exactly once, for the driver's own requests, too; a wrong password, a missing permission and an
    untrusted certificate each give one clear error."""
    from kafka.admin import ACL, ACLOperation, ACLPermissionType, KafkaAdminClient, ResourcePattern, ResourceType

    kafka = new_kafka(tls=True, scram={"writer": "right"})
    rig = Rig(kafka, kafka.topic(1), options={"client": client})
    rig.options |= {
        "kafka.bootstrap.servers": kafka.broker.listeners["SASL_SSL"],
        "kafka.security.protocol": "SASL_SSL",
        "kafka.ssl.ca.location": str(kafka.broker.certificate),
        "kafka.sasl.mechanism": "SCRAM-SHA-512",
        "kafka.sasl.username": "writer",
        "kafka.sasl.password": "right",
    }
    with pytest.raises(Refused, match=r"KAFKA_PERMISSION|LEDGER_TOPIC"):
        send(rig, EXACT, rows([b"v"]))
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    admin.create_acls(
        [
            ACL("User:writer", "*", ACLOperation.ALL, ACLPermissionType.ALLOW, ResourcePattern(kind, name))
            for kind, name in (
                (ResourceType.TOPIC, "*"),
                (ResourceType.TRANSACTIONAL_ID, "*"),
                (ResourceType.CLUSTER, "kafka-cluster"),
            )
        ]
    )
    admin.close()
    send(rig, EXACT, rows([b"v"]))
    assert rig.visible() == [b"v"]
    rig.options["kafka.sasl.password"] = "wrong"
    with pytest.raises(DeliveredError, match=r"CREDENTIALS|PERMISSION"):
        rig.sink.preflight(EXACT)
    rig.options["kafka.sasl.password"] = "right"
    del rig.options["kafka.ssl.ca.location"]
    with pytest.raises(DeliveredError, match=r"(?i)certificate"):
        rig.sink.preflight(EXACT)
