"""Rows that SQLite itself refuses: to the dead letters, with the column; the others are written, once."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.sinks import Rig

from delivered.engine.shard import find_reasons
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError
from delivered.pipeline.registry import find_sink

LIMIT = 100_000
MODES: dict[str, dict[str, str]] = {
    "append": {},
    "upsert": {"mode": "upsert", "keyColumns": "id"},
    "insert": {"mode": "insert", "keyColumns": "id"},
    "constraints": {"onConstraint": "dead_letter"},
}
CASES: dict[str, tuple[str, Any, Any, str]] = {
    "generated": ("v TEXT, w AS (json_extract(v, '$.a')) STORED", '{"a": 1}', '{"a": ', "malformed JSON"),
    "virtual": ("v TEXT, w AS (json_extract(v, '$.a')) CHECK (w > 0)", '{"a": 1}', '{"a": ', "malformed JSON"),
    "index": ("v TEXT", '{"a": 1}', '{"a": ', "malformed JSON"),
    "check": ("v TEXT CHECK (json_extract(v, '$.a') > 0)", '{"a": 1}', '{"a": ', "malformed JSON"),
    "overflow": ("v INTEGER, w AS (abs(v)) STORED", 7, -(2**63), "integer overflow"),
    "strict": ("v REAL", 0.5, math.nan, "cannot store TEXT value in REAL column t.v"),
    "long": ("v TEXT", "short", "x" * LIMIT, f"column 'v' has {LIMIT} bytes: SQLite stores at most {LIMIT} bytes"),
    "two long": ("v TEXT, w TEXT", "short", "x" * (LIMIT // 2), f"column 'w' has {LIMIT // 2} bytes: SQLite stores"),
}
"""By case: columns of the table, a good and a bad value, what the reason says."""


@pytest.fixture
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection takes rows of at most `LIMIT` bytes."""
    connect = sqlite3.connect

    def connected(*given: Any, **more: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*given, **more)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LIMIT)
        return connection

    monkeypatch.setattr(sqlite3, "connect", connected)


def made(folder: Path, case: str) -> Path:
    path, body = folder / "rows.db", CASES[case][0]
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            f"CREATE TABLE t (id INTEGER NOT NULL UNIQUE, {body}) {'STRICT' if case == 'strict' else ''}"
        )
        if case == "index":
            connection.execute("CREATE INDEX of_a ON t (json_extract(v, '$.a'))")
    return path


def batch(case: str, ids: list[int], values: list[Any]) -> pa.RecordBatch:
    columns = {"id": pa.array(ids, pa.int64()), "v": pa.array(values)}
    return pa.record_batch({**columns, "w": columns["v"]} if case == "two long" else columns)


@pytest.mark.usefixtures("short_rows")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_a_refused_row_is_a_dead_letter(tmp_path: Path, case: str, mode: str) -> None:
    _, good, bad, said = CASES[case]
    path = made(tmp_path, case)
    sink = find_sink("sqlite", {"path": str(path), "table": "t", **MODES[mode]})
    rows = batch(case, list(range(12)), [bad if i in (1, 6, 7) else good if i < 9 else None for i in range(12)])
    reasons = find_reasons(sink, rows)
    assert reasons is not None
    assert [i for i, reason in enumerate(reasons.to_pylist()) if reason is not None] == [1, 6, 7]
    assert all(said in reason for reason in reasons.drop_null().to_pylist()), reasons
    rig = Rig(sink)
    rig.run_rows(0, [rows.filter(reasons.is_null())])
    with closing(sqlite3.connect(path)) as connection:
        stored = [i for (i,) in connection.execute("SELECT id FROM t ORDER BY id")]
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert stored == [0, 2, 3, 4, 5, 8, 9, 10, 11]
    assert {n for n in names if not n.startswith("_delivered_")} == {"t"}, "the trial leaves nothing"


REFUSED: dict[str, tuple[str, Any, str]] = {
    **{case: (body, bad, said.partition(":")[0]) for case, (body, _, bad, said) in CASES.items() if "long" not in case},
    "positive": ("v INTEGER CONSTRAINT positive CHECK (v > 0)", -1, "CHECK constraint failed: positive"),
    "not null": ("v TEXT NOT NULL", None, "NOT NULL constraint failed: t.v"),
    "unique": ("v TEXT UNIQUE", "a", "UNIQUE constraint failed: t.v"),
    "trigger": ("v TEXT", "never", "never again"),
}


def constrained(folder: Path, case: str) -> Path:
    path, body = folder / "rows.db", REFUSED[case][0]
    with closing(sqlite3.connect(path)) as connection:
        strict = "STRICT" if case == "strict" else ""
        connection.execute(f"CREATE TABLE t (id INTEGER NOT NULL UNIQUE, {body}) {strict}")
        if case == "index":
            connection.execute("CREATE INDEX of_a ON t (json_extract(v, '$.a'))")
        if case == "trigger":
            connection.execute(
                "CREATE TRIGGER no BEFORE INSERT ON t WHEN new.v = 'never' "
                "BEGIN SELECT RAISE(ABORT, 'never again'); END"
            )
    return path


def with_bad(case: str) -> pa.RecordBatch:
    bad = REFUSED[case][1]
    good = {int: 7, float: 0.5}.get(type(bad), '{"a": 1}')
    values = [good] * 12 if case != "unique" else [f"row {i}" for i in range(11)] + ["a"]
    return batch(case, list(range(12)), [*values[:8], bad, *values[9:]])


@pytest.mark.parametrize("guarantee", [Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE])
@pytest.mark.parametrize("case", REFUSED)
def test_a_row_that_stops_the_query_is_named(tmp_path: Path, case: str, guarantee: Guarantee) -> None:
    """By its columns and values, and as a row: not as a disk that is full or a file that is damaged."""
    _, bad, said = REFUSED[case]
    path = constrained(tmp_path, case)
    rig = Rig(find_sink("sqlite", {"path": str(path), "table": "t"}))
    number = 8 if case != "unique" else 11
    for _ in range(2 if guarantee is Guarantee.EXACTLY_ONCE else 1):  # again after a restart
        with pytest.raises(DeliveredError, match="ROW_REFUSED") as caught:
            rig.run_rows(0, [with_bad(case)], rig.context(guarantee=guarantee))
        shown = "NaN" if case == "strict" else bad
        assert f"rejected the row (id = {number}, v = {shown!r})" in str(caught.value)
        assert said in str(caught.value)
    with closing(sqlite3.connect(path)) as connection:
        assert guarantee is Guarantee.AT_LEAST_ONCE or connection.execute("SELECT id FROM t").fetchall() == []


@pytest.mark.parametrize("case", ["positive", "not null", "unique", "trigger", "strict"])
def test_a_row_that_breaks_a_constraint_is_kept(tmp_path: Path, case: str) -> None:
    """They are up to onConstraint in every database, and are not tried."""
    path = constrained(tmp_path, case)
    sink = find_sink("sqlite", {"path": str(path), "table": "t", "onConstraint": "dead_letter"})
    assert case == "strict" or find_reasons(sink, with_bad(case)) is None
    Rig(sink).run_rows(0, [with_bad(case)])
    with closing(sqlite3.connect(path)) as connection:
        (stored,) = connection.execute("SELECT count(*) FROM t").fetchone()
        found = connection.execute("SELECT reason FROM _delivered_dead_letter").fetchall()
    assert (stored, len(found)) == (11, 1)
    assert REFUSED[case][2] in found[0][0]


def test_rows_are_tried_by_what_the_table_computes(tmp_path: Path) -> None:
    """In a partial index too; not if the table's definition needs a function of the application."""
    path = tmp_path / "rows.db"
    rows = batch("", [0, 1], ['{"a": 1}', "{"])
    sink = find_sink("sqlite", {"path": str(path), "table": "t"})
    assert find_reasons(sink, rows) is None, "no file yet"
    with closing(sqlite3.connect(path)) as connection:
        connection.create_function("theirs", 1, lambda text: text, deterministic=True)
        connection.execute("CREATE TABLE t (id INTEGER, v TEXT)")
        assert find_reasons(sink, rows) is None
        connection.execute("CREATE INDEX one ON t (v) WHERE json_extract(v, '$.a') = 1")
        assert [r is not None for r in find_reasons(sink, rows).to_pylist()] == [False, True]  # type: ignore[union-attr]
        connection.execute("CREATE INDEX two ON t (theirs(v))")
        assert find_reasons(sink, rows) is None
