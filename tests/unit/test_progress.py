"""Progress of `delivered run`: an idle rate falls to 0, the lag covers all partitions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.sinks import Rig, offsets

import delivered
from delivered.engine.decide import commit_batch
from delivered.engine.shard import write_shard
from delivered.model.fingerprint import Fingerprint
from delivered.model.rows import Rows
from delivered.model.work import Account
from delivered.pipeline import progress
from delivered.pipeline.progress import Progress
from delivered.source import lag


@dataclass
class Last:
    batch: int
    accounts: dict[str, Account]


class Ledger:
    batch, records = 0, 0

    def look(self) -> Any:
        last = Last(self.batch, {"s": Account(Fingerprint(self.records))})
        return type("State", (), {"last": last})()


def test_the_rate_falls_to_zero_when_nothing_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    ledger = Ledger()
    seen = Progress(ledger)  # type: ignore[arg-type]
    seen.refresh()
    now, ledger.batch, ledger.records = 104.0, 1, 4_000
    seen.refresh()
    assert (round(seen.rate), seen.records) == (1_000, 4_000)
    assert "1,000 records/s" in seen.text
    shown = seen.shown
    while now < 120.0:
        now += 1.0
        seen.refresh()
    assert seen.rate == 0
    assert " 0 records/s" in seen.text
    assert seen.shown != shown, "told again, for it changed"


@pytest.mark.parametrize(
    ("newest", "end", "behind"),
    [
        ({"orders": {"0": 12, "1": 5}}, {"orders": {"0": 10, "1": 5}}, 2),
        ({"orders": {"0": 12, "1": 5}}, {"orders": {"0": 10}}, 7),
        ({"0": 3}, {"0": 3}, 0),
        ({"orders": {"0": "12:4"}}, {"orders": {"0": "12:3"}}, None),
        (None, {"0": 3}, None),
        ({"version": 9, "offsets": {"0": 7}, "#log": "x"}, {"version": 4, "offsets": {"0": 5}}, 2),
        ({"lsn": 900, "#system": "7"}, {"lsn": 100}, None),
    ],
)
def test_lag_of_what_a_source_writes(newest: Any, end: Any, behind: int | None) -> None:
    assert lag({"latestOffset": newest, "endOffset": end}) == behind
    assert lag({"latestOffset": json.dumps(newest), "endOffset": json.dumps(end)}) == behind


def test_rows_that_the_table_did_not_take_are_counted(tmp_path: Path) -> None:
    sink = delivered.sqlite(str(tmp_path / "out.db"), "rows", mode="insert", keyColumns="key")
    pipeline = delivered.Pipeline(
        name="life", guarantee="exactly_once", source=delivered.log(str(tmp_path / "in")), sinks=[sink],
        checkpoint=tmp_path / "checkpoint",
    )  # fmt: skip
    rig = Rig(pipeline.spec.open(), "life")  # type: ignore[arg-type]

    def run(batch: int, keys: range) -> None:
        context, rows = rig.context(), pa.record_batch({"key": list(keys)})
        rig.schema = rows.schema
        message = write_shard(rig.sinks, rig.plan(context, batch), 0, 0, iter([Rows(rows)]), rows.schema)
        commit_batch(context, batch, offsets(batch), [message])

    run(0, range(5))
    run(1, range(4, 6))
    with progress.watch(pipeline, type("Query", (), {"id": "i0", "lastProgress": None}), lambda _: iter(())) as seen:
        assert not seen.skipped
        run(2, range(3, 10))
        seen.refresh()
        assert (seen.records, dict(seen.skipped)) == (7, {"conflict": 3})
        assert "7 records, 3 not accepted by a table (3 conflict)" in seen.text
        assert seen.to_json()["left_out"] == {"conflict": 3}
        seen.refresh()
        assert dict(seen.skipped) == {"conflict": 3}


def report(second: int, *dropped: int) -> Any:
    operators = [{"numRowsDroppedByWatermark": n} for n in dropped]
    return {"timestamp": f"2026-11-24T10:00:{second:02}.000Z", "sources": [], "stateOperators": operators}


class Query:
    """With state, and its reports so far."""

    def __init__(self) -> None:
        self.recentProgress: list[Any] = []

    @property
    def lastProgress(self) -> Any:  # noqa: N802
        return self.recentProgress[-1] if self.recentProgress else None


def newest_first(query: Any) -> Iterator[Any]:
    return reversed(query.recentProgress)


def test_late_rows_of_every_batch_are_counted_once() -> None:
    query = Query()
    seen = Progress(Ledger(), lambda since: progress._reported(query, newest_first, since))  # type: ignore[arg-type]
    seen.refresh()
    assert seen.late == 0 and "late" not in seen.totals
    query.recentProgress = [report(0, 0), report(1, 3), report(2, 0, 4)]
    seen.refresh()
    query.recentProgress.append(report(13, 0))
    seen.refresh()
    query.recentProgress += [report(14, 2), report(24, 0)]
    seen.refresh()
    seen.refresh()
    assert seen.late == 9
    assert "9 rows dropped as late" in seen.totals
    assert seen.to_json()["late"] == 9
