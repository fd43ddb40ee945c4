"""Whether a pipeline's driver does its work on this host: for a probe."""

from __future__ import annotations

from delivered.operate.state import Driver, Problem, Status

_UNANSWERED = ("UNREACHABLE", "UNREADABLE", "LOGIN")


def unanswered(status: Status) -> bool:
    """Whether ledger, sinks, sources or checkpoint did not all answer."""
    return any(map(_unanswered, status.problems))


def not_ready(status: Status) -> str | None:
    """Why the pipeline is not at work; None: its ledger names a driver that lives on this host and decides, or no
    record waits. A driver claims the ledger with its first batch: one that has nothing to do has not claimed it yet."""
    failed = [p.text for p in status.problems if p.code == "DELIVERED_STALLED" or _unanswered(p)]
    if failed:
        return failed[0]
    if status.driver is Driver.RUNNING or status.lag_total == 0:
        return None
    if status.driver is Driver.NONE:
        return status.problems[0].text if status.problems else "no driver has claimed the ledger yet"
    waits = "" if status.lag_total is None else f", and {status.lag_total:,} offsets wait"
    return f"the driver that the ledger names is {status.driver.value}{waits}"


def _unanswered(problem: Problem) -> bool:
    return problem.code.endswith(_UNANSWERED)
