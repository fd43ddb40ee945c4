"""Workloads of operators through Spark, end to end: correct ones pass, broken ones are detected."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from delivered.model.capability import Guarantee
from delivered_lab.verify.case import Case, Environment, Result, run_case
from delivered_lab.verify.faults import catalogue
from delivered_lab.verify.judge import Verdict
from delivered_lab.verify.services import SPARK
from delivered_lab.verify.systems import SQLITE
from delivered_lab.verify.workloads import WORKLOADS

BROKEN = Path(__file__).parent / "broken"
EXACTLY = Guarantee.EXACTLY_ONCE


def run(folder: Path, workload: str, fault: str, **sink: str) -> Result:
    found = next(f for f in catalogue(EXACTLY, SQLITE) if f.name == fault)
    path = os.pathsep.join([str(BROKEN), os.environ.get("PYTHONPATH", "")])
    environment = Environment(folder, print, {"PYTHONPATH": path}, sink_options=sink)
    try:
        return run_case(Case(SQLITE, EXACTLY, workload, found, 1, SPARK), environment)
    finally:
        environment.close()


@pytest.mark.matrix
def test_running_totals_are_recomputed_after_a_kill(tmp_path: Path) -> None:
    found = run(tmp_path, "totals", "killed-after-staging")
    assert found.verdict == Verdict.HELD, found.reasons
    assert (found.fired, found.runs, found.delivered) == (1, 2, 18)
    assert (found.missing, found.extra, found.different) == (0, 0, 0)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("workload", "transform", "how"),
    [("totals", "forgets_state", "different"), ("windows-update", "counts_late_records", "extra")],
)
def test_a_broken_transform_is_found_out(
    workload: str, transform: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(WORKLOADS[workload], python=f"broken_transforms:{transform}")
    monkeypatch.setitem(WORKLOADS, workload, broken)
    found = run(tmp_path, workload, "none")
    assert found.verdict == Verdict.BROKEN, found
    assert getattr(found, how) > 0
    assert any(reason.startswith("by_key") for reason in found.reasons), found.reasons


@pytest.mark.matrix
def test_a_sink_that_takes_a_batch_twice_is_found_out(tmp_path: Path) -> None:
    """Of a query without a watermark: after one, the last batch may be empty."""
    found = run(tmp_path, "distinct", "log-entry-removed", format="forgets_batches")
    assert found.verdict == Verdict.BROKEN, found
    assert found.duplicated > 0
