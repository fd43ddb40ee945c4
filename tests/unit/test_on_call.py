"""What a pipeline's checkpoint says to somebody on call: its pace, its runs, dead letters that nobody has seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from delivered.checkpoint import history
from delivered.checkpoint.history import RUNS_MAX, Run, Sample, Samples, looked_at, new_dead_letters
from delivered.model.errors import DeliveredError, Unreachable
from delivered.operate.rules import run_problems
from delivered.operate.status import Driver, SinkStatus, Status, pace_of


def sampled(lags: list[int], reads: list[int], every_s: float = 5.0) -> list[Sample]:
    return [
        Sample(int(n * every_s * 1000), "source", {"t/0": lag}, {"t/0": read})
        for n, (lag, read) in enumerate(zip(lags, reads, strict=True))
    ]


def test_a_pipeline_that_falls_behind() -> None:
    """120/s arrive, 50/s are delivered."""
    found = sampled([350 * n for n in range(13)], [250] * 13)
    pace = pace_of(found, {"source": {"t/0": 4200}}, found[-1].at_ms)
    assert pace is not None and pace.grows
    assert (round(pace.in_per_s), round(pace.out_per_s), round(pace.behind_per_s)) == (120, 50, 70)
    assert pace.text == "120/s in, 50/s out, falls behind by 70/s"
    assert pace.caught_up_s is None


def test_a_pipeline_that_catches_up() -> None:
    found = sampled([13_000 - 1000 * n for n in range(13)], [2000] * 13)
    pace = pace_of(found, {"source": {"t/0": 1000}}, found[-1].at_ms)
    assert pace is not None and not pace.grows
    assert (pace.in_per_s, pace.out_per_s, pace.caught_up_s) == (200, 400, 5)
    assert pace.text == "200/s in, 400/s out, caught up in 5 s"


@pytest.mark.parametrize(
    "lags",
    [
        [100, 900, 100, 900] * 3,  # a saw: batches
        [0] * 8 + [9000, 6000, 3000, 1000],  # a burst that is worked off
        [0] * 4 + [9000] * 4 + [6000] * 4,  # one that is half worked off
        [10 * n for n in range(12)],  # less than a moment's input
    ],
)
def test_a_lag_that_moves_is_no_trend(lags: list[int]) -> None:
    found = sampled(lags, [500] * 12)
    pace = pace_of(found, {"source": {"t/0": lags[-1]}}, found[-1].at_ms)
    assert pace is not None and not pace.grows


def test_what_waited_for_a_driver_is_no_trend() -> None:
    """It was away for 40 s, and catches up: its own samples alone say how fast."""
    before = sampled([0] * 4, [100] * 4)
    later = [replace(s, at_ms=s.at_ms + 55_000) for s in sampled([8000, 8500, 8400, 8300], [0, 400, 600, 600])]
    pace = pace_of([*before, *later], {"source": {"t/0": 8300}}, later[-1].at_ms)
    assert pace is not None and not pace.grows
    assert pace_of([*before, later[0]], {"source": {"t/0": 8000}}, later[0].at_ms) is None, "too few"


def test_without_a_driver_all_that_arrives_waits() -> None:
    found = sampled([0, 0, 0, 0], [100] * 4)
    pace = pace_of(found, {"source": {"t/0": 6000}}, found[-1].at_ms + 60_000)
    assert pace is not None and (pace.in_per_s, pace.out_per_s) == (100, 0)
    assert pace_of([], {"source": {"t/0": 1}}) is None
    assert pace_of(found, {}) is None, "no source answers"


def test_samples_are_kept_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Samples(str(tmp_path), "orders")
    kept.keep({"t": {"0": 10}}, {"t": {"0": 15}})
    kept.keep({"t": {"0": 12}}, {"t": {"0": 20}})
    monkeypatch.setattr(history, "SAMPLE_EVERY_S", 0.0)
    kept.keep({"t": {"0": 14}}, {"t": {"0": 30}})
    found = history.samples(str(tmp_path))
    assert [(s.source, s.lag, s.read) for s in found] == [
        ("orders", {"t/0": 5}, {"t/0": 0}),
        ("orders", {"t/0": 16}, {"t/0": 4}),
    ]
    Samples(None, "orders").keep({}, {})


def test_runs_are_kept_and_bounded(tmp_path: Path) -> None:
    (tmp_path / "delivered").mkdir()
    for n in range(RUNS_MAX + 5):
        history.keep_run(str(tmp_path), Run(str(n), "host", 1, n))
    newest = history.runs(str(tmp_path))[-1]
    failed = newest.ended(7, Unreachable("KAFKA_UNREACHABLE", "No broker answered.", "start it"))
    history.keep_run(str(tmp_path), failed)
    found = history.runs(str(tmp_path))
    assert len(found) == RUNS_MAX and found[-1] == failed and found[-1].has_failed
    (tmp_path / history.RUNS).write_text("torn")
    assert history.runs(str(tmp_path)) == []


def test_a_failed_start_leaves_a_new_checkpoint_alone(tmp_path: Path) -> None:
    with pytest.raises(DeliveredError), history.keeping_failed_start(str(tmp_path / "new")):
        raise DeliveredError("STALLED", "x")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metadata").write_text(json.dumps({"id": "i"}))
    with pytest.raises(DeliveredError), history.keeping_failed_start(str(tmp_path / "old")):
        raise DeliveredError("STALLED", "x")
    assert [p.name for p in (tmp_path / "old").iterdir()] == ["metadata"], "it may be another connector's"
    history.keep_run(str(tmp_path / "old"), Run("1", "host-a", 4711, 1).ended(None, None))
    with pytest.raises(DeliveredError), history.keeping_failed_start(str(tmp_path / "old")):
        raise DeliveredError("STALLED", "x")
    run = history.runs(str(tmp_path / "old"))[-1]
    assert (run.code, run.batch) == ("DELIVERED_STALLED", None)


def test_the_error_of_the_last_run_is_a_problem_until_a_later_one() -> None:
    failed = Run("1", "host-a", 4711, 1).ended(7, Unreachable("KAFKA_UNREACHABLE", "No broker answered.", "start it"))
    now = Status("p", "exactly_once", "/c", Driver.STOPPED, runs=(failed,))
    (problem,) = run_problems(now)
    assert problem.code == "DELIVERED_RUN_FAILED" and problem.next_step == "start it"
    assert "host-a, process 4711, in batch 7: [DELIVERED_KAFKA_UNREACHABLE] No broker answered." in problem.text
    later = Run("2", "host-a", 4712, failed.ended_ms or 0)
    assert not [*run_problems(Status("p", "", "", Driver.STOPPED, runs=(failed, later)))]
    assert not [*run_problems(Status("p", "", "", Driver.RUNNING, runs=(failed,)))]


def test_dead_letters_are_new_until_somebody_looks(tmp_path: Path) -> None:
    (tmp_path / "delivered").mkdir()
    before, later = SinkStatus("bad", "sqlite", 21, 0, True), SinkStatus("bad", "sqlite", 25, 0, True)
    assert new_dead_letters(str(tmp_path), [before])["bad"].count == 21
    looked_at(str(tmp_path), [before])
    assert new_dead_letters(str(tmp_path), [before])["bad"].count == 0
    new = new_dead_letters(str(tmp_path), [later])["bad"]
    assert new.count == 4 and new.since_ms is not None
    again = SinkStatus("bad", "sqlite", 3, 0, True)
    assert new_dead_letters(str(tmp_path), [again])["bad"].count == 3, "of a new checkpoint"
    assert new_dead_letters(str(tmp_path), [SinkStatus("bad", "sqlite", None, 0, True)]) == {}
