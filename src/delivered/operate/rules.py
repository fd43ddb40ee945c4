"""What is wrong in the status of a pipeline, each with what fixes it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from delivered import html
from delivered.model.options import duration
from delivered.model.work import BatchReport
from delivered.operate.status import Driver, Problem, Status, duration_text, seal_problems
from delivered.operate.transactions import Open, is_current
from delivered.pipeline.definition import Definition
from delivered.pipeline.receive import is_dead
from delivered.planner import Trigger

_PARTITIONS_SHOWN = 5
_STALLED_S_MIN = 15.0
_STALLED_BATCHES = 3
_BLOCKS_S_MIN = 15.0
_BLOCKS_SHARE = 0.1
"""Of its time-out: an application with a long one keeps its transactions open for long."""


def problems_of(pipeline: Definition, now: Status, reports: Sequence[BatchReport]) -> Iterator[Problem]:
    start = "start the pipeline: delivered run PIPELINE.yaml"
    yield from hanging_transactions(now)
    for t in now.transactions or ():
        if t.hanging:
            continue
        if t.decided and now.driver is not Driver.RUNNING:
            yield Problem.build("TRANSACTION_UNAPPLIED", id=t.id, start=start)
        if not t.decided and not of_running_batch(now, t):
            how = "TRANSACTION_ORPHANED.OPEN_FOR" if t.age_s is not None else "TRANSACTION_ORPHANED.OPEN"
            yield Problem.build(how, id=t.id, age=t.age_s)
    yield from old_transactions(now)
    yield from blocking_transactions(now, _usual_s(reports))
    yield from receiver_problems(now)
    lag, age = now.lag_total, now.decided_age_s
    if age is not None and now.lag_s_max is not None:  # after a quiet hour, the first record has not waited for it
        age = min(age, now.lag_s_max)
    if lag and now.driver is Driver.STOPPED and pipeline.trigger.kind is not Trigger.AVAILABLE_NOW:
        yield Problem.build("STOPPED_WITH_LAG", lag=lag, why=_why_stopped(now), start=start)
    elif lag and age is not None and age > (limit := _stalled_after(pipeline, reports)):
        yield Problem.build("STALLED", age=age, limit=limit, lag=lag)
    if now.pace is not None and now.pace.grows and now.driver in (Driver.RUNNING, Driver.ELSEWHERE):
        yield Problem.build(
            "FALLING_BEHIND",
            arrived=now.pace.in_per_s,
            delivered=now.pace.out_per_s,
            behind=now.pace.behind_per_s,
            lag=now.pace.lag,
        )
    yield from run_problems(now)
    for sink, new in now.new_dead_letters.items():
        if new.count:
            looked = "the start" if new.since_ms is None else html.utc(new.since_ms)
            yield Problem.build("DEAD_LETTERS", sink=sink, count=new.count, since=looked)
    for sink, audit in now.audits.items():
        if audit["verdict"] == "broken":
            yield Problem.build("AUDIT_BROKEN", sink=sink, breaches="; ".join(audit["breaches"]))
        if audit.get("error"):
            yield Problem.build("AUDIT_NOT_RUN", sink=sink, reason=audit["error"])
    yield from seal_problems(now.seals)
    for s in now.sinks:
        if s.given_up:
            yield Problem.build("RECORDS_GIVEN_UP", sink=s.name, given_up=s.given_up)


def of_running_batch(now: Status, t: Open) -> bool:
    """Whether the driver that the ledger names ends this transaction itself, with the batch that it writes now."""
    if t.hanging:
        return False
    if t.decided:
        return now.driver is Driver.RUNNING and not t.old
    lives = {Driver.RUNNING: True, Driver.ELSEWHERE: None}.get(now.driver, False)
    return is_current(t.age_s, lives, now.decided_age_s)


def hanging_transactions(now: Status) -> Iterator[Problem]:
    for t in now.transactions or ():
        if t.hanging:
            end = "apply" if t.decided else "abort"
            yield Problem.build(
                "TRANSACTION_HANGING.STATUS",
                id=t.id,
                outcome="committed" if t.decided else "aborted",
                partitions=", ".join(t.targets),
                end=end,
            )


def old_transactions(now: Status) -> Iterator[Problem]:
    for t in now.transactions or ():
        if t.old and t.age_s is not None:
            limit = "" if t.timeout_s is None else f", and its server aborts it after {t.timeout_s:.0f} s"
            yield Problem.build(
                "TRANSACTION_OLD", id=t.id, age_s=t.age_s, limit=limit, end="apply" if t.decided else "abort"
            )


def blocking_transactions(now: Status, batch_s: float) -> Iterator[Problem]:
    """Of other applications, that have hidden records for longer than is usual.

    Args:
        batch_s: that a batch of this pipeline usually takes.
    """
    at_sources = [("TRANSACTION_BLOCKS.SOURCE", name, held) for name, held in now.held_back.items()]
    at_sinks = [("TRANSACTION_BLOCKS.SINK", name, held) for name, held in now.hidden.items()]
    for code, name, hides in (*at_sources, *at_sinks):
        for t in hides.by:
            open_s, share = t.age_s(), _BLOCKS_SHARE * (t.timeout_s or 0.0)
            if open_s is None or open_s <= max(_BLOCKS_S_MIN, _STALLED_BATCHES * batch_s, share):
                continue
            yield Problem.build(
                code,
                id=t.id or str(t.producer),
                who=f"The transaction {t.id!r}"
                if t.id
                else f"A transaction of producer {t.producer}, whose id no coordinator shows to this user",
                age=duration_text(open_s),
                limit="" if t.timeout_s is None else f" (its time-out is {duration_text(t.timeout_s)})",
                count=sum(hides.offsets.get(p, 0) for p in t.at),
                place=name,
                partitions=", ".join(f"{p} offset {offset}" for p, offset in sorted(t.at.items())[:_PARTITIONS_SHOWN]),
                command=t.end,
            )


def run_problems(now: Status) -> Iterator[Problem]:
    """The error that ended the last run, unless a later one goes on."""
    last = now.runs[-1] if now.runs else None
    if now.driver is Driver.RUNNING or last is None or last.ended_ms is None or not last.has_failed:
        return
    if now.decided_at_ms is not None and now.decided_at_ms > last.ended_ms:
        return  # by another driver, beside which this one could not start
    yield Problem.build(
        "RUN_FAILED",
        at=html.utc(last.ended_ms),
        host=last.host,
        process=last.process,
        batch="before its first batch" if last.batch is None else f"in batch {last.batch}",
        error=f"[{last.code}] {last.message}",
        step=last.next_step or "read the driver's log, then start the pipeline: delivered run PIPELINE.yaml",
    )


def _why_stopped(now: Status) -> str:
    if not now.runs:
        return ""
    last = now.runs[-1]
    if last.ended_ms is None:
        return (
            f" Process {last.process} on {last.host}, running since {html.utc(last.started_ms)}, ended without an "
            "error: it was killed, or its machine stopped."
        )
    return "" if last.has_failed else f" It was stopped at {html.utc(last.ended_ms)}."


def receiver_problems(now: Status) -> Iterator[Problem]:
    for source, reports in now.receivers.items():
        for r in filter(is_dead, reports):
            ago = max(0.0, time.time() - r.at_ms / 1000)
            yield Problem.build("RECEIVER_GONE", source=source, process=r.owner.process, host=r.owner.host, seconds=ago)
    for source, window in now.windows.items():
        if window.short:
            yield Problem.build(
                "DEDUP_WINDOW_SHORT.STATUS",
                source=source,
                kept_s=window.kept_s,
                needed_s=window.needed_s,
                needed=duration(int(window.needed_s) * 1000),
            )


def _stalled_after(pipeline: Definition, reports: Sequence[BatchReport]) -> float:
    """Seconds without a decision that mean trouble while records wait."""
    return max(_STALLED_S_MIN, _STALLED_BATCHES * _usual_s(reports), pipeline.batch_s_max or 0.0)


def _usual_s(reports: Sequence[BatchReport]) -> float:
    """That a batch takes, or the time between two."""
    took = [sum(r.seconds.values()) for r in reports]
    gaps = [(b.decided_at_ms - a.decided_at_ms) / 1000 for a, b in pairwise(reports)]
    return sorted([*took, *gaps])[len(took + gaps) // 2] if took else 0.0
