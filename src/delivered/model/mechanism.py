"""The steps of a batch under each mechanism, in order.

The planner builds plans from these lists, the engine looks up its current step in them (`parts`), and tests fail at
crash points that are in no list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from delivered.model.guarantee import Guarantee
from delivered.model.step import StepId


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
        keys_in_table: a dedup keeps its keys in the deciding sink's database: noted when read, active from the
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
    """Taken from the lists above; equal for all mechanisms of a guarantee."""
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
