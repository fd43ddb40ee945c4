"""Our errors as Spark shows them: it knows a worker's exception only as text, deep in a trace. Here they come back."""

from __future__ import annotations

import re

from delivered.model import errors
from delivered.model.errors import DeliveredError
from delivered.model.extras import missing_extra

_OURS = re.compile(r"\[DELIVERED_([A-Z0-9_]+)\] (.*?)(?: Next: (.*?))?\s*(?=\n|$)", re.DOTALL)
_LENGTH_MAX = 4_000
_WORKER_DIED = re.compile(
    r"no cause message|Python worker exited unexpectedly|EOFException|EOFError|Connection reset|Broken pipe|"
    r"Software caused connection abort"
)
"""What Spark says when a Python worker is gone: the end of a connection, at times nothing at all."""
_KNOWN_TYPES = {
    "OUTCOME_UNKNOWN": errors.OutcomeUnknown,
    "DECISION_UNKNOWN": errors.OutcomeUnknown,
    "APPLY_UNKNOWN": errors.OutcomeUnknown,
    "BEGIN_UNKNOWN": errors.OutcomeUnknown,
    "SWEEP_INCOMPLETE": errors.OutcomeUnknown,
}
_REFUSED = ("OPTION_", "GUARANTEE_", "NAME_", "CHECKPOINT_NEW", "ASYNC_", "EXTRA_", "SECRET_", "FORMAT_", "SCHEMA")


def translated(error: BaseException) -> DeliveredError | None:
    """The error of ours inside an exception of Spark's, or the extra that brings a missing library; None: neither."""
    if isinstance(error, DeliveredError):
        return error
    found = _OURS.search(str(error))
    if found is None:
        return missing_extra(str(error)) or _worker_died(str(error))
    code, message, next_step = found.group(1), found.group(2).strip(), found.group(3)
    # A message may hold line breaks only by accident; the trace of Spark follows on the next line.
    kind = _KNOWN_TYPES.get(code, errors.UsageError if code.startswith(_REFUSED) else DeliveredError)
    return kind(code, message[:_LENGTH_MAX], next_step.strip() if next_step else None)


def _worker_died(said: str) -> DeliveredError | None:
    found = _WORKER_DIED.search(said)
    if found is None:
        return None
    return DeliveredError(
        "WORKER_DIED",
        f"A Python worker of Spark ended without a word ({found.group(0)!r}): it was killed, by a person or because "
        "memory ran out. Checkpoint and ledger hold what was done; nothing that the guarantee promises is lost by it.",
        next_step="start the pipeline again, now or later: the batch is finished or run again, as its guarantee says; "
        "if it comes back, look for a lack of memory",
    )
