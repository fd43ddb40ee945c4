"""Through Spark, a driver that was started ahead finds out what a fresh one does, also one that ran another case."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from delivered.model.capability import Guarantee
from delivered_lab.verify.case import AHEAD, Case, Environment, Result, run_case
from delivered_lab.verify.evidence import load
from delivered_lab.verify.faults import catalogue
from delivered_lab.verify.judge import Verdict
from delivered_lab.verify.services import SPARK
from delivered_lab.verify.systems import SQLITE

_PATH = os.pathsep.join([str(Path(__file__).parent / "broken"), os.environ.get("PYTHONPATH", "")])


@pytest.mark.matrix
def test_drivers_that_were_started_ahead_tell_a_broken_sink_from_an_honest_one(tmp_path: Path) -> None:
    environment = Environment(tmp_path, print, {"PYTHONPATH": _PATH}, ahead=True)

    def run(connector: str, fault: str) -> Result:
        environment.sink_options = {"format": connector}
        found = next(f for f in catalogue(Guarantee.EXACTLY_ONCE, SQLITE) if f.name == fault)
        return run_case(Case(SQLITE, Guarantee.EXACTLY_ONCE, "unique", found, 1, SPARK), environment)

    try:
        broken, honest = run("forgets_batches", "log-entry-removed"), run("honest", "killed-after-staging")
    finally:
        environment.close()
    assert broken.verdict == Verdict.BROKEN, broken
    assert broken.duplicated > 0
    assert (honest.verdict, honest.fired) == (Verdict.HELD, 1), honest.reasons
    assert (broken.start, honest.start) == (AHEAD, AHEAD)
    # Case after case, in the same drivers: what they log of Spark is with each run.
    first, last = (Path(r.folder) for r in (broken, honest))
    assert (first / "run1.spark.log").exists()
    ends = [o for o in load(last / "history.jsonl") if o.name == "run" and o.end == "unknown"]
    assert [o.value["killed"] > 3 for o in ends] == [True]
