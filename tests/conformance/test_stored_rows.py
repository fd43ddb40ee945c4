"""What a database does not store without saying so: triggers, rules, conflict clauses, collations (P32)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from tests.support.keyed_stores import STORES, Store
from tests.support.sinks import EXACT, Rig, offsets
from tests.support.sweeps import once_each, sweep

from delivered.engine.decide import commit_batch
from delivered.engine.shard import write_shard
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.rows import Rows
from delivered.model.work import LedgerState
from delivered_lab.brokers.postgres import PROGRAMS

DATABASES = [n for n in STORES if n not in ("delta", "iceberg")]
DROPPING = [n for n in DATABASES if not n.startswith("mysql")]
"""MySQL's triggers can change a row, not drop it."""
SCHEMA = pa.schema([("id", pa.int64()), ("version", pa.int64()), ("text", pa.string()), ("was", pa.int64())])
UPSERT = {"mode": "upsert", "keyColumns": "id"}
VERSIONS = {**UPSERT, "versionColumn": "version"}
DELETES = {**VERSIONS, "deleteColumn": "gone"}
EXPECTS = {**VERSIONS, "expectedVersion": "was"}
MODES: dict[str, dict[str, str]] = {
    "append": {},
    "upsert": UPSERT,
    "versions": VERSIONS,
    "insert": {"mode": "insert", "keyColumns": "id"},
    "expected": EXPECTS,
}
POSTGRES = ["postgres-one-transaction", "postgres-two-phase"]
_count = iter(range(10_000))
Made = Callable[[str], Store]


@pytest.fixture
def made(request: pytest.FixtureRequest) -> Made:
    return lambda name: STORES[name](request)


def table(store: Store, columns: str = "id bigint NOT NULL, version bigint, text varchar(40), UNIQUE (id)") -> str:
    name = f"w{next(_count)}"
    store.execute(f"CREATE TABLE {name} ({columns})")
    return name


def hook(store: Store, name: str, event: str, condition: str = "{row}.id % 2 = 1", keeps: str = "") -> str:
    """A trigger that drops the rows of a condition, or runs `keeps` for them."""
    trigger, row = f"hook_{name}_{event.lower()}", "OLD" if event == "DELETE" else "NEW"
    condition = condition.format(row=row)
    if store.connector.name == "sqlite":
        does = keeps or "SELECT RAISE(IGNORE)"
        store.execute(f"CREATE TRIGGER {trigger} BEFORE {event} ON {name} WHEN {condition} BEGIN {does}; END")
    else:
        does = keeps or "RETURN NULL"
        store.execute(
            f"CREATE FUNCTION {trigger}() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN IF {condition} THEN {does}; END IF; RETURN {row}; END $$"
        )
        store.execute(f"CREATE TRIGGER {trigger} BEFORE {event} ON {name} FOR EACH ROW EXECUTE FUNCTION {trigger}()")
    return trigger


def rows(given: list[tuple[Any, ...]], options: dict[str, str]) -> pa.RecordBatch:
    """(id, version, text, expected version or whether it is a delete)."""
    schema = SCHEMA.set(0, pa.field("id", pa.string())) if given and isinstance(given[0][0], str) else SCHEMA
    if "deleteColumn" in options:
        schema = schema.set(3, pa.field("gone", pa.bool_()))
    batch = pa.RecordBatch.from_arrays(
        [pa.array([r[i] for r in given], f.type) for i, f in enumerate(schema)], schema=schema
    )
    return batch if "expectedVersion" in options or "deleteColumn" in options else batch.drop_columns(["was"])


def run(rig: Rig, batch: int, options: dict[str, str], *shards: list[tuple[Any, ...]]) -> None:
    rig.run_rows(batch, [rows(s, options) for s in shards])


def ledger(rig: Rig) -> LedgerState:
    store = rig.sink.store(rig.scope)
    try:
        return store.peek()
    finally:
        store.close()


def refused(rig: Rig, batch: int, options: dict[str, str], *shards: list[tuple[Any, ...]]) -> str:
    """The error of a batch that is not decided, and of which nothing is left. A decision wraps its reason."""
    before = ledger(rig)
    with pytest.raises(DeliveredError) as caught:
        run(rig, batch, options, *shards)
    after = ledger(rig)
    assert after.last == before.last, "decided"
    committer = rig.sink.committer(rig.scope)
    committer.abort_orphans(())
    committer.close()
    assert caught.value.next_step and not ("DECISION_FAILED" in str(caught.value) and "Next:" not in str(caught.value))
    return str(caught.value)


def state(store: Store, name: str) -> list[tuple[Any, ...]]:
    return sorted(store.execute(f"SELECT id, version, text FROM {name}"))


FOUR = [(i, 1, f"t{i}", None) for i in range(4)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("database", once_each(DROPPING))
def test_rows_that_a_trigger_drops_stop_the_batch(made: Made, database: str, mode: str) -> None:
    store = made(database)
    name, options = table(store), MODES[mode]
    trigger = hook(store, name, "INSERT")
    rig = Rig(store.sink(table=name, **options))
    error = refused(rig, 0, options, FOUR)
    assert "[DELIVERED_ROWS_NOT_STORED]" in error
    assert name in error and trigger in error
    assert "4 rows" in error and "2" in error
    assert state(store, name) == []
    store.execute(f"DROP TRIGGER {trigger}" + ("" if store.connector.name == "sqlite" else f" ON {name}"))
    run(rig, 0, options, FOUR)
    assert state(store, name) == [r[:3] for r in FOUR]


@pytest.mark.parametrize("mode", ["upsert", "versions", "expected"])
@pytest.mark.parametrize("database", once_each(DROPPING))
def test_updates_that_a_trigger_drops_stop_the_batch(made: Made, database: str, mode: str) -> None:
    store = made(database)
    name, options = table(store), MODES[mode]
    rig = Rig(store.sink(table=name, **options))
    run(rig, 0, options, FOUR)
    hook(store, name, "UPDATE")
    assert "[DELIVERED_ROWS_NOT_STORED]" in refused(rig, 1, options, [(0, 2, "new", 1), (1, 2, "new", 1)])
    assert state(store, name) == [r[:3] for r in FOUR]
    run(rig, 1, options, [(0, 2, "new", 1), (2, 2, "new", 1)])
    assert state(store, name) == [(0, 2, "new"), (1, 1, "t1"), (2, 2, "new"), (3, 1, "t3")]


@pytest.mark.parametrize("database", once_each(DATABASES))
def test_outdated_rows_are_no_missing_rows(made: Made, database: str) -> None:
    store = made(database)
    name = table(store)
    rig = Rig(store.sink(table=name, **VERSIONS))
    run(rig, 0, VERSIONS, [(1, 5, "a", None), (2, 5, "b", None)])
    run(rig, 1, VERSIONS, [(1, 4, "old", None), (2, 5, "same", None), (3, 1, "c", None)])
    run(rig, 2, VERSIONS, [(1, 4, "old", None)])
    assert state(store, name) == [(1, 5, "a"), (2, 5, "b"), (3, 1, "c")]
    keys = table(store, "id bigint NOT NULL, UNIQUE (id)")
    only = Rig(store.sink(table=keys, **UPSERT))
    for batch in range(2):
        only.run_rows(batch, [pa.record_batch({"id": pa.array([1, 2 + batch], pa.int64())})])
    assert sorted(store.execute(f"SELECT id FROM {keys}")) == [(1,), (2,), (3,)]
    run(rig, 3, VERSIONS, [(1, 6, "a", None)])
    same = Rig(store.sink(table=table(store), **UPSERT))
    for batch in range(2):  # MySQL counts a row that did not change only if it is asked to
        run(same, batch, UPSERT, FOUR)


@pytest.mark.parametrize("database", [n for n in DROPPING if not n.endswith("two-phase")])
def test_deletes_that_a_trigger_drops_stop_the_batch(made: Made, database: str) -> None:
    store = made(database)
    name = table(store)
    rig = Rig(store.sink(table=name, **DELETES))
    run(rig, 0, DELETES, [(*r[:3], False) for r in FOUR])
    hook(store, name, "DELETE")
    error = refused(rig, 1, DELETES, [(i, 2, None, True) for i in range(2)])
    assert "[DELIVERED_ROWS_NOT_STORED]" in error and "delete" in error
    assert state(store, name) == [r[:3] for r in FOUR]
    run(rig, 1, DELETES, [(0, 2, None, True), (9, 2, None, True), (3, 1, None, True)])
    assert state(store, name) == [r[:3] for r in FOUR[1:]]
    every = Rig(store.sink(table=name, mode="complete"))
    assert "[DELIVERED_ROWS_NOT_STORED]" in refused(every, 0, {}, [(7, 1, "x", None)])
    assert state(store, name) == [r[:3] for r in FOUR[1:]]


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE])
@pytest.mark.parametrize("database", ["sqlite", "postgres-one-transaction"])
def test_the_weaker_guarantees_count_too(made: Made, database: str, guarantee: Guarantee, mode: str) -> None:
    store = made(database)
    name, options = table(store), MODES[mode]
    hook(store, name, "INSERT")
    rig = Rig(store.sink(table=name, **options))
    given = rows(FOUR, options)
    rig.schema = given.schema
    plan = rig.plan(rig.context(guarantee=guarantee), 0)
    with pytest.raises(DeliveredError, match="ROWS_NOT_STORED"):
        write_shard(rig.sinks, plan, 0, 0, iter([Rows(given)]), given.schema)
    assert state(store, name) == []


@pytest.mark.parametrize("mode", ["append", "insert"])
@pytest.mark.parametrize("database", once_each(DROPPING))
def test_dropped_rows_become_dead_letters_as_broken_constraints_do(made: Made, database: str, mode: str) -> None:
    store = made(database)
    options = {**MODES[mode], "onConstraint": "dead_letter"}
    name = table(store)
    trigger = hook(store, name, "INSERT")
    rig = Rig(store.sink(table=name, **options))
    run(rig, 0, options, FOUR)
    assert state(store, name) == [r[:3] for r in FOUR[::2]]
    committer: Any = rig.sink.committer(rig.scope)
    assert committer.skipped() == {"constraint": 2}
    kept = committer.dead_letters()
    committer.close()
    assert [trigger in letter.reason for letter in kept] == [True, True]


LOOSE = {
    "sqlite": [("text COLLATE NOCASE", "a", "A"), ("text COLLATE RTRIM", "a", "a  ")],
    "postgres": [
        ("jsonb", "1.0", "1.00"),
        ("varchar(20) COLLATE loose", "a", "A"),
        ("citext", "a", "A"),
        ("json_twice", "1.0", "1.00"),
    ],
    "mysql": [
        ("varchar(20) COLLATE utf8mb4_general_ci", "a", "A"),
        ("varchar(20) COLLATE utf8mb4_bin", "a", "a "),
    ],
}
CASES = sweep(
    [(d, *case) for d in DATABASES for case in LOOSE[d.split("-")[0]]],
    lambda database, *_: database in ("sqlite", "postgres-one-transaction", "mysql-two-phase"),
)


def loose_table(store: Store, kind: str) -> str:
    try:
        if "loose" in kind:
            store.execute(
                "CREATE COLLATION IF NOT EXISTS loose (provider = icu, locale = 'und-u-ks-level2', "
                "deterministic = false)"
            )
        elif kind == "citext":
            store.execute("CREATE EXTENSION IF NOT EXISTS citext")
        elif kind == "json_twice":
            with contextlib.suppress(psycopg.errors.DuplicateObject):
                store.execute("CREATE DOMAIN json_once AS jsonb")
                store.execute("CREATE DOMAIN json_twice AS json_once")
    except psycopg.errors.FeatureNotSupported as error:
        pytest.skip(f"this build of PostgreSQL: {error}; set {PROGRAMS} to the programs of another")
    return table(store, f"id {kind} NOT NULL, version bigint, text varchar(40), UNIQUE (id)")


@pytest.mark.parametrize("mode", ["upsert", "versions", "expected"])
@pytest.mark.parametrize(("database", "kind", "key", "other"), CASES)
def test_keys_that_only_the_column_makes_equal_stop_the_batch(
    made: Made, database: str, kind: str, key: str, other: str, mode: str
) -> None:
    store, options = made(database), MODES[mode]
    name = loose_table(store, kind)
    rig = Rig(store.sink(table=name, **options))
    assert [f.code for f in rig.sink.preflight(EXACT)] == ["KEY_COLLATION"]
    b = "2" if "json" in kind else "b"
    one = [(key, 1, "x", None), (b, 1, "x", None)]
    error = refused(rig, 0, options, [*one, (other, 2, "y", 1)])
    # SQLite stages keys by their bytes: the other key has no version to expect.
    code = "VERSION_CONFLICT" if database == "sqlite" and mode == "expected" else "KEY_COLLATION"
    assert f"[DELIVERED_{code}]" in error and f"'{key}" in error.lower()
    assert state(store, name) == []
    run(rig, 0, options, one)
    before = state(store, name)
    assert len(before) == 2
    assert "[DELIVERED_KEY_COLLATION]" in refused(rig, 1, options, [(other, 2, "y", 1)])
    assert state(store, name) == before
    run(rig, 1, options, [(key, 2, "y", 1)])
    assert sorted(r[1:] for r in state(store, name)) == [(1, "x"), (2, "y")]
    if store.deletes and mode == "versions":
        deletes = Rig(store.sink(table=name, **DELETES))
        assert "[DELIVERED_KEY_COLLATION]" in refused(deletes, 0, DELETES, [(other, 9, None, True)])
        run(deletes, 0, DELETES, [(key, 9, None, True)])
        assert [r[1:] for r in state(store, name)] == [(1, "x")]


@pytest.mark.parametrize("mode", ["upsert", "versions"])
@pytest.mark.parametrize("database", once_each(DATABASES))
def test_a_trigger_that_changes_the_key_stops_the_batch(made: Made, database: str, mode: str) -> None:
    store = made(database)
    name, options = table(store), MODES[mode]
    if store.connector.name == "sqlite":
        store.execute(
            f"CREATE TRIGGER move_{name} AFTER INSERT ON {name} BEGIN "
            f"UPDATE {name} SET id = NEW.id + 100 WHERE id = NEW.id; END"
        )
    elif store.connector.name == "mysql":
        store.execute(f"CREATE TRIGGER move_{name} BEFORE INSERT ON {name} FOR EACH ROW SET NEW.id = NEW.id + 100")
    else:
        hook(store, name, "INSERT", keeps="NEW.id := NEW.id + 100")
    rig = Rig(store.sink(table=name, **options))
    assert [f.code for f in rig.sink.preflight(EXACT)] == ["TRIGGERS"]
    assert "[DELIVERED_ROWS_NOT_STORED]" in refused(rig, 0, options, [(1, 1, "x", None)])
    assert state(store, name) == []


@pytest.mark.parametrize("database", once_each(DATABASES))
def test_the_plan_shows_what_was_checked(made: Made, database: str) -> None:
    store = made(database)
    name = table(store)
    sink: Any = store.sink(table=name, **UPSERT)
    assert not store.sink(table="missing", ifNotExists="true").checked_target()  # type: ignore[attr-defined]
    assert not sink.preflight(EXACT)
    [line] = sink.checked_target()
    assert name in line and "no triggers" in line and "identical" in line
    assert "no rules" in line and "row security does not apply" in line
    assert "no generated or identity columns" in line
    if store.connector.name == "sqlite":
        assert "no widths" in line
    else:
        assert "widths text varchar(40)" in line or "widths text character varying(40)" in line
    kept = "VIRTUAL" if database == "sqlite" else "STORED"
    store.execute(f"ALTER TABLE {name} ADD COLUMN twice bigint GENERATED ALWAYS AS (id * 2) {kept}")
    [line] = sink.checked_target()
    assert "filled by the server twice (generated)" in line
    with pytest.raises(UsageError, match=r"COLUMN_COMPUTED.*Column 'twice'"):
        sink.ready_target(pa.schema([("id", pa.int64()), ("twice", pa.int64())]))


@pytest.mark.parametrize("database", once_each(POSTGRES))
def test_the_plan_shows_identity_columns_and_rows_do_not_give_them(made: Made, database: str) -> None:
    store = made(database)
    name = table(store, "id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, version int, text text")
    sink: Any = store.sink(table=name)
    [line] = sink.checked_target()
    assert "no widths; filled by the server id (identity)" in line
    with pytest.raises(UsageError, match=r"COLUMN_COMPUTED.*Column 'id' .*identity"):
        sink.ready_target(pa.schema([("id", pa.int64()), ("text", pa.string())]))
    sink.ready_target(pa.schema([("text", pa.string())]))


@pytest.mark.parametrize(
    ("database", "rule", "mode"),
    sweep(
        itertools.product(POSTGRES, ["INSTEAD NOTHING", "INSTEAD INSERT INTO other_{t} VALUES (NEW.*)"], MODES),
        lambda database, rule, mode: rule == "INSTEAD NOTHING" or (database, mode) == (POSTGRES[0], "append"),
    ),
)
def test_rules_that_replace_a_statement_are_refused(made: Made, database: str, rule: str, mode: str) -> None:
    """COPY ignores rules: an append under two_phase stores its rows."""
    store = made(database)
    name, options = table(store), MODES[mode]
    run(Rig(store.sink(table=name, **options)), 0, options, [(8, 1, "x", None)])
    rig = Rig(store.sink(table=name, **options))
    store.execute(f"CREATE TABLE other_{name} (LIKE {name})")
    store.execute(f"CREATE RULE away_{name} AS ON INSERT TO {name} DO {rule.format(t=name)}")
    found = [f.code for f in rig.sink.preflight(EXACT) if f.refuses]
    if mode == "append" and database.endswith("two-phase"):
        assert found == []
        run(rig, 0, options, FOUR)
        assert len(state(store, name)) == 5
        return
    assert found == ["TABLE_RULE"]
    error = refused(rig, 0, options, FOUR)
    assert "[DELIVERED_TABLE_RULE]" in error and f"away_{name}" in error
    assert len(state(store, name)) == 1


@pytest.mark.parametrize("database", once_each(POSTGRES))
def test_a_view_in_place_of_the_table_is_refused_in_mid_run(made: Made, database: str) -> None:
    store = made(database)
    name = table(store)
    rig = Rig(store.sink(table=name))
    run(rig, 0, {}, FOUR)
    store.execute(f"ALTER TABLE {name} RENAME TO {name}_old")
    store.execute(f"CREATE VIEW {name} AS SELECT * FROM {name}_old")
    hook_name = f"away_{name}"
    store.execute(f"CREATE FUNCTION {hook_name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$")
    store.execute(f"CREATE TRIGGER x INSTEAD OF INSERT ON {name} FOR EACH ROW EXECUTE FUNCTION {hook_name}()")
    fresh = Rig(store.sink(table=name))
    assert "[DELIVERED_NOT_A_TABLE]" in refused(fresh, 0, {}, FOUR)


@pytest.mark.parametrize("database", once_each(POSTGRES))
def test_a_partition_whose_trigger_drops_rows(made: Made, database: str) -> None:
    store = made(database)
    name = f"w{next(_count)}"
    store.execute(f"CREATE TABLE {name} (id bigint, version bigint, text text) PARTITION BY LIST (version)")
    store.execute(f"CREATE TABLE {name}_1 PARTITION OF {name} FOR VALUES IN (1)")
    trigger = hook(store, f"{name}_1", "INSERT")
    rig = Rig(store.sink(table=name))
    assert trigger in next(f.message for f in rig.sink.preflight(EXACT) if f.code == "TRIGGERS")
    error = refused(rig, 0, {}, FOUR)
    assert "[DELIVERED_ROWS_NOT_STORED]" in error and trigger in error


@pytest.mark.parametrize("database", once_each(POSTGRES))
def test_values_that_the_columns_type_would_cut_are_refused(made: Made, database: str) -> None:
    """varchar(n) drops spaces beyond n, timestamp(n) rounds, both without an error."""
    store = made(database)
    name = table(store, "id bigint, version bigint, text varchar(3)")
    rig = Rig(store.sink(table=name))
    error = refused(rig, 0, {}, [(1, 1, "abc  ", None)])
    assert "[DELIVERED_TEXT_TOO_LONG]" in error and "'text'" in error and "3" in error
    run(rig, 0, {}, [(1, 1, "abc", None), (2, 1, "äöü", None), (3, 1, None, None)])
    assert state(store, name) == [(1, 1, "abc"), (2, 1, "äöü"), (3, 1, None)]
    for kind, values in (("timestamp(3)", pa.timestamp("us")), ("time(0)", pa.time64("us"))):
        moments = pa.record_batch({"at": pa.array([1], values)})
        short = Rig(store.sink(table=table(store, f"at {kind}")))
        with pytest.raises(DeliveredError, match="COLUMN_TYPE"):
            short.run_rows(0, [moments])


@pytest.mark.parametrize("database", once_each(POSTGRES))
def test_row_security_is_a_finding_and_hidden_rows_stop_the_batch(
    made: Made, database: str, request: pytest.FixtureRequest
) -> None:
    store, user = made(database), "bound_by_policies"
    name = f"public.policies{next(_count)}"  # the superuser's own schema is that of the ledgers
    store.execute(f"CREATE TABLE {name} (id bigint NOT NULL UNIQUE, version bigint, text text)")
    with contextlib.suppress(psycopg.errors.DuplicateObject):
        store.execute(f"CREATE ROLE {user} LOGIN")
    store.execute(f"GRANT CREATE ON DATABASE delivered TO {user}")
    store.execute(f"GRANT ALL ON {name} TO {user}")
    store.execute(f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY")
    store.execute(f"CREATE POLICY few ON {name} USING (id < 3) WITH CHECK (true)")
    store.execute(f"INSERT INTO {name} VALUES (1, 1, 'seen'), (5, 1, 'hidden')")
    url = request.getfixturevalue("postgres").url.replace("delivered@", f"{user}@")
    assert not Rig(store.sink(table=name)).sink.preflight(EXACT), "it does not bind a superuser"
    rig = Rig(store.sink(table=name, url=url, ledgerSchema="of_" + user, **UPSERT))
    assert [(f.code, f.refuses) for f in rig.sink.preflight(EXACT)] == [("ROW_SECURITY", False)]
    loads = database.endswith("two-phase")
    appends = Rig(store.sink(table=name, url=url, ledgerSchema="of_" + user))
    assert [(f.code, f.refuses) for f in appends.sink.preflight(EXACT)] == [("ROW_SECURITY", loads)], "COPY into it"
    assert "row-level security" in refused(rig, 0, UPSERT, [(2, 1, "new", None), (5, 2, "over it", None)])
    assert sorted(state(store, name)) == [(1, 1, "seen"), (5, 1, "hidden")]
    run(rig, 0, UPSERT, [(1, 2, "again", None), (2, 1, "new", None)])
    assert sorted(state(store, name)) == [(1, 2, "again"), (2, 1, "new"), (5, 1, "hidden")]


@pytest.mark.parametrize("database", once_each(POSTGRES))
def test_an_index_that_makes_keys_equal(made: Made, database: str) -> None:
    """The column compares bytes, the operator class of its unique index does not."""
    store = made(database)
    compare = {"lt": "<", "le": "<=", "eq": "=", "ge": ">=", "gt": ">"}
    bodies = {"": "int", **dict.fromkeys(compare, "bool")}
    for short, kind in bodies.items():
        body = f"lower($1) {compare[short]} lower($2)" if short else "bttextcmp(lower($1), lower($2))"
        with contextlib.suppress(psycopg.errors.DuplicateFunction):
            store.execute(
                f"CREATE FUNCTION loosely{short}(text, text) RETURNS {kind} LANGUAGE sql IMMUTABLE AS 'SELECT {body}'"
            )
            if short:
                operator = f"{compare[short]}~~ (FUNCTION = loosely{short}, LEFTARG = text, RIGHTARG = text)"
                store.execute(f"CREATE OPERATOR {operator}")
    with contextlib.suppress(psycopg.errors.DuplicateObject):
        store.execute(
            "CREATE OPERATOR CLASS loose_ops FOR TYPE text USING btree AS OPERATOR 1 <~~, OPERATOR 2 <=~~, "
            "OPERATOR 3 =~~, OPERATOR 4 >=~~, OPERATOR 5 >~~, FUNCTION 1 loosely(text, text)"
        )
    name = table(store, "id text NOT NULL, version bigint, text text")
    store.execute(f"CREATE UNIQUE INDEX ON {name} (id loose_ops)")
    rig = Rig(store.sink(table=name, **UPSERT))
    assert "KEY_COLLATION" in [f.code for f in rig.sink.preflight(EXACT)]
    assert "DELIVERED_KEY_COLLATION" in refused(rig, 0, UPSERT, [("a", 1, "x", None), ("A", 1, "y", None)])
    run(rig, 0, UPSERT, [("a", 1, "x", None)])
    assert "no row of the key id = 'A'" in refused(rig, 1, UPSERT, [("A", 1, "y", None)])


@pytest.mark.parametrize("clause", ["IGNORE", "REPLACE"])
@pytest.mark.parametrize("mode", MODES)
def test_conflict_clauses_of_an_sqlite_table_do_not_apply(made: Made, mode: str, clause: str) -> None:
    store = made("sqlite")
    name = table(
        store, f"id INTEGER NOT NULL PRIMARY KEY, version bigint, text TEXT NOT NULL UNIQUE ON CONFLICT {clause}"
    )
    options = MODES[mode]
    rig = Rig(store.sink(table=name, **options))
    assert "CONFLICT_CLAUSE" in [f.code for f in rig.sink.preflight(EXACT)]
    run(rig, 0, options, [(1, 1, "a", None)])
    assert "[DELIVERED_ROW_REFUSED]" in refused(rig, 1, options, [(2, 1, "b", None), (3, 1, "a", None)])
    assert state(store, name) == [(1, 1, "a")]


def test_a_view_or_virtual_table_of_sqlite_is_refused(made: Made) -> None:
    store = made("sqlite")
    name = table(store)
    store.execute(f"CREATE VIEW v{name} AS SELECT * FROM {name}")
    store.execute(f"CREATE TRIGGER i{name} INSTEAD OF INSERT ON v{name} BEGIN SELECT 1; END")
    rig = Rig(store.sink(table=f"v{name}"))
    assert [f.code for f in rig.sink.preflight(EXACT) if f.refuses] == ["NOT_A_TABLE"]
    assert "[DELIVERED_NOT_A_TABLE]" in refused(rig, 0, {}, FOUR)
    store.execute(f"CREATE VIRTUAL TABLE r{name} USING rtree(id, low, high)")
    sink = store.sink(table=f"r{name}")
    assert [f.code for f in sink.preflight(EXACT) if f.refuses] == ["NOT_A_TABLE"]


@pytest.mark.parametrize("database", once_each(["sqlite", "mysql-one-transaction", "mysql-two-phase"]))
def test_a_null_that_the_column_would_fill_is_refused(made: Made, database: str) -> None:
    store = made(database)
    numbered = "INTEGER PRIMARY KEY" if database == "sqlite" else "bigint AUTO_INCREMENT PRIMARY KEY"
    name = table(store, f"id {numbered}, version bigint, text varchar(40)")
    rig = Rig(store.sink(table=name))
    assert "[DELIVERED_NULL_FILLED]" in refused(rig, 0, {}, [(1, 1, "a", None), (None, 1, "b", None)])
    run(rig, 0, {}, [(1, 1, "a", None), (0, 1, "b", None)])
    assert state(store, name) == [(0, 1, "b"), (1, 1, "a")]
    if database != "sqlite":
        stamped = table(store, "id bigint, at timestamp(6) NOT NULL")
        batch = pa.record_batch({"id": pa.array([1]), "at": pa.array([None], pa.timestamp("us", "UTC"))})
        with pytest.raises(DeliveredError, match="NULL_FILLED"):
            Rig(store.sink(table=stamped)).run_rows(0, [batch])


@pytest.mark.parametrize("database", once_each(["mysql-one-transaction", "mysql-two-phase"]))
def test_spaces_that_mysql_would_cut_are_refused(made: Made, database: str) -> None:
    store = made(database)
    name = table(store, "id bigint, version bigint, text varchar(3) COLLATE utf8mb4_nopad_bin")
    rig = Rig(store.sink(table=name))
    refused(rig, 0, {}, [(1, 1, "abc  ", None)])
    assert state(store, name) == []


REALS = pa.record_batch({"id": pa.array([1, 2], pa.int64()), "text": pa.array([1.23456789012, 2.5], pa.float64())})
NARROWED = {"postgres": "ALTER COLUMN text TYPE real", "mysql": "MODIFY text float"}


@pytest.mark.parametrize(
    ("database", "mode"),
    [
        *itertools.product(("postgres-one-transaction", "mysql-one-transaction"), ("append", "upsert", "insert")),
        ("mysql-two-phase", "upsert"),
        ("mysql-two-phase", "insert"),
    ],
)
def test_a_column_altered_while_rows_wait_for_their_decision_rounds_nothing(
    made: Made, database: str, mode: str
) -> None:
    """In PostgreSQL, a task's own transaction holds the table's lock; in MySQL, only once it writes to it."""
    store = made(database)
    name = table(store, "id bigint NOT NULL, text double precision, UNIQUE (id)")
    rig = Rig(store.sink(table=name, **MODES[mode]), schema=REALS.schema)

    def alter() -> Iterator[Rows]:
        yield Rows(REALS)
        store.execute(f"ALTER TABLE {name} {NARROWED[store.connector.name]}")

    context = rig.context()
    plan = rig.plan(context, 0)
    late = database == "mysql-two-phase"
    with pytest.raises(DeliveredError, match=r"'text' of double(?: precision)? became (?:real|float)") as caught:
        messages = [write_shard(rig.sinks, plan, 0, 0, alter() if late else iter([Rows(REALS)]), REALS.schema)]
        list(alter())
        commit_batch(context, 0, offsets(0), messages)
    assert "TABLE_ALTERED" in str(caught.value)
    assert store.execute(f"SELECT * FROM {name}") == [] and ledger(rig).last is None
