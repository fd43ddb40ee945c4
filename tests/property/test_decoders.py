"""Mutated bytes as records in every format: a value or a rejection with a reason in words, never anything else."""

from __future__ import annotations

import gzip
import json
import random
import sqlite3
import struct
import tracemalloc
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from kafka.record.util import calc_crc32c

from delivered.clients.kafka import NoAnswer
from delivered.connectors.kafka import topics
from delivered.connectors.outbox import CONNECTOR as OUTBOX
from delivered.connectors.outbox.pgoutput import Begin, Change, Op, Relation
from delivered.connectors.outbox.pgoutput import Decoder as Pgoutput
from delivered.connectors.outbox.rows import ADDED, Changes, Events, Layout, Reader
from delivered.connectors.pulsar import fields
from delivered.connectors.pulsar.client import Registered as OfPulsar
from delivered.connectors.pulsar.columns import Values
from delivered.connectors.rabbitmq.client import _connection_class, stream_offset
from delivered.connectors.rabbitmq.client import headers as of_message
from delivered.connectors.rocketmq.remoting import stored
from delivered.kits.schemas import Format
from delivered.kits.schemas.formatted import Decoder
from delivered.kits.schemas.registry import Registered
from delivered.model.errors import BadRecord, InvariantBroken
from delivered.patterns.saga import NO_UNDO, Saga, Step, begin, ddl

SEEDS: dict[str, Any] = json.loads((Path(__file__).parent / "seeds.json").read_text())
"""By format: a schema, and records in hexadecimal that it reads, or that broke a decoder once."""
TELLING = [b"\x00", b"\x7f", b"\x80", b"\xff", b"\xff" * 10, b"9" * 5_000, b"1e400", b"NaN", b'"\\ud800"', b"[" * 3_000]


def mutated(dice: random.Random, seed: bytes) -> bytes:
    found = bytearray(seed)
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(found) + 1)
        match dice.randrange(5):
            case 0:
                found[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                found[at : at + dice.randrange(3)] = dice.choice(TELLING)
            case 2:
                del found[at:]
            case 3:
                found[at:at] = found[: dice.randrange(len(found) + 1)]
            case _:
                del found[at : at + dice.randrange(4)]
    return bytes(found)


def bytes_of(name: str, count: int) -> list[bytes]:
    return mutations(name, [bytes.fromhex(s) for s in SEEDS[name]["records"]], count)


def mutations(name: str, seeds: list[bytes], count: int) -> list[bytes]:
    dice = random.Random(name)
    return seeds + [mutated(dice, dice.choice(seeds)) for _ in range(count)]


COUNTS = [400, pytest.param(40_000, marks=pytest.mark.matrix)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["avro", "protobuf", "json_schema"])
def test_records_of_a_registry(name: str, count: int) -> None:
    schema = SEEDS[name]["schema"]
    known = Registered(1, Format(name), schema if isinstance(schema, str) else json.dumps(schema))
    data = [struct.pack(">bI", 0, 1) + each for each in bytes_of(name, count)]
    for planned in (known, None):
        values, reasons = Decoder(planned, None, {1: known}.get).column(pa.array(data, pa.binary()))
        values.validate(full=True)
        pa.array(reasons, pa.string()).validate(full=True)
        assert {why is None for why in reasons} == {True, False}
        assert all(why is None or (why.isprintable() and len(why) <= 300) for why in reasons)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["avro", "pulsar_json"])
def test_records_of_pulsar(name: str, count: int) -> None:
    planned = OfPulsar(0, "AVRO" if name == "avro" else "JSON", json.dumps(SEEDS[name]["schema"]))
    values = Values("test", "persistent://a/b/c", planned, lambda _: None)
    data = bytes_of(name, count)
    found, bad = values.column(data, [0] * len(data), [(1, n, -1) for n in range(len(data))])
    found.validate(full=True)
    assert 0 < len(bad) < len(data)


@pytest.mark.parametrize("count", COUNTS)
def test_frames_of_rocketmq_and_positions_of_pulsar(count: int) -> None:
    for data in bytes_of("rocketmq", count):
        try:
            list(stored(data))
        except (ValueError, struct.error):
            continue
    for data in bytes_of("avro", count):
        try:
            fields(data)
        except ValueError:
            continue


def pgoutput_row(*values: bytes | None) -> bytes:
    parts = [b"n" if v is None else b"t" + struct.pack(">I", len(v)) + v for v in values]
    return struct.pack(">H", len(values)) + b"".join(parts)


COLUMNS = ("id", "aggregatetype", "aggregateid", "type", "payload")
OID = struct.pack(">I", 16391)
RELATION = (
    b"R" + OID + b"public\0outbox\0d" + struct.pack(">H", len(COLUMNS))
    + b"".join(b"\x01" + n.encode() + b"\0" + struct.pack(">Ii", 17 if n == "id" else 25, -1) for n in COLUMNS)
)  # fmt: skip
ROW = pgoutput_row(b"\\x00ff", b"order", b"7", None, b'{"a": [1]}')
PGOUTPUT = [
    RELATION,
    b"I" + OID + b"N" + ROW,
    b"U" + OID + b"K" + ROW + b"N" + ROW,
    b"D" + OID + b"O" + ROW,
    b"T" + struct.pack(">IB", 1, 0) + OID,
    b"Y" + OID + b"public\0d\0",
    b"B" + struct.pack(">QqI", 25829624, 841_000_000, 735),
    b"I" + OID + b"N" + pgoutput_row(b"\\x01", b"order", b"7", None, b"[" * 100_000),
    b"I" + OID + b"N" + pgoutput_row(b"\\xzz", b"order", b"7", None, b"{}"),
]


@pytest.mark.parametrize("count", COUNTS)
def test_messages_of_pgoutput(count: int) -> None:
    """As rows of an outbox and as changes of a table."""
    options = OUTBOX.source({"url": "postgresql://h/db", "payloadFormat": "json"}).options  # type: ignore[attr-defined]
    read = 0
    for data in mutations("pgoutput", PGOUTPUT, count):
        decoder, events = Pgoutput(), Events(options, rejects=False)
        decoder.decode(RELATION)
        try:
            for found in decoder.decode(data):
                if isinstance(found, Begin):
                    events.add(found.lsn, found.time_us, (b"1", b"a", None, None, b"{}"))
                elif found.new is not None:
                    assert len(found.new) == len(found.relation.columns)
                    reader = Reader(options)
                    reader.id_of(found.relation, found.new)
                    events.add(1, 2, reader.read(found.relation, found.new))
        except (InvariantBroken, BadRecord):
            continue
        events.take().good.validate(full=True)
        read += 1
    assert read


CHANGED = pa.schema([("n", pa.decimal128(10, 2)), ("at", pa.timestamp("us")), ("s", pa.string()), ("b", pa.binary()),
                     ("d", pa.date32()), ("i", pa.int32()), ("o", pa.bool_())])  # fmt: skip
VALUES = [b"12.50", b"2024-02-29 12:00:00.5", b'[1:2]={1,"a",NULL}', b"\\x00ff", b"0044-03-15 BC", b"-7", b"t"]


@pytest.mark.parametrize("count", COUNTS)
def test_values_of_changed_rows(count: int) -> None:
    """Text of PostgreSQL, composites and arrays included, in the columns that a change stream gives."""
    options = OUTBOX.source({"url": "postgresql://h/db", "table": "t"}).options  # type: ignore[attr-defined]
    shape = tuple((name, 25, -1, True) for name in CHANGED.names)
    layout = Layout(pa.schema([*CHANGED, *ADDED]), (), shape)
    names = tuple(CHANGED.names)
    relation = Relation(1, "public", "t", names, (True,) * len(names), (25,) * len(names), (-1,) * len(names))
    dice, read = random.Random("values"), 0
    for n in range(count):
        row: list[bytes | None] = list(VALUES)
        if n:
            at = dice.randrange(len(row))
            row[at] = mutated(dice, VALUES[at])
        changes = Changes(options, layout, rejects=False)
        try:
            changes.add(n, Change(Op.INSERT, relation, None, tuple(row)))
            changes.take().good.validate(full=True)
            read += 1
        except BadRecord:
            continue
    assert 0 < read < count


@pytest.mark.parametrize("count", COUNTS)
def test_frames_of_rabbitmq(count: int) -> None:
    from pika import frame, spec
    from pika.exceptions import AMQPError

    headers = {"x-stream-offset": 7, "n": {"a": [1, "b", None]}, "t": True}
    seeds = [
        frame.Method(1, spec.Basic.Deliver("c", 1, False, "x", "key")).marshal(),
        frame.Method(1, spec.Basic.QosOk()).marshal(),
        frame.Header(1, 3, spec.BasicProperties(headers=headers, message_id="m", timestamp=5)).marshal(),
        frame.Body(1, b"abc").marshal(),
        frame.Heartbeat().marshal(),
        b"AMQP\x00\x00\x09\x01",
        struct.pack(">BHL", 1, 1, 2**32 - 1) + b"\xff" * 20,
    ]
    kind = _connection_class()
    read = 0
    for data in mutations("rabbitmq", [bytes(s) for s in seeds], count):
        connection = kind.__new__(kind)
        connection._frame_buffer = data
        try:
            size, found = connection._read_frame()
        except AMQPError:
            continue
        assert size <= len(data)
        if isinstance(found, frame.Header):
            stream_offset(found.properties)
            of_message(found.properties)
            read += 1
    assert read


def gzip_batch(payload: bytes) -> Any:
    """A record batch of Kafka's whose records are this, compressed as its attributes say."""
    made = DefaultRecordBatchBuilder(2, 1, True, 7, 0, 0, 1 << 20)
    for n in range(200):
        made.append(n, timestamp=n, key=b"k" * 50, value=b"v" * 50, headers=[])
    built = bytes(made.build())
    size = DefaultRecordBatch.HEADER_STRUCT.size
    return DefaultRecordBatch(built[:size] + (payload or built[size:]))


def test_a_ledgers_batch_is_bounded_however_it_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "_UNPACKED_BYTES_MAX", 1 << 20)
    assert len(topics._read(gzip_batch(b""))) == 200
    bomb = gzip.compress(b"\0" * (64 << 20))
    for payload in (bomb, gzip.compress(b"") + bomb, bomb[:500], b"no gzip"):
        batch = gzip_batch(payload)
        tracemalloc.start()
        assert topics._read(batch) == [topics.Record(0, b"", None, 7, 0)]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 << 20


SAGAS = [b'{"total": 12, "n": [1, "b", null, 1.5e3], "s": "\\u00e9"}', "über-7".encode(), b"1e308", b'"\\ud83d\\ude00"']


@pytest.mark.parametrize("count", COUNTS)
def test_data_and_ids_of_a_saga(count: int) -> None:
    """What `begin` takes, the log gives back; the rest is a BadRecord, and the caller's transaction goes on."""
    saga, taken = Saga("checkout", steps=[Step("pay", lambda call: None, undo=NO_UNDO)]), 0
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        for statement in ddl("sqlite"):
            database.execute(statement)
        database.execute("BEGIN")
        for n, data in enumerate(mutations("saga", SAGAS, count)):
            text = data.decode("utf-8", "surrogateescape")
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                value = {"text": text, "ünter": [text]}
            for id_, given in ((f"{n}-{text}", None), (str(n), value), (f"t{n}", text)):
                try:
                    assert begin(database, saga, id=id_, data=given)
                except BadRecord as error:
                    assert len(str(error)) < 2_000 and str(error).isprintable()
                    continue
                ((kept,),) = database.execute("SELECT data FROM delivered_saga WHERE id = ?", (id_,)).fetchall()
                assert json.loads(kept) == given
                taken += 1
    assert taken > count


def kafka_batches() -> list[bytes]:
    """Of a ledger: records with headers, compressed or not, and the end of their transaction."""
    made = list[bytes]()
    for codec in (0, 1):
        builder = DefaultRecordBatchBuilder(2, codec, True, 7, 1, 0, 1 << 20)
        for n in range(3):
            builder.append(n, timestamp=n, key=b"key", value=b"v" * n or None, headers=[("h", b"x"), ("ü", None)])
        made.append(bytes(builder.build()))
    end = DefaultRecordBatchBuilder(2, 0, True, 7, 1, -1, 1 << 20)
    end.append(0, timestamp=1, key=b"\0\0\0\1", value=b"\0\0\0\0\0\0", headers=[])
    control = bytearray(end.build())
    control[22] |= 0x20
    return [*made, bytes(control), made[0] + bytes(control)]


def with_checksum(data: bytes) -> bytes:
    """As a producer could send it: only the broker's own batches have a wrong one."""
    return data[:17] + struct.pack(">I", calc_crc32c(data[21:])) + data[21:] if len(data) > 61 else data


@pytest.mark.parametrize("count", COUNTS)
def test_record_batches_of_a_ledger_by_kafka_python(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records, or an answer that is none, or LEDGER_DAMAGED: no other error, in either way of reading."""
    reader, read = topics.CommittedReader(None, "t", 0), 0  # type: ignore[arg-type]
    for n, data in enumerate(mutations("kafka", [with_checksum(b) for b in kafka_batches()], count)):
        part = SimpleNamespace(
            records=with_checksum(data) if n % 2 else data, aborted_transactions=(), last_stable_offset=0
        )
        reader.position = 0
        with suppress(NoAnswer, InvariantBroken):
            read += sum(type(r.key) is bytes for r in reader._records(part))
        monkeypatch.setattr(reader, "_wire", SimpleNamespace(patiently=lambda ask, part=part: part))
        with suppress(NoAnswer, InvariantBroken):
            reader.position = 0
            reader._behind_open(3, lambda record: True)
    assert read
