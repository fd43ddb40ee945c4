"""`make rehearsal`: each trouble is seen in every place within 15 s, and gone after what they say mends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


CASES = [
    *("a transaction hangs", "another application's transaction blocks the source", "the driver is killed"),
    *("Spark's JVM is killed", "a row is rejected", "a receiver is killed", "the broker is down"),
    *(
        "the broker is frozen",
        "audits stop; counted from the kill",
        "records expire before an audit",
        "the pipeline falls behind",
    ),
]


@pytest.mark.matrix
def test_trouble_is_seen_and_mended(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "examples.rehearsal"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    cases = json.loads((tmp_path / "build" / "rehearsal.json").read_text())["cases"]
    assert [c["case"] for c in cases] == CASES
    assert all(c["seen_on"] == ["alert", "metrics", "page", "status", "webhook"] for c in cases)


@pytest.mark.matrix
def test_the_alert_rules_load() -> None:
    from examples.rehearsal import RULES, prometheus

    promtool = prometheus().with_name("promtool")
    done = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
