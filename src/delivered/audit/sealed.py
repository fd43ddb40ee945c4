"""What the seals of a sink say together: which batches were proved, which were not, and when the newest was.

So do those of a chain of pipelines. If a hop delivered every record of its source, and the next hop read all that the
first one delivered and delivered that in turn, then the records arrived from end to end, and no row needs to be read
again. That holds where the seals join: each chain of seals covers its checkpoint from the first batch on, and the next
hop read from the first row on. Damage at one hop is damage from end to end; of damage at two, seals do not say what is
left. All of it is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from delivered.audit.evidence import Counts, Verdict, breaches
from delivered.audit.seal import Seal, State, Sums, checked, digest_of
from delivered.model.capability import Guarantee
from delivered.model.identity import batches_text

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


_APART_MS = 3_600_000


@dataclass(frozen=True)
class SealedHop:
    """One pipeline of a chain, to the sink that the next one reads, or to the last one.

    Attributes:
        seals: `sealed.current` ones.
        doubt: why they do not say what its newest audit found, or that it could not judge; empty: they do.
        from_start: it read its source from the first row that the hop before it wrote.
    """

    pipeline: str
    guarantee: Guarantee
    seals: Sequence[Seal]
    doubt: str = ""
    from_start: bool = True


@dataclass(frozen=True)
class Joined:
    """What the seals say from end to end.

    Attributes:
        counts: sent by the first source, delivered to the last sink, and what was damaged at any hop.
        given_up: at any hop, by its ledger.
        start, end: positions in the first source.
        unknowns: damage that counts do not show.
        notes: which batches of which hop, and when they were sealed.
    """

    counts: Counts
    given_up: int
    start: str
    end: str
    unknowns: tuple[str, ...]
    notes: tuple[str, ...]


def why_apart(hops: Sequence[SealedHop]) -> str | None:
    """Why the seals of a chain do not join, so that its ends have to be compared; None: they do."""
    for hop in hops:
        if (why := _why_incomplete(hop)) is not None:
            return why
    if skipped := [h.pipeline for h in hops[1:] if not h.from_start]:
        return f"{skipped[0]} did not read from the first row on"
    broken = [h.pipeline for h in hops if any(seal.state is State.BROKEN for seal in h.seals)]
    if len(broken) > 1:
        # A row that one hop doubled and the next one lost has arrived (decision 078).
        return f"{' and '.join(broken)} are broken, and one may have undone what the other one did"
    return None


def _why_incomplete(hop: SealedHop) -> str | None:
    """Why the seals do not say what became of every record of all batches up to the last one."""
    if hop.doubt:
        return f"{hop.pipeline}: {hop.doubt}"
    if not hop.seals:
        return f"{hop.pipeline} was never sealed"
    if (first := hop.seals[0].first) != 0:
        return f"the seals of {hop.pipeline} start with batch {first}"
    if len({s.scope.incarnation for s in hop.seals}) > 1:
        return f"{hop.pipeline} was sealed on several checkpoints"
    for seal in hop.seals:
        if seal.state not in (State.HELD, State.BROKEN):
            why = "not judged" if seal.audited else "never audited"
            return f"{hop.pipeline}, {batches_text(seal.first, seal.last)}: {why}"
    return None


def join(hops: Sequence[SealedHop]) -> Joined:
    """What the seals say, if they join (`why_apart`)."""
    last = [hop.seals[-1] for hop in hops]
    each = [seal.total.counts for seal in last]
    counts = Counts(
        sent=each[0].sent,
        delivered=each[-1].delivered,
        **{name: sum(getattr(c, name) for c in each) for name in ("lost", "duplicated", "altered", "unexpected")},
    )
    return Joined(
        counts,
        sum(seal.account.given_up.count for seal in last),
        hops[0].seals[0].start,
        last[0].end,
        tuple(text for hop in hops for text in _beyond_counts(hop)),
        tuple(f"{h.pipeline} is sealed up to batch {h.seals[-1].last} by {len(h.seals)} seals" for h in hops)
        + _ages(last),
    )


def _beyond_counts(hop: SealedHop) -> list[str]:
    """Breaches that a hop's counts do not explain, such as damage to rows that only the ledger accounts for."""
    found = []
    for seal in hop.seals:
        explained = breaches(hop.guarantee, seal.sums.counts, seal.sums.ledger.given_up.count)
        found += [f"{hop.pipeline}, seal {seal.number}: {text}" for text in seal.breaches if text not in explained]
    return found


def _ages(last: Sequence[Seal]) -> tuple[str, ...]:
    """When each hop was sealed, if not at one time."""
    times = [seal.sealed_at.isoformat(timespec="seconds") for seal in last]
    if any(abs(a.sealed_at_ms - b.sealed_at_ms) >= _APART_MS for a, b in pairwise(last)):
        return (f"the hops were sealed at different times: {', '.join(times)}",)
    return ()
