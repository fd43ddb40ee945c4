"""Mutated bytes as records in every format: a value or a rejection with a reason in words, never anything else."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from delivered.connectors.pulsar.admin import Registered as OfPulsar
from delivered.connectors.pulsar.positions import fields
from delivered.connectors.pulsar.schemas import Values
from delivered.connectors.rocketmq.topic import stored
from delivered.kits.schemas.codec import Decoder
from delivered.kits.schemas.options import Format
from delivered.kits.schemas.registry import Registered

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
    dice, seeds = random.Random(name), [bytes.fromhex(s) for s in SEEDS[name]["records"]]
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
