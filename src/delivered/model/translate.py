"""What workers say, as it comes back out of Spark: errors as text in a trace, warnings among the lines of its log."""

from __future__ import annotations

import re

from delivered.model import errors
from delivered.model.errors import DeliveredError
from delivered.model.extras import missing_extra

_OURS = re.compile(
    r"(?:delivered\.model\.errors\.(\w+): )?\[DELIVERED_([A-Z0-9_]+)\] (.*?)(?: Next: (.*?))?\s*(?=\n|$)", re.DOTALL
)
WARNING_MARK = "delivered: "
"""Starts each line that a worker writes to standard error for people. `delivered run` shows these lines."""

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
    "ORPHANS_NOT_ABORTED": errors.OutcomeUnknown,
}
_REFUSED = ("OPTION_", "GUARANTEE_", "NAME_", "CHECKPOINT_NEW", "ASYNC_", "EXTRA_", "SECRET_", "FORMAT_", "SCHEMA")


def translated(error: BaseException) -> DeliveredError | None:
    """The error of ours inside an exception of Spark's, or the extra that brings a missing library; None: neither."""
    if isinstance(error, DeliveredError):
        return error
    text = _as_spark_says(error)
    return _ours(text) or missing_extra(text) or _worker_died(text)


def from_our_code(text: str) -> DeliveredError | None:
    """The same, if what Spark says concerns this package: a user's own function may miss a library, too."""
    return (
        _ours(text)
        or (missing_extra(text) if "delivered/" in text else None)
        or (_worker_died(text) if "[STREAM_FAILED]" in text and "DataSource delivered_" in text else None)
    )


def _ours(text: str) -> DeliveredError | None:
    found = _OURS.search(text)
    if found is None:
        return None
    name, code, message, next_step = found.group(1), found.group(2), found.group(3).strip(), found.group(4)
    # A message may hold line breaks only by accident; the trace of Spark follows on the next line.
    by_code = _KNOWN_TYPES.get(code, errors.UsageError if code.startswith(_REFUSED) else DeliveredError)
    kind: type[DeliveredError] = getattr(errors, name or "", by_code)
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


def _as_spark_says(error: BaseException) -> str:
    """Its whole text, also where hooks.py shortened it."""
    whole = getattr(type(error).__str__, "__wrapped__", None)
    return str(error) if whole is None else str(whole(error))
