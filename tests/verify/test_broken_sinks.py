"""The verifier is itself verified: sinks that claim exactly_once wrongly must be found out, the honest one not."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from delivered.model.capability import Guarantee
from delivered_lab.verify.case import Case, Environment, Result, run_case
from delivered_lab.verify.faults import catalogue
from delivered_lab.verify.judge import Verdict
from delivered_lab.verify.services import ENGINE, SPARK
from delivered_lab.verify.systems import DELTA, FILES, KAFKA, POSTGRES, SQLITE

BROKEN = Path(__file__).parent / "broken"
_PATH = os.pathsep.join([str(BROKEN), os.environ.get("PYTHONPATH", "")])


def run(
    tmp_path: Path,
    connector: str,
    fault: str,
    service: str = ENGINE,
    sink: str = SQLITE,
    workload: str = "unique",
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE,
    source: dict[str, str] | None = None,
    **more: str,
) -> Result:
    found = next(f for f in catalogue(guarantee, sink) if f.name == fault)
    if source:
        found = replace(found, extra={**found.extra, "source": source})
    environment = Environment(tmp_path, print, {"PYTHONPATH": _PATH}, sink_options={"format": connector, **more})
    try:
        return run_case(Case(sink, guarantee, workload, found, 1, service), environment)
    finally:
        environment.close()


@pytest.mark.parametrize("fault", [pytest.param("none", marks=pytest.mark.matrix), "log-entry-removed"])
def test_the_honest_sink_passes(tmp_path: Path, fault: str) -> None:
    found = run(tmp_path, "honest", fault)
    assert (found.verdict, found.lost, found.duplicated) == (Verdict.HELD, 0, 0), found.reasons


def test_the_honest_sink_passes_with_upserts(tmp_path: Path) -> None:
    found = run(tmp_path, "honest", "killed-twice", workload="changes")
    assert (found.verdict, found.lost, found.duplicated) == (Verdict.HELD, 0, 0), found.reasons


@pytest.mark.parametrize(
    ("connector", "fault", "how"),
    [
        ("sends_at_once", "killed-after-staging", "duplicated"),
        ("forgets_batches", "log-entry-removed", "duplicated"),
        pytest.param("batch_number_alone", "checkpoint-deleted", "stopped_right", marks=pytest.mark.matrix),
        pytest.param("applies_undecided", "killed-after-staging", "duplicated", marks=pytest.mark.matrix),
        pytest.param("trusts_xor", "none", "duplicated", marks=pytest.mark.matrix),
    ],
)
def test_a_broken_sink_is_found_out(tmp_path: Path, connector: str, fault: str, how: str) -> None:
    found = run(tmp_path, connector, fault)
    assert found.verdict == Verdict.BROKEN, found
    assert any(reason.startswith(how) for reason in found.reasons), found.reasons
    assert found.final_read


@pytest.mark.parametrize(
    ("connector", "fault", "how"),
    [
        pytest.param("sends_at_once", "killed-after-staging", "torn_batch", marks=pytest.mark.matrix),
        # A driver presumed dead overwrites a newer batch with an old one.
        ("fences_nobody", "zombie-decide", "aborted_read"),
    ],
)
def test_an_upsert_that_shows_a_part_or_goes_back_is_found_out(
    tmp_path: Path, connector: str, fault: str, how: str
) -> None:
    found = run(tmp_path, connector, fault, workload="changes")
    assert found.verdict == Verdict.BROKEN, found
    assert any(reason.startswith(how) for reason in found.reasons), found.reasons


@pytest.mark.matrix  # of SQLite, test_a_broken_sink_is_found_out finds it in `make test`
@pytest.mark.parametrize("sink", [POSTGRES, DELTA, FILES])
def test_a_table_sink_that_does_not_ask_whether_a_batch_is_in_is_found_out(tmp_path: Path, sink: str) -> None:
    """P1: the last file of commits/ is removed. What appends without a look doubles the batch."""
    state = str(tmp_path / "ledger.db")
    naive = run(tmp_path / "naive", f"forgets_{sink}", "log-entry-removed", sink=sink, state=state + "1")
    assert naive.verdict == Verdict.BROKEN, naive
    assert any(reason.startswith("duplicated") for reason in naive.reasons), naive.reasons
    looks = run(tmp_path / "looks", f"appends_{sink}", "log-entry-removed", sink=sink, state=state + "2")
    assert (looks.verdict, looks.lost, looks.duplicated) == (Verdict.HELD, 0, 0), looks.reasons


@pytest.mark.matrix
def test_a_broken_sink_is_found_out_under_spark_too(tmp_path: Path) -> None:
    found = run(tmp_path, "forgets_batches", "log-entry-removed", SPARK)
    assert found.verdict == Verdict.BROKEN, found
    assert found.duplicated > 0


@pytest.mark.parametrize(
    ("connector", "verdict"),
    [("sends_in_every_attempt", Verdict.BROKEN), pytest.param(SQLITE, Verdict.HELD, marks=pytest.mark.matrix)],
)
def test_a_stage_that_runs_again_sends_once(tmp_path: Path, connector: str, verdict: Verdict) -> None:
    found = run(tmp_path, connector, "stage-rerun", guarantee=Guarantee.AT_MOST_ONCE)
    assert found.verdict == verdict, found
    assert bool(found.duplicated) is (verdict is Verdict.BROKEN), found.reasons


@pytest.mark.matrix  # starts a server, which it kills four times
def test_a_sink_that_forgets_is_found_out_when_driver_and_server_die(tmp_path: Path) -> None:
    state = str(tmp_path / "ledger.db")
    found = run(tmp_path, f"forgets_{POSTGRES}", "killed-together", sink=POSTGRES, state=state)
    assert found.verdict == Verdict.BROKEN, found
    assert found.duplicated > 0, found.reasons


@pytest.mark.matrix
@pytest.mark.parametrize(("connector", "verdict"), [("orders_by_clock", Verdict.BROKEN), (KAFKA, Verdict.HELD)])
def test_an_order_by_clocks_is_found_out(tmp_path: Path, connector: str, verdict: Verdict) -> None:
    found = run(tmp_path, connector, "clocks-differ", sink=KAFKA)
    assert found.verdict == verdict, found
    assert bool(found.lost) is (verdict is Verdict.BROKEN), found.reasons


@pytest.mark.matrix
def test_a_source_that_goes_on_after_it_lost_its_end_is_found_out(tmp_path: Path) -> None:
    found = run(tmp_path, KAFKA, "source-lost-end", sink=KAFKA, source={"failOnDataLoss": "false"})
    assert found.verdict == Verdict.BROKEN, found
    assert any(reason.startswith("stopped_right") for reason in found.reasons), found.reasons
