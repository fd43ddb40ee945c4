"""When the next audit of a pipeline may start, and how much of the time audits may take. Pure: times are given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from delivered.model.dedup import duration, read_ms
from delivered.model.errors import UsageError
from delivered.model.options import Unfit

SHARE = "10 %"
SEALS_LATE = 3
"""A seal older than so many intervals is a problem."""
STOP_S_MAX = 30.0
"""How long a stop waits for a running audit to notice."""
_GAP_S = 10.0
"""How long an audit that is due waits for a moment between two batches."""
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class Cadence:
    """
    Attributes:
        every_s: seconds from the start of an audit to the start of the next one, at least.
        share: of the time that audits may take; above 0, at most 1.
    """

    every_s: float
    share: float = 0.1

    @classmethod
    def parse(cls, every: str, share: str | float | None = None) -> Self:
        """From "15 min" and "10 %" or 0.1.

        Raises:
            UsageError: neither a duration nor a share.
        """
        try:
            every_ms = read_ms(every)
        except Unfit as error:
            raise error.of("audit.every", 'write every: "15 min"') from None
        try:
            return cls(every_ms / 1000, _read_share(SHARE if share is None else share))
        except Unfit as error:
            raise error.of("audit.share", 'write share: "10 %"') from None

    @classmethod
    def of(cls, entry: Mapping[str, str]) -> Self | None:
        """Of a pipeline's `audit`; None: it does not audit by itself.

        Raises:
            UsageError: as `parse`; or a share, and no interval.
        """
        if "every" in entry:
            return cls.parse(entry["every"], entry.get("share"))
        if "share" in entry:
            raise UsageError("AUDIT_SHARE")
        return None

    @property
    def every(self) -> str:
        """For display."""
        return duration(int(self.every_s * 1000))

    @property
    def late_s(self) -> float:
        """Age from which a seal is too old."""
        return SEALS_LATE * self.every_s

    def after(self, started_s: float, ended_s: float) -> float:
        """When the next audit is due, after one that took so long."""
        pause_s = (ended_s - started_s) * (1 / self.share - 1)
        return max(started_s + self.every_s, ended_s + pause_s)


def _read_share(value: str | float) -> float:
    percent = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        share = float(percent[1]) / 100 if percent is not None else float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise Unfit.build("OPTION_VALUE.SHARE", text=value)
    return share


@dataclass(frozen=True)
class Load:
    """What the query does now.

    Attributes:
        idle: it is between two batches.
        behind: more records wait than its last batch took; None: its source does not count.
    """

    idle: bool
    behind: bool | None = None


class Schedule:
    """When audits start. Times are seconds of one steady clock.

    Args:
        sealed_s: seconds since the last seal, at most; None: there is none, and the first audit is due at once.
    """

    def __init__(self, cadence: Cadence, now_s: float, sealed_s: float | None = None) -> None:
        self._cadence = cadence
        self.due_s = now_s if sealed_s is None else now_s + max(0.0, cadence.every_s - max(0.0, sealed_s))

    def may_start(self, now_s: float, load: Load) -> bool:
        """An audit is due, and takes nothing from a batch that waits: a query that is behind has no audits."""
        if now_s < self.due_s or load.behind:
            return False
        return load.idle or (load.behind is False and now_s >= self.due_s + _GAP_S)

    def ended(self, started_s: float, ended_s: float) -> None:
        """An audit ran, and found something or failed."""
        self.due_s = self._cadence.after(started_s, ended_s)
