"""Rows of every type, and the single steps of a batch into a table."""

from __future__ import annotations

import datetime as dt
import decimal
import math

import pyarrow as pa

from delivered.connectors.delta.sink import DeltaSink
from delivered.engine.context import open_ledger
from delivered.ledger import Ledger
from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.work import Account, Decision, Owner, Prepared

EXACT = Guarantee.EXACTLY_ONCE
SCOPE = Scope("orders", "t", "i0")
ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "name": ["a", None, "ü z"]})
SUMMER_TIME = dt.datetime(2026, 3, 29, 1, 30, tzinfo=dt.UTC)
EVERY_TYPE = pa.table(
    {
        "flag": pa.array([True, False, None]),
        "tiny": pa.array([-128, 127, None], pa.int8()),
        "small": pa.array([-(2**15), 2**15 - 1, None], pa.int16()),
        "int": pa.array([-(2**31), 2**31 - 1, None], pa.int32()),
        "big": pa.array([-(2**63), 2**63 - 1, None], pa.int64()),
        "single": pa.array([1.5, math.nan, None], pa.float32()),
        "double": pa.array([math.inf, math.nan, -0.0], pa.float64()),
        "text": pa.array(["", "NaN", "a\0b"]),
        "large": pa.array(["x", None, "é" * 100], pa.large_string()),
        "bytes": pa.array([b"", b"\0\xff", None]),
        "price": pa.array([decimal.Decimal("0.0000000001"), decimal.Decimal(-10) ** 27, None], pa.decimal128(38, 10)),
        "day": pa.array([dt.date(1, 1, 1), dt.date(9999, 12, 31), None]),
        "at": pa.array([-62_135_596_800_000_000, 253_402_300_799_999_999, None], pa.timestamp("us")),
        "at_zone": pa.array([SUMMER_TIME, SUMMER_TIME, None], pa.timestamp("us", "UTC")),
        "list": pa.array([[1, None], [], None], pa.list_(pa.int32())),
        "struct": pa.array([{"a": 1, "b": "x"}, {"a": None, "b": None}, None]),
        "map": pa.array([[("k", 1.5)], [], None], pa.map_(pa.string(), pa.float64())),
    }
)  # fmt: skip


def staged(sink: DeltaSink, rows: pa.Table, batch: int = 0, scope: Scope = SCOPE, shard: int = 0) -> Prepared:
    work = Work(scope, batch, shard)
    writer = sink.writer(work, EXACT, rows.schema)
    total = Fingerprint()
    for part in rows.to_batches():
        total += fingerprint(sink.records(part), 0)
        writer.stage(part)
    return Prepared.of(work, total, writer.prepare(total))


def decision(batch: int, *prepared: Prepared, owner: str = "o") -> Decision:
    total = sum((p.fingerprint for p in prepared), Fingerprint())
    return Decision(SCOPE, owner, EXACT, batch, "{}", prepared, {SCOPE.sink: Account(total)}, batch + 1)


def claimed(sink: DeltaSink, rows: pa.Table = ROWS) -> Ledger:
    sink.ready_target(rows.schema)
    found = open_ledger(sink, SCOPE)
    found.claim(Owner("o"))
    return found


def total(table: pa.Table, names: list[str]) -> Fingerprint:
    return sum((fingerprint(b, 0, names) for b in table.to_batches()), Fingerprint())


UPSERT = {"mode": "upsert", "keyColumns": "id", "versionColumn": "v"}


def days(*rows: tuple[str, str | None, int]) -> pa.Table:
    kinds = pa.schema([("day", pa.string()), ("city", pa.string()), ("id", pa.int64())])
    return pa.Table.from_pylist([dict(zip(kinds.names, row, strict=True)) for row in rows], schema=kinds)


def items(*rows: tuple[int, int, str]) -> pa.Table:
    kinds = pa.schema([("id", pa.int64()), ("v", pa.int64()), ("part", pa.string())])
    return pa.Table.from_pylist([dict(zip(kinds.names, row, strict=True)) for row in rows], schema=kinds)
