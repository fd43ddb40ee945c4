"""What retention of a topic cannot have removed: by the age of records, size of the log, decisions of a ledger."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from delivered.audit.account import _newest_before, _started_ms
from delivered.audit.evidence import History, LedgerAccount
from delivered.connectors.kafka import reader
from delivered.connectors.kafka.reader import CLOCKS_APART_MS, Retention

NOW = 1_000_000_000
HOUR = 3_600_000


@pytest.mark.parametrize(
    ("settings", "size", "reach"),
    [
        (Retention(None, None, compacts=True), 0, 0),
        (Retention(HOUR, None, compacts=False), None, NOW - HOUR + CLOCKS_APART_MS),
        (Retention(None, 100, compacts=False), 99, 0),
        (Retention(None, 100, compacts=False), 100, None),
        (Retention(None, 100, compacts=False), None, None),
        (Retention(None, 100, compacts=True), 99, None),
        (Retention(HOUR, 100, compacts=False), 99, NOW - HOUR + CLOCKS_APART_MS),
        (Retention(HOUR, 100, compacts=False), 100, None),
    ],
)
def test_reach_of_a_topics_settings(
    settings: Retention, size: int | None, reach: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_now_ms", lambda: NOW)
    assert settings.reach_ms(size) == reach


def test_batches_are_as_old_as_the_decision_before_them(tmp_path: Path) -> None:
    offsets = tmp_path / "offsets"
    offsets.mkdir()
    (offsets / "0").write_text('v1\n{"batchTimestampMs": 90}\n' + json.dumps({}))
    ends = tuple((batch, "{}") for batch in range(3))
    ledger = LedgerAccount("i", History(3, ends=ends, decided_ms=(100, 200, 300)), None)
    assert ledger.ends == ends
    started = _started_ms(str(tmp_path), ledger)
    assert started == [90, 100, 200]
    assert [_newest_before(started, ms) for ms in (90, 91, 150, 201, None)] == [-1, 0, 1, 2, 2]
    assert _newest_before([90, 300, 200], 250) == 2, "a clock that was set back"
    later = replace(ledger, history=replace(ledger.history, ends=tuple((batch + 1_000, "{}") for batch, _ in ends)))
    started = _started_ms(str(tmp_path), later)
    assert started == [0, 100, 200], "neither ledger nor checkpoint keep what was before"
    assert [_newest_before(started, ms) for ms in (90, 150)] == [0, 1]
