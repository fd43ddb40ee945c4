"""Compares a ledger with a checkpoint. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from delivered.model.capability import Guarantee
from delivered.model.errors import LedgerAhead, LedgerBehind, Refused
from delivered.model.identity import OtherLedger, Scope
from delivered.model.limits import LEDGER_INCARNATIONS
from delivered.model.options import shown, starting_at, without_newest
from delivered.model.work import Archived, CheckpointView, Decision, LedgerState, Started, Tolerance


@dataclass(frozen=True)
class NewBatch:
    """The batch was neither decided nor started."""


@dataclass(frozen=True)
class DecidedBatch:
    """The batch is decided; what is left of it must be applied."""

    decision: Decision


@dataclass(frozen=True)
class StartedBatch:
    """at_most_once: the batch may have sent records, but was not recorded as done."""

    started: Started


@dataclass(frozen=True)
class ArchivedRun:
    """The run was decided and finished so long ago that only its archive entry is left."""

    archived: Archived


_OTHERS_SHOWN = 5

Verdict = NewBatch | DecidedBatch | StartedBatch | ArchivedRun


def judge(
    state: LedgerState,
    view: CheckpointView,
    scope: Scope,
    guarantee: Guarantee,
    tolerance: Tolerance,
    others: Sequence[OtherLedger] = (),
) -> Verdict:
    """Classify the batch about to run.

    Args:
        others: other ledgers in the same place, if this one has nothing of the checkpoint.

    Raises:
        LedgerAhead: the checkpoint was restored from an older copy.
        LedgerBehind: the sink or its ledger was restored from an older copy, or replaced.
        Refused: the checkpoint is new, but an earlier one already wrote to this sink; or the guarantee became stricter,
            and records of this batch may have been sent under the weaker one.
    """
    last, started = state.last, state.started
    if last is None and state.archived is not None:
        return _judge_archived(state.archived, view, guarantee, tolerance)
    newest = max((r.batch for r in (last, started) if r is not None), default=None)
    if newest is not None and newest > view.batch:
        raise LedgerAhead(
            "LEDGER_AHEAD.START",
            newest=newest,
            incarnation=view.incarnation,
            batch=view.batch,
            action=_recovery_action(
                last.offsets if last is not None else started.offsets if started is not None else ""
            ),
        )
    if last is not None and last.batch == view.batch:
        _check_offsets(last.offsets, view)
        return DecidedBatch(last)
    if started is not None and started.batch == view.batch:
        _check_offsets(started.offsets, view)
        return _judge_started(started, guarantee, tolerance)
    if newest is None:
        if (error := find_rename(view, scope, tolerance, others)) is not None:
            raise error
        _check_first_batch(state, view, scope, guarantee, tolerance, others)
    elif (last.batch if last else -1) < view.batch - 1 - view.repartitions and not tolerance.missing_ledger:
        # Every batch that Spark logged was decided. If it only started, its decision was lost.
        raise LedgerBehind(
            "LEDGER_BEHIND.START",
            batch=view.batch,
            newest=last.batch if last else "none",
            action=without_newest(last.offsets if last else "", last.other_sinks if last else ()),
        )
    if last is not None and last.guarantee is Guarantee.AT_LEAST_ONCE:
        # Under at_least_once, a batch leaves no record until it is done.
        return _judge_started(Started(view.batch, view.offsets), guarantee, tolerance)
    return NewBatch()


def _judge_started(started: Started, guarantee: Guarantee, tolerance: Tolerance) -> Verdict:
    """Classify a batch whose records may already have been sent."""
    match guarantee:
        case Guarantee.AT_MOST_ONCE:
            return StartedBatch(started)
        case Guarantee.AT_LEAST_ONCE:
            return NewBatch()
        case Guarantee.EXACTLY_ONCE if tolerance.repeated_batch:
            return NewBatch()
        case Guarantee.EXACTLY_ONCE:
            raise Refused("BATCH_BEGUN", batch=started.batch)


def _judge_archived(archived: Archived, view: CheckpointView, guarantee: Guarantee, tolerance: Tolerance) -> Verdict:
    """Classify a batch of an incarnation that the ledger has archived."""
    if not archived.decided:
        return _judge_started(Started(view.batch, view.offsets), guarantee, tolerance)
    if view.run:
        return ArchivedRun(archived)
    if tolerance.missing_ledger:
        return NewBatch()
    raise LedgerBehind(
        "LEDGER_FORGOTTEN",
        batch=view.batch,
        incarnation=view.incarnation,
        rows=archived.rows,
        ledger_incarnations=LEDGER_INCARNATIONS,
    )


def _check_offsets(decided: str, view: CheckpointView) -> None:
    if decided != view.offsets:
        raise LedgerAhead(
            "LEDGER_AHEAD.OFFSETS",
            batch=view.batch,
            incarnation=view.incarnation,
            decided=shown(decided),
            offsets=shown(view.offsets),
            action=_recovery_action(decided),
        )


def _recovery_action(offsets: str) -> str:
    """How to continue after the last decided batch, without an audit."""
    return (
        "restore the newest checkpoint; or start a new one where the last decided batch ended: a new "
        f'checkpointLocation, {starting_at(offsets)} and, once, .option("newCheckpoint", "accept")'
    )


def find_rename(
    view: CheckpointView, scope: Scope, tolerance: Tolerance, others: Sequence[OtherLedger]
) -> LedgerBehind | None:
    """Why a checkpoint must not continue that is in the ledger under another name."""
    former = next((o for o in others if o.same_incarnation), None)
    if former is None or tolerance.missing_ledger:
        return None
    what, name, now = "sink", former.sink, scope.sink
    if former.pipeline != scope.pipeline:
        what, name, now = "pipeline", former.pipeline, scope.pipeline
    named_by = " (without the option, the pipeline is named after the query)" if what == "pipeline" else ""
    return LedgerBehind(
        "LEDGER_RENAMED",
        incarnation=view.incarnation,
        what=what,
        name=name,
        batch=view.batch,
        current=now,
        named_by=named_by,
    )


def _check_first_batch(
    state: LedgerState,
    view: CheckpointView,
    scope: Scope,
    guarantee: Guarantee,
    tolerance: Tolerance,
    others: Sequence[OtherLedger],
) -> None:
    if view.batch > 0 and not tolerance.missing_ledger:
        known = ", ".join(f"{o.pipeline!r} (sink {o.sink!r})" for o in others[:_OTHERS_SHOWN])
        raise LedgerBehind(
            "LEDGER_MISSING.START",
            batch=view.batch,
            pipeline=scope.pipeline,
            sink=scope.sink,
            incarnation=view.incarnation,
            known=f" Ledgers in the same place: {known}." if known else "",
            renamed="if the pipeline or its sink was renamed, restore the name; " if known else "",
        )
    if guarantee is Guarantee.AT_LEAST_ONCE or tolerance.new_checkpoint:
        return
    if state.earlier:
        earlier = state.earlier[0]
        raise Refused(
            "CHECKPOINT_NEW.DECIDED",
            incarnation=view.incarnation,
            pipeline=earlier.scope.pipeline,
            batch=earlier.batch,
            sink=earlier.scope.sink,
            earlier_incarnation=earlier.scope.incarnation,
            offsets=shown(earlier.offsets),
            starting_offsets=starting_at(earlier.offsets),
        )
    if state.earlier_started:
        incarnation, started = state.earlier_started[0]
        raise Refused(
            "CHECKPOINT_NEW.STARTED",
            incarnation=view.incarnation,
            started_incarnation=incarnation,
            batch=started.batch,
            offsets=shown(started.offsets),
            starting_offsets=starting_at(started.offsets),
        )
