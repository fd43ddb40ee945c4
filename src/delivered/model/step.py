"""The steps of a plan, their order under each mechanism, crash points between them, and log lines that name them."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any

from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, without_passwords

# The steps of a plan, and the crash points between them.
#
# A step has the same id in the plan, docstrings, log lines, crash points and tests. A crash point is a step's id with a
# moment, `commit.decide:after`, and optionally the n-th time it is reached, `commit.apply:after#2`.


class StepId(StrEnum):
    """In the order of a batch. Outside batches, `receive.*` belongs to receivers, `saga.*` to whoever runs sagas, and
    `audit.*` to audits."""

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
    AUDIT_READ = "audit.read"
    AUDIT_SEAL = "audit.seal"


class Moment(StrEnum):
    BEFORE = "before"
    AFTER = "after"


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
    work: Mapping[str, Any] | None = None


_here = _Place()
_work: Mapping[str, Any] = MappingProxyType({})


def work_for(pipeline: str | None, **facts: Any) -> None:
    """Say what this process works on, for its log lines; one of Spark's works on one task or query at a time."""
    global _work
    _work = {"pipeline": pipeline, **facts}
    _here.step, _here.facts = None, {}


@contextmanager
def batch_of(pipeline: str) -> Iterator[None]:
    """The same for this thread alone: the user's process works on several queries at a time."""
    _here.work, _here.step, _here.facts = {"pipeline": pipeline}, None, {}
    try:
        yield
    finally:
        _here.work, _here.step, _here.facts = None, None, {}


def place() -> dict[str, Any]:
    """Where this thread is: pipeline, step, batch, shard, attempt, sink; without those that it does not know."""
    known = {"pipeline": None, "step": _here.step, **(_here.work or _work), **_here.facts}
    return {name: known[name] for name in _PLACE if known.get(name) is not None}


def reach(step: StepId, moment: Moment, **facts: Any) -> None:
    """Mark that this process is at a crash point. Costs a microsecond if no handler is installed."""
    _here.step = step if moment is Moment.BEFORE else None
    if facts:
        _here.facts = facts
    if _handler is not None:
        _handler(f"{step}:{moment}", facts)


# The steps of a batch under each mechanism, in order.
#
# The planner builds plans from these lists, the engine looks up its current step in them (`parts`), and tests fail at
# crash points that are in no list.


class Mechanism(StrEnum):
    TWO_PHASE = "two_phase"
    ONE_TRANSACTION = "one_transaction"
    LAST_RESOURCE = "last_resource"
    """The deciding sink commits in one transaction; the other sinks prepare before it."""
    AT_LEAST_ONCE = "at_least_once"
    AT_MOST_ONCE = "at_most_once"


_SENDS = (
    StepId.BATCH_BEGIN,
    StepId.SOURCE_READ,
    StepId.WRITE_SEND,
    StepId.WRITE_FLUSH,
    StepId.COMMIT_RECORD,
    StepId.LOG,
)

STEPS: Mapping[Mechanism, tuple[StepId, ...]] = {
    Mechanism.TWO_PHASE: (
        StepId.SOURCE_READ,
        StepId.WRITE_STAGE,
        StepId.WRITE_PREPARE,
        StepId.COMMIT_DECIDE,
        StepId.COMMIT_APPLY,
        StepId.LOG,
    ),
    Mechanism.ONE_TRANSACTION: (
        StepId.SOURCE_READ,
        StepId.WRITE_STAGE,
        StepId.WRITE_PREPARE,
        StepId.COMMIT_APPLY,
        StepId.COMMIT_DECIDE,
        StepId.LOG,
    ),
    Mechanism.LAST_RESOURCE: (
        StepId.SOURCE_READ,
        StepId.WRITE_STAGE,
        StepId.WRITE_PREPARE,
        StepId.COMMIT_APPLY,
        StepId.COMMIT_DECIDE,
        StepId.COMMIT_APPLY,
        StepId.LOG,
    ),
    Mechanism.AT_LEAST_ONCE: _SENDS,
    Mechanism.AT_MOST_ONCE: _SENDS,
}
"""Steps of a batch without failures."""

MECHANISMS: Mapping[Guarantee, tuple[Mechanism, ...]] = {
    Guarantee.EXACTLY_ONCE: (Mechanism.TWO_PHASE, Mechanism.ONE_TRANSACTION, Mechanism.LAST_RESOURCE),
    Guarantee.AT_LEAST_ONCE: (Mechanism.AT_LEAST_ONCE,),
    Guarantee.AT_MOST_ONCE: (Mechanism.AT_MOST_ONCE,),
}

_CHECKED = (StepId.RECOVER_CLAIM, StepId.RECOVER_CHECK)
RECOVERY: Mapping[Guarantee, tuple[StepId, ...]] = {
    Guarantee.EXACTLY_ONCE: (*_CHECKED, StepId.RECOVER_APPLY, StepId.RECOVER_ABORT_ORPHANS),
    Guarantee.AT_LEAST_ONCE: (*_CHECKED, StepId.RECOVER_ABORT_ORPHANS),
    Guarantee.AT_MOST_ONCE: (*_CHECKED, StepId.RECOVER_ABORT_ORPHANS),
}
"""Steps of a start, before its first batch."""


def steps_of(mechanism: Mechanism, *, keys_in_table: bool = False) -> tuple[StepId, ...]:
    """The steps of a batch.

    Args:
        keys_in_table: a dedup keeps its keys in the deciding sink's database: recorded when read, active from the
            decision's transaction on.
    """
    found: list[StepId] = []
    for step in STEPS[mechanism]:
        if keys_in_table and step in _DECIDES:
            found.append(StepId.DEDUP_KEEP)
        found.append(step)
        if keys_in_table and step is StepId.SOURCE_READ:
            found.append(StepId.DEDUP_NOTE)
    return tuple(found)


@dataclass(frozen=True)
class Parts:
    """The role of each step under a guarantee.

    Attributes:
        begin: record, before the first row is sent, that the batch may send rows; None: not needed.
        write, promise: steps of a task: send rows; prepare them.
        decide: from here on the batch counts.
        apply: make decided rows visible; None: they are visible already.
    """

    begin: StepId | None
    write: StepId
    promise: StepId
    decide: StepId
    apply: StepId | None


@cache
def parts(guarantee: Guarantee) -> Parts:
    """From the lists above; equal for all mechanisms of a guarantee."""
    steps = STEPS[MECHANISMS[guarantee][0]]

    def one(*playing: StepId) -> StepId:
        (found,) = (s for s in steps if s in playing)
        return found

    return Parts(
        begin=StepId.BATCH_BEGIN if StepId.BATCH_BEGIN in steps else None,
        write=one(StepId.WRITE_STAGE, StepId.WRITE_SEND),
        promise=one(StepId.WRITE_PREPARE, StepId.WRITE_FLUSH),
        decide=one(*_DECIDES),
        apply=StepId.COMMIT_APPLY if StepId.COMMIT_APPLY in steps else None,
    )


_DECIDES = (StepId.COMMIT_DECIDE, StepId.COMMIT_RECORD)


# Logs as JSON lines, one object each, with the place in a batch that a line comes from.

LOG_FORMAT = "DELIVERED_LOG_FORMAT"
"""The environment variable; its value `json` is passed on to receivers and Spark's workers."""


def as_json() -> bool:
    """Whether this process and those that it starts log JSON lines."""
    return os.environ.get(LOG_FORMAT, "").lower() == "json"


def is_line_of_ours(line: str) -> bool:
    """Whether a line of a log with lines of others, Spark's, was written by `JsonLines` for this package."""
    return line.startswith('{"time": ') and '"logger": "delivered' in line


WARNING_MARK = "delivered: "
"""Prefix of a worker's lines on standard error that are meant for users. `delivered run` shows them."""


class JsonLines(logging.Formatter):
    """A line per record: time (RFC 3339, UTC), level, logger, message; pipeline, step, batch, shard and sink where they
    are known; code and next of an error.

    Set it on a handler of your own, `logging.getLogger("delivered").handlers`, to use it with other loggers.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": without_passwords(record.getMessage()),
            **place(),
        }
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, DeliveredError):
            line |= {"code": error.code, "next": error.next_step}
        elif record.exc_info:
            line["exception"] = without_passwords(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


def show_warnings() -> None:
    """Log warnings to standard error, which Spark adds to its own log: workers have no logging configuration."""
    ours = logging.getLogger("delivered")
    if logging.getLogger().handlers or any(not isinstance(h, logging.NullHandler) for h in ours.handlers):
        return
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    text = logging.Formatter(f"%(asctime)s %(process)d {WARNING_MARK}%(message)s", "%H:%M:%S")
    handler.setFormatter(JsonLines() if as_json() else text)
    ours.addHandler(handler)
