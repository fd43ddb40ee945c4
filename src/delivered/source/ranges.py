"""Ranges of offsets: how much of a backlog one batch reads, and how it is split.

All functions are pure, so that a rerun of a batch, perhaps in another process, is split the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True)
class Range(Generic[Key]):
    """Offsets `start` (inclusive) to `end` (exclusive) of one partition.

    Attributes:
        key: names the partition.
    """

    key: Key
    start: int
    end: int

    @property
    def size(self) -> int:
        """Offsets, not records: transaction markers and aborted records leave gaps."""
        return self.end - self.start


def admit(sizes: Mapping[Key, int], limit: int | None) -> dict[Key, int]:
    """How many offsets of each partition the next batch reads.

    Shares are proportional to the backlog; their sum is `limit` or the whole backlog, whichever is smaller. Every
    partition with a backlog gets at least one, so that busy ones do not starve it: with more such partitions than
    `limit`, the sum is their count.

    Args:
        sizes: backlog per partition, in offsets, at least 0. Ties are broken by the order of this mapping.
        limit: at least 1; None: no bound.
    """
    waiting = {k: n for k, n in sizes.items() if n > 0}
    total = sum(waiting.values())
    if limit is None or total <= limit:
        return dict(sizes)
    rest = max(0, limit - len(waiting))
    extra = total - len(waiting)  # each has one already
    shares = _apportion({k: n - 1 for k, n in waiting.items()}, rest, extra)
    return {k: (1 + shares[k] if k in waiting else 0) for k in sizes}


def split(ranges: Sequence[Range[Key]], pieces_min: int | None, size_max: int | None = None) -> list[Range[Key]]:
    """Split ranges into at least `pieces_min` pieces, if there are that many offsets; large ranges first.

    Empty ranges yield no piece. The pieces of a range are contiguous and cover it; their sizes differ by at most one,
    unless `size_max` is set too.

    Args:
        size_max: of a piece, in offsets.
    """
    wanted = [r for r in ranges if r.size > 0]
    if size_max is not None:
        wanted = [piece for r in wanted for piece in _cut(r, -(-r.size // size_max))]
    if pieces_min is None or pieces_min <= len(wanted):
        return wanted
    total = sum(r.size for r in wanted)
    more = min(pieces_min, total) - len(wanted)
    extra = _apportion(dict(enumerate(r.size - 1 for r in wanted)), more, total - len(wanted))
    pieces: list[Range[Key]] = []
    for i, r in enumerate(wanted):
        pieces += _cut(r, 1 + extra[i])
    return pieces


def _cut(r: Range[Key], count: int) -> list[Range[Key]]:
    bounds = [r.start + r.size * n // count for n in range(count + 1)]
    return [Range(r.key, a, b) for a, b in pairwise(bounds)]


def backwards(start: Mapping[str, Any], end: Mapping[str, Any]) -> str | None:
    """Where a logged range of offsets ends before its start, for messages; None: nowhere.

    Args:
        start, end: nested by partition. Positions that are not numbers are not compared.
    """
    for name in start.keys() & end.keys():
        a, b = start[name], end[name]
        if isinstance(a, dict) and isinstance(b, dict):
            if (inner := backwards(a, b)) is not None:
                return f"{name} {inner}"
        elif isinstance(a, int) and isinstance(b, int) and a > b:
            return f"{name}: from {a} to {b}"
    return None


def earlier(end: Mapping[str, Any], until: Mapping[str, Any]) -> dict[str, Any]:
    """Per partition, the earlier of two positions of one source; only partitions that `until` names.

    Args:
        end, until: nested by partition; numbers.
    """
    found: dict[str, Any] = {}
    for name, bound in until.items():
        at = end.get(name, bound)
        found[name] = earlier(at, bound) if isinstance(bound, Mapping) else min(at, bound)
    return found


def _apportion(weights: Mapping[Key, int], seats: int, total: int) -> dict[Key, int]:
    """Distribute `seats` (at most `total`, the sum of `weights`) by largest remainder, none above its weight."""
    if total == 0:
        return dict.fromkeys(weights, 0)
    shares = {k: seats * w // total for k, w in weights.items()}
    left = seats - sum(shares.values())
    by_remainder = sorted(weights, key=lambda k: -(seats * weights[k] % total))
    for k in by_remainder[:left]:
        shares[k] += 1
    return shares
