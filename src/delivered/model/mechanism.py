"""What a batch goes through to keep a guarantee: the steps of each mechanism, in order.

Written here once. The planner makes its plan of these lists; the engine asks them which step it is at (`parts`); a
crash point that no list holds is an error in the tests.
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
    """Of several sinks the one that decides commits in one transaction; the others prepare before it."""
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
"""Of a batch, when nothing goes wrong."""

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
"""Of a start, before its first batch."""


def steps_of(mechanism: Mechanism, *, keys_in_table: bool = False) -> tuple[StepId, ...]:
    """The steps of a batch.

    Args:
        keys_in_table: a dedup remembers keys in the database of the sink that decides: noted when they were read, and
            kept by the transaction of the decision.
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
    """Which step plays which part under a guarantee.

    Attributes:
        begin: makes known, before the first row leaves, that a batch may send; None: none need know.
        write, promise: of a task: rows go out; they are durable, and as far as they can be without a decision.
        decide: from here on the batch counts.
        apply: makes what is decided visible; None: it is visible already.
    """

    begin: StepId | None
    write: StepId
    promise: StepId
    decide: StepId
    apply: StepId | None


@cache
def parts(guarantee: Guarantee) -> Parts:
    """By the lists above; all mechanisms of one guarantee agree."""
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
