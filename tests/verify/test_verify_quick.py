"""`delivered verify` end to end: its quick subset with the real sinks, through the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from delivered.cli.main import app
from delivered.model.capability import Guarantee
from delivered_lab import brokers
from delivered_lab.verify.case import Case, Environment, run_case
from delivered_lab.verify.evidence import load
from delivered_lab.verify.faults import PLACES, catalogue
from delivered_lab.verify.judge import Verdict
from delivered_lab.verify.matrix import SINKS, Choice, Store, cases
from delivered_lab.verify.services import ENGINE, SPARK
from delivered_lab.verify.systems import SINK_KINDS, SQLITE

FIELDS = [
    "sink", "guarantee", "workload", "fault", "seed", "verdict", "lost", "duplicated", "fired", "final_read",
]  # fmt: skip


def verify(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "delivered.cli.main", "verify", "--out", str(folder / "verify.json")]
    command += ["--folder", str(folder / "cases"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)


@pytest.mark.matrix
def test_the_quick_subset_holds_and_is_not_run_twice(tmp_path: Path) -> None:
    done = verify(tmp_path, "--quick", "--service", ENGINE, "--jobs", "2", "--output", "json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    written = json.loads((tmp_path / "verify.json").read_text())
    assert list(written) == ["format", "results"]
    results = written["results"]
    assert json.loads(done.stdout) == results
    expected = cases(Choice(quick=True, service=ENGINE))
    assert sorted(r["fault"] for r in results) == sorted(c.fault.name for c in expected)
    for r in results:
        assert list(r)[: len(FIELDS)] == FIELDS
        assert (r["verdict"], r["final_read"]) == ("held", True), r
        assert r["lost"] == 0 or r["guarantee"] == "at_most_once", r
        assert r["duplicated"] == 0 or r["guarantee"] == "at_least_once", r
        assert r["fired"] == len(r["faults"]) > 0
        assert load(Path(r["folder"]) / "history.jsonl")
    page = (tmp_path / "verify.html").read_text()
    assert all(r["again"] in page for r in results)
    assert "http" not in page.replace("http://www.w3.org", "")
    again = verify(tmp_path, "--quick", "--service", ENGINE, "--resume")
    assert again.returncode == 0
    assert "1/" not in again.stderr


@pytest.mark.matrix
def test_one_case_through_spark(tmp_path: Path) -> None:
    """The product as a user runs it: `delivered run`, killed between prepare and decide."""
    fault = next(f for f in catalogue(Guarantee.EXACTLY_ONCE, SQLITE) if f.name == "killed-after-staging")
    environment = Environment(tmp_path, print)
    try:
        found = run_case(Case(SQLITE, Guarantee.EXACTLY_ONCE, "keyed", fault, 1, SPARK), environment)
    finally:
        environment.close()
    assert found.verdict == Verdict.HELD, found.reasons
    assert (found.fired, found.runs, found.delivered) == (1, 2, found.sent)


def test_every_failure_point_has_a_fault_for_every_guarantee_and_sink() -> None:
    for sink, kind in SINK_KINDS.items():
        for guarantee in kind.guarantees:
            faults = catalogue(guarantee, sink)
            assert {f.place for f in faults} == set(PLACES) - set(kind.absent)
            assert all(f.requires for f in faults if f.name != "none")


def test_the_same_seed_gives_the_same_cases_and_records() -> None:
    from delivered_lab.verify.workloads import WORKLOADS, records

    assert [c.key for c in cases(Choice(seed=3))] == [c.key for c in cases(Choice(seed=3))]
    for workload in WORKLOADS.values():
        if workload.name != "big":
            assert records(workload, 3) == records(workload, 3)
    assert records(WORKLOADS["keyed"], 3) != records(WORKLOADS["keyed"], 4)


@pytest.mark.matrix
def test_the_same_seed_gives_the_same_faults(tmp_path: Path) -> None:
    """Two runs with one seed and one with another: compares the times of the kills, not only their number."""

    def moments(seed: int, folder: Path) -> list[object]:
        fault = next(f for f in catalogue(Guarantee.EXACTLY_ONCE, SQLITE) if f.name == "killed-at-random")
        environment = Environment(folder, print)
        try:
            found = run_case(Case(SQLITE, Guarantee.EXACTLY_ONCE, "keyed", fault, seed, ENGINE), environment)
        finally:
            environment.close()
        assert found.verdict == Verdict.HELD, found.reasons
        history = load(Path(found.folder) / "history.jsonl")
        return [(o.name, o.value["share"]) for o in history if o.process == "fault"]

    first = moments(3, tmp_path / "1")
    assert len(first) == 3
    assert moments(3, tmp_path / "2") == first
    assert moments(4, tmp_path / "3") != first


@pytest.mark.parametrize(
    ("pattern", "count"), [("F7", None), ("kafka/exactly_once/keyed/expired-random", 0), ("nothing/*", 0)]
)
def test_only_chooses_cases(pattern: str, count: int | None) -> None:
    found = cases(Choice(only=(pattern,)))
    assert all(c.fault.place == "F7" for c in found)
    assert (len(found) > 0) if count is None else (len(found) == count)
    assert {c.sink for c in cases(Choice())} == set(SINKS)


def test_a_store_keeps_results_and_knows_what_is_settled(tmp_path: Path) -> None:
    from delivered_lab.verify.case import Result

    case = cases(Choice(service=ENGINE))[0]
    first = Result(
        case.sink, case.guarantee.value, case.workload, case.fault.name, 1, "unknown", 0, 0, 0, False, service=ENGINE
    )
    store = Store(tmp_path / "v.json")
    store.add(first)
    assert not store.settled(case)
    first.verdict = "held"
    first.record([])
    store.add(first)
    fresh = Store(tmp_path / "v.json")
    fresh.load()
    assert fresh.settled(case)
    assert fresh.results[case.key] == first


def test_an_unknown_service_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["verify", "--out", str(tmp_path / "verify.json"), "--service", "storm"])
    assert done.exit_code == 2
    assert "SERVICE_UNKNOWN" in done.stderr


def test_a_server_that_a_case_left_dead_or_silent_starts_again_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all later cases of this environment fail at once, and it takes most of what waits."""
    environment = Environment(tmp_path, print)
    try:
        server = environment.server("postgres")
        environment.next_case()
        assert environment.server("postgres") is server
        server.kill()
        assert environment.server("postgres") is server, "within a case a killed server is the case's own affair"
        environment.next_case()
        silent = environment.server("postgres")
        assert silent.is_running
        monkeypatch.setattr("delivered_lab.verify.case._ANSWER_S_MAX", 0.0)
        os.kill(silent.pid, signal.SIGSTOP)
        environment.next_case()
        assert not silent.is_running
        assert brokers.status(environment.server("postgres").folder).answering
    finally:
        environment.close()
