"""The verifier is itself verified: sinks that claim exactly_once wrongly must be found out, the honest one not."""

from __future__ import annotations

from pathlib import Path

import pytest

from delivered.model.guarantee import Guarantee
from delivered.verify.cell import Cell, Ground, Result, run_cell
from delivered.verify.faults import SQLITE, catalogue
from delivered.verify.services import ENGINE, SPARK
from delivered.verify.verdict import Verdict

BROKEN = Path(__file__).parent / "broken"


def run(tmp_path: Path, connector: str, fault: str, service: str = ENGINE) -> Result:
    found = next(f for f in catalogue(Guarantee.EXACTLY_ONCE, SQLITE) if f.name == fault)
    ground = Ground(tmp_path, print, {"PYTHONPATH": str(BROKEN)}, sink_options={"format": connector})
    try:
        return run_cell(Cell(SQLITE, Guarantee.EXACTLY_ONCE, "unique", found, 1, service), ground)
    finally:
        ground.close()


@pytest.mark.parametrize("fault", ["none", "log-entry-removed"])
def test_the_honest_sink_passes(tmp_path: Path, fault: str) -> None:
    found = run(tmp_path, "honest", fault)
    assert (found.verdict, found.lost, found.duplicated) == (Verdict.HELD, 0, 0), found.reasons


@pytest.mark.parametrize(
    ("connector", "fault", "how"),
    [
        ("sends_at_once", "killed-after-staging", "duplicated"),
        ("forgets_batches", "log-entry-removed", "duplicated"),
        ("batch_number_alone", "checkpoint-deleted", "stopped_right"),
        ("applies_undecided", "killed-after-staging", "duplicated"),
        ("trusts_xor", "none", "duplicated"),
    ],
)
def test_a_broken_sink_is_found_out(tmp_path: Path, connector: str, fault: str, how: str) -> None:
    found = run(tmp_path, connector, fault)
    assert found.verdict == Verdict.BROKEN, found
    assert any(reason.startswith(how) for reason in found.reasons), found.reasons
    assert found.final_read


def test_a_broken_sink_is_found_out_under_spark_too(tmp_path: Path) -> None:
    found = run(tmp_path, "forgets_batches", "log-entry-removed", SPARK)
    assert found.verdict == Verdict.BROKEN, found
    assert found.duplicated > 0
