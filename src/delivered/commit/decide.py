"""After a batch: check what the tasks say, decide, apply."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from delivered.commit.apply import apply_decided
from delivered.commit.context import Context
from delivered.model.errors import (
    DeliveredError,
    InvariantBroken,
    OutcomeUnknown,
    PromiseBroken,
    ReplayDiffers,
)
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.model.limits import DECISION_BYTES_MAX
from delivered.model.outcome import Failed, Ok, Unknown
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Action, BatchPlan, Decision, LedgerState, Prepared, ShardMessage

log = logging.getLogger(__name__)


def commit_batch(
    context: Context, batch: int, offsets: str, messages: Sequence[ShardMessage | None]
) -> Decision | None:
    """Make a batch count, then visible.

    Runs on the driver, after all tasks of the batch succeeded. May be called again for the same batch.
    Before: every shard is prepared. After: the decision is durable and every participant visible.

        1  every task's message is there and speaks of this batch
        2  commit.decide   one durable record                      <- from here on the batch counts
        3  commit.apply    each participant made visible

    Returns:
        The decision, or None if every shard was in already.

    Raises:
        InvariantBroken: the messages do not fit together. Nothing was decided.
        ReplayDiffers: a shard written again differs from the one decided. Nothing was applied.
        OutcomeUnknown, PromiseBroken: the next start finishes the batch.
    """
    said = _checked(context, batch, messages)
    if said and all(m.did is Action.SKIP for m in said):
        return None
    state = context.ledger.resume(context.owner.id)
    decision = _decision(context, batch, offsets, said, state)
    if decision is None:
        return None
    _decide(context, decision)
    if context.guarantee is Guarantee.EXACTLY_ONCE:
        _apply(context, decision)
    return decision


def abort_batch(context: Context, messages: Sequence[ShardMessage | None]) -> None:
    """Give back what the tasks of a failed batch prepared. What is missed here, the next recovery sweeps.

    Never touches a batch that was decided: the participants of a decision may be committing.
    """
    state = context.ledger.resume(context.owner.id)
    for message in messages:
        if message is None or message.prepared is None or not message.prepared.handle:
            continue
        if state.last is not None and state.last.batch >= message.plan.batch:
            continue
        context.resource.abort(message.prepared)


def _checked(context: Context, batch: int, messages: Sequence[ShardMessage | None]) -> list[ShardMessage]:
    said = [m for m in messages if m is not None]
    if len(said) != len(messages):
        raise InvariantBroken(
            "MESSAGE_MISSING",
            f"Batch {batch}: {len(messages) - len(said)} of {len(messages)} tasks sent no message, and Spark asks to "
            "commit. Nothing was decided.",
            next_step="start the pipeline again; the batch runs again",
        )
    for m in said:
        if (m.plan.scope, m.plan.owner, m.plan.batch) != (context.scope, context.owner.id, batch):
            raise InvariantBroken(
                "MESSAGE_FOREIGN",
                f"Batch {batch} of {context.scope}: shard {m.shard} speaks of batch {m.plan.batch} of {m.plan.scope}, "
                f"owner {m.plan.owner}; this driver is {context.owner.id}. Nothing was decided.",
                next_step="start the pipeline again; the batch runs again",
            )
    if len({m.shard for m in said}) != len(said):
        raise InvariantBroken(
            "SHARD_TWICE",
            f"Batch {batch}: two messages for one shard among {sorted(m.shard for m in said)}. Nothing was decided.",
            next_step="start the pipeline again; the batch runs again",
        )
    return sorted(said, key=lambda m: m.shard)


def _decision(
    context: Context, batch: int, offsets: str, said: list[ShardMessage], state: LedgerState
) -> Decision | None:
    written = tuple(m.prepared for m in said if m.prepared is not None)
    given_up = sum((m.given_up for m in said), Fingerprint())
    plan = said[0].plan if said else None
    last = state.last
    if last is not None and last.batch == batch:
        if plan is None or not plan.rewrite:
            # Committed before, and Spark asks again: the decision stands as it is.
            return last
        return _repaired(context, plan, last, said, written)
    if last is not None and last.batch > batch:
        raise InvariantBroken(
            "DECISION_OLD",
            f"Batch {batch} is to be decided, and the ledger holds batch {last.batch} already. Nothing was decided.",
            next_step="stop every other driver on this checkpoint, then start the pipeline again",
        )
    account = sum((p.fingerprint for p in written), Fingerprint())
    return Decision(
        scope=context.scope,
        owner=context.owner.id,
        guarantee=context.guarantee,
        batch=batch,
        offsets=plan.offsets if plan else offsets,
        participants=written,
        total=(last.total if last else Fingerprint()) + account,
        given_up=(last.given_up if last else Fingerprint()) + given_up,
        decided_at_ms=time.time_ns() // 1_000_000,
    )


def _repaired(
    context: Context, plan: BatchPlan, last: Decision, said: list[ShardMessage], written: tuple[Prepared, ...]
) -> Decision:
    """The decision with the participants that replace those whose promise expired."""
    different = [p for p in written if plan.rewrite[p.shard] != p.fingerprint]
    if different or len(said) != plan.shards or {p.shard for p in written} != set(plan.rewrite):
        for p in written:
            context.resource.abort(p)
    if len(said) != plan.shards:
        raise ReplayDiffers(
            "REPLAY_SHARDS_DIFFER",
            f"Batch {last.batch} was decided with {plan.shards} shards and ran again with {len(said)}; shards "
            f"{sorted(plan.rewrite)} must be written again and cannot be told apart now. Nothing more was applied.",
            next_step="start again with the former number of partitions (spark.sql.shuffle.partitions, repartition)",
        )
    if different:
        p = different[0]
        raise ReplayDiffers(
            "REPLAY_DIFFERS",
            f"Batch {last.batch}, shard {p.shard}: decided with fingerprint {plan.rewrite[p.shard]}, ran again with "
            f"{p.fingerprint}. The transform is not deterministic; the other shards of the batch are visible.",
            next_step="take what changes between runs (rand(), now()) out of the transform, then start again",
        )
    if {p.shard for p in written} != set(plan.rewrite):
        raise InvariantBroken(
            "REWRITE_INCOMPLETE",
            f"Batch {last.batch}: shards {sorted(plan.rewrite)} had to be written again, the tasks wrote "
            f"{sorted(p.shard for p in written)}.",
            next_step="start the pipeline again; the batch runs again",
        )
    new = {p.shard: p for p in written}
    participants = tuple(new.get(p.shard, p) for p in last.participants)
    return Decision(
        scope=last.scope,
        owner=context.owner.id,
        guarantee=last.guarantee,
        batch=last.batch,
        offsets=last.offsets,
        participants=participants,
        total=last.total,
        given_up=last.given_up,
        decided_at_ms=time.time_ns() // 1_000_000,
        revision=last.revision + 1,
    )


def _decide(context: Context, decision: Decision) -> None:
    step = StepId.COMMIT_DECIDE if context.guarantee is Guarantee.EXACTLY_ONCE else StepId.COMMIT_RECORD
    size = len(decision.to_json())
    if size > DECISION_BYTES_MAX:
        _give_back(context, decision)
        raise InvariantBroken(
            "DECISION_TOO_LARGE",
            f"The decision of batch {decision.batch} is {size} bytes with {len(decision.participants)} participants; "
            f"the limit is {DECISION_BYTES_MAX}. Nothing was decided.",
            next_step="write with fewer partitions, for instance df.coalesce(200)",
        )
    reach(step, Moment.BEFORE, batch=decision.batch)
    outcome = context.ledger.decide(decision)  # THE line that decides a batch
    if isinstance(outcome, Unknown):
        outcome = _look(context, decision, outcome)
    match outcome:
        case Ok():
            reach(step, Moment.AFTER, batch=decision.batch)
        case Failed(reason):
            _give_back(context, decision)
            raise DeliveredError(
                "DECISION_FAILED",
                f"Batch {decision.batch} was not decided: {reason}. Nothing of it is visible.",
                next_step="start the pipeline again; the batch runs again",
            )
        case Unknown(reason):
            raise OutcomeUnknown(
                "DECISION_UNKNOWN",
                f"Whether batch {decision.batch} was decided cannot be told now: {reason}.",
                next_step="start the pipeline again when the ledger answers; recovery finishes or repeats the batch",
            )


def _look(context: Context, decision: Decision, unknown: Unknown) -> Ok[None] | Failed | Unknown:
    """Fence, so that a decision under way cannot get in later; then look whether it is in."""
    try:
        last = context.ledger.claim(context.owner).last
    except DeliveredError as error:
        return Unknown(f"{unknown.reason}; then {error}")
    # The same batch and revision by the same owner is this decision: nobody else may write it.
    if last is not None and (last.batch, last.revision, last.owner) == (
        decision.batch,
        decision.revision,
        decision.owner,
    ):
        return Ok(None)
    return Failed(unknown.reason)


def _give_back(context: Context, decision: Decision) -> None:
    if decision.revision == 0 and decision.guarantee is Guarantee.EXACTLY_ONCE:
        for p in decision.participants:
            context.resource.abort(p)


def _apply(context: Context, decision: Decision) -> None:
    broken = apply_decided(context, decision, StepId.COMMIT_APPLY)
    gone = [
        p.shard
        for p in broken
        if not context.resource.applied(Work(decision.scope, decision.batch, p.shard, p.attempt))
    ]
    if gone:
        raise PromiseBroken(
            "PROMISE_EXPIRED",
            f"Batch {decision.batch} is decided, and the sink dropped the prepared rows of shards {gone} before they "
            "were made visible. Nothing is lost: these shards alone are written again by the next start.",
            next_step="start the pipeline again; if it comes back, raise transactionTimeout or shorten the batches",
        )
