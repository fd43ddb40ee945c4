"""How fast records arrive and leave, from samples that the driver keeps next to its checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from delivered.checkpoint.history import Sample

WINDOW_S = 60.0
_SAMPLES_MIN = 4
_STALE_S = 30.0
_WAITS_S_MIN = 15.0
"""Of input that waits: less is one batch's worth."""


@dataclass(frozen=True)
class Pace:
    """Over the last minute, or the last batches if they take longer.

    Attributes:
        in_per_s, out_per_s: offsets that arrived, and that were delivered.
        lag: offsets that wait now.
        grows: the lag has grown throughout, and more than a moment's input waits.
    """

    in_per_s: float
    out_per_s: float
    lag: int
    grows: bool = False

    @property
    def behind_per_s(self) -> float:
        """By how much the lag grows; negative: it shrinks."""
        return self.in_per_s - self.out_per_s

    @property
    def caught_up_s(self) -> float | None:
        """Until nothing waits, at this pace; None: the lag does not shrink."""
        return self.lag / -self.behind_per_s if self.lag and self.behind_per_s < 0 else None

    @property
    def text(self) -> str:
        """For display: "120/s in, 50/s out, falls behind by 70/s"."""
        rates = f"{self.in_per_s:,.0f}/s in, {self.out_per_s:,.0f}/s out"
        if self.grows:
            return f"{rates}, falls behind by {self.behind_per_s:,.0f}/s"
        if self.caught_up_s is not None and self.caught_up_s >= 1:
            return f"{rates}, caught up in {duration_text(self.caught_up_s)}"
        return rates

    def to_json(self) -> dict[str, Any]:
        caught_up = self.caught_up_s
        return {
            "in_per_s": round(self.in_per_s, 1),
            "out_per_s": round(self.out_per_s, 1),
            "behind_per_s": round(self.behind_per_s, 1),
            "caught_up_s": None if caught_up is None else round(caught_up, 1),
            "grows": self.grows,
        }


def duration_text(seconds: float) -> str:
    """For display: "40 s", "3 min", "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def pace_of(samples: Sequence[Sample], lag: Mapping[str, Mapping[str, int]], now_ms: int | None = None) -> Pace | None:
    """
    Args:
        samples: oldest first, of all sources.
        lag: now, by source and partition.

    Returns:
        None: a source has no samples, or none answers.
    """
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    paces = [_of_source([s for s in samples if s.source == n], sum(of.values()), now_ms) for n, of in lag.items()]
    known = [p for p in paces if p is not None]
    if not paces or len(known) < len(paces):
        return None
    ins, outs = sum(p.in_per_s for p in known), sum(p.out_per_s for p in known)
    return Pace(ins, outs, sum(p.lag for p in known), any(p.grows for p in known))


def _of_source(samples: Sequence[Sample], lag: int, now_ms: int) -> Pace | None:
    since_ms = now_ms - WINDOW_S * 1000
    stops = [b.at_ms for a, b in pairwise(samples) if b.at_ms - a.at_ms > _STALE_S * 1000]
    samples = [s for s in samples if s.at_ms >= max(stops, default=0)]  # since its driver was started again
    window = [s for s in samples if s.at_ms >= since_ms]
    if len(window) < _SAMPLES_MIN:
        window = list(samples[-_SAMPLES_MIN:])
    if not window:
        return None
    last = window[-1]
    if now_ms - last.at_ms > _STALE_S * 1000:  # no batch is planned: what arrives waits
        seconds = (now_ms - last.at_ms) / 1000
        return Pace(max(0.0, (lag - last.lag_total) / seconds), 0.0, lag)
    seconds = (last.at_ms - window[0].at_ms) / 1000
    if len(window) < _SAMPLES_MIN or seconds <= 0:
        return None
    out = sum(s.read_total for s in window[1:]) / seconds
    arrived = max(0.0, out + (last.lag_total - window[0].lag_total) / seconds)
    return Pace(arrived, out, lag, _grows(window, arrived, seconds))


def _grows(window: Sequence[Sample], arrived: float, seconds: float) -> bool:
    """By the medians of three parts: a burst is no trend."""
    if seconds < WINDOW_S * 0.75 or window[-1].lag_total < arrived * _WAITS_S_MIN:
        return False
    size = len(window) // 3 or 1
    first, middle, last = (
        median(s.lag_total for s in part) for part in (window[:size], window[size:-size], window[-size:])
    )
    return first < middle < last
