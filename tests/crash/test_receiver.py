"""Receivers really killed at every crash point: no acknowledged message is lost, none is duplicated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from tests.crash.receiver_process import PER_APPEND, Spool
from tests.support.steps import ROLE_OF_STEP, Role
from tests.support.sweeps import sweep

from delivered.connectors.log import CONNECTOR
from delivered.crash import CRASH, CRASH_DIR
from delivered.model.step import Moment
from delivered_lab.supervisor import hits, release

MESSAGES = 400
QUARANTINE = [f"receive.quarantine:{m}" for m in Moment]
NEVER_REACHED = {"receive.take:before", *QUARANTINE}
"""Skipped: before a message is taken, nothing can be lost; and these are good messages."""
POINTS = [f"{s}:{m}" for s, role in ROLE_OF_STEP.items() if role is Role.RECEIVER for m in Moment]


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    made = Spool(tmp_path / "spool.db")
    made.send([(f"id{n}", b"message %d" % n) for n in range(MESSAGES)])
    return made


def start(spool: Spool, crash: str = "", *options: str) -> subprocess.Popen[bytes]:
    folder = spool.path.parent
    (folder / "hits").mkdir(exist_ok=True)
    environment = {**os.environ, CRASH: crash, CRASH_DIR: str(folder / "hits")}
    command = [sys.executable, "-m", "tests.crash.receiver_process", str(spool.path), str(folder / "log"), *options]
    return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2])


def entered(spool: Spool, log: str = "log") -> Counter[bytes]:
    source = CONNECTOR.source({"path": str(spool.path.parent / log)})
    driver = source.driver()
    pieces = driver.slices(*driver.batch())
    return Counter(v for p in pieces for b in source.read(p) for v in b.column("value").to_pylist())


def verdict(spool: Spool) -> tuple[int, int]:
    """Number of lost messages, and of messages in the log more than once."""
    found = entered(spool)
    return MESSAGES - len(found), sum(1 for n in found.values() if n > 1)


@pytest.mark.parametrize(
    ("point", "nth"),
    sweep(
        product([p for p in POINTS if p not in NEVER_REACHED], [1, 3]),
        # Receivers of real queues are killed before they acknowledge.
        lambda point, nth: nth == 3 and point != "receive.ack:before",
    ),
)
def test_killed_at_a_point_and_started_again(spool: Spool, point: str, nth: int) -> None:
    crash = f"{point}#{nth}!kill"
    assert start(spool, crash).wait(60) == -signal.SIGKILL
    assert len(hits(spool.path.parent / "hits")) == 1
    left = spool.left()
    assert left >= MESSAGES - nth * PER_APPEND, "acknowledged is only what was persisted"
    assert start(spool, crash).wait(60) == 0
    assert spool.left() == 0
    assert verdict(spool) == (0, 0)


@pytest.mark.parametrize("for_ms", [0, 3_600_000])
def test_ids_outlive_the_count_for_a_time(spool: Spool, for_ms: int) -> None:
    """More messages than `dedupWindow` are redelivered after a kill: with the count alone, some enter twice."""
    crash, window = "receive.ack:before#3!kill", f"--window={PER_APPEND // 4},{for_ms}"
    assert start(spool, crash, window).wait(60) == -signal.SIGKILL
    assert start(spool, crash, window).wait(60) == 0
    lost, twice = verdict(spool)
    assert (lost, twice > 0) == (0, not for_ms)


def test_points_that_are_never_reached_are_not(spool: Spool) -> None:
    assert start(spool, ",".join(f"{p}!kill" for p in NEVER_REACHED)).wait(60) == 0
    assert hits(spool.path.parent / "hits") == []


POISONED = [7, 50, 51, 399]


@pytest.fixture
def poisoned(tmp_path: Path) -> Spool:
    """As `spool`, but no log can store four of the messages."""
    made = Spool(tmp_path / "spool.db")
    bodies = [b"poison %d" % n if n in POISONED else b"message %d" % n for n in range(MESSAGES)]
    made.send([(f"id{n}", body) for n, body in enumerate(bodies)])
    return made


@pytest.mark.parametrize(
    ("point", "nth"),
    sweep(
        product([*QUARANTINE, "receive.persist:before", "receive.persist:after", "receive.ack:after"], [1, 2]),
        # Before, a message is in neither log yet, as at receive.persist:before.
        lambda point, nth: (point, nth) == ("receive.quarantine:after", 1),
    ),
)
def test_poison_goes_to_the_dead_letters_whenever_it_is_killed(poisoned: Spool, point: str, nth: int) -> None:
    """Each message is in exactly one of the two logs, once, before the queue deletes it."""
    crash = f"{point}#{nth}!kill"
    assert start(poisoned, crash, "--quarantine").wait(60) == -signal.SIGKILL
    held = len(entered(poisoned)) + len(entered(poisoned, "log.bad"))
    assert held >= MESSAGES - poisoned.left(), "forgotten is only what is in one of the two"
    assert start(poisoned, crash, "--quarantine").wait(60) == 0
    assert poisoned.left() == 0
    good = [b"message %d" % n for n in range(MESSAGES) if n not in POISONED]
    assert entered(poisoned) == Counter(good)
    assert entered(poisoned, "log.bad") == Counter(b"poison %d" % n for n in POISONED)


def test_poison_ends_a_receiver_that_has_no_place_for_it(poisoned: Spool) -> None:
    assert start(poisoned).wait(60) == 1
    assert poisoned.left() == MESSAGES - len(entered(poisoned))


def test_acknowledging_first_is_found_out(spool: Spool) -> None:
    """The same kill, with the receiver broken on purpose."""
    crash = "receive.persist:before#3!kill"
    assert start(spool, crash, "--ack-first").wait(60) == -signal.SIGKILL
    assert start(spool, crash, "--ack-first").wait(60) == 0
    lost, twice = verdict(spool)
    assert lost >= PER_APPEND
    assert twice == 0


def test_a_zombie_wakes_up_after_another_took_its_messages(spool: Spool) -> None:
    """F7: paused with messages taken but not persisted; another receiver appends them; then it resumes."""
    zombie = start(spool, "receive.persist:before#2!wait")
    deadline = time.monotonic() + 60
    while not (found := hits(spool.path.parent / "hits")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # While one batch is persisted, it gathers the next; with both full it takes no more.
    while spool.held() < 2 * PER_APPEND:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # Like a broker after a timeout: the silent receiver's messages are redelivered to others.
    spool._open().execute("UPDATE m SET holder = NULL")
    assert start(spool).wait(60) == 0
    assert verdict(spool) == (0, 0)
    release(found[0][0])
    assert zombie.wait(60) == 0
    assert verdict(spool) == (0, 0)


def test_two_receivers_and_one_is_killed_over_and_over(spool: Spool) -> None:
    spool.send([(f"id{n}", b"message %d" % n) for n in range(0, MESSAGES, 3)])  # a sender that retries
    steady = start(spool)
    for _ in range(3):
        other = start(spool)
        time.sleep(0.9)
        other.kill()
        other.wait()
    assert steady.wait(60) == 0
    assert verdict(spool) == (0, 0)
