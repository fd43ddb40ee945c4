"""Which damage a guarantee forbids. The only place where findings become a verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from delivered.model.guarantee import Guarantee
from delivered.verify.checkers import CHECKERS, Finding, run
from delivered.verify.evidence import Evidence
from delivered.verify.verdict import Verdict

_ALWAYS = frozenset({"unexpected", "source_kept", "unseen", "aborted_read", "hanging", "accounts", "stopped_right"})

FORBIDDEN: dict[Guarantee, frozenset[str]] = {
    Guarantee.AT_MOST_ONCE: _ALWAYS | {"duplicated"},
    Guarantee.AT_LEAST_ONCE: _ALWAYS | {"lost"},
    Guarantee.EXACTLY_ONCE: _ALWAYS | {"lost", "duplicated", "torn_batch", "order"},
}
"""Guarantee -> checkers whose finding breaks it. The others are asked too, and only reported."""


@dataclass(frozen=True)
class Judgement:
    """
    Attributes:
        findings: of every checker, in the order of `CHECKERS`.
        reasons: why it is not held, as sentences.
    """

    verdict: Verdict
    findings: tuple[Finding, ...]
    reasons: tuple[str, ...] = ()

    def count(self, checker: str) -> int:
        return next((f.count for f in self.findings if f.checker == checker), 0)


def judge(evidence: Evidence) -> Judgement:
    """Ask every checker; broken beats invalid beats unknown beats held.

    A pipeline that had to stop leaves what it did not get to: then nothing is lost, because nothing was skipped.
    """
    findings = tuple(run(name, checker, evidence) for name, checker in CHECKERS.items())
    forbidden = set(FORBIDDEN[evidence.guarantee])
    if evidence.stays_down:
        forbidden -= {"lost"}
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
