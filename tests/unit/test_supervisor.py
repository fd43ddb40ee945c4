"""Killing a process with all that it started."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from delivered_lab.supervisor import kill_tree


def test_the_number_of_a_process_that_was_waited_for_may_be_anothers() -> None:
    """What lives under the number now is not killed; what the ended process left in its session is."""
    command = ["sh", "-c", "sleep 600 & echo $!"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert parent.stdout is not None
    orphan = psutil.Process(int(parent.stdout.readline()))
    parent.wait()
    assert kill_tree(parent) == 1
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    other = subprocess.Popen(["sleep", "600"])
    parent.pid = other.pid
    assert kill_tree(parent) == 0
    assert other.poll() is None
    assert kill_tree(other) == 1
    other.wait()
    parent.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent ended")
def test_what_the_verifier_started_ends_with_it() -> None:
    """From a thread that ends before: for Linux, it would be the parent."""
    started = (
        "import threading, time; from delivered_lab.supervisor import start_with_us\n"
        "start = lambda: print(start_with_us(['sleep', '600']).pid, flush=True)\n"
        "one = threading.Thread(target=start); one.start(); one.join(); print('ended', flush=True); time.sleep(600)"
    )
    verifier = subprocess.Popen([sys.executable, "-c", started], stdout=subprocess.PIPE, text=True)
    assert verifier.stdout is not None
    child = psutil.Process(int(verifier.stdout.readline()))
    assert verifier.stdout.readline() == "ended\n"
    assert child.status() != psutil.STATUS_ZOMBIE
    verifier.kill()
    verifier.wait()
    verifier.stdout.close()
    gone, alive = psutil.wait_procs([child], timeout=60)
    assert gone and not alive


def test_workers_of_a_killed_driver_end_after_their_task() -> None:
    """Of the engine's loop: an idle one at once."""
    driver = (
        "import functools, time; from delivered_lab.verify import loop\n"
        "pool = loop.start_workers([])\n"
        "pool.submit(loop._run, functools.partial(time.sleep, 1))\n"
        "print(*pool._processes, flush=True); time.sleep(600)"
    )
    started = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in started.stdout.readline().split()]
    assert workers and all(w.status() != psutil.STATUS_ZOMBIE for w in workers)
    started.kill()
    started.wait()
    started.stdout.close()
    gone, alive = psutil.wait_procs(workers, timeout=60)
    assert len(gone) == len(workers) and not alive
