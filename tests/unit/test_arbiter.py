"""The arbiter of at_most_once, as a process: one attempt of a shard may send, whatever number Spark gives it (P31)."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import tenacity

from delivered.engine import arbiter as driver_side
from delivered.engine import shard
from delivered.engine.context import new_owner
from delivered.engine.shard import may_send
from delivered.model.capability import Guarantee
from delivered.model.errors import Unreachable
from delivered.model.identity import Scope
from delivered.model.work import Action, Arbiter, BatchPlan, DriverAddress, Owner

SCOPE = Scope("orders", "ids", "inc-1")
LOCAL = DriverAddress("127.0.0.1")
ASK = """
import pickle, sys
from delivered.engine.shard import may_send
print(may_send(pickle.loads(bytes.fromhex(sys.argv[1])), 0), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def jvm() -> Iterator[subprocess.Popen[bytes]]:
    """Stands for the driver's JVM, with which its arbiter ends."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def owner(jvm: subprocess.Popen[bytes]) -> Owner:
    return new_owner(psutil.Process(jvm.pid))


def _plan(owner: Owner, scope: Scope = SCOPE) -> BatchPlan:
    arbiter = driver_side.register_plan(scope, owner, LOCAL)
    return BatchPlan(scope, owner.id, Guarantee.AT_MOST_ONCE, 0, "{}", Action.WRITE, arbiter=arbiter)


def _attempt(plan: BatchPlan) -> subprocess.Popen[str]:
    """A task's process that asks for shard 0, prints the answer and lives on."""
    return subprocess.Popen(
        [sys.executable, "-c", ASK, pickle.dumps(plan).hex()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def _said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_one_of_many_attempts_at_once_may_send(owner: Owner) -> None:
    plan = _plan(owner)
    tasks = [_attempt(plan) for _ in range(4)]
    try:
        with ThreadPoolExecutor(len(tasks)) as pool:
            answers = [pool.submit(_said, t) for t in tasks]
            winner = next(t for t, a in zip(tasks, answers, strict=True) if _first(answers) is a)
            assert sum(a.done() for a in answers) == 1, "the others wait until the winner has ended"
            winner.kill()
            assert sorted(a.result() for a in answers) == ["False", "False", "False", "True"]
    finally:
        for task in tasks:
            task.kill()
            task.wait()


@tenacity.retry(stop=tenacity.stop_after_delay(60), wait=tenacity.wait_fixed(0.05), reraise=True)
def _first(answers: list) -> object:  # type: ignore[type-arg]
    found = next((a for a in answers if a.done()), None)
    assert found is not None
    assert found.result() == "True"
    return found


def test_a_shard_is_never_granted_again(owner: Owner) -> None:
    plan = _plan(owner)
    assert may_send(plan, 0)
    assert may_send(plan, 1), "another shard; the worker has moved on, and Spark has the result of shard 0"
    assert not may_send(plan, 0)
    shard._release()
    assert not may_send(plan, 1)


def test_a_later_plan_voids_the_grants_of_an_earlier_one(owner: Owner) -> None:
    first = _plan(owner)
    other = _plan(owner, Scope("bills", "ids", "inc-1"))
    second = _plan(owner)
    assert not may_send(first, 0)
    assert may_send(second, 0)
    assert may_send(other, 0), "another pipeline's plan stands"
    shard._release()


def test_without_an_arbiter_nothing_is_sent(owner: Owner) -> None:
    plan = _plan(owner)
    assert plan.arbiter is not None
    assert not may_send(BatchPlan(SCOPE, "o", Guarantee.AT_MOST_ONCE, 0, "{}", Action.WRITE), 0)
    stranger = Arbiter(plan.arbiter.host, plan.arbiter.port, uuid.uuid4().hex)
    assert not may_send(BatchPlan(SCOPE, "o", Guarantee.AT_MOST_ONCE, 0, "{}", Action.WRITE, arbiter=stranger), 0)


def test_an_arbiter_that_does_not_answer_is_an_error(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "CONNECT_TIMEOUT_S", 0.5)
    nobody = Arbiter("127.0.0.1", 1, "t")
    with pytest.raises(Unreachable, match=r"GRANT_UNREACHABLE.*This attempt sent nothing"):
        may_send(BatchPlan(SCOPE, owner.id, Guarantee.AT_MOST_ONCE, 0, "{}", Action.WRITE, arbiter=nobody), 0)


def test_one_process_per_driver_which_ends_with_it(owner: Owner, jvm: subprocess.Popen[bytes]) -> None:
    file = driver_side._file_of(owner)
    first, second = _plan(owner).arbiter, _plan(owner).arbiter
    assert first is not None
    assert second is not None
    assert (first.host, first.port) == (second.host, second.port)
    assert first.token != second.token
    assert file.stat().st_mode & 0o077 == 0, "its secret is the user's own"
    jvm.kill()
    jvm.wait()
    _until_missing(file)


@tenacity.retry(stop=tenacity.stop_after_delay(60), wait=tenacity.wait_fixed(0.05), reraise=True)
def _until_missing(file: Path) -> None:
    assert not file.exists()


def test_a_dead_arbiter_is_replaced_for_the_next_plan(owner: Owner) -> None:
    first = _plan(owner)
    assert first.arbiter is not None
    process = psutil.Process(json.loads(driver_side._file_of(owner).read_text())["pid"])
    process.kill()
    process.wait()
    second = _plan(owner)
    assert may_send(second, 0)
    shard._release()


def test_a_stranger_cannot_register_a_plan(owner: Owner) -> None:
    plan = _plan(owner)
    assert plan.arbiter is not None
    forged = {"host": "127.0.0.1", "local": "127.0.0.1", "port": plan.arbiter.port, "secret": "guessed"}
    with pytest.raises(ConnectionError):
        driver_side._plan(forged, "orders/ids", "mine")
    assert may_send(plan, 0)
    shard._release()
