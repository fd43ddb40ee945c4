"""Progress of `delivered run`: an idle rate falls to 0, the lag covers all partitions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from delivered.pipeline import progress
from delivered.pipeline.progress import Progress
from delivered.source.lag import lag


@dataclass
class Total:
    count: int


@dataclass
class Last:
    batch: int
    total: Total
    given_up: Total
    others: dict[str, Any]


class Ledger:
    batch, records = 0, 0

    def look(self) -> Any:
        last = Last(self.batch, Total(self.records), Total(0), {})
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
    ],
)
def test_lag_of_what_a_source_writes(newest: Any, end: Any, behind: int | None) -> None:
    assert lag({"latestOffset": newest, "endOffset": end}) == behind
    assert lag({"latestOffset": json.dumps(newest), "endOffset": json.dumps(end)}) == behind
