"""mergeSchema in every database: a column that appears in mid-stream, and one that is gone again."""

from __future__ import annotations

import datetime as dt
import re
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.support.keyed_stores import STORES, Store
from tests.support.scans import scanned_table
from tests.support.sinks import Rig, offsets
from tests.support.sweeps import once_each

from delivered.connectors.mysql import CONNECTOR as MYSQL
from delivered.connectors.postgres import CONNECTOR as POSTGRES
from delivered.engine.decide import commit_batch
from delivered.engine.shard import write_shard
from delivered.model.errors import UsageError
from delivered.model.rows import Rows

CONNECTORS = {"mysql": MYSQL, "postgres": POSTGRES}
DATABASES = [n for n in STORES if n not in ("delta", "iceberg")]
MODES: dict[str, dict[str, str]] = {
    "append": {},
    "upsert": {"mode": "upsert", "keyColumns": "id"},
    "insert": {"mode": "insert", "keyColumns": "id"},
    "complete": {"mode": "complete"},
}
KNOWN = pa.schema([("id", pa.int64()), ("version", pa.int64())])
ADDED: dict[str, tuple[pa.DataType, Any]] = {
    "yes": (pa.bool_(), True), "small": (pa.int16(), -7), "real": (pa.float64(), 0.5),
    "money": (pa.decimal128(12, 2), Decimal("12.30")), "note": (pa.string(), "ü"), "raw": (pa.binary(), b"\x00\xff"),
    "day": (pa.date32(), dt.date(2026, 11, 24)),
    "at": (pa.timestamp("us", "UTC"), dt.datetime(2026, 1, 2, tzinfo=dt.UTC)),
}  # fmt: skip
_count = iter(range(10_000))


@pytest.fixture(params=once_each(DATABASES))
def store(request: pytest.FixtureRequest) -> Store:
    return STORES[request.param](request)


def table(store: Store, more: str = "") -> str:
    name = f"m{next(_count)}"
    store.execute(f"CREATE TABLE {name} (id bigint NOT NULL, version bigint{more}, UNIQUE (id))")
    return name


def rows(ids: range, version: int, names: tuple[str, ...] = ()) -> pa.RecordBatch:
    schema = pa.schema([*KNOWN, *((n, ADDED[n][0]) for n in names)])
    return pa.RecordBatch.from_pylist(
        [{"id": i, "version": version, **{n: ADDED[n][1] for n in names}} for i in ids], schema
    )


def run(rig: Rig, batch: int, given: pa.RecordBatch) -> None:
    """A start whose first batch has one shard; rows come in two record batches."""
    rig.schema = given.schema
    context = rig.context()
    plan = rig.plan(context, batch)
    parts = iter([given.slice(0, 3), given.slice(3)])
    commit_batch(context, batch, offsets(batch), [write_shard(rig.sinks, plan, 0, 0, map(Rows, parts), given.schema)])


def there(rig: Rig) -> dict[int, dict[str, Any]]:
    """Rows as an audit reads them."""
    found = scanned_table(rig.sink).to_pylist()
    assert len({r["id"] for r in found}) == len(found)
    return {r["id"]: r for r in found}


@pytest.mark.checkpoint("nullable columns, added: PostgreSQL, MySQL, SQLite", "continue", "with `mergeSchema`")
@pytest.mark.checkpoint(
    "added columns, removed: PostgreSQL, MySQL, SQLite", "continue", "an upsert keeps the existing values"
)
@pytest.mark.parametrize("mode", MODES)
def test_columns_come_and_go(store: Store, mode: str) -> None:
    name = table(store)
    rig = Rig(store.sink(table=name, **MODES[mode]))
    if mode == "complete" and not rig.sink.capability().batch_atomic:
        pytest.skip("complete needs one transaction")
    run(rig, 0, rows(range(5), 0))
    old, names = rig.sink, tuple(ADDED)
    with pytest.raises(UsageError, match=r"COLUMN_MISSING.*mergeSchema"):
        run(rig, 1, rows(range(5, 10), 1, names))
    assert set(there(rig)) == set(range(5)), "a refused batch changes nothing"

    rig.sink = store.sink(table=name, mergeSchema="true", **MODES[mode])
    run(rig, 1, rows(range(5, 10), 1, names))
    run(rig, 2, rows(range(10, 12), 2, names[:2]))
    rig.sink = old  # without the option, and with the earlier transform
    run(rig, 3, rows(range(12, 14), 3))
    lives = {"complete": {12: 3, 13: 3}}.get(
        mode, {i: 0 if i < 5 else 1 if i < 10 else 2 if i < 12 else 3 for i in range(14)}
    )
    found = there(rig)
    assert {i: r["version"] for i, r in found.items()} == lives
    for i, row in found.items():
        has = names if 5 <= i < 10 else names[:2] if 10 <= i < 12 else ()
        assert {n: row[n] for n in names} == {n: ADDED[n][1] if n in has else None for n in names}


def test_an_upsert_without_the_column_leaves_what_stands_there(store: Store) -> None:
    name = table(store)
    rig = Rig(store.sink(table=name, mergeSchema="true", **MODES["upsert"]))
    run(rig, 0, rows(range(4), 0, ("note",)))
    run(rig, 1, rows(range(2, 6), 1))
    expected = {i: (int(i > 1), "ü" if i < 4 else None) for i in range(6)}
    assert {i: (r["version"], r["note"]) for i, r in there(rig).items()} == expected


@pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])
def test_killed_right_after_alter_table(store: Store, back: bool) -> None:
    """MySQL commits it before the stored schema is updated. The next start goes on with either transform."""
    name = table(store)
    rig = Rig(store.sink(table=name, mergeSchema="true"))
    run(rig, 0, rows(range(5), 0))
    store.execute(f"ALTER TABLE {name} ADD COLUMN small smallint")
    run(rig, 1, rows(range(5, 8), 1, () if back else ("small",)))
    run(rig, 2, rows(range(8, 10), 2, ("small",)))
    expected = {i: None if i < (8 if back else 5) else -7 for i in range(10)}
    assert {i: r["small"] for i, r in there(rig).items()} == expected


def test_a_fenced_driver_that_alters_the_table_hurts_nobody(store: Store) -> None:
    """F7: paused between its claim and ALTER TABLE. The one that took over has the earlier transform."""
    name = table(store)
    zombie = Rig(store.sink(table=name, mergeSchema="true"), schema=rows(range(0), 0, ("small",)).schema)
    rig = Rig(store.sink(table=name), zombie.pipeline)
    run(rig, 0, rows(range(5), 0))
    context = rig.context("second")
    rig.schema = KNOWN
    plan = rig.plan(context, 1)
    zombie.sink.add_columns(zombie.schema)
    message = write_shard(rig.sinks, plan, 0, 0, iter([Rows(rows(range(5, 8), 1))]), KNOWN)
    commit_batch(context, 1, offsets(1), [message])
    assert {i: r["small"] for i, r in there(rig).items()} == dict.fromkeys(range(8))


RIGHTS = {
    "postgres": ("CREATE ROLE {user} LOGIN", "GRANT CREATE ON DATABASE delivered TO {user}",
                 "GRANT SELECT, INSERT ON {table} TO {user}", "GRANT USAGE ON SCHEMA public TO {user}"),
    "mysql": ("CREATE USER {user}@'127.0.0.1'", "GRANT ALL ON ledger_{user}.* TO {user}@'127.0.0.1'",
              "GRANT SELECT, INSERT ON {table} TO {user}@'127.0.0.1'"),
}  # fmt: skip


@pytest.mark.parametrize("system", RIGHTS)
def test_without_the_right_to_alter_the_table(system: str, request: pytest.FixtureRequest) -> None:
    """Refused before a row is written; once the owner has run the statement of the error, the same start goes on."""
    server: Any = request.getfixturevalue(system)
    user, name = f"writer{next(_count)}", f"{'public' if system == 'postgres' else 'dev'}.m{next(_count)}"
    server.execute(f"CREATE TABLE {name} (id bigint NOT NULL, version bigint)")
    for statement in RIGHTS[system]:
        server.execute(statement.format(user=user, table=name))

    def sink(**more: str) -> Any:
        url = server.url.replace("delivered@", f"{user}@")
        return CONNECTORS[system].sink({"url": url, "dbtable": name, "ledgerSchema": f"ledger_{user}", **more})

    rig = Rig(sink())
    run(rig, 0, rows(range(5), 0))
    rig.sink = sink(mergeSchema="true")
    with pytest.raises(UsageError) as caught:
        run(rig, 1, rows(range(5, 8), 1, ("note", "small")))
    error = caught.value
    assert error.code == "DELIVERED_PERMISSION"
    assert f"mergeSchema adds columns to table {name!r}" in str(error)
    assert "the user may not alter it" in str(error)
    assert server.execute(f"SELECT count(*) FROM {name}") == [(5,)]
    assert error.next_step is not None
    statement, grant = re.findall(r"(ALTER TABLE .*?|GRANT ALTER ON .*?);", error.next_step)
    assert name in grant
    server.execute(statement)
    run(rig, 1, rows(range(5, 8), 1, ("note", "small")))
    assert server.execute(f"SELECT count(*), count(note), count(small) FROM {name}") == [(8, 3, 3)]


def test_what_cannot_be_merged(store: Store) -> None:
    name = table(store)
    rig = Rig(store.sink(table=name, mergeSchema="true"))
    run(rig, 0, rows(range(5), 0))
    good = rows(range(5, 8), 1)
    for more, code in (
        (("Version", pa.array([1, 2, 3])), "COLUMN_CASE"),
        (("gone", pa.nulls(3)), "TYPE_UNKNOWN"),
    ):
        with pytest.raises(UsageError, match=code):
            run(rig, 1, good.append_column(*more).drop_columns(["version"]))
    texts = good.set_column(1, "version", pa.array(["1", "2", "3"]))
    with pytest.raises(UsageError, match=r"(SCHEMA_CHANGED|COLUMN_TYPE)"):
        run(rig, 1, texts)
    rig.sink = store.sink(table=name)
    store.execute(f"ALTER TABLE {name} ADD COLUMN small smallint")
    with pytest.raises(UsageError, match=r"SCHEMA_CHANGED.*mergeSchema"):
        run(rig, 1, rows(range(5, 8), 1, ("small",)))
    run(rig, 1, good)
    assert len(there(rig)) == 8
