"""Rows of every type written to a database server by a sink alone."""

from __future__ import annotations

import datetime as dt
from decimal import Context, Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from hypothesis import strategies as st
from tests.support.scans import scanned_table

from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.work import Promise

if TYPE_CHECKING:
    from tests.support.servers import Mysql, Postgres

    Server = Mysql | Postgres

MECHANISMS = ["one_transaction", "two_phase"]
UTC = dt.UTC
EVERY_TYPE = pa.schema(
    [
        ("yes", pa.bool_()), ("tiny", pa.int8()), ("small", pa.int16()), ("whole", pa.int32()), ("big", pa.int64()),
        ("real", pa.float32()), ("wide", pa.float64()), ("money", pa.decimal128(12, 2)),
        ("huge", pa.decimal128(38, 18)), ("integral", pa.decimal128(38, 0)),
        ("text", pa.string()), ("bytes", pa.binary()), ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")), ("local", pa.timestamp("us")), ("clock", pa.time64("us")),
    ]
)  # fmt: skip


def decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    top = 10**precision - 1
    exact = Context(prec=60)
    return st.integers(-top, top).map(lambda n: Decimal(n).scaleb(-scale, exact))


_EPOCH_DAY = {"min_value": dt.date(1, 1, 1), "max_value": dt.date(9999, 12, 31)}
_MOMENTS = (dt.datetime(1, 1, 2), dt.datetime(9999, 12, 30))  # noqa: DTZ001
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "yes": st.booleans(), "tiny": st.integers(-128, 127), "small": st.integers(-(2**15), 2**15 - 1),
    "whole": st.integers(-(2**31), 2**31 - 1), "big": st.integers(-(2**63), 2**63 - 1),
    "real": st.floats(width=32, allow_nan=True), "wide": st.floats(allow_nan=True),
    "money": decimals(12, 2), "huge": decimals(38, 18), "integral": decimals(38, 0),
    "text": st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])), "bytes": st.binary(),
    "day": st.dates(**_EPOCH_DAY), "at": st.datetimes(*_MOMENTS, timezones=st.just(UTC)),
    "local": st.datetimes(*_MOMENTS), "clock": st.times(),
}  # fmt: skip


def write(sink: Any, batches: list[pa.RecordBatch], guarantee: Guarantee = Guarantee.AT_LEAST_ONCE) -> Promise:
    """One shard, outside of any pipeline."""
    writer = sink.writer(Work(Scope("p", sink.name, "i"), 0, 0), guarantee, batches[0].schema)
    try:
        for batch in batches:
            writer.stage(batch)
        promise: Promise = writer.prepare(Fingerprint(sum(b.num_rows for b in batches)))
        return promise
    finally:
        writer.abort()


def read(sink: Any) -> pa.Table:
    return scanned_table(sink)


RECORDS = 1_000
COLUMNS = {
    "postgres": "id text, payload bytea, position bigint, at timestamptz",
    "mysql": "id longtext, payload longblob, position bigint, at datetime(6)",
}
POINTS = [
    "recover.claim:before", "recover.claim:after", "recover.abort_orphans:before", "write.stage:after#3@batch=0",
    "write.prepare:before@batch=0", "write.prepare:after@batch=0@shard=0", "write.prepare:after@batch=0@shard=1",
    "commit.decide:before@batch=1", "commit.decide:after@batch=1", "recover.apply:before", "recover.apply:after",
    "commit.apply:before@batch=0", "commit.apply:after@batch=2@shard=0", "log:before@batch=2",
]  # fmt: skip
"""Crash points, with one kill at each in a single history."""
TASK = """
import pickle, sys
from delivered.crash import install_from_environment
from delivered.engine.shard import write_shard
from delivered.engine import Sinks
from delivered.model.rows import Rows
install_from_environment()
sink, plan, shard, batch, schema = pickle.load(open(sys.argv[1], "rb"))
write_shard(Sinks.one(sink), plan, shard, 0, iter([Rows(batch)]), schema)
"""
