"""The ledger's history: a chain of decisions that must be consistent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from delivered.model.limits import LEDGER_HISTORY_BATCHES
from delivered.model.work import Decision

SHOWN_MAX = 20


@dataclass(frozen=True)
class BatchLine:
    """One decided batch, for the report."""

    batch: int
    decided_at_ms: int
    shards: int
    records: int
    given_up: int
    fingerprint: str
    revision: int

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class History:
    """
    Attributes:
        batches: decided batches that the ledger still keeps.
        lines: the newest of them, oldest first; bounded.
        faults: where a decision does not follow from the previous one; each means that the ledger was tampered
            with, restored from a copy, or written by two owners.
        last, before: the newest decision and its predecessor.
    """

    batches: int = 0
    lines: tuple[BatchLine, ...] = ()
    faults: tuple[str, ...] = ()
    last: Decision | None = None
    before: Decision | None = None

    def to_json(self) -> dict[str, Any]:
        return {"batches": self.batches, "faults": list(self.faults), "lines": [line.to_json() for line in self.lines]}


def check_history(decisions: Iterable[Decision], lines_max: int = SHOWN_MAX) -> History:
    """Walk the chain once. Memory is bounded: `lines_max` lines and a limited list of faults.

    Args:
        decisions: of one incarnation, oldest first; the first one kept need not be batch 0.
    """
    lines: deque[BatchLine] = deque(maxlen=lines_max)
    faults: list[str] = []
    before: Decision | None = None
    last: Decision | None = None
    count = 0
    for decision in decisions:
        count += 1
        given_up = decision.given_up.count - (last.given_up.count if last else 0)
        if last is not None:
            faults.extend(_faults(last, decision))
        elif decision.batch == 0 and decision.total != decision.fingerprint:
            faults.append(
                f"batch 0: its total {decision.total} differs from its own fingerprint {decision.fingerprint}"
            )
        lines.append(
            BatchLine(
                batch=decision.batch,
                decided_at_ms=decision.decided_at_ms,
                shards=len(decision.participants),
                records=decision.fingerprint.count,
                given_up=given_up if last is not None or decision.batch == 0 else 0,
                fingerprint=str(decision.fingerprint),
                revision=decision.revision,
            )
        )
        before, last = last, decision
        if count > 2 * LEDGER_HISTORY_BATCHES:
            # A ledger that keeps everything must not make the audit run forever.
            faults.append(f"the ledger keeps more than {2 * LEDGER_HISTORY_BATCHES} batches; the rest was not checked")
            break
    return History(count, tuple(lines), tuple(faults[:SHOWN_MAX]), last, before)


def _faults(last: Decision, decision: Decision) -> list[str]:
    faults = []
    if decision.batch <= last.batch:
        faults.append(f"batch {decision.batch} follows batch {last.batch}")
    elif decision.batch > last.batch + 1 and last.total + decision.fingerprint != decision.total:
        # Spark's repartition of state leaves a gap in the numbers, and none in the totals.
        faults.append(f"batches {last.batch + 1} to {decision.batch - 1} are missing")
    elif last.total + decision.fingerprint != decision.total:
        faults.append(
            f"batch {decision.batch}: its total {decision.total} is not the previous total {last.total} plus its own "
            f"fingerprint {decision.fingerprint}"
        )
    if decision.given_up.count < last.given_up.count:
        faults.append(f"batch {decision.batch}: the count of given-up records decreased")
    return faults
