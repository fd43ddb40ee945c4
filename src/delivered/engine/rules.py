"""What a ledger and a checkpoint mean together. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from delivered.model.archive import Archived
from delivered.model.dialect import shown, starting_at
from delivered.model.errors import LedgerAhead, LedgerBehind, Refused
from delivered.model.guarantee import Guarantee
from delivered.model.identity import OtherLedger, Scope
from delivered.model.limits import LEDGER_INCARNATIONS
from delivered.model.work import Begun, CheckpointView, Decision, LedgerState, Tolerance


@dataclass(frozen=True)
class NewBatch:
    """The batch was never decided nor begun."""


@dataclass(frozen=True)
class DecidedBatch:
    """The batch counts already; what is left of it must be applied."""

    decision: Decision


@dataclass(frozen=True)
class BegunBatch:
    """at_most_once: the batch may have sent records, and its account is missing."""

    begun: Begun


@dataclass(frozen=True)
class ArchivedRun:
    """The run was decided and finished, so long ago that only its archived entry is left."""

    archived: Archived


_OTHERS_SHOWN = 5

Verdict = NewBatch | DecidedBatch | BegunBatch | ArchivedRun


def judge(
    state: LedgerState,
    view: CheckpointView,
    scope: Scope,
    guarantee: Guarantee,
    tolerance: Tolerance,
    others: Sequence[OtherLedger] = (),
) -> Verdict:
    """Say what the batch about to run is.

    Args:
        others: other ledgers in the same place, where this one knows nothing of the checkpoint.

    Raises:
        LedgerAhead: an older checkpoint was put back.
        LedgerBehind: the sink or its ledger was put back, or is another one.
        Refused: the checkpoint is new, and an earlier one already wrote to this sink; or the guarantee became
            stricter, and records of this batch may have left under the weaker one.
    """
    last, begun = state.last, state.begun
    if last is None and state.archived is not None:
        return _archived(state.archived, view, guarantee, tolerance)
    newest = max((r.batch for r in (last, begun) if r is not None), default=None)
    if newest is not None and newest > view.batch:
        raise LedgerAhead(
            "LEDGER_AHEAD",
            f"The ledger holds batch {newest} of incarnation {view.incarnation}, the checkpoint is about to run "
            f"batch {view.batch}: an older copy of the checkpoint was put back. Going on would skip or repeat records.",
            next_step=_after(last.offsets if last is not None else begun.offsets if begun is not None else ""),
        )
    if last is not None and last.batch == view.batch:
        _same_offsets(last.offsets, view)
        return DecidedBatch(last)
    if begun is not None and begun.batch == view.batch:
        _same_offsets(begun.offsets, view)
        return _begun(begun, guarantee, tolerance)
    if newest is None:
        _renamed(view, scope, tolerance, others)
        _first_of_ledger(state, view, scope, guarantee, tolerance, others)
    elif (last.batch if last else -1) < view.batch - 1 and not tolerance.missing_ledger:
        # Every batch that Spark logged was decided. One that was only begun shows that the decision is gone.
        raise LedgerBehind(
            "LEDGER_BEHIND",
            f"The checkpoint is about to run batch {view.batch}, the ledger's newest decided batch is "
            f"{last.batch if last else 'none'}: the batches between them are missing in the sink. The sink, or its "
            "ledger, was put back to an older copy.",
            next_step='restore the sink, or accept the gap once with .option("missingLedger", "accept")',
        )
    if last is not None and last.guarantee is Guarantee.AT_LEAST_ONCE:
        # Under at_least_once a batch leaves no trace before it is done.
        return _begun(Begun(view.batch, view.offsets), guarantee, tolerance)
    return NewBatch()


def _begun(begun: Begun, guarantee: Guarantee, tolerance: Tolerance) -> Verdict:
    """What to do with a batch of which records may have left before."""
    match guarantee:
        case Guarantee.AT_MOST_ONCE:
            return BegunBatch(begun)
        case Guarantee.AT_LEAST_ONCE:
            return NewBatch()
        case Guarantee.EXACTLY_ONCE if tolerance.repeated_batch:
            return NewBatch()
        case Guarantee.EXACTLY_ONCE:
            raise Refused(
                "BATCH_BEGUN",
                f"Batch {begun.batch} may have been begun under a weaker guarantee and never finished; some of its "
                "records may be in the sink. exactly_once can neither skip nor repeat it.",
                next_step='accept that its records may appear twice with .option("repeatedBatch", "accept"), once; '
                "or start with guarantee at_most_once, let it finish one batch, then change to exactly_once",
            )


def _archived(archived: Archived, view: CheckpointView, guarantee: Guarantee, tolerance: Tolerance) -> Verdict:
    """What a batch of an incarnation is of which the ledger keeps its archived entry alone."""
    if not archived.decided:
        return _begun(Begun(view.batch, view.offsets), guarantee, tolerance)
    if view.run:
        return ArchivedRun(archived)
    if tolerance.missing_ledger:
        return NewBatch()
    raise LedgerBehind(
        "LEDGER_FORGOTTEN",
        f"The checkpoint is about to run batch {view.batch} of incarnation {view.incarnation}, which wrote "
        f"{archived.rows} records to this sink, and more than {LEDGER_INCARNATIONS} later checkpoints did since. The "
        "ledger does not hold its batches any more: whether the sink has this one cannot be told.",
        next_step="use the newest checkpoint; or accept once that the batch may be there, with "
        '.option("missingLedger", "accept")',
    )


def _same_offsets(decided: str, view: CheckpointView) -> None:
    if decided != view.offsets:
        raise LedgerAhead(
            "LEDGER_AHEAD",
            f"Batch {view.batch} of incarnation {view.incarnation} was decided for the offsets {shown(decided)}, and "
            f"is about to run for {shown(view.offsets)}: an older copy of the checkpoint was put back. Taking the one "
            "for the other would lose records.",
            next_step=_after(decided),
        )


def _after(offsets: str) -> str:
    """How to go on behind the last decided batch, without a file to audit."""
    return (
        "restore the newest checkpoint; or begin a new one where the last decided batch ended: a new "
        f'checkpointLocation, {starting_at(offsets)} and, once, .option("newCheckpoint", "accept")'
    )


def _renamed(view: CheckpointView, scope: Scope, tolerance: Tolerance, others: Sequence[OtherLedger]) -> None:
    """Refuse a checkpoint that the ledger knows under another name."""
    former = next((o for o in others if o.same_incarnation), None)
    if former is None or tolerance.missing_ledger:
        return
    what, name, now = "sink", former.sink, scope.sink
    if former.pipeline != scope.pipeline:
        what, name, now = "pipeline", former.pipeline, scope.pipeline
    named_by = " (without the option, the query's name is the pipeline's)" if what == "pipeline" else ""
    raise LedgerBehind(
        "LEDGER_RENAMED",
        f"This checkpoint (incarnation {view.incarnation}) wrote its batches as {what} {name!r}, and is about to run "
        f"batch {view.batch} as {what} {now!r}{named_by}. A ledger knows batches by these names: going on could "
        f"write batch {view.batch} twice.",
        next_step=f'restore the name: .option("{what}", "{name}"); another name needs a new checkpoint',
    )


def _first_of_ledger(
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
            "LEDGER_MISSING",
            f"The checkpoint is about to run batch {view.batch}, and the ledger of pipeline {scope.pipeline!r}, sink "
            f"{scope.sink!r}, knows no batch of incarnation {view.incarnation}. Whether the sink holds batch "
            f"{view.batch} already cannot be told.{f' Ledgers in the same place: {known}.' if known else ''}",
            next_step=("if the pipeline or its sink was renamed, restore the name; " if known else "")
            + "point the sink at the ledger that this checkpoint was written with; or, if this is the first start with "
            'a ledger, accept it once with .option("missingLedger", "accept")',
        )
    if guarantee is Guarantee.AT_LEAST_ONCE or tolerance.new_checkpoint:
        return
    if state.earlier:
        earlier = state.earlier[0]
        raise Refused(
            "CHECKPOINT_NEW",
            f"The checkpoint is new (incarnation {view.incarnation}), and pipeline {earlier.scope.pipeline!r} already "
            f"wrote batch {earlier.batch} to sink {earlier.scope.sink!r} from another checkpoint (incarnation "
            f"{earlier.scope.incarnation}). Reading the source again from the start would write records twice. The "
            f"earlier one ended at the offsets {shown(earlier.offsets)}",
            next_step=f"restore the earlier checkpoint, or start where it ended with {starting_at(earlier.offsets)} "
            'and accept the new checkpoint with .option("newCheckpoint", "accept"), or give the pipeline another name',
        )
    if state.earlier_begun:
        incarnation, begun = state.earlier_begun[0]
        raise Refused(
            "CHECKPOINT_NEW",
            f"The checkpoint is new (incarnation {view.incarnation}), and incarnation {incarnation} began "
            f"batch {begun.batch} of this pipeline and never finished it: some of its records may be in the sink. "
            f"Reading the source again from the start would write them twice. It ends at the offsets "
            f"{shown(begun.offsets)}",
            next_step=f"restore the earlier checkpoint, or start where it ended with {starting_at(begun.offsets)} and "
            'accept the new checkpoint with .option("newCheckpoint", "accept"), or give the pipeline another name',
        )
