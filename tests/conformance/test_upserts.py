"""mode upsert in every sink that supports it, against a dictionary as the model."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.keyed_stores import STORES, Store
from tests.support.sinks import EXACT, Rig
from tests.support.sweeps import sweep
from tests.support.upserts import SCHEMA, Row, rows

from delivered.connectors.delta import CONNECTOR as DELTA
from delivered.connectors.iceberg import CONNECTOR as ICEBERG
from delivered.connectors.mysql import CONNECTOR as MYSQL
from delivered.connectors.postgres import CONNECTOR as POSTGRES
from delivered.engine.shard import write_shard
from delivered.model.capability import Commit, Guarantee
from delivered.model.errors import BadRecord, DeliveredError, UsageError
from delivered.model.rows import Rows
from delivered.model.work import Ok

State = dict[tuple[str, int], tuple[int, str | None]]
_count = iter(range(10_000))
TABLES = (DELTA, ICEBERG)
"""Tables of files."""


# broker/test_upsert_kill.py upserts under two_phase.
@pytest.fixture(params=sweep(STORES, lambda name: not name.endswith("two-phase")))
def store(request: pytest.FixtureRequest) -> Store:
    return STORES[request.param](request)


def table(store: Store, key: str = "region, id") -> str:
    name = f"u{next(_count)}"
    store.execute(f"CREATE TABLE {name} ({store.columns}, UNIQUE ({key}))")
    return name


def options(name: str, version: bool = False, delete: bool = False) -> dict[str, str]:
    given = {"table": name, "mode": "upsert", "keyColumns": "region, id"}
    return given | ({"versionColumn": "version"} if version else {}) | ({"deleteColumn": "gone"} if delete else {})


def run(rig: Rig, batch: int, shards: list[list[Row]], delete: bool, guarantee: Guarantee = EXACT) -> None:
    rig.run_rows(batch, [rows(s, delete) for s in shards], rig.context(guarantee=guarantee))


def state(store: Store, name: str) -> State:
    found = store.execute(f"SELECT region, id, version, text FROM {name}")
    assert len({r[:2] for r in found}) == len(found)
    return {r[:2]: r[2:] for r in found}


def model(state: State, shards: list[list[Row]], version: bool, delete: bool) -> None:
    """Apply a batch row by row, in shard order. With versions, see below."""
    if not version:
        for row in (r for s in shards for r in s):
            if delete and row[4]:
                state.pop(row[:2], None)
            else:
                state[row[:2]] = row[2:4]
        return
    newest: dict[tuple[str, int], Row] = {}
    for row in (r for s in shards for r in s):
        known = newest.get(row[:2])
        if known is None or row[2] > known[2]:
            newest[row[:2]] = row
    for key, row in newest.items():
        if key in state and state[key][0] >= row[2]:
            continue
        if delete and row[4]:
            state.pop(key, None)
        else:
            state[key] = row[2:4]


@pytest.mark.parametrize(
    ("spread", "version", "delete"),
    [
        pytest.param(
            spread,
            version,
            delete,
            # A sink that takes a key's rows from anywhere takes them from one shard.
            marks=() if spread == version == delete else pytest.mark.matrix,
            id=f"{'anywhere' if spread else 'by-key'}-{'version' * version}-{'delete' * delete}",
        )
        for spread in (False, True)
        for version in (False, True)
        for delete in (False, True)
    ],
)
def test_final_state_is_that_of_the_model(store: Store, version: bool, delete: bool, spread: bool) -> None:
    """Random batches; each key in one shard, or, with versions, anywhere."""
    if delete and not store.deletes:
        pytest.skip("two_phase takes no deletions")
    if spread and (not version or "two_phase" in str(store.sink(table="x", **_plain()))):
        pytest.skip("refused, see the tests below")
    name = table(store)
    rig = Rig(store.sink(**options(name, version, delete)))
    random_ = random.Random(f"{version}{delete}{spread}")
    expected: State = {}
    texts = iter(range(1_000_000))
    for batch in range(6):
        shards: list[list[Row]] = [[] for _ in range(3)]
        # Versions that tie within a batch and with stored rows, but never across shards.
        for _ in range(60):
            id_ = random_.randrange(12)
            home = random_.randrange(3) if spread else id_ % 3
            at = random_.randrange(8) * 3 + home
            gone = random_.random() < 0.3
            text = None if gone and delete else f"t{next(texts)}"
            shards[home].append((f"r{id_ % 2}", id_, at, text, gone if gone else random_.choice([False, None])))
        run(rig, batch, shards, delete)
        model(expected, shards, version, delete)
        assert state(store, name) == expected
    assert expected
    ledger = rig.context().ledger
    last = ledger.look().last
    assert last is not None
    assert last.total.count == 360
    default = None if store.connector in TABLES else "kept"  # no column defaults
    assert store.execute(f"SELECT DISTINCT note FROM {name}") == [(default,)]


def _plain() -> dict[str, str]:
    return {"mode": "upsert", "keyColumns": "id"}


def test_key_in_two_shards_without_version_is_refused(store: Store) -> None:
    name = table(store)
    extra = {"lockTimeout": "1"} if store.connector in (POSTGRES, MYSQL) else {}
    rig = Rig(store.sink(**options(name), **extra))
    run(rig, 0, [[("r", 1, 0, "old", False)]], delete=False)
    with pytest.raises(DeliveredError) as caught:
        run(rig, 1, [[("r", 1, 0, "a", False)], [("r", 2, 0, "b", False), ("r", 1, 0, "c", False)]], delete=False)
    assert "KEY_IN_TWO_SHARDS" in str(caught.value) or "LOCK_TIMEOUT" in str(caught.value)
    assert "repartition" in f"{caught.value}"
    assert state(store, name) == {("r", 1): (0, "old")}
    # In one shard, the same batch is accepted.
    run(rig, 1, [[("r", 1, 0, "a", False), ("r", 1, 0, "c", False)], [("r", 2, 0, "b", False)]], delete=False)
    assert state(store, name) == {("r", 1): (0, "c"), ("r", 2): (0, "b")}


def test_of_equal_versions_the_first_one_stays(store: Store) -> None:
    """In one batch or two: batch boundaries make no difference."""
    name = table(store)
    rig = Rig(store.sink(**options(name, version=True)))
    run(rig, 0, [[("r", 1, 5, "first", None), ("r", 1, 5, "second", None), ("r", 2, 5, "first", None)]], delete=False)
    run(rig, 1, [[("r", 2, 5, "second", None)]], delete=False)
    assert state(store, name) == {("r", 1): (5, "first"), ("r", 2): (5, "first")}


def test_a_deletion_beats_an_older_row_of_another_shard(store: Store) -> None:
    if not store.deletes:
        pytest.skip("two_phase takes no deletions")
    name = table(store)
    rig = Rig(store.sink(**options(name, version=True, delete=True)))
    run(rig, 0, [[("r", 1, 5, None, True)], [("r", 1, 3, "older", False)]], delete=True)
    run(rig, 1, [[("r", 2, 3, "older", False)], [("r", 2, 5, None, True)]], delete=True)
    run(rig, 2, [[("r", 3, 3, None, True)], [("r", 3, 5, "newer", False)]], delete=True)
    assert state(store, name) == {("r", 3): (5, "newer")}


@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE])
def test_the_weaker_guarantees_upsert_too(store: Store, guarantee: Guarantee) -> None:
    name = table(store)
    if store.connector in TABLES:
        found = store.sink(**options(name)).preflight(guarantee)
        assert [f.code for f in found if f.refuses] == ["MODE_GUARANTEE"]
        return
    rig = Rig(store.sink(**options(name, version=True, delete=True)))
    run(rig, 0, [[("r", i % 7, i, f"t{i}", False) for i in range(30)]], delete=True, guarantee=guarantee)
    run(rig, 1, [[("r", 1, 99, None, True), ("r", 2, 0, "late", False)]], delete=True, guarantee=guarantee)
    expected = {("r", i % 7): (i, f"t{i}") for i in range(30)}
    del expected["r", 1]
    assert state(store, name) == expected


def test_what_is_wrong_is_refused_before_the_start(store: Store) -> None:
    name = table(store, key="region")

    def refusals(**given: str) -> list[str]:
        return [f.code for f in store.sink(table=name, **given).preflight(EXACT) if f.refuses]

    if store.connector not in TABLES:  # tables of files have no unique index
        assert refusals(mode="upsert", keyColumns="region, id") == ["KEY_NOT_UNIQUE"]
    assert refusals(mode="upsert", keyColumns="region") == []
    if store.connector not in TABLES:
        store.execute(f"CREATE UNIQUE INDEX more_{name} ON {name} {store.not_whole}")
        not_whole = "text" if "text" in store.not_whole else "id"
        assert refusals(mode="upsert", keyColumns=not_whole) == ["KEY_NOT_UNIQUE"]
        store.execute(f"CREATE UNIQUE INDEX most_{name} ON {name} (id, region)")
    assert refusals(mode="upsert", keyColumns="region, id") == []
    expected = [] if store.deletes else ["DELETE_TWO_PHASE"]
    assert refusals(mode="upsert", keyColumns="region", deleteColumn="gone") == expected
    for given, code in (
        ({"mode": "upsert"}, "OPTION_MISSING"),
        ({"mode": "merge"}, "OPTION_VALUE"),
        ({"keyColumns": "id"}, "OPTION_VALUE"),
        ({"mode": "upsert", "keyColumns": "id,id"}, "OPTION_VALUE"),
        ({"mode": "upsert", "keyColumns": "id", "versionColumn": "id"}, "OPTION_VALUE"),
    ):
        with pytest.raises(UsageError, match=f"DELIVERED_{code}"):
            store.sink(table=name, **given)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"keyColumns": "ID"}, "COLUMN_MISSING"),
        ({"versionColumn": "text"}, "COLUMN_TYPE"),
        ({"versionColumn": "share"}, "COLUMN_TYPE"),
        ({"keyColumns": "share"}, "COLUMN_TYPE"),
        ({"deleteColumn": "text"}, "COLUMN_TYPE"),
    ],
)
def test_columns_that_do_not_fit_their_role(store: Store, given: dict[str, str], code: str) -> None:
    sink = store.sink(table="t", **{"mode": "upsert", "keyColumns": "id", **given})
    with pytest.raises(UsageError, match=f"DELIVERED_{code}") as caught:
        sink.check_schema(SCHEMA.append(pa.field("share", pa.float64())))
    assert caught.value.next_step


@pytest.mark.parametrize("column", ["id", "version"])
def test_null_in_key_or_version_is_a_bad_record(store: Store, column: str) -> None:
    name = table(store)
    rig = Rig(store.sink(**options(name, version=True)))
    row = {"region": "r", "id": 1, "version": 1, "text": "t", column: None}
    rig.schema = rows([], False).schema
    plan = rig.plan(rig.context(), 0)
    bad = pa.RecordBatch.from_pylist([row], schema=rows([], False).schema)
    with pytest.raises(BadRecord, match="_NULL"):
        write_shard(rig.sinks, plan, 0, 0, iter([Rows(bad)]), bad.schema)
    assert state(store, name) == {}


def test_missing_table_is_made_with_its_key(store: Store, tmp_path: Path) -> None:
    name = f"u{next(_count)}"
    rig = Rig(store.sink(**options(name, version=True), ifNotExists="true"))
    assert not [f for f in rig.sink.preflight(EXACT) if f.refuses]
    run(rig, 0, [[("r", 1, 1, "a", None), ("r", 1, 2, "b", None)]], delete=False)
    assert state(store, name) == {("r", 1): (2, "b")}
    assert not [f for f in rig.sink.preflight(EXACT) if f.refuses], "the table has the unique index that it needs"


def test_nothing_is_left_behind(store: Store) -> None:
    def staging() -> set[str]:
        """Staging tables of all pipelines: earlier tests left theirs on purpose."""
        return {str(row[0]) for row in store.execute(store.staging)} if store.staging else set()

    name, before = table(store), staging()
    rig = Rig(store.sink(**options(name, version=True)))
    run(rig, 0, [[("r", i, 1, "a", None) for i in range(9)], [("q", i, 1, "a", None) for i in range(9)]], delete=False)
    context = rig.context("next")
    assert context.committers.abort_orphans(()) == Ok(0)
    assert staging() <= before


def test_complete_leaves_the_rows_of_the_newest_batch(store: Store) -> None:
    """Other writers' rows are removed, too; an empty batch empties the table; a rerun changes nothing."""
    name = table(store)
    sink = store.sink(table=name, mode="complete")
    if sink.capability().commit is not Commit.ONE_TRANSACTION:
        return  # refused: tests/unit/test_output_mode.py
    rig = Rig(sink)
    before: list[list[Row]] = []
    for batch, shards in enumerate(
        [
            [[("eu", 1, 1, "a", False)], [("us", 2, 1, "b", False)]],
            [[("eu", 1, 2, "c", False)], []],
            [[], []],
            [[("eu", 3, 1, "d", False)], [("us", 1, 5, "e", False)]],
        ]
    ):
        run(rig, batch, shards, delete=False)
        assert state(store, name) == {r[:2]: r[2:4] for s in shards for r in s}
        run(rig, batch, shards, delete=False)
        before = shards
    assert state(store, name) == {r[:2]: r[2:4] for s in before for r in s}
