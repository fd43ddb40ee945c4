"""Declared output modes: their effect on a sink, and refused requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import delivered
from delivered.audit.request import check_write_mode
from delivered.connectors.sqlite import CONNECTOR as SQLITE
from delivered.engine import Sinks
from delivered.engine.keys import check_keys_unique
from delivered.model.rows import Rows
from delivered.planner import Plan, Refusal

SQL = "SELECT CAST(key AS STRING) AS k, date(timestamp) AS `day`, count(*) AS n FROM source GROUP BY s.k, `day`"


def made(folder: Path, sink: Any, mode: str = "update", guarantee: str = "exactly_once", sql: Any = SQL) -> Any:
    return delivered.Pipeline(
        name="totals",
        guarantee=guarantee,
        checkpoint=folder / "checkpoint",
        source=delivered.log(str(folder / "in")),
        transform=sql,
        sinks=[sink],
        output_mode=mode,
    )


def test_update_is_an_upsert_by_the_columns_of_group_by(tmp_path: Path) -> None:
    table = delivered.sqlite(str(tmp_path / "out.db"), "t")
    (found,) = made(tmp_path, table).sinks
    assert found.sink().capability().write.keys == ("k", "day")
    assert "one row for each k, day: a second one stops" in " ".join(
        str(made(tmp_path, table).plan(offline=True)).split()
    )
    named = delivered.sqlite(str(tmp_path / "out.db"), "t", keyColumns="k", versionColumn="n")
    (found,) = made(tmp_path, named, sql=lambda frame: frame).sinks
    assert (found.sink().capability().write.keys, found.options["versionColumn"]) == (("k",), "n")
    (found,) = made(tmp_path, delivered.delta(str(tmp_path / "t"))).sinks
    assert found.sink().capability().write.upserts
    changes = delivered.sqlite(str(tmp_path / "out.db"), "t", mode="append")
    assert made(tmp_path, changes).sinks == (changes,)
    topic = delivered.kafka("localhost:9092", topic="t")
    assert made(tmp_path, topic).sinks == (topic,)
    assert made(tmp_path, table, "append").sinks == (table,)


@pytest.mark.parametrize(
    "sql",
    [
        lambda frame: frame.groupBy("k").count(),
        "SELECT window(timestamp, '1 hour') AS w, count(*) AS n FROM source GROUP BY window(timestamp, '1 hour')",
        "SELECT k, sum(n) FROM (SELECT key AS k, value, count(*) AS n FROM source GROUP BY key, value) GROUP BY k",
        "SELECT DISTINCT key FROM source",
        "SELECT key, count(*) AS n FROM source GROUP BY 1",
    ],
)
def test_an_upsert_without_keys_is_refused(sql: Any, tmp_path: Path) -> None:
    with pytest.raises(delivered.UsageError, match="OUTPUT_MODE_KEYS") as caught:
        made(tmp_path, delivered.sqlite(str(tmp_path / "out.db"), "t"), sql=sql)
    assert "keyColumns" in str(caught.value)


def test_complete_replaces_a_table_and_is_refused_elsewhere(tmp_path: Path) -> None:
    table = delivered.sqlite(str(tmp_path / "out.db"), "t")
    pipeline = made(tmp_path, table, "complete")
    assert pipeline.sinks[0].options["mode"] == "complete"
    plan = pipeline.plan(offline=True)
    assert isinstance(plan, Plan)
    assert "in place of all its rows" in str(plan)
    for sink in (delivered.kafka("localhost:9092", topic="t"), delivered.files(str(tmp_path / "f"))):
        with pytest.raises(delivered.Refused, match="OUTPUT_MODE_COMPLETE"):
            made(tmp_path, sink, "complete")
    upsert = delivered.sqlite(str(tmp_path / "out.db"), "t", mode="upsert", keyColumns="k")
    with pytest.raises(delivered.UsageError, match=r"DELIVERED_OUTPUT_MODE\].*has mode 'upsert'"):
        made(tmp_path, upsert, "complete")
    with pytest.raises(delivered.UsageError, match="output_mode"):
        made(tmp_path, table, "upsert")


@pytest.mark.parametrize(
    ("mode", "guarantee", "more"),
    [
        ("append", "exactly_once", {"mode": "complete"}),
        ("complete", "at_least_once", {}),
        ("complete", "at_most_once", {}),
        ("complete", "exactly_once", {"mechanism": "two_phase"}),
    ],
)
def test_complete_needs_one_transaction_and_all_rows(mode: str, guarantee: str, more: Any, tmp_path: Path) -> None:
    sink = delivered.sqlite(str(tmp_path / "out.db"), "t", **more)
    if "mechanism" in more:
        sink = delivered.postgres("postgresql://localhost/shop", "t", **more)
    plan = made(tmp_path, sink, mode, guarantee).plan(offline=True)
    assert isinstance(plan, Refusal)
    assert plan.code == "MODE_COMPLETE"


def test_an_audit_says_why_it_cannot_judge_changes(tmp_path: Path) -> None:
    for sink, mode, code in [
        (delivered.kafka("localhost:9092", topic="t"), "update", "AUDIT_OUTPUT_MODE"),
        (delivered.sqlite(str(tmp_path / "out.db"), "t"), "update", "AUDIT_ORDER"),
        (delivered.sqlite(str(tmp_path / "out.db"), "t"), "complete", "AUDIT_ORDER"),
    ]:
        pipeline = made(tmp_path, sink, mode)
        with pytest.raises(delivered.Refused, match=code):
            if code == "AUDIT_ORDER":
                check_write_mode(pipeline.sinks[0].sink().capability().write)
            else:
                pipeline.audit()


def test_two_rows_of_one_key_are_found_across_batches() -> None:
    sink = SQLITE.sink({"path": "/tmp/o.db", "table": "t", "mode": "upsert", "keyColumns": "k,day"})
    rows = [Rows(pa.record_batch({"k": ["a", "b"], "day": [1, d], "n": [1, 2]})) for d in (1, 2, 1)]
    assert list(check_keys_unique(Sinks.one(sink), iter(rows[:1]))) == rows[:1]
    with pytest.raises(delivered.UsageError, match=r"KEY_TWICE\] A batch holds 3 rows of the key k = 'a', day = '1'"):
        list(check_keys_unique(Sinks.one(sink), iter(rows)))
    versioned = SQLITE.sink(
        {"path": "/tmp/o.db", "table": "t", "mode": "upsert", "keyColumns": "k", "versionColumn": "n"}
    )
    assert len(list(check_keys_unique(Sinks.one(versioned), iter(rows)))) == 3
    assert list(check_keys_unique(Sinks.one(sink), iter([]))) == []
