"""What is wrong with a pipeline, by its status, each with what mends it. Asks nobody."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from delivered.model.dedup import duration
from delivered.model.work import BatchReport
from delivered.operate.state import Driver, Problem, Status
from delivered.pipeline.definition import Definition
from delivered.pipeline.receive import is_gone
from delivered.planner import Trigger

_CLOCKS_S = 5.0
"""By which the clocks of two machines may differ. Beyond it, what is shown is wrong, and nothing else: an undecided
transaction that is aborted is written again."""
_STALLED_S_MIN = 60.0
_STALLED_BATCHES = 5


def problems_of(pipeline: Definition, now: Status, reports: Sequence[BatchReport]) -> Iterator[Problem]:
    start = "start the pipeline: delivered run PIPELINE.yaml"
    yield from hanging_transactions(now)
    for t in now.transactions or ():
        if t.hanging:
            continue
        if t.decided and now.driver is not Driver.RUNNING:
            yield Problem(
                "DELIVERED_TRANSACTION_UNAPPLIED",
                f"{t.id} was decided and is not visible yet.",
                f"{start}, which applies it; or delivered transactions apply PIPELINE.yaml {t.id}",
            )
        # Batches follow each other: one opened before the newest decision, which does not name it, has no batch left.
        age, since = t.age_s, now.decided_age_s
        stale = now.driver is not Driver.RUNNING or (since is not None and age is not None and age > since + _CLOCKS_S)
        if not t.decided and stale:
            yield Problem(
                "DELIVERED_TRANSACTION_ORPHANED",
                f"{t.id} has been open for {age:.0f} s, and no decision names it: it blocks readers or holds locks."
                if age is not None
                else f"{t.id} is open, and no decision names it: it blocks readers or holds locks.",
                f"delivered transactions abort PIPELINE.yaml {t.id}",
            )
    yield from old_transactions(now)
    yield from of_receivers(now)
    lag, age = now.lag_total, now.decided_age_s
    if lag and now.driver is Driver.STOPPED and pipeline.trigger.kind is not Trigger.AVAILABLE_NOW:
        yield Problem("DELIVERED_STOPPED_WITH_LAG", f"No driver runs, and {lag:,} offsets wait.", start)
    elif lag and age is not None and age > (limit := _stalled_after(pipeline, reports)):
        yield Problem(
            "DELIVERED_STALLED",
            f"No batch was decided for {age:.0f} s (limit {limit:.0f} s), and {lag:,} offsets wait.",
            "read the driver's log; delivered doctor PIPELINE.yaml asks source and sink",
        )
    for sink, audit in now.audits.items():
        if audit["verdict"] == "broken":
            yield Problem(
                "DELIVERED_AUDIT_BROKEN", f"{sink}: {'; '.join(audit['breaches'])}", "delivered audit PIPELINE.yaml"
            )
    for s in now.sinks:
        if s.given_up:
            yield Problem(
                "DELIVERED_RECORDS_GIVEN_UP",
                f"{s.name}: up to {s.given_up:,} records were given up (at_most_once, or lostRecords).",
                "under at_most_once, choose at_least_once or exactly_once if that is not acceptable",
            )


def hanging_transactions(now: Status) -> Iterator[Problem]:
    for t in now.transactions or ():
        if t.hanging:
            end = "apply" if t.decided else "abort"
            yield Problem(
                "DELIVERED_TRANSACTION_HANGING",
                f"{t.id} was {'committed' if t.decided else 'aborted'}, but its brokers lost the end: it is still open "
                f"in {', '.join(t.targets)}, which hides its own and all later records from read_committed readers.",
                f"delivered transactions {end} PIPELINE.yaml {t.id}, as a user with Alter on the cluster; a start of "
                "the pipeline does the same",
            )


def old_transactions(now: Status) -> Iterator[Problem]:
    for t in now.transactions or ():
        if t.old and t.age_s is not None:
            limit = "" if t.timeout_s is None else f", and its server aborts it after {t.timeout_s:.0f} s"
            yield Problem(
                "DELIVERED_TRANSACTION_OLD",
                f"{t.id} has been open for {t.age_s:.0f} s{limit}.",
                f"delivered transactions {'apply' if t.decided else 'abort'} PIPELINE.yaml {t.id}; if it is a running "
                "batch's, make batches smaller, or raise transactionTimeout",
            )


def of_receivers(now: Status) -> Iterator[Problem]:
    for source, reports in now.receivers.items():
        for r in filter(is_gone, reports):
            ago = max(0.0, time.time() - r.at_ms / 1000)
            yield Problem(
                "DELIVERED_RECEIVER_GONE",
                f"{source}: the receiver in process {r.owner.process} on {r.owner.host} was not stopped, and is gone; "
                f"it last reported {ago:.0f} s ago. Messages wait in the queue, unless another one takes them.",
                "delivered receive PIPELINE.yaml",
            )
    for source, window in now.windows.items():
        if window.short:
            yield Problem(
                "DELIVERED_DEDUP_WINDOW_SHORT",
                f"{source}: the log recognises a message for {window.kept_s:,.0f} s, and the queue may redeliver it "
                f"after {window.needed_s:,.0f} s: it would count as a new one.",
                f"restart the receivers with dedupFor of at least {duration(int(window.needed_s) * 1000)}",
            )


def _stalled_after(pipeline: Definition, reports: Sequence[BatchReport]) -> float:
    """Seconds without a decision that mean trouble while records wait."""
    took = [sum(r.seconds.values()) for r in reports]
    gaps = [(b.decided_at_ms - a.decided_at_ms) / 1000 for a, b in pairwise(reports)]
    usual = sorted([*took, *gaps])[len(took + gaps) // 2] if took else 0.0
    return max(_STALLED_S_MIN, _STALLED_BATCHES * usual, pipeline.batch_s_max or 0.0)
