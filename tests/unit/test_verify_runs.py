"""Verifier runs as files and pages, judged recovery times, faults generated from a seed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delivered.model.capability import Guarantee
from delivered.model.errors import UsageError
from delivered_lab.verify import matrix, report
from delivered_lab.verify.case import Case, Result, can_mount, small_disk
from delivered_lab.verify.faults import PLACES, catalogue
from delivered_lab.verify.fixture import empty
from delivered_lab.verify.judge import Verdict
from delivered_lab.verify.matrix import FORMAT, Choice, Store, cases
from delivered_lab.verify.services import ENGINE, SERVICES, SPARK
from delivered_lab.verify.systems import DELTA, KAFKA, POSTGRES, SINK_KINDS, SQLITE
from delivered_lab.verify.workloads import WORKLOADS


def result(fault: str = "killed-between", verdict: str = "held", **more: object) -> Result:
    base = Result(SQLITE, "exactly_once", "keyed", fault, 1, verdict, 0, 0, 4, True, service=ENGINE, place="F6b")
    for name, value in more.items():
        setattr(base, name, value)
    return base


def test_a_run_is_listed_while_it_goes_on_and_when_it_ended(tmp_path: Path) -> None:
    log = report.RunLog(tmp_path, "--only F6b --seed 1")
    log.add(result())
    report.write_index(tmp_path)
    page = (tmp_path / report.INDEX).read_text()
    assert "did not end" in page
    log.add(result("killed-at-random", "broken", lost=3))
    assert log.end() == tmp_path / report.INDEX
    page = (tmp_path / report.INDEX).read_text()
    assert "did not end" not in page
    assert "✕ broken" in page
    assert "--only F6b --seed 1" in page
    assert f"runs/{log.run.name}.html" in page
    assert (tmp_path / "runs" / f"{log.run.name}.html").exists()
    (found,) = report.load_runs(tmp_path)
    assert found == log.run
    assert found.verdict is Verdict.BROKEN


@pytest.mark.parametrize("newer", [FORMAT + 1, "2030a"])
def test_results_of_a_later_version_are_refused(newer: object, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"format": newer, "results": []}))
    with pytest.raises(UsageError, match="VERIFY_FORMAT_NEWER"):
        Store(path).load()


def test_a_file_that_is_no_run_does_not_hide_the_others(tmp_path: Path) -> None:
    log = report.RunLog(tmp_path, "")
    log.add(result())
    (tmp_path / "runs" / "other.json").write_text('{"name": "x"')
    assert [r.name for r in report.load_runs(tmp_path)] == [log.run.name]


def test_a_run_without_a_cell_leaves_nothing(tmp_path: Path) -> None:
    assert report.RunLog(tmp_path, "").end() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("plain_now_s", "recovery"), [(1.0, "held"), (0.4, "broken")])
def test_a_slow_recovery_is_held_against_a_plain_restart_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_now_s: float, recovery: str
) -> None:
    """The recorded 0.5 s may be from a less loaded machine."""

    def run(case: Case, environment: object, plain_s: float | None = None, audit: bool = False) -> Result:
        if case.fault.name == "none":
            return result("none", plain_s=plain_now_s)
        finding = {"checker": "recovery", "verdict": "broken", "count": 1, "examples": [], "note": ""}
        return result(plain_s=plain_s, recovery_s=[1.5], recovery="broken", findings=[finding])

    monkeypatch.setattr(matrix, "run_case", run)
    store = Store(tmp_path / "v.json")
    store.add(result("none", plain_s=0.5))
    choice = Choice(("sqlite/exactly_once/keyed/killed-between",), service=ENGINE)
    (found,) = matrix.run_matrix(choice, store, tmp_path / "cases")
    assert (found.plain_s, found.recovery, found.findings[0]["verdict"]) == (plain_now_s, recovery, recovery)
    assert store.plain_s(matrix.cases(choice)[0]) == plain_now_s


@pytest.mark.parametrize(("slowest", "slow"), [(3.9, 0), (4.1, 1)])
def test_recovery_is_judged_against_twice_a_plain_restart(slowest: float, slow: int) -> None:
    found = result(plain_s=2.0, recovery_s=[1.0, slowest], recovery="broken" if slow else "held")
    speed = report.recovery([found, result(recovery_s=[9.0])], (SQLITE, "exactly_once", ENGINE))
    assert speed == report.Speed(1, slow, 2.0, slowest)
    page = report.page([found])
    assert ("above 2x" if slow else "within 2x") in page
    assert report.recovery([result()], (SQLITE, "exactly_once", ENGINE)) is None


def test_a_plain_restart_is_taken_from_the_same_workload_if_it_is_known(tmp_path: Path) -> None:
    fault = next(f for f in catalogue(Guarantee.EXACTLY_ONCE, SQLITE) if f.name == "killed-between")
    case = Case(SQLITE, Guarantee.EXACTLY_ONCE, "unique", fault, 1, ENGINE)
    store = Store(tmp_path / "v.json")
    assert store.plain_s(case) is None
    store.add(result("none", plain_s=2.0))
    assert store.plain_s(case) == 2.0
    store.add(result("none", plain_s=3.0, workload="unique"))
    assert store.plain_s(case) == 3.0


def test_every_workload_is_run_somewhere_and_the_engine_runs_all_that_need_no_spark() -> None:
    everywhere = {c.workload for c in cases(Choice(service=SPARK))}
    assert everywhere == set(WORKLOADS)
    engine = {c.workload for c in cases(Choice(service=ENGINE))}
    assert engine == {n for n, w in WORKLOADS.items() if not w.needs_spark}


def test_a_slice_has_so_many_cells_of_each_place_guarantee_and_sink_and_the_same_ones_each_time() -> None:
    everything = cases(Choice(only=(KAFKA, SQLITE)))
    groups = {(c.fault.place, c.guarantee, c.sink) for c in everything}
    slice_ = cases(Choice(only=(KAFKA, SQLITE), per_place=1))
    assert {(c.fault.place, c.guarantee, c.sink) for c in slice_} == groups
    assert len(slice_) == len(groups) == 2 * 3 * len(PLACES)
    assert [c.key for c in slice_] == [c.key for c in cases(Choice(only=(KAFKA, SQLITE), per_place=1))]
    kept = {c.key for c in slice_}
    for c in slice_:
        fewer = [e for e in everything if (e.fault.place, e.guarantee, e.sink) == (c.fault.place, c.guarantee, c.sink)]
        assert len(c.fault.requires) == min(len(e.fault.requires) for e in fewer)
    more = cases(Choice(only=(KAFKA, SQLITE), per_place=2))
    assert kept < {c.key for c in more}
    assert len(more) < len(everything)


@pytest.mark.parametrize("sink", SINK_KINDS)
def test_every_sink_meets_every_failure_point_but_for_those_that_it_says_are_absent(sink: str) -> None:
    for guarantee in Guarantee:
        places = {f.place for f in catalogue(guarantee, sink)}
        can_have = guarantee in SINK_KINDS[sink].guarantees
        assert places == (set(PLACES) - set(SINK_KINDS[sink].absent) if can_have else set())


@pytest.mark.parametrize("sink", [SQLITE, KAFKA, POSTGRES, DELTA])
def test_one_case_passes_every_failure_point(sink: str) -> None:
    fault = next(f for f in catalogue(Guarantee.EXACTLY_ONCE, sink) if f.name == "killed-everywhere")
    assert set(fault.parts) == set(PLACES) - {"none"}
    assert all(fault.parts.values())
    assert Counter(fault.requires) == Counter(name for names in fault.parts.values() for name in names)


@pytest.mark.parametrize("sink", SINK_KINDS)
def test_one_case_of_few_starts_reaches_each_failure_point_under_every_guarantee(sink: str) -> None:
    kind = SINK_KINDS[sink]
    for guarantee in kind.guarantees:
        fault = next(f for f in catalogue(guarantee, sink) if f.name == "each-point")
        assert set(fault.parts) == set(PLACES) - {"none"} - set(kind.absent)
        assert all(fault.parts.values())
        assert Counter(fault.requires) == Counter(name for names in fault.parts.values() for name in names)


def test_a_case_of_several_failure_points_counts_at_each() -> None:
    one, several = result("killed-after", fired=2, place="F6c"), result("killed-everywhere", fired=3, place="F6b")
    several.parts = {"F6b": 2, "F6c": 1}
    assert [one.fired_at(p) for p in ("F6b", "F6c")] == [None, 2]
    assert [several.fired_at(p) for p in ("F6b", "F6c", "F7")] == [2, 1, None]


def test_the_faults_that_were_asked_for_exist() -> None:
    names = {f.name for f in catalogue(Guarantee.EXACTLY_ONCE, KAFKA)}
    assert names >= {
        "producer-killed-at", "replies-lost", "late-end-txn", "broker-killed", "broker-restarted", "worker-killed",
        "disk-full", "black-hole", "killed-reading", "killed-reading-directly", "task-retried", "poison", "oversized",
        "killed-at-random", "zombie-prepare", "second-driver", "expired-before-decide", "expired-after-decide",
        "expired-random", "expired-random-sql", "paused-past-timeout", "log-entry-removed", "older-checkpoint",
        "checkpoint-deleted", "shards-changed", "shuffle-changed", "slices-changed",
    }  # fmt: skip


@pytest.mark.skipif(not can_mount(), reason="only root may mount")
def test_a_small_disk_that_a_killed_verifier_left_is_taken_away(tmp_path: Path) -> None:
    with small_disk(tmp_path / "case" / "disk", 1):
        (tmp_path / "case" / "disk" / "file").touch()
        empty(tmp_path / "case")
        assert list((tmp_path / "case").iterdir()) == []


def test_an_audit_of_several_sinks_is_one_account(tmp_path: Path) -> None:
    """Each sink may give up records of its own under at_most_once."""
    reports = [{"verdict": "held", "counts": {"lost": 3, "given_up": 4}}, {"verdict": "unknown", "counts": {"lost": 2}}]

    class Answering:
        def ask(self, arguments: Sequence[str], env: Mapping[str, str], output: Path, errors: Path) -> Any:
            output.write_text(json.dumps(reports))
            return SimpleNamespace(wait=lambda timeout_s: 0)

    found = SERVICES[SPARK].audit(tmp_path / "pipeline.yaml", tmp_path, None, Answering())  # type: ignore[arg-type]
    assert found == {"verdict": "unknown", "counts": {"lost": 5, "given_up": 4}}
