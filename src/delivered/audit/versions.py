"""Which batches ran with the current transform and can be recomputed; the ledger's account of the others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from delivered.model.fingerprint import Fingerprint
from delivered.model.work import Account, Decision


@dataclass(frozen=True)
class VersionRange:
    """Consecutive batches that ran with one version of the transform.

    Attributes:
        fingerprint: of the transform; empty: unknown.
        first, last: batches.
        start: the source's offsets where they begin; empty: where the pipeline began.
        end: the source's offsets where they end.
        decided: what they handed to the sink, and what they gave up.
    """

    fingerprint: str
    first: int
    last: int
    start: str
    end: str
    decided: Account


def version_ranges(newest: Decision) -> list[VersionRange]:
    """All batches of an incarnation up to `newest`, according to the ledger of the audited sink."""
    total = Account(newest.total, newest.given_up)
    if not newest.transforms:
        return [VersionRange("", 0, newest.batch, "", newest.offsets, total)]
    sink, ranges = newest.scope.sink, []
    following = [*((t.batch - 1, t.after, t.accounts.get(sink, Account())) for t in newest.transforms[1:])]
    following.append((newest.batch, newest.offsets, total))
    for version, (last, end, until) in zip(newest.transforms, following, strict=True):
        before = version.accounts.get(sink, Account())
        decided = Account(until.total - before.total, until.given_up - before.given_up)
        ranges.append(VersionRange(version.fingerprint, version.batch, last, version.after, end, decided))
    return ranges


@dataclass(frozen=True)
class Earlier:
    """Batches that ran with a transform other than the audit's.

    Attributes:
        batches: for display: "0 to 4, 9".
        handed: what they handed to the sink, according to the ledger.
        given_up: what they gave up (at_most_once).
        missing: how many of their records are not in the sink.
        differs: the sink holds as many records as the ledger says, but different ones.
    """

    batches: str
    handed: Fingerprint
    given_up: Fingerprint = Fingerprint()
    missing: int = 0
    differs: bool = False


def earlier(ranges: Sequence[VersionRange], present: str) -> tuple[list[VersionRange], Earlier | None]:
    """The ranges that can be recomputed, and the rest.

    Args:
        present: fingerprint of the current transform; empty: all batches are assumed to have run with it, as are
            batches whose transform is unknown.
    """
    if not present:
        return list(ranges), None
    others = [r for r in ranges if r.fingerprint not in ("", present)]
    if not others:
        return list(ranges), None
    batches = ", ".join(str(r.first) if r.first == r.last else f"{r.first} to {r.last}" for r in others)
    handed = sum((r.decided.total for r in others), Fingerprint())
    given_up = sum((r.decided.given_up for r in others), Fingerprint())
    return [r for r in ranges if r not in others], Earlier(batches, handed, given_up)
