"""Reports of batches beside a checkpoint: bounded, torn lines passed over, totals that outlive their lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delivered.checkpoint import history
from delivered.model.work import BatchReport


def report(batch: int, rewritten: int = 0) -> BatchReport:
    return BatchReport(batch, 1_000 + batch, {"out": 5}, 2, rewritten, {"plan": 0.5, "apply": 0.25})


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_totals", {})


def test_reports_are_read_back_in_order(tmp_path: Path) -> None:
    location = str(tmp_path)
    assert history.batches(location) == []
    for batch in range(5):
        history.add(location, report(batch))
    assert history.batches(location) == [report(b) for b in range(5)]
    assert [r.batch for r in history.batches(location, 2)] == [3, 4]


def test_totals_go_on_in_another_process_and_after_old_lines_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "BYTES_MAX", 1_000)
    location = str(tmp_path)
    for batch in range(40):
        history.add(location, report(batch, rewritten=batch % 2))
        if batch == 20:
            monkeypatch.setattr(history, "_totals", {})
    assert 0 < len(history.batches(location)) < 40
    assert history.batches(location)[-1].batch == 39
    assert history.totals(location) == history.Totals(40, 20, {"plan": 20.0, "apply": 10.0})
    assert sum(f.stat().st_size for f in (tmp_path / "delivered").iterdir()) < 3_000


def test_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    location = str(tmp_path)
    history.add(location, report(0))
    with (tmp_path / history.FILE).open("a") as file:
        file.write('{"batch":1,"decid')
    assert [r.batch for r in history.batches(location)] == [0]
    assert history.totals(location).batches == 1


def test_lines_of_another_version_are_read(tmp_path: Path) -> None:
    """With more fields, or without one that is needed: a status still answers."""
    location = str(tmp_path)
    history.add(location, report(0))
    newer = json.loads((tmp_path / history.FILE).read_text())
    newer |= {"batch": 1, "more": 1, "totals": {**newer["totals"], "more": 1}}
    (tmp_path / history.FILE).write_text(f'{{"batch":0}}\n{json.dumps(newer)}\n')
    sample = {"at_ms": 1, "source": "s", "lag": {}, "read": {}}
    state = {"at_ms": 1, "batch": 0, "rows": {}, "bytes": {}, "late": {}}
    for name, line in ((history.SAMPLES, sample), (history.STATES, state)):
        (tmp_path / name).write_text(f'{json.dumps({**line, "more": 1})}\n{{"at_ms":2}}\nnull\n')
    assert [r.batch for r in history.batches(location)] == [1]
    assert history.totals(location).batches == 1
    assert [s.at_ms for s in history.samples(location)] == [1]
    assert [s.at_ms for s in history.states(location)] == [1]


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "delivered").write_text("a file")
    history.add(str(tmp_path), report(0))
    history.add("s3://bucket/x?endpoint_override=127.0.0.1:9&scheme=http&region=x", report(0))
    assert history.batches(str(tmp_path)) == []


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
def test_a_file_is_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(history, "_BLOCK_BYTES", block)
    path = tmp_path / "lines"
    for text in ("", "\n", "1", "1\n", "12\n345\n\nü6\n", "12\n345"):
        path.write_text(text)
        assert [b.decode() for b in history._backwards(path) if b] == [x for x in text.split("\n") if x][::-1]
    assert list(history._backwards(tmp_path / "none")) == []
