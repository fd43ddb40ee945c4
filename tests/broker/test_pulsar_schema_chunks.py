"""Schema-encoded values in chunked messages: writing, reading across batch boundaries, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.pulsar import CHUNK, batches, read, read_all, sink, source
from tests.support.pulsar_schemas import V0, V1, avro, batch, read_back, registers, told, versions, write
from tests.support.servers import Pulsar
from tests.support.sweeps import sweep

from delivered.model.errors import BadRecord
from delivered.model.fingerprint import fingerprint

LONG = CHUNK * 2 + 100
"""Characters: three chunks."""
KIND = pa.struct([("id", pa.int64()), ("name", pa.string())])


def encoded(kind: str, schema: dict[str, Any], value: dict[str, Any]) -> bytes:
    return avro(schema, value) if kind == "AVRO" else json.dumps(value).encode()


def entries(pulsar: Pulsar, topic: str) -> int:
    return int(pulsar.admin("GET", f"persistent/public/default/{topic}/internalStats")["currentLedgerEntries"])


@pytest.mark.parametrize("kind", sweep(["AVRO", "JSON"], lambda kind: kind == "AVRO"))
def test_each_is_read_by_the_version_that_it_names_wherever_a_batch_ends(pulsar: Pulsar, kind: str) -> None:
    """Two versions, chunks of both among plain messages: every chunk is its own batch."""
    topic = pulsar.topic()
    plain = [{"id": n, "name": f"plain {n}"} for n in range(4)]
    big = [{"id": n, "name": str(n)[-1] * LONG} for n in (10, 11)]
    paid = [{**value, "paid": True} for value in (big[1], plain[3])]
    pulsar.send(topic, [encoded(kind, V0, plain[0])], schema=registers(V0, kind))
    pulsar.send(
        topic, [encoded(kind, V0, v) for v in (big[0], plain[1])], schema=registers(V0, kind), chunking_enabled=True
    )
    pulsar.send(topic, [encoded(kind, V1, v) for v in paid], schema=registers(V1, kind), chunking_enabled=True)
    assert entries(pulsar, topic) == 4 - 1 + 2 * 3, "the long values were not cut into chunks"
    whole = [{**v, "paid": None} for v in (plain[0], big[0], plain[1])] + paid

    src = source(pulsar, topic, schema="topic", startingOffsets="earliest")
    found = read_all(source(pulsar, topic, schema="topic"))
    assert told(found) == whole
    cuts = batches(src, 1)
    assert len(cuts) == entries(pulsar, topic)
    one_by_one = pa.concat_tables([read(src, *cut) for cut in cuts])
    assert told(one_by_one) == whole
    assert one_by_one.column("native").equals(found.column("native"))
    old = source(pulsar, topic, schema="topic", schemaVersion=0)
    assert told(read_all(old)) == [{k: v[k] for k in ("id", "name")} for v in whole]


@pytest.mark.parametrize("kind", ["AVRO", "JSON"])
def test_one_that_does_not_follow_its_schema_is_told(pulsar: Pulsar, kind: str) -> None:
    topic = pulsar.topic()
    bad = encoded(kind, V0, {"id": 1, "name": "x" * LONG})[:-1]
    pulsar.send(topic, [bad], schema=registers(V0, kind), chunking_enabled=True)
    with pytest.raises(BadRecord, match=r"MESSAGE_UNREADABLE.*names version 0") as caught:
        read_all(source(pulsar, topic, schema="topic"))
    last = read_all(source(pulsar, topic)).column("native").to_pylist()[0]
    assert f"message {last['ledger_id']}:{last['entry_id']} of {topic}" in caught.value.message
    assert len(str(caught.value)) < 1_000, "the value is in the error"


@pytest.mark.parametrize("kind", ["avro", pytest.param("json", marks=pytest.mark.matrix)])
def test_the_sink_writes_them(pulsar: Pulsar, tmp_path: Path, kind: str) -> None:
    topic = pulsar.topic(2)
    rows = batch(
        KIND, {"id": 1, "name": "short"}, {"id": 2, "name": "l" * LONG}, None, {"id": 3, "name": "\u00e4" * CHUNK}
    )
    made = sink(tmp_path, pulsar, topic, schema=kind, chunking="true")
    write(made, rows)
    found = read_all(source(pulsar, topic, schema="topic"))
    assert sorted(map(str, told(found))) == sorted(map(str, rows.column("value").to_pylist()))
    assert len(versions(pulsar, topic)) == 1
    assert read_back(made) == fingerprint(made.records(rows), 1)

    with pytest.raises(BadRecord, match=r"RECORD_TOO_LARGE.*Row 1 .*chunking") as caught:
        write(sink(tmp_path, pulsar, topic, schema=kind), rows)
    assert len(str(caught.value)) < 1_000
