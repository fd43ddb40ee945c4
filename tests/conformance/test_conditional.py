"""Conditional writes (mode insert, expectedVersion, onConstraint) in every database, against a model."""

from __future__ import annotations

import datetime as dt
import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from tests.support.keyed_stores import STORES, Store
from tests.support.sinks import Rig
from tests.support.sweeps import once_each

import delivered
from delivered.engine.context import Context
from delivered.model.capability import OnConflict
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.rows import from_json_texts
from delivered_lab.verify.services import wait_for

DATABASES = [n for n in STORES if n not in ("delta", "iceberg")]
INSERT = {"mode": "insert", "keyColumns": "id"}
EXPECT = {"mode": "upsert", "keyColumns": "id", "versionColumn": "version", "expectedVersion": "was"}
LETTERS = {"onConflict": "dead_letter"}
SCHEMA = pa.schema([("id", pa.int64()), ("version", pa.int64()), ("text", pa.string()), ("was", pa.int64())])
Row = tuple[int, int, str, int | None]
_count = iter(range(10_000))


@pytest.fixture(params=once_each(DATABASES))
def store(request: pytest.FixtureRequest) -> Store:
    return STORES[request.param](request)


def table(store: Store, more: str = "") -> str:
    name = f"c{next(_count)}"
    store.execute(f"CREATE TABLE {name} (id bigint NOT NULL, version bigint, text varchar(40){more}, UNIQUE (id))")
    return name


def rows(given: list[Row], expects: bool) -> pa.RecordBatch:
    columns = [pa.array([r[i] for r in given], f.type) for i, f in enumerate(SCHEMA)]
    batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    return batch if expects else batch.drop_columns(["was"])


def run(rig: Rig, batch: int, shards: list[list[Row]], context: Context | None = None) -> None:
    expects = rig.sink.capability().write.expected is not None
    rig.run_rows(batch, [rows(s, expects) for s in shards], context)


def state(store: Store, name: str) -> dict[int, tuple[Any, ...]]:
    found = store.execute(f"SELECT id, version, text FROM {name}")
    assert len({r[0] for r in found}) == len(found)
    return {r[0]: r[1:] for r in found}


def skipped(rig: Rig) -> dict[str, int]:
    committer = rig.sink.committer(rig.scope)
    try:
        return dict(committer.skipped())
    finally:
        committer.close()


def letters(store: Store, rig: Rig) -> list[tuple[int, int, str, dict[str, Any]]]:
    own = "_delivered_dead_letter" if rig.sink.capability().system == "sqlite" else "delivered.dead_letter"
    found = store.execute(f"SELECT batch, shard, reason, record FROM {own} WHERE pipeline = '{rig.pipeline}'")
    committer = rig.sink.committer(rig.scope)
    try:
        kept = [(n.batch, n.shard, n.reason, n.record) for n in committer.dead_letters()]
    finally:
        committer.close()
    assert sorted(kept) == sorted(found)
    return [(b, s, reason, json.loads(record)) for b, s, reason, record in found]


def by_key(given: list[Row]) -> list[list[Row]]:
    return [[r for r in given if r[0] % 2 == s] for s in range(2)]


@pytest.mark.parametrize("kept", [pytest.param(False, id="skip"), pytest.param(True, id="dead_letter")])
def test_the_first_row_of_a_key_stays(store: Store, kept: bool) -> None:
    name = table(store)
    store.execute(f"INSERT INTO {name} (id, version, text) VALUES (3, 0, 'before')")
    rig = Rig(store.sink(table=name, **INSERT, **(LETTERS if kept else {})))
    random_rows, wanted, refused = random.Random(7), {3: (0, "before")}, []
    for batch in range(4):
        given = [(random_rows.randrange(12), batch * 100 + i, f"row {batch}.{i}", None) for i in range(20)]
        for row in (r for shard in by_key(given) for r in shard):
            if row[0] in wanted:
                refused.append((batch, row[0], row[1]))
            else:
                wanted[row[0]] = row[1:3]
        run(rig, batch, by_key(given))
        assert state(store, name) == wanted
    assert skipped(rig) == {"conflict": len(refused)} and refused
    found = letters(store, rig)
    assert Counter((b, r["id"], r["version"]) for b, _, _, r in found) == (Counter(refused) if kept else Counter())
    assert {(s, r["id"] % 2) for _, s, _, r in found} <= {(0, 0), (1, 1)}
    assert {reason for _, _, reason, _ in found} <= {"a row of this key is in the table"}


def test_a_row_is_written_only_if_the_expected_version_stands(store: Store) -> None:
    name = table(store)
    store.execute(f"INSERT INTO {name} (id, version, text) VALUES (1, 5, 'before')")
    rig = Rig(store.sink(table=name, **EXPECT, **LETTERS))
    run(rig, 0, by_key([(1, 6, "a", 5), (1, 7, "b", 6), (1, 9, "no", 6), (2, 1, "new", None), (4, 2, "no", 1)]))
    assert state(store, name) == {1: (7, "b"), 2: (1, "new")}
    run(rig, 1, by_key([(1, 8, "no", None), (2, 2, "c", 1), (2, 3, "no", 1), (4, 1, "new", None), (4, 2, "d", 1)]))
    assert state(store, name) == {1: (7, "b"), 2: (2, "c"), 4: (2, "d")}
    assert skipped(rig) == {"conflict": 4}
    found = [(b, r["id"], r["was"], reason) for b, _, reason, r in letters(store, rig)]
    assert sorted(found, key=lambda f: f[:2]) == [
        (0, 1, 6, "expected version = 6, found version = 7"),
        (0, 4, 1, "expected version = 1, found no row"),
        (1, 1, None, "expected no row, found version = 7"),
        (1, 2, 1, "expected version = 1, found version = 2"),
    ]


@pytest.mark.parametrize(
    ("options", "row", "says"),
    [
        pytest.param({**INSERT, "onConflict": "fail"}, (1, 1, "x", None), "key id = '1': a row of this", id="key"),
        pytest.param(EXPECT, (1, 9, "x", 4), "key id = '1': expected version = 4, found version = 5", id="version"),
    ],
)
def test_a_conflict_stops_the_query_with_key_expected_and_found(
    store: Store, options: dict[str, str], row: Row, says: str
) -> None:
    name = table(store)
    store.execute(f"INSERT INTO {name} (id, version, text) VALUES (1, 5, 'before')")
    rig = Rig(store.sink(table=name, **options))
    with pytest.raises(DeliveredError, match=says):
        run(rig, 0, by_key([(2, 1, "good", None), row]))
    assert state(store, name) == {1: (5, "before")} and skipped(rig) == {} and not letters(store, rig)


@pytest.mark.parametrize("options", [{}, {"mode": "upsert", "keyColumns": "id"}, INSERT, EXPECT | LETTERS])
def test_rows_that_break_a_constraint_are_dead_letters(store: Store, options: dict[str, str]) -> None:
    parent = f"parent{next(_count)}"
    store.execute(f"CREATE TABLE {parent} (version bigint PRIMARY KEY)")
    store.execute(f"INSERT INTO {parent} VALUES (1), (2)")
    more = f", UNIQUE (text), CHECK (text <> 'bad'), FOREIGN KEY (version) REFERENCES {parent} (version)"
    name = table(store, more)
    rig = Rig(store.sink(table=name, onConstraint="dead_letter", **options))
    good = [(i, 1 + i % 2, f"good {i}", None) for i in range(20)]
    bad = [(30, 1, "bad", None), (32, 7, "orphan", None), (34, 2, "good 4", None)]
    run(rig, 0, by_key([*good[:9], bad[0], *good[9:15], bad[1], *good[15:], bad[2]]))
    assert state(store, name) == {r[0]: r[1:3] for r in good}
    assert skipped(rig) == {"constraint": 3}
    found = letters(store, rig)
    assert sorted(r["id"] for *_, r in found) == [30, 32, 34] and all(reason for _, _, reason, _ in found)
    run(rig, 1, by_key([(40, 1, "later", None)]))
    assert 40 in state(store, name)


def test_a_broken_constraint_stops_the_query_by_default(store: Store) -> None:
    name = table(store, ", CHECK (text <> 'bad')")
    rig = Rig(store.sink(table=name, **INSERT))
    with pytest.raises(DeliveredError, match="ROW_REFUSED"):
        run(rig, 0, by_key([(1, 1, "good", None), (2, 1, "bad", None)]))
    assert state(store, name) == {}


def test_a_decided_batch_written_again_changes_nothing(store: Store) -> None:
    name = table(store)
    rig = Rig(store.sink(table=name, **INSERT, **LETTERS))
    given = by_key([(1, 1, "first", None), (1, 2, "second", None), (2, 1, "x", None)])
    run(rig, 0, given)
    before = state(store, name), skipped(rig), letters(store, rig)
    assert before[1] == {"conflict": 1}
    run(rig, 0, given, rig.context("second"))
    run(rig, 0, given, rig.context("third"))
    assert (state(store, name), skipped(rig), letters(store, rig)) == before


def test_a_key_in_two_shards_is_refused(store: Store) -> None:
    """Their order is undefined. Under two_phase the second shard waits for the first one's lock."""
    name = table(store)
    rig = Rig(store.sink(table=name, **INSERT))
    if rig.sink.capability().commit.value == "two_phase":
        rig = Rig(store.sink(table=name, **INSERT, lockTimeout="1"))
    with pytest.raises(DeliveredError, match=r"KEY_IN_TWO_SHARDS|LOCK_TIMEOUT"):
        run(rig, 0, [[(1, 1, "a", None)], [(1, 2, "b", None)]])
    assert state(store, name) == {}


@pytest.mark.parametrize("mechanism", ["one_transaction", "two_phase"])
def test_a_key_that_another_writer_inserts_meanwhile_is_a_conflict(postgres: Any, mechanism: str) -> None:
    """Its transaction is open when the row is checked: the INSERT waits, violates the index, and is retried."""
    name = postgres.table("id bigint UNIQUE, version bigint, text text")
    rig = Rig(postgres.sink(name, mechanism=mechanism, **INSERT, **LETTERS))
    with psycopg.connect(postgres.url) as other, ThreadPoolExecutor() as pool:
        other.execute(f"INSERT INTO {name} VALUES (1, 0, 'other')")
        ours = pool.submit(run, rig, 0, [[(1, 1, "ours", None), (2, 1, "ours", None)]])
        waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE 'delivered%'"
        wait_for(lambda: bool(postgres.execute(waits)), 30, "our INSERT waits")
        other.commit()
        ours.result(120)
    assert sorted(postgres.execute(f"SELECT id, text FROM {name}")) == [(1, "other"), (2, "ours")]
    assert skipped(rig) == {"conflict": 1}


def test_options_that_do_not_go_together_are_refused() -> None:
    from delivered.connectors.sqlite import CONNECTOR

    def made(**options: str) -> Any:
        return CONNECTOR.sink({"path": "/tmp/x.db", "table": "t", **options}).capability().write

    write = made(**INSERT)
    assert write.insert and write.on_conflict is OnConflict.SKIP
    assert made(**EXPECT).on_conflict is OnConflict.FAIL
    for wrong, says in [
        ({"mode": "insert"}, "keyColumns"),
        ({**INSERT, "versionColumn": "version"}, "versionColumn.*mode upsert"),
        ({**EXPECT, "mode": "insert"}, "versionColumn|expectedVersion"),
        ({"mode": "upsert", "keyColumns": "id", "expectedVersion": "was"}, "versionColumn"),
        ({**EXPECT, "expectedVersion": "version"}, "twice"),
        ({**EXPECT, "deleteColumn": "gone"}, "deleteColumn"),
        ({**EXPECT, "onConflict": "skip"}, "mode insert only.*dead_letter"),
        ({"onConflict": "skip"}, "onConflict.*mode insert"),
        ({"onConstraint": "skip"}, "fail, dead_letter"),
        ({"mode": "complete", "onConstraint": "dead_letter"}, "complete"),
    ]:
        with pytest.raises(UsageError, match=says):
            made(**wrong)
    sink = CONNECTOR.sink({"path": "/tmp/x.db", "table": "t", **EXPECT})
    text = pa.schema([f if f.name != "was" else f.with_type(pa.string()) for f in SCHEMA])
    with pytest.raises(UsageError, match=r"expectedVersion 'was' is string, but .* 'version', is int64"):
        sink.check_schema(text)
    with pytest.raises(UsageError, match="'was'"):
        sink.check_schema(pa.schema([f for f in SCHEMA if f.name != "was"]))


def test_the_plan_says_what_the_table_decides_and_refuses_weaker_guarantees(tmp_path: Path) -> None:
    def planned(guarantee: str, **options: str) -> str:
        sink = delivered.sqlite(str(tmp_path / "x.db"), "t", **options)
        source = delivered.log(str(tmp_path / "log"))
        made = delivered.Pipeline(
            name="p", guarantee=guarantee, checkpoint=str(tmp_path / "c"), source=source, sinks=[sink]
        )
        return " ".join(str(made.plan(offline=True)).split())

    assert "a key that is there stays: others are skipped and counted" in planned("exactly_once", **INSERT)
    said = planned("exactly_once", **EXPECT, onConstraint="dead_letter")
    assert "only if its version is was: others stop the query, broken constraints to dead letters" in said
    for options in (INSERT, EXPECT, {"onConstraint": "dead_letter"}):
        assert "MODE_CONDITIONAL" in planned("at_least_once", **options)


def test_a_null_key_is_refused(store: Store) -> None:
    rig = Rig(store.sink(table=table(store), **INSERT))
    with pytest.raises(DeliveredError, match="KEY_NULL"):
        run(rig, 0, [[(None, 1, "x", None)]])  # type: ignore[list-item]


_LETTER = {
    "yes": (pa.bool_(), "boolean", True),
    "whole": (pa.int64(), "bigint", -(1 << 63)),
    "narrow": (pa.float32(), "real", 0.1),
    "wide": (pa.float64(), "double precision", 1.7976931348623157e308),
    "money": (pa.decimal128(38, 10), "decimal(38, 10)", Decimal("-1234567890123456789012345678.0000000010")),
    "text": (pa.string(), "varchar(99)", " é\n\"{}'%s\\ "),
    "doc": (pa.string(), "json", '{"n": 12345678901234567.890, "b": true}'),
    "bytes": (pa.binary(), "blob", b"\x00\xff"),
    "utf8": (pa.binary(), "blob", b'{"base64": "AA=="}'),
    "day": (pa.date32(), "date", dt.date(1, 1, 1)),
    "local": (pa.timestamp("us"), "timestamp", dt.datetime.fromisoformat("9999-12-31T23:59:59.999999")),
    "at": (pa.timestamp("us", "UTC"), "timestamptz", dt.datetime(1, 1, 1, 0, 0, 0, 1, tzinfo=dt.UTC)),
    "clock": (pa.time64("us"), "time", dt.time(23, 59, 59, 999_999)),
}
"""Column -> its type, in Arrow and SQL, and a value."""
_LOCAL, _TEXTS = "datetime(6)", ("decimal(38, 10)", "date", "timestamp", "timestamptz")
_SPELLED = {
    "postgres": {"blob": "bytea"},
    "mysql": {"real": "float", "timestamp": _LOCAL, "timestamptz": _LOCAL, "time": "time(6)", "json": "longtext"},
    "sqlite": {**dict.fromkeys(_TEXTS, "text"), "time": "integer", "json": "text"},
}


def test_a_dead_letter_of_a_constraint_holds_the_row(store: Store) -> None:
    """Of all types, as a retry takes it."""
    name, spelled = f"c{next(_count)}", _SPELLED[store.connector.name]
    columns = ", ".join(f"{n} {spelled.get(sql, sql)}" for n, (_, sql, _) in _LETTER.items())
    store.execute(f"CREATE TABLE {name} (id bigint CHECK (id < 0), {columns})")
    schema = pa.schema([("id", pa.int64()), *((n, kind) for n, (kind, _, _) in _LETTER.items())])
    rows = pa.table(
        {"id": [1, 2], **{n: pa.array([v, None], kind) for n, (kind, _, v) in _LETTER.items()}}, schema
    ).to_batches()[0]
    rig = Rig(store.sink(table=name, onConstraint="dead_letter"))
    rig.run_rows(0, [rows])
    found = [json.dumps(record) for *_, record in letters(store, rig)]
    assert from_json_texts(found, schema).sort_by("id").to_pylist() == rows.to_pylist()
