"""Messages of workers as returned by Spark: errors as text in a trace, warnings as log lines."""

from __future__ import annotations

import re

from delivered.model import errors
from delivered.model.errors import DeliveredError, LedgerBehind, ReplayDiffers, missing_extra

_OURS = re.compile(r"(?:delivered\.model\.errors\.(\w+): )?\[DELIVERED_([A-Z0-9_]+)\] ([^\n]*)")
_NEXT = " Next: "
_OUR_TYPES = "delivered.model.errors."
_OUR_FILES = "/delivered/"
_PICKLED = "_pickle.PicklingError: [DELIVERED_"
"""How an error of a batch's plan arrives, see `spark.writers`."""
_TRACE = re.compile(r"Traceback \(most recent call last\):\n((?:[ ]{2,}[^\n]*\n)+)([^\n]*)")
"""A trace's frames, which are indented, and the first line of its exception."""
_FRAME = re.compile(r'^  File "([^"\n]*)"', re.MULTILINE)

_LENGTH_MAX = 4_000
_CAUSE_LENGTH_MAX = 2_000
_WORKER_DIED = re.compile(
    r"no cause message|Python worker exited unexpectedly|EOFException|EOFError|Connection reset|Broken pipe|"
    r"Software caused connection abort"
)
"""Spark's messages for a dead Python worker: a closed connection, sometimes no cause at all."""
_STATE_UNREADABLE = re.compile(
    r"\[(CANNOT_LOAD_STATE_STORE\.(UNCATEGORIZED|CANNOT_FIND\w+|CANNOT_READ\w+|INVALID_CHECKPOINT_LINEAGE|UNEXPECTED\w+)|"
    r"CHECKPOINT_FILE_CHECKSUM_VERIFICATION_FAILED|STATE_STORE_ROW_CHECKSUM_VERIFICATION_FAILED)\]"
)
_STATE_PLACE = re.compile(
    r"/state/(?P<operator>\d+)/(?P<partition>\d+)/|operatorId=(?P<operator2>\d+), ?partitionId=(?P<partition2>\d+)"
)
_SECOND_QUERY = re.compile(
    r"Multiple streaming (?:jobs|queries) (?:detected|are concurrently)[^\n]{0,60}|"
    r"Another instance of this query[^\n]{0,60}|another query with (?:the )?same id is already active"
)
_OF_OURS = re.compile(r"DataSource delivered_|delivered/spark/foreach\.py")
"""In the text of a failed query that writes to one of our sinks, by itself or in its foreachBatch."""
_CAUSE = re.compile(r"^Caused by: (.*)$", re.MULTILINE)
_NO_JVM = "[JAVA_GATEWAY_EXITED]"
_NO_PACKAGE = re.compile(r"ModuleNotFoundError: No module named 'delivered(?:\.[\w.]+)?'")
_OTHER_PYTHON = re.compile(r"\[PYTHON_VERSION_MISMATCH\] ([^\n]*?)(?: SQLSTATE|\n|$)")
_SETTING = re.compile(r"\[INVALID_CONF_VALUE[\w.]*\] ([^\n]*?)(?: SQLSTATE|\n|$)")
_NOT_IN_LOCALE = re.compile(r"input contains unmappable characters: ([^\n]*)")
"""Java names files in the encoding of its process's locale, which in C and POSIX is ASCII."""
_KNOWN_TYPES = {
    "OUTCOME_UNKNOWN": errors.OutcomeUnknown,
    "DECISION_UNKNOWN": errors.OutcomeUnknown,
    "APPLY_UNKNOWN": errors.OutcomeUnknown,
    "BEGIN_UNKNOWN": errors.OutcomeUnknown,
    "ORPHANS_NOT_ABORTED": errors.OutcomeUnknown,
}
_REFUSED = ("OPTION_", "GUARANTEE_", "NAME_", "CHECKPOINT_NEW", "ASYNC_", "EXTRA_", "SECRET_", "FORMAT_", "SCHEMA")


def translated(error: BaseException) -> DeliveredError | None:
    """This package's error inside a Spark exception, or the one that names a missing library's extra; None: neither."""
    if isinstance(error, DeliveredError):
        return error
    text = _as_spark_says(error)
    # A damaged state file may end early, like a dead worker's connection.
    return (
        _ours(text)
        or missing_extra(text)
        or _unfit_process(text)
        or _refused_setting(text)
        or _second_query(text)
        or _state_unreadable(text)
        or _worker_died(text)
    )


def worker_death(error: BaseException) -> DeliveredError | None:
    """The error of a Python process of Spark that died in the middle of a call; None: it was something else. Of calls
    with a format of ours only: Spark says no more than "Broken pipe"."""
    found = translated(error)
    return found if found is not None and found.code == "DELIVERED_WORKER_DIED" else None


def from_our_code(text: str) -> DeliveredError | None:
    """As `translated`, but only if the trace is from this package: a user's function may lack a library, too."""
    return (
        _ours(text)
        or (missing_extra(text) if "delivered/" in text else None)
        or (_second_query(text) if "WriteToMicroBatchDataSource delivered_" in text else None)
        or (_worker_died(text) if "[STREAM_FAILED]" in text and _OF_OURS.search(text) else None)
    )


def _ours(text: str) -> DeliveredError | None:
    # Messages are single lines; Spark's trace follows on the next one.
    part = _ours_part(text)
    found = None if part is None else _OURS.search(part)
    if found is None:
        return None
    name, code, line = found.groups()
    # The last one: a message may quote a record, but what comes after it is ours.
    message, separator, next_step = line.rpartition(_NEXT)
    if not separator:
        message, next_step = line, ""
    by_code = _KNOWN_TYPES.get(code, errors.UsageError if code.startswith(_REFUSED) else DeliveredError)
    kind: type[DeliveredError] = getattr(errors, name or "", by_code)
    return kind(code, message.strip()[:_LENGTH_MAX], next_step.strip() or None)


def _ours_part(text: str) -> str | None:
    """The part of a trace in which an error of ours is ours; None: the user's code raised, and its message may quote a
    record that imitates one.

    Python prints a trace's frames, whose lines no message can change, before the first line of the message. So the
    first trace decides: an error of ours ends it; or a library or Spark raised below our code, and the error that
    followed from it comes next; or it is none of ours.
    """
    trace = _TRACE.search(text)
    if trace is None:
        return text
    while trace is not None:
        frames, line = trace.groups()
        files = _FRAME.findall(frames)
        if line.startswith(_OUR_TYPES) or (line.startswith(_PICKLED) and files and _OUR_FILES in files[-1]):
            return line
        below_ours = any(_OUR_FILES in file for file in files)
        if files and not (below_ours and (_OUR_FILES in files[-1] or "-packages/" in files[-1])):
            return None
        trace = _TRACE.search(text, trace.end())
    return None


def _unfit_process(text: str) -> DeliveredError | None:
    """A process of Spark that cannot do its work as it was started."""
    if _NO_JVM in text:
        return DeliveredError("JVM_NOT_STARTED")
    if _NO_PACKAGE.search(text):
        return DeliveredError("WORKER_PYTHON.PACKAGE")
    other, path = _OTHER_PYTHON.search(text), _NOT_IN_LOCALE.search(text)
    if other is not None:
        return DeliveredError("WORKER_PYTHON.VERSION", actual=other[1])
    return None if path is None else DeliveredError("LOCALE_WITHOUT_PATH", path=path[1])


def _state_unreadable(trace: str) -> DeliveredError | None:
    found = _STATE_UNREADABLE.search(trace)
    if found is None:
        return None
    places = [p.groupdict() for p in _STATE_PLACE.finditer(trace)]
    numbers = {k: v for p in reversed(places) for k, v in p.items() if v is not None}
    operator = numbers.get("operator") or numbers.get("operator2")
    partition = numbers.get("partition") or numbers.get("partition2")
    where = (
        f"operator {operator}, partition {partition} (state/{operator}/{partition} of the checkpoint)"
        if operator and partition
        else "a partition (Spark does not name it here: it has the number of the lost task in Spark's log)"
    )
    message = trace[found.start() :].partition("\n")[0].partition(" SQLSTATE")[0]
    causes = _CAUSE.findall(trace)
    why = f"{message} ({causes[-1].strip()})" if causes else message
    return DeliveredError("STATE_UNREADABLE", where=where, reason=why[:1000])


def _refused_setting(text: str) -> DeliveredError | None:
    found = _SETTING.match(text)
    return None if found is None else errors.UsageError("SETTING_VALUE", reason=found[1].rstrip("."))


def _second_query(trace: str) -> DeliveredError | None:
    found = _SECOND_QUERY.search(trace)
    if found is None:
        return None
    return DeliveredError("CHECKPOINT_SHARED", actual=found.group(0))


def _worker_died(trace: str) -> DeliveredError | None:
    found = _WORKER_DIED.search(trace)
    if found is None:
        return None
    return DeliveredError("WORKER_DIED", actual=found.group(0))


def cause_of(error: BaseException) -> str:
    """The line of a failed query's trace that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    cause = next((line for line in reversed(lines) if "Error" in line and not line.startswith("at ")), lines[0])
    return cause[:_CAUSE_LENGTH_MAX]


def _as_spark_says(error: BaseException) -> str:
    """The full text, even if hooks.py shortened it."""
    unwrapped = getattr(type(error).__str__, "__wrapped__", None)
    return str(error) if unwrapped is None else str(unwrapped(error))


_ARGUMENTS = {
    "newCheckpoint": "new_checkpoint",
    "missingLedger": "missing_ledger",
    "repeatedBatch": "repeated_batch",
    "newTarget": "new_target",
    "lostRecords": "lost_records",
}
"""Of `write_batch`, by the options that have the same effect on a stream."""


def of_own_call(error: DeliveredError) -> DeliveredError:
    """The same, with arguments of `write_batch` for options; it names mistakes of a user's function that look like
    losses."""
    code, message, step = error.args
    for option, argument in _ARGUMENTS.items():
        step = (step or "").replace(f'.option("{option}", "accept")', f"write_batch(..., {argument}=True)")
    match error.code.removeprefix("DELIVERED_"):
        case "LEDGER_BEHIND" if error.condition != "DECISION":
            return LedgerBehind("LEDGER_BEHIND.FOREACH_BATCH", reason=message, action=step)
        case "LEDGER_MISSING":
            return LedgerBehind("LEDGER_MISSING.FOREACH_BATCH", reason=message, action=step)
        case "REPLAY_DIFFERS":
            return ReplayDiffers("REPLAY_DIFFERS.FOREACH_BATCH", reason=message, action=step)
    return type(error)(code, message, step or None)
