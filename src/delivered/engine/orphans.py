"""Abort orphans: open participants that no decision names."""

from __future__ import annotations

import logging
import time

from delivered.engine.context import Context
from delivered.model.errors import OutcomeUnknown
from delivered.model.limits import SWEEP_EVERY_S
from delivered.model.outcome import Failed, Ok, Unknown
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision

log = logging.getLogger(__name__)


def abort_late_orphans(context: Context, *keep: Decision) -> None:
    """`abort_orphans`, at most once a minute: tasks of a superseded driver may outlive it, and open participants."""
    if time.monotonic() - context.swept.at_s > SWEEP_EVERY_S:
        abort_orphans(context, *keep)


def abort_orphans(context: Context, *keep: Decision) -> None:
    """Abort every open participant of this pipeline and sink that no decision in `keep` names.

    Raises:
        OutcomeUnknown: some may still be open.
        Fenced: another driver owns the ledger, and some may be its own.
    """
    reach(StepId.RECOVER_ABORT_ORPHANS, Moment.BEFORE)
    context.ledger.check_claim()
    context.swept.at_s = time.monotonic()
    match context.committers.abort_orphans([p for decision in keep for p in decision.participants]):
        case Ok(count):
            if count:
                log.info("aborted %d orphaned participants", count, extra={"step": StepId.RECOVER_ABORT_ORPHANS})
        case Failed(reason) | Unknown(reason):
            raise OutcomeUnknown(
                "ORPHANS_NOT_ABORTED",
                f"Orphaned participants of an earlier run of {context.scope.pipeline!r} at sink {context.scope.sink!r} "
                f"could not be aborted: {reason}.",
                next_step="start again once the server responds; `delivered transactions list` shows them",
            )
    reach(StepId.RECOVER_ABORT_ORPHANS, Moment.AFTER)
