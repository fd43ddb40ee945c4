"""Crash points from the environment, and a supervisor that kills: real processes, really killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from delivered.crash import Crashed, CrashPoint, Handler, parse
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.step import Moment, StepId
from delivered_lab.supervisor import hits, run

PIPELINE = """
import subprocess, sys, os
from pathlib import Path
from delivered.crash import Crashed, install_from_environment
from delivered.model.step import Moment, StepId, reach
install_from_environment()
out = Path(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import os, time; os.setpgid(0, 0); time.sleep(600)"])
with out.open("a") as log:
    log.write(f"{os.getpid()} {child.pid}\\n")
for batch in range(3):
    for shard in range(2):
        try:
            reach(StepId.COMMIT_APPLY, Moment.AFTER, batch=batch, shard=shard)
        except Crashed:
            with out.open("a") as log:
                log.write("raised\\n")
child.kill()
"""


@pytest.mark.parametrize("step", list(StepId))
@pytest.mark.parametrize("moment", list(Moment))
def test_every_point_can_be_named(step: StepId, moment: Moment) -> None:
    text = f"{step}:{moment}#2@batch=3@shard=1!kill"
    (point,) = parse(text)
    assert (point.step, point.moment, point.nth, dict(point.where)) == (step, moment, 2, {"batch": "3", "shard": "1"})
    assert parse(str(point)) == (point,)


@pytest.mark.parametrize("text", ["commit.decid:after", "commit.decide", "commit.decide:later", "log:after#0", "x!y"])
def test_a_wrong_point_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert text in caught.value.message
    assert caught.value.next_step


def test_a_point_is_hit_once_over_all_processes(tmp_path: Path) -> None:
    points = parse("commit.apply:after#2@batch=1!raise")
    for fresh_process in range(2):
        handler = Handler(points, tmp_path)
        handler("commit.apply:after", {"batch": 0})
        handler("commit.apply:after", {"batch": 1, "shard": 0})
        handler("commit.apply:before", {"batch": 1, "shard": 1})
        if fresh_process == 0:
            with pytest.raises(Crashed):
                handler("commit.apply:after", {"batch": 1, "shard": 1})
        else:
            handler("commit.apply:after", {"batch": 1, "shard": 1})
    ((_, hit),) = hits(tmp_path)
    assert (hit.point, hit.facts) == (str(points[0]), {"batch": 1, "shard": 1})


def test_conditions_need_the_fact() -> None:
    assert not CrashPoint(StepId.LOG, Moment.AFTER, where={"shard": "0"}).matches("log:after", {"batch": 0})


def test_supervisor_kills_the_tree_and_starts_again(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "hits"
    crash = "commit.apply:after#2,commit.apply:after@batch=2@shard=0,commit.apply:after@batch=2@shard=1!raise"
    outcome = run([sys.executable, "-c", PIPELINE, str(out)], crash, folder, timeout_s=60)
    assert outcome.exit_code == 0
    assert [k.hit.facts for k in outcome.kills] == [{"batch": 0, "shard": 1}, {"batch": 2, "shard": 0}]
    assert all(k.processes == 2 for k in outcome.kills), "the process and its child in a group of its own"
    assert outcome.runs == 3
    lines = out.read_text().splitlines()
    assert lines[-1] == "raised"
    pids = [int(pid) for line in lines if line != "raised" for pid in line.split()]
    deadline = time.monotonic() + 120
    while (alive := [p for p in pids if psutil.pid_exists(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive == []


def test_supervisor_ends_what_does_not_end(tmp_path: Path) -> None:
    with pytest.raises(DeliveredError, match="SUPERVISOR_TIMEOUT"):
        run([sys.executable, "-c", "import time; time.sleep(600)"], "log:after", tmp_path, timeout_s=1)


def test_kill_inside_is_no_kill_of_the_supervisor(tmp_path: Path) -> None:
    outcome = run(
        [sys.executable, "-c", PIPELINE.replace("time.sleep(600)", "pass"), str(tmp_path / "out")],
        "commit.apply:after@batch=1!kill",
        tmp_path / "hits",
        timeout_s=60,
    )
    assert (outcome.kills, outcome.exit_code, outcome.runs) == ((), -9, 1)
