"""What the seals of a sink say together: which batches were proved, which were not, and when the newest was. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from delivered.audit.evidence import Verdict
from delivered.audit.seal import Seal, State, Sums, checked, digest_of

REASONS_MAX = 20
"""Of a range, as many are kept as an audit lists samples."""


@dataclass(frozen=True)
class SealedRange:
    """Consecutive seals of one checkpoint with the same state.

    Attributes:
        incarnation: of the checkpoint.
        first, last: batches.
        first_seal, last_seal: their numbers.
        start, end: source positions, as in a seal.
        sums: of these batches; of those that were never audited, the ledger's alone.
        reasons: why it is broken, unknown or was never audited, each once; at most `REASONS_MAX`.
        sealed_from_ms, sealed_at_ms: when the first and the last of them were sealed, by the auditors' clocks.
    """

    state: State
    incarnation: str
    first: int
    last: int
    first_seal: int
    last_seal: int
    start: str
    end: str
    sums: Sums
    reasons: tuple[str, ...] = ()
    sealed_from_ms: int = 0
    sealed_at_ms: int = 0

    @property
    def batches(self) -> str:
        """For display: "4" or "4 to 9"."""
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"

    @property
    def records(self) -> int:
        """Handed to the sink, by the ledger."""
        return self.sums.ledger.total.count

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.state.value,
            "incarnation": self.incarnation,
            "batches": [self.first, self.last],
            "seals": [self.first_seal, self.last_seal],
            "records": self.records,
            "counts": asdict(self.sums.counts),
            "reasons": list(self.reasons),
            "sealed_from_ms": self.sealed_from_ms,
            "sealed_at_ms": self.sealed_at_ms,
        }


@dataclass(frozen=True)
class Sealed:
    """The seals of one sink, or the newest of them.

    Attributes:
        ranges: oldest first; of batches that were compared several times, by the newest seal.
        last: the newest seal of all keys; None: there is none.
        digest: its hash.
        faults: where the chain does not hold (`chain_faults`).
        superseded: ranges whose batches were compared again later, as they were sealed then.
        shares: the seals of shares of the keys, oldest first. They prove nothing of other keys, and are in no range.
    """

    ranges: tuple[SealedRange, ...] = ()
    last: Seal | None = None
    digest: str = ""
    faults: tuple[str, ...] = ()
    superseded: tuple[SealedRange, ...] = ()
    shares: tuple[Seal, ...] = ()

    @property
    def broken_shares(self) -> tuple[Seal, ...]:
        """Of the shares that no later audit compared again."""
        newest = {(s.scope, s.keys["share"], s.keys["of"]): s for s in self.shares if s.keys is not None}
        after = -1 if self.last is None else self.last.number
        return tuple(s for s in newest.values() if s.state is State.BROKEN and s.number > after)

    @property
    def verdict(self) -> Verdict | None:
        """Of all ranges: broken beats unknown beats held. What was never audited, and a chain that does not hold, are
        unknown. None: there is no seal of all keys, and no share of them is broken."""
        states = {r.state for r in self.ranges}
        if State.BROKEN in states or self.broken_shares:
            return Verdict.BROKEN
        if self.faults or states - {State.HELD}:
            return Verdict.UNKNOWN
        return Verdict.HELD if states else None

    def of(self, state: State) -> tuple[SealedRange, ...]:
        return tuple(r for r in self.ranges if r.state is state)

    def age_s(self, now_ms: int) -> float | None:
        """Seconds since the newest seal; 0 if its auditor's clock is ahead. None: there is none."""
        return None if self.last is None else max(0.0, (now_ms - self.last.sealed_at_ms) / 1000)

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.value if self.verdict is not None else None,
            "last": None
            if self.last is None
            else {
                "number": self.last.number,
                "sha256": self.digest,
                "batch": self.last.last,
                "state": self.last.state.value,
                "sealed_at_ms": self.last.sealed_at_ms,
            },
            "ranges": [r.to_json() for r in self.ranges],
            "superseded": [r.to_json() for r in self.superseded],
            "shares": [_share_json(seal) for seal in self.shares],
            "faults": list(self.faults),
        }


def _share_json(seal: Seal) -> dict[str, Any]:
    return {
        **(seal.keys or {}),
        "seal": seal.number,
        "incarnation": seal.scope.incarnation,
        "batches": [seal.first, seal.last],
        "state": seal.state.value,
        "counts": asdict(seal.sums.counts),
        "reasons": list((*seal.breaches, *seal.unknowns)[:REASONS_MAX]),
        "sealed_at_ms": seal.sealed_at_ms,
    }


def read_sealed(texts: Iterable[str]) -> Sealed:
    """
    Args:
        texts: seals as stored, oldest first: all of a sink's, or from any number on: reading takes 0.1 ms a seal. Those
            that cannot be read are a fault, and in no range.

    Raises:
        Refused: a later version of this package wrote one.
    """
    seals: list[Seal] = []
    faults: list[str] = []
    digest = ""
    stored = list(texts)
    for text, (seal, found) in zip(stored, checked(stored), strict=True):
        faults += found
        if seal is not None:
            seals.append(seal)
            digest = digest_of(text) if seal.keys is None else digest
    kept = current(seals)
    numbers = {seal.number for seal in kept}
    others = [seal for seal in seals if seal.keys is None and seal.number not in numbers]
    shares = tuple(seal for seal in seals if seal.keys is not None)
    return Sealed(_ranges(kept), kept[-1] if kept else None, digest, tuple(faults), _ranges(others), shares)


def current(seals: Sequence[Seal]) -> list[Seal]:
    """The newest seal of all keys and those that it continues, of each checkpoint: without those whose batches were
    compared again later."""
    kept: list[Seal] = []
    for seal in reversed([seal for seal in seals if seal.keys is None]):
        if not kept or kept[-1].scope != seal.scope or seal.last < kept[-1].first:
            kept.append(seal)
    return kept[::-1]


def _ranges(seals: Iterable[Seal]) -> tuple[SealedRange, ...]:
    ranges: list[SealedRange] = []
    for seal in seals:
        now = _range_of(seal)
        if ranges and _continues(ranges[-1], now):
            now = _joined(ranges.pop(), now)
        ranges.append(now)
    return tuple(ranges)


def _range_of(seal: Seal) -> SealedRange:
    return SealedRange(
        state=seal.state,
        incarnation=seal.scope.incarnation,
        first=seal.first,
        last=seal.last,
        first_seal=seal.number,
        last_seal=seal.number,
        start=seal.start,
        end=seal.end,
        sums=seal.sums,
        reasons=(*seal.breaches, *seal.unknowns)[:REASONS_MAX],
        sealed_from_ms=seal.sealed_at_ms,
        sealed_at_ms=seal.sealed_at_ms,
    )


def _continues(before: SealedRange, now: SealedRange) -> bool:
    same = (before.state, before.incarnation) == (now.state, now.incarnation)
    return same and before.last + 1 == now.first


def _joined(before: SealedRange, now: SealedRange) -> SealedRange:
    return replace(
        before,
        last=now.last,
        last_seal=now.last_seal,
        end=now.end,
        sums=before.sums + now.sums,
        reasons=tuple(dict.fromkeys(before.reasons + now.reasons))[:REASONS_MAX],
        sealed_at_ms=now.sealed_at_ms,
    )
