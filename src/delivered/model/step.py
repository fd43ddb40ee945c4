"""The steps of a plan, and the crash points between them.

A step has the same id in the plan, docstrings, log lines, crash points and tests.
A crash point is a step's id with a moment, `commit.decide:after`, and optionally the n-th time it is reached,
`commit.apply:after#2`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any


class StepId(StrEnum):
    """In the order of a batch; `receive.*` belongs to receivers and `saga.*` to whoever runs sagas, outside batches."""

    SOURCE_READ = "source.read"
    DEDUP_NOTE = "dedup.note"
    RECOVER_CLAIM = "recover.claim"
    RECOVER_CHECK = "recover.check"
    RECOVER_APPLY = "recover.apply"
    RECOVER_ABORT_ORPHANS = "recover.abort_orphans"
    BATCH_BEGIN = "batch.begin"
    WRITE_STAGE = "write.stage"
    WRITE_SEND = "write.send"
    WRITE_PREPARE = "write.prepare"
    WRITE_FLUSH = "write.flush"
    DEDUP_KEEP = "dedup.keep"
    COMMIT_DECIDE = "commit.decide"
    COMMIT_APPLY = "commit.apply"
    COMMIT_RECORD = "commit.record"
    LOG = "log"
    RECEIVE_TAKE = "receive.take"
    RECEIVE_PERSIST = "receive.persist"
    RECEIVE_QUARANTINE = "receive.quarantine"
    RECEIVE_ACK = "receive.ack"
    SAGA_LOG = "saga.log"
    SAGA_CALL = "saga.call"


class Moment(StrEnum):
    BEFORE = "before"
    AFTER = "after"


class Role(StrEnum):
    """The process at a crash point."""

    DRIVER = "driver"
    TASK = "task"
    RECEIVER = "receiver"
    WORKER = "worker"


ROLE_OF_STEP: dict[StepId, Role] = {
    StepId.SOURCE_READ: Role.TASK,
    StepId.DEDUP_NOTE: Role.TASK,
    StepId.RECOVER_CLAIM: Role.DRIVER,
    StepId.RECOVER_CHECK: Role.DRIVER,
    StepId.RECOVER_APPLY: Role.DRIVER,
    StepId.RECOVER_ABORT_ORPHANS: Role.DRIVER,
    StepId.BATCH_BEGIN: Role.DRIVER,
    StepId.WRITE_STAGE: Role.TASK,
    StepId.WRITE_SEND: Role.TASK,
    StepId.WRITE_PREPARE: Role.TASK,
    StepId.WRITE_FLUSH: Role.TASK,
    StepId.DEDUP_KEEP: Role.DRIVER,
    StepId.COMMIT_DECIDE: Role.DRIVER,
    StepId.COMMIT_APPLY: Role.DRIVER,
    StepId.COMMIT_RECORD: Role.DRIVER,
    StepId.LOG: Role.DRIVER,
    StepId.RECEIVE_TAKE: Role.RECEIVER,
    StepId.RECEIVE_PERSIST: Role.RECEIVER,
    StepId.RECEIVE_QUARANTINE: Role.RECEIVER,
    StepId.RECEIVE_ACK: Role.RECEIVER,
    StepId.SAGA_LOG: Role.WORKER,
    StepId.SAGA_CALL: Role.WORKER,
}


@dataclass(frozen=True)
class Step:
    """One line of a plan.

    Attributes:
        does: what happens, in a few words.
        on_crash: what a crash right after this step costs.
        decides: whether the batch counts from here on.
    """

    id: StepId
    does: str
    on_crash: str
    decides: bool = False


Handler = Callable[[str, dict[str, Any]], None]
_handler: Handler | None = None
_PLACE = ("pipeline", "step", "batch", "shard", "attempt", "sink")


def install(handler: Handler | None) -> None:
    """Install this process's crash point handler; None: none. Only for `delivered.crash`."""
    global _handler
    _handler = handler


def armed() -> bool:
    """Whether a crash point handler is installed. Applies then run one by one, so that a crash between two exists."""
    return _handler is not None


class _Place(threading.local):
    step: StepId | None = None
    facts: Mapping[str, Any] = MappingProxyType({})


_here = _Place()
_work: Mapping[str, Any] = MappingProxyType({})


def work_for(pipeline: str | None, **facts: Any) -> None:
    """Say what this process works on, for its log lines; one of Spark's works on one task or query at a time."""
    global _work
    _work = {"pipeline": pipeline, **facts}
    _here.step, _here.facts = None, {}


def place() -> dict[str, Any]:
    """Where this thread is: pipeline, step, batch, shard, attempt, sink; without those that it does not know."""
    known = {"pipeline": None, "step": _here.step, **_work, **_here.facts}
    return {name: known[name] for name in _PLACE if known.get(name) is not None}


def reach(step: StepId, moment: Moment, **facts: Any) -> None:
    """Mark that this process is at a crash point. Costs a microsecond if no handler is installed."""
    _here.step = step if moment is Moment.BEFORE else None
    if facts:
        _here.facts = facts
    if _handler is not None:
        _handler(f"{step}:{moment}", facts)
