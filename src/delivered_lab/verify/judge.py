"""Judges: each checker looks at the evidence for one kind of damage; one table says which damage a guarantee forbids.
None knows the product.

A checker that raises gives unknown, never a pass. A checker without evidence gives unknown as well; the table knows
for which of them that is acceptable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from delivered import Guarantee
from delivered_lab.verify.evidence import Evidence, Seen

SAMPLES_MAX = 10
RECOVERY_RATIO_MAX = 2.0


class Verdict(StrEnum):
    """Precedence: false, unknown, true.

    `INVALID` is about the run, not the pipeline: a required fault did not fire, or there was no final read of the sink.
    Such a run never passes, whatever its checkers report; what they found broken stays broken.
    """

    BROKEN = "broken"
    INVALID = "invalid"
    UNKNOWN = "unknown"
    HELD = "held"

    @classmethod
    def worst(cls, verdicts: Iterable[Verdict]) -> Verdict:
        """The one that takes precedence; UNKNOWN for none."""
        rank = list(cls)
        return min(verdicts, key=rank.index, default=cls.UNKNOWN)

    @property
    def exit_code(self) -> int:
        return {Verdict.HELD: 0, Verdict.BROKEN: 1, Verdict.INVALID: 3, Verdict.UNKNOWN: 3}[self]


@dataclass(frozen=True)
class Finding:
    """
    Attributes:
        checker: its name.
        count: number of damaged records, batches or transactions.
        samples: some of them.
    """

    checker: str
    verdict: Verdict
    count: int = 0
    samples: tuple[str, ...] = ()
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict.value}


Checker = Callable[[Evidence], Finding]


def run(name: str, checker: Checker, evidence: Evidence) -> Finding:
    """Run one checker; if it cannot decide, the finding is unknown."""
    try:
        return checker(evidence)
    except Exception as error:
        return Finding(name, Verdict.UNKNOWN, note=f"{type(error).__name__}: {error}")


def _found(name: str, damage: Counter[str] | Iterable[str], note: str = "") -> Finding:
    counted = Counter(damage)
    verdict = Verdict.BROKEN if counted else Verdict.HELD
    return Finding(name, verdict, counted.total(), tuple(sorted(counted)[:SAMPLES_MAX]), note)


def lost(evidence: Evidence) -> Finding:
    """In the source, but missing from the sink at the end, or there fewer times."""
    return _found("lost", evidence.expected - evidence.found)


def duplicated(evidence: Evidence) -> Finding:
    """More often in the sink than in the source."""
    more = evidence.found - evidence.expected
    return _found("duplicated", Counter({e: n for e, n in more.items() if e in evidence.expected}))


def unexpected(evidence: Evidence) -> Finding:
    """In the sink, but never sent: made up, altered, or from another run."""
    return _found("unexpected", Counter({e: n for e, n in evidence.found.items() if e not in evidence.expected}))


def differences(evidence: Evidence) -> dict[str, list[str]]:
    """Keys of an operator's rows: missing, extra, and different from the oracle."""
    if evidence.wanted is None:
        return {}
    newest = {s.key: s.effect for s in sorted(_final(evidence), key=lambda s: (s.partition, s.position))}
    return {
        "missing": [e for k, e in evidence.wanted.items() if k not in newest],
        "extra": [e for k, e in newest.items() if k not in evidence.wanted],
        "different": [
            f"{newest[k]}, and not {e}" for k, e in evidence.wanted.items() if k in newest and newest[k] != e
        ],
    }


def by_key(evidence: Evidence) -> Finding:
    """The newest row of a key differs from the one recomputed from the source, is missing, or should not exist."""
    found = differences(evidence)
    if not found:
        return Finding("by_key", Verdict.HELD, note="this workload has no keys that distinguish rows")
    damage = [f"{what}: {text}" for what, texts in found.items() for text in texts]
    return _found("by_key", damage, ", ".join(f"{len(texts)} {what}" for what, texts in found.items()))


def source_kept(evidence: Evidence) -> Finding:
    """Every acknowledged record is in the source, and nothing that was never sent."""
    missing = [f"acknowledged, not in the source: {r}" for r in evidence.acknowledged if r not in evidence.in_source]
    foreign = [] if evidence.offered is None else [r for r in evidence.in_source if r not in evidence.offered]
    return _found("source_kept", [*missing, *(f"in the source, never sent: {r}" for r in foreign)])


def unseen(evidence: Evidence) -> Finding:
    """There at the end, but the continuous reader never saw it, or saw it fewer times."""
    return _found("unseen", evidence.found - Counter(s.effect for s in evidence.seen))


def aborted_read(evidence: Evidence) -> Finding:
    """G1a, aborted read: the reader saw something that is not there at the end because it was rolled back.

    For rows that replace others: a state came back that a newer one had replaced.
    """
    if evidence.states is not None:
        return _found("aborted_read", [text for text, known in _strange_states(evidence) if known])
    there = {(s.partition, s.position): s.effect for s in _final(evidence)}
    missing = [s.effect for s in evidence.seen if there.get((s.partition, s.position)) != s.effect]
    return _found("aborted_read", missing)


def torn_batch(evidence: Evidence) -> Finding:
    """A reader saw part of a batch, where the sink claims that a batch becomes visible atomically.

    An effect shared by several batches does not identify the batch. For rows that replace others: a state that no batch
    leaves behind.
    """
    if not evidence.batch_atomic:
        return Finding("torn_batch", Verdict.HELD, note="the sink does not claim it")
    if evidence.states is not None:
        torn = [text for text, known in _strange_states(evidence) if not known]
        return _found("torn_batch", torn, f"{len(evidence.snapshots)} snapshots, {len(evidence.states)} batches")
    if evidence.batches is None:
        return Finding("torn_batch", Verdict.UNKNOWN, note="which records make a batch is not known")
    if not evidence.snapshots:
        return Finding("torn_batch", Verdict.UNKNOWN, note="nobody saw all of the sink at once")
    batches_of = Counter(effect for batch in evidence.batches.values() for effect in batch)
    own = {number: {e for e in batch if batches_of[e] == 1} for number, batch in evidence.batches.items()}
    torn = [
        f"batch {number} at {at_s:.2f} s: {len(batch & visible)} of {len(batch)}"
        for at_s, visible in evidence.snapshots
        for number, batch in own.items()
        if batch & visible and not batch <= visible
    ]
    return _found("torn_batch", torn, f"{len(evidence.snapshots)} snapshots, {len(evidence.batches)} batches")


def _strange_states(evidence: Evidence) -> Iterator[tuple[str, bool]]:
    """Snapshots that are not the state after any batch, and those of a batch older than the last one seen; and whether
    they match a batch."""
    states, newest = [frozenset[str](), *(evidence.states or ())], 0
    for at_s, visible in evidence.snapshots:
        number = next((n for n in range(newest, len(states)) if states[n] == visible), None)
        if number is not None:
            newest = number
        elif visible in states:
            yield (
                f"at {at_s:.2f} s: the state after batch {states.index(visible) - 1}, after that of {newest - 1}",
                True,
            )
        else:
            nearest = min(states, key=lambda s: len(s ^ visible))
            odd = ", ".join(sorted(visible ^ nearest)[:3])
            yield f"at {at_s:.2f} s: unlike the state after batch {states.index(nearest) - 1}: {odd}", False


def order(evidence: Evidence) -> Finding:
    """Within a key, effects became visible out of send order. For copies, the first one counts."""
    if not evidence.ordered:
        return Finding("order", Verdict.HELD, note="this workload keeps no order")
    newest: dict[tuple[str, str], int] = {}
    first: set[str] = set()
    wrong: list[str] = []
    for s in sorted(_final(evidence), key=lambda s: (s.partition, s.position)):
        if s.key is None or s.number is None or s.effect in first:
            continue
        first.add(s.effect)
        at = (s.partition, s.key)
        if s.number < newest.get(at, -1):
            wrong.append(f"{s.effect} (key {s.key}, number {s.number}) after number {newest[at]}")
        newest[at] = max(s.number, newest.get(at, -1))
    return _found("order", wrong)


def hanging(evidence: Evidence) -> Finding:
    """A transaction is still open after recovery and blocks every read-committed reader behind it."""
    if evidence.open_transactions is None:
        return Finding("hanging", Verdict.UNKNOWN, note="nobody looked for open transactions")
    return _found("hanging", evidence.open_transactions)


def accounts(evidence: Evidence) -> Finding:
    """The product's own account is true: its audit agrees, and what it gave up covers what is missing."""
    missing = (evidence.expected - evidence.found).total()
    more = (evidence.found - evidence.expected).total()
    wrong: list[str] = []
    damaged = (missing and not evidence.guarantee.may_lose) or (more and not evidence.guarantee.may_duplicate)
    if evidence.audit_verdict == "held" and damaged:
        wrong.append(f"the audit says held; {missing} records are missing and {more} too many")
    if evidence.audit_verdict == "broken" and not damaged:
        wrong.append("the audit says broken; nothing was found that the guarantee forbids")
    if evidence.guarantee.may_lose and missing:
        if evidence.given_up is None:
            return Finding("accounts", Verdict.UNKNOWN, missing, note=f"{missing} records are missing, and not counted")
        if evidence.given_up < missing:
            wrong.append(f"{missing} records are missing, and only {evidence.given_up} are reported as given up")
    return _found("accounts", wrong, f"audit: {evidence.audit_verdict or 'not asked'}")


def stopped_right(evidence: Evidence) -> Finding:
    """The pipeline went on where it had to, and stopped with the right error where going on would be wrong."""
    wrong = [
        f"{s.when}: it had to end with {' or '.join(s.wanted) or 'no error'}, it ended with {s.got or 'no error'}"
        for s in evidence.stops
        if not s.right
    ]
    codes = ", ".join(s.got for s in evidence.stops if s.got and s.right)
    return _found("stopped_right", wrong, f"stopped with {codes}" if codes else "")


def recovery(evidence: Evidence) -> Finding:
    """From a restart after SIGKILL to the first new effect: at most twice the time of a plain restart."""
    if not evidence.recovery_s:
        return Finding("recovery", Verdict.UNKNOWN, note="no driver was killed before it had something to show")
    if evidence.plain_s is None:
        return Finding("recovery", Verdict.UNKNOWN, note="the time of a plain restart is not known")
    return compared(evidence.recovery_s, evidence.plain_s)


def compared(recovery_s: Sequence[float], plain_s: float) -> Finding:
    """Args: recovery_s: of each restart after a kill; at least one. plain_s: of a plain restart."""
    slow = [f"{s:.1f} s (a plain restart: {plain_s:.1f} s)" for s in recovery_s if s > RECOVERY_RATIO_MAX * plain_s]
    return _found("recovery", slow, f"slowest {max(recovery_s):.1f} s, plain {plain_s:.1f} s")


def _final(evidence: Evidence) -> list[Seen]:
    if evidence.final is None:
        raise ValueError("nobody read the sink at the end")
    return list(evidence.final)


CHECKERS: dict[str, Checker] = {
    checker.__name__: checker
    for checker in (
        lost, duplicated, unexpected, by_key, source_kept, unseen, aborted_read, torn_batch, order, hanging, accounts,
        stopped_right, recovery,
    )
}  # fmt: skip


# -- the only place that turns findings into a verdict -----------------------------------------------------------------

_ALWAYS = frozenset({"unexpected", "source_kept", "unseen", "aborted_read", "hanging", "accounts", "stopped_right"})

FORBIDDEN: dict[Guarantee, frozenset[str]] = {
    Guarantee.AT_MOST_ONCE: _ALWAYS | {"duplicated"},
    Guarantee.AT_LEAST_ONCE: _ALWAYS | {"lost"},
    Guarantee.EXACTLY_ONCE: _ALWAYS | {"lost", "duplicated", "by_key", "torn_batch", "order"},
}
"""Guarantee -> checkers whose finding breaks it. The others also run, and are only reported."""


@dataclass(frozen=True)
class Judgement:
    """
    Attributes:
        findings: of every checker, in the order of `CHECKERS`.
        reasons: why it does not hold, as sentences.
    """

    verdict: Verdict
    findings: tuple[Finding, ...]
    reasons: tuple[str, ...] = ()

    def count(self, checker: str) -> int:
        return next((f.count for f in self.findings if f.checker == checker), 0)


def judge(evidence: Evidence, only: Collection[str] = CHECKERS) -> Judgement:
    """Run every checker, or `only` these; broken beats invalid beats unknown beats held.

    A pipeline that had to stop leaves records behind: they are not lost, because nothing was skipped.
    """
    findings = tuple(run(name, checker, evidence) for name, checker in CHECKERS.items() if name in only)
    forbidden = set(FORBIDDEN[evidence.guarantee])
    if evidence.stays_down:
        forbidden -= {"lost", "by_key"}
    verdicts, reasons = [Verdict.HELD], list[str]()
    for f in findings:
        if f.checker in forbidden and f.verdict is not Verdict.HELD:
            verdicts.append(f.verdict)
            what = ", ".join(f.samples[:3]) or f.note
            reasons.append(f"{f.checker} {f.verdict}" + (f" ({f.count})" if f.count else "") + f": {what}")
    for reason in _invalid(evidence):
        verdicts.append(Verdict.INVALID)
        reasons.append(reason)
    return Judgement(Verdict.worst(verdicts), findings, tuple(reasons))


def _invalid(evidence: Evidence) -> list[str]:
    quiet = Counter(evidence.required) - Counter(evidence.fired)
    found = [f"the fault {name} did not fire" for name in quiet]
    if evidence.final is None:
        found.append("nobody read the sink at the end")
    if not evidence.expected:
        found.append("the source held no record")
    return found
