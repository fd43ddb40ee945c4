"""Drivers of the verifier that are started ahead: which one takes a run, what it is told, and how its run ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from delivered.crash import CRASH, CRASH_DIR
from delivered_lab.verify.ahead import IDLE_MAX, RUNS_MAX, Driver, Drivers
from delivered_lab.verify.services import DELIVERED, DRIVER, start

STAND_IN = """
import json, os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])  # as a JVM
for number in range(100):
    print(json.dumps({"ready": True}), flush=True)
    line = sys.stdin.readline()
    if not line:
        break
    asked = json.loads(line)
    what = asked["arguments"][0]
    with open(asked["output"], "a") as output:
        output.write(f"{os.getpid()} {json.dumps(asked)}\\n")
    if what == "hang":
        time.sleep(600)
    if what == "die":
        os._exit(9)
    print(json.dumps({"code": int(what)}), flush=True)
"""
"""Answers as `verify.driver` does, without Spark."""


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[Drivers]:
    found = Drivers(tmp_path / "drivers", {"WORLD": "1"}, (sys.executable, "-c", STAND_IN))
    yield found
    found.close()


def taken(drivers: Drivers) -> Driver:
    found = drivers.take()
    assert found is not None
    return found


def test_a_run_is_a_task_with_an_exit_code_and_an_output_of_its_own(drivers: Drivers, tmp_path: Path) -> None:
    for number, code in ((1, 0), (2, 3)):
        run = start(DRIVER, number, tmp_path, [*DELIVERED, str(code)], "log:before", {"WORLD": "1"}, taken(drivers))
        assert run.wait_end(10) == code
        assert (run.lives, run.ahead) == (False, True)
        pid, _, asked = run.output.read_text().partition(" ")
        assert int(pid) == run.process.pid
        # What it was started with is not said again; crash points are those of this run.
        told = json.loads(asked)["environment"]
        assert told == {CRASH: "log:before", CRASH_DIR: str(tmp_path / f"run{number}.hits")}


def test_a_driver_whose_run_ended_takes_the_next_one(drivers: Drivers, tmp_path: Path) -> None:
    pids = set()
    for number in range(3):
        driver = taken(drivers)
        pids.add(driver.pid)
        assert driver.ask([str(number)], {}, tmp_path / "out", tmp_path / "out").wait(10) == number
    assert len(pids) == 1


def test_a_killed_driver_is_gone_with_what_it_started_and_another_one_takes_over(
    drivers: Drivers, tmp_path: Path
) -> None:
    driver = taken(drivers)
    run = start(DRIVER, 1, tmp_path, [*DELIVERED, "hang"], driver=driver)
    children = psutil.Process(driver.pid).children()
    assert run.lives
    with pytest.raises(TimeoutError):
        run.wait_end(0.1)
    assert run.kill() >= 1 + len(children)
    assert not run.lives
    assert not any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children)
    assert run.kill() == 0
    assert taken(drivers).pid != driver.pid


def test_a_driver_that_dies_in_a_run_ends_the_run(drivers: Drivers, tmp_path: Path) -> None:
    run = start(DRIVER, 1, tmp_path, [*DELIVERED, "die"], driver=taken(drivers))
    assert run.wait_end(10) == 9
    assert run.code == "?"


def test_of_two_drivers_of_a_case_the_one_that_started_last_goes_on(drivers: Drivers, tmp_path: Path) -> None:
    """A ledger takes the other one for alive as long as its process is there."""
    first = taken(drivers)
    running = first.ask(["hang"], {}, tmp_path / "out", tmp_path / "out")
    second = taken(drivers)
    assert second.pid != first.pid
    assert second.ask(["1"], {}, tmp_path / "out", tmp_path / "out").wait(10) == 1
    assert taken(drivers) is second  # the first one is at work
    running.returncode = 0  # as if it had ended
    assert taken(drivers) is second
    assert not first.lives
    assert second.lives


def test_another_case_may_use_all_that_is_idle(drivers: Drivers, tmp_path: Path) -> None:
    first, second = taken(drivers), None
    first.ask(["0"], {}, tmp_path / "out", tmp_path / "out").wait(10)
    drivers.next_case()
    second = taken(drivers)
    assert first.lives
    assert second.ask(["0"], {}, tmp_path / "out", tmp_path / "out").wait(10) == 0
    busy = taken(drivers)
    busy.ask(["hang"], {}, tmp_path / "out", tmp_path / "out")
    drivers.next_case()  # what a case left running ends with it
    assert not busy.lives
    assert len(drivers._all) <= IDLE_MAX


def test_a_driver_ends_after_many_runs_or_when_it_is_spent(drivers: Drivers, tmp_path: Path) -> None:
    first = taken(drivers)
    for _ in range(RUNS_MAX):
        assert taken(drivers) is first
        assert first.ask(["0"], {}, tmp_path / "out", tmp_path / "out").wait(10) == 0
    second = taken(drivers)
    assert second is not first
    assert not first.lives
    second.spent = True
    assert second.ask(["0"], {}, tmp_path / "out", tmp_path / "out").wait(10) == 0
    assert taken(drivers) is not second


def test_without_a_driver_that_gets_ready_a_run_starts_afresh(tmp_path: Path) -> None:
    drivers = Drivers(tmp_path / "drivers", {}, (sys.executable, "-c", "raise SystemExit(1)"))
    assert drivers.take() is None
    drivers.close()


COMMANDS = """
import json, os, sys
from delivered_lab.verify.driver import run
before = dict(os.environ)
codes = [run(["explain", n], {"DELIVERED_CRASH": "log:before"}, f"{n}.out", f"{n}.err") for n in sys.argv[1:]]
print(json.dumps(codes), dict(os.environ) == before)
"""


def test_a_command_runs_as_on_the_command_line(tmp_path: Path) -> None:
    """Exit code, output and errors are its own; environment and streams are back afterwards."""
    names = ["DATA_LOST", "NO_SUCH_CODE"]
    together = subprocess.run(
        [sys.executable, "-c", COMMANDS, *names], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    alone = [subprocess.run([*DELIVERED, "explain", n], capture_output=True, check=False) for n in names]
    assert together.stdout == f"{[a.returncode for a in alone]} True\n"
    for name, one in zip(names, alone, strict=True):
        assert (tmp_path / f"{name}.out").read_bytes() == one.stdout
        assert (tmp_path / f"{name}.err").read_bytes() == one.stderr
