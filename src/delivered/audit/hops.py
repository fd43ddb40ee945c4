"""A chain of pipelines judged from the seals of its hops. Pure.

If a hop delivered every record of its source, and the next hop read all that the first one delivered and delivered that
in turn, then the records arrived from end to end, and no row needs to be read again. That holds where the seals join:
each chain of seals covers its checkpoint from the first batch on, and the next hop read from the first row on. Damage
at one hop is damage from end to end; of damage at two, seals do not say what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from delivered.audit.evidence import Counts, breaches
from delivered.audit.seal import Seal, State
from delivered.model.capability import Guarantee
from delivered.model.identity import batches_text

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
        tuple(_covered(hop) for hop in hops) + _ages(last),
    )


def _beyond_counts(hop: SealedHop) -> list[str]:
    """Breaches that a hop's counts do not explain, such as damage to rows that only the ledger accounts for."""
    found = []
    for seal in hop.seals:
        explained = breaches(hop.guarantee, seal.sums.counts, seal.sums.ledger.given_up.count)
        found += [f"{hop.pipeline}, seal {seal.number}: {text}" for text in seal.breaches if text not in explained]
    return found


def _covered(hop: SealedHop) -> str:
    return f"{hop.pipeline} is sealed up to batch {hop.seals[-1].last} by {len(hop.seals)} seals"


def _ages(last: Sequence[Seal]) -> tuple[str, ...]:
    """When each hop was sealed, if not at one time."""
    times = [seal.sealed_at.isoformat(timespec="seconds") for seal in last]
    if any(abs(a.sealed_at_ms - b.sealed_at_ms) >= _APART_MS for a, b in pairwise(last)):
        return (f"the hops were sealed at different times: {', '.join(times)}",)
    return ()
