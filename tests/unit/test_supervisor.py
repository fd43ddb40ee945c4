"""Killing a process with all that it started."""

from __future__ import annotations

import subprocess

import psutil

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
