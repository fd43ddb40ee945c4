"""Pulsar's schemas at the sink: registered from the columns, or rows fitted to the existing one."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.broker.send_help import killed_and_started_again
from tests.support.pulsar import ids, read_all, sink, source, taken
from tests.support.pulsar_schemas import batch, read_back, record, registers, told, versions, write
from tests.support.servers import Pulsar

from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, UsageError
from delivered.model.fingerprint import fingerprint

AT = datetime(2024, 2, 29, 12, 0, 0, 123000, UTC)
EVERY = pa.struct(
    [
        ("small", pa.int16()),
        ("id", pa.int64()),
        ("real", pa.float32()),
        ("name", pa.string()),
        ("yes", pa.bool_()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("tags", pa.list_(pa.struct([("at", pa.timestamp("us"))]))),
        ("by", pa.map_(pa.string(), pa.float64())),
    ]
)
VALUE = {
    "small": 3, "id": 1 << 40, "real": 0.5, "name": "n\u00e4me", "yes": True, "day": date(2024, 2, 29), "at": AT,
    "tags": [{"at": AT.replace(tzinfo=None)}, None], "by": [("k", 0.1)],
}  # fmt: skip
BINARY = [pa.field("raw", pa.binary()), pa.field("price", pa.decimal128(9, 2))]
OF_BINARY = {"raw": b"\x00\xff", "price": Decimal("-12.34")}
NAMED = pa.struct([("id", pa.int64()), ("name", pa.string())])


@pytest.mark.parametrize("kind", ["avro", "json"])
def test_a_topic_gets_the_schema_of_the_columns(pulsar: Pulsar, tmp_path: Path, kind: str) -> None:
    topic = pulsar.topic(2)
    rows = batch(
        pa.struct([*EVERY, *(BINARY if kind == "avro" else [])]),
        {**VALUE, **OF_BINARY},
        dict.fromkeys(f.name for f in EVERY),
        None,
    )
    made = sink(tmp_path, pulsar, topic, schema=kind)
    assert [f for g in Guarantee for f in made.preflight(g)] == []
    write(made, rows)
    assert made.preflight(Guarantee.AT_LEAST_ONCE) == []
    write(made, rows)
    ((found, schema),) = versions(pulsar, topic)
    assert found == kind.upper()
    assert schema["fields"][1] == {"name": "id", "type": ["null", "long"], "default": None}

    back = read_all(source(pulsar, topic, schema="topic"))
    wanted = Counter(map(str, rows.column("value").to_pylist()))
    assert Counter(map(str, told(back))) == Counter({k: 2 * n for k, n in wanted.items()})
    assert set(ids(taken(pulsar, topic))) == {f"p.s.i.0.0.{n}" for n in range(3)}
    sent = fingerprint(made.records(rows), 1)
    assert read_back(made) == sent + sent


@pytest.mark.parametrize("kind", ["avro", "json"])
def test_rows_are_fitted_to_the_schema_that_is_there_and_more_columns_added(
    pulsar: Pulsar, tmp_path: Path, kind: str
) -> None:
    """Another producer's types: milliseconds, an enum, a required field, a field without a column."""
    schema = record(("name", "string"), ("unused", "string"), ("color", _enum("RED", "BLUE")))
    schema["fields"].insert(0, {"name": "id", "type": "long"})
    schema["fields"].append({"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}})
    topic = pulsar.topic()
    pulsar.client().create_producer(topic, schema=registers(schema, kind.upper())).close()
    made = sink(tmp_path, pulsar, topic, schema=kind)
    fits = pa.struct(
        [("at", pa.timestamp("us", tz="UTC")), ("color", pa.string()), ("id", pa.int32()), ("name", pa.string())]
    )
    good = {"at": AT, "color": "BLUE", "id": 7, "name": "a"}
    rows = batch(fits, good)
    write(made, rows)
    assert versions(pulsar, topic) == [(kind.upper(), schema)]
    assert told(read_all(source(pulsar, topic, schema="topic"))) == [{**good, "unused": None}]
    assert read_back(made) == fingerprint(made.records(rows), 1)

    write(made, batch(pa.struct([*fits, ("more", pa.float64())]), {**good, "more": 0.5}))
    assert len(versions(pulsar, topic)) == 2
    newest = told(read_all(source(pulsar, topic, schema="topic")))
    assert [v["more"] for v in newest] == [None, 0.5]
    write(made, rows)  # a pipeline without the new field
    assert len(versions(pulsar, topic)) == 2

    for bad in ({**good, "color": "GREEN"}, {**good, "id": None}, {**good, "at": AT.replace(microsecond=1)}):
        count = len(taken(pulsar, topic))
        with pytest.raises(BadRecord, match=r"Row \d of a shard.*does not match the schema"):
            write(made, batch(fits, bad))
        assert len(taken(pulsar, topic)) == count


def _enum(*symbols: str) -> dict[str, Any]:
    return {"type": "enum", "name": "Color", "symbols": list(symbols)}


def test_what_does_not_fit_is_refused_before_the_start(pulsar: Pulsar, tmp_path: Path) -> None:
    there = record(("id", "string"), ("at", {"type": "array", "items": record(("x", "int"), name="X")}))
    there["fields"].append({"name": "must", "type": "int"})
    topic = pulsar.topic()
    pulsar.client().create_producer(topic, schema=registers(there)).close()
    inner = pa.list_(pa.struct([("x", pa.string()), ("y", pa.int32())]))
    rows = batch(pa.struct([("id", pa.int64()), ("at", inner)]))
    with pytest.raises(UsageError, match="SCHEMA_INCOMPATIBLE") as caught:
        sink(tmp_path, pulsar, topic, schema="avro").ready_target(rows.schema)
    for said in (
        "version 0",
        "'id' is string there, and the column is int64",
        "'at[].x' is int32 there",
        "at[].y is not in the schema",
        "'must' may not be null there, and has no column",
    ):
        assert said in caught.value.message
    with pytest.raises(UsageError, match="it is AVRO, but the option schema is json"):
        sink(tmp_path, pulsar, topic, schema="json").ready_target(rows.schema)
    assert len(versions(pulsar, topic)) == 1

    closed = pulsar.namespace(isAllowAutoUpdateSchema=False)
    full = pulsar.topic(namespace=closed)
    made = sink(tmp_path, pulsar, full, schema="avro")
    with pytest.raises(UsageError, match=r"the brokers rejected the schema of the rows.*may not register"):
        made.ready_target(batch(NAMED).schema)
    short = sink(tmp_path, pulsar, topic, schema="json")
    for kind, said in (
        (pa.binary(), "it is binary"),
        (pa.struct([("a b", pa.int32())]), "column 'a b'"),
        (pa.struct([("a", pa.struct([("b", pa.binary())]))]), "'a.b' is bytes"),
        (pa.struct([("t", pa.time32("ms"))]), r"column 't' is time32\[ms\]"),
    ):
        with pytest.raises(UsageError, match=said):
            short.check_schema(batch(kind).schema)
    with pytest.raises(UsageError, match="OPTION_VALUE"):
        sink(tmp_path, pulsar, topic, schema="topic")


@pytest.mark.parametrize(
    ("guarantee", "point"),
    [
        ("at_least_once", "write.flush:after"),
        ("at_most_once", "write.flush:after"),
        ("at_least_once", "log:before"),
    ],
)
@pytest.mark.matrix
def test_killed_and_started_again_with_a_schema(pulsar: Pulsar, tmp_path: Path, guarantee: str, point: str) -> None:
    """The first start registers the schema, the second one finds it."""
    (tmp_path / "structs.py").write_text(
        "import pyarrow as pa\n\n\n"
        "def made(rows):\n"
        "    values = pa.StructArray.from_arrays([rows.column('value').cast(pa.string())], names=['name'])\n"
        "    return pa.RecordBatch.from_arrays([values], names=['value'])\n"
    )
    topic = pulsar.topic()
    killed_and_started_again(
        tmp_path,
        {"format": "pulsar", **pulsar.options, "topic": topic, "schema": "avro"},
        guarantee,
        point,
        lambda: (v["name"].encode() for v in told(read_all(source(pulsar, topic, schema="topic")))),
        {"select": ["value"], "arrow": "structs:made"},
    )
    assert len(versions(pulsar, topic)) == 1


def test_bytes_to_a_namespace_that_enforces_schemas_are_refused(pulsar: Pulsar, tmp_path: Path) -> None:
    strict = pulsar.topic(namespace=pulsar.namespace(schemaValidationEnforced=True))
    made = sink(tmp_path, pulsar, strict, schema="avro")
    assert made.preflight(Guarantee.AT_LEAST_ONCE) == []
    write(made, batch(NAMED, {"id": 1, "name": "a"}))
    assert made.preflight(Guarantee.AT_LEAST_ONCE) == []
    (finding,) = sink(tmp_path, pulsar, strict).preflight(Guarantee.AT_LEAST_ONCE)
    assert (finding.code, finding.refuses) == ("SCHEMA_INCOMPATIBLE", True)
