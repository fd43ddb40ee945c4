"""A sink that keeps the newest row of each key, told as if it kept all of them.

A row of number n of its key says that the records 0 to n of this key came through: that is what judges of lost, torn
and rolled-back records are told. A key whose number was higher before is told as an effect that is not there at the
end.
"""

from __future__ import annotations

from collections.abc import Sequence

from delivered.verify.evidence import Seen
from delivered.verify.systems.base import Row
from delivered.verify.workloads import Record, Workload


class Newest:
    """
    Args:
        sent: all records that may be, with a number for each of a key.
    """

    def __init__(self, workload: Workload, sent: Sequence[Record]) -> None:
        self._workload = workload
        self._effects = {(r.key, r.number): workload.effect_of(r.key, r.value).id for r in sent}
        self._at: dict[str, int] = {}

    def told(self, rows: Sequence[Row], at_s: float) -> list[Seen]:
        """All that the rows of a sink, seen at one moment, say."""
        found: list[Seen] = []
        for row in rows:
            effect = self._workload.effect_of(row.key, row.value)
            key, number = effect.key, effect.number
            if key is None or number is None:
                found.append(Seen(effect.id, row.partition, row.position, at_s=at_s))
                continue
            ids = [self._effects.get((key, i), f"{key} {i}: nobody sent it") for i in range(number)]
            found += [Seen(e, key, i, key, i, at_s) for i, e in enumerate([*ids, effect.id])]
        return found

    def went_back(self, told: Sequence[Seen], at_s: float) -> list[Seen]:
        """Keys that stand behind where they stood at the call before, or are gone."""
        now: dict[str, int] = {}
        for s in told:
            if s.key is not None and s.number is not None:
                now[s.key] = max(s.number, now.get(s.key, -1))
        found = [
            Seen(f"{key} went back from {before} to {now.get(key, 'nothing')}", key, before, key, before, at_s)
            for key, before in self._at.items()
            if now.get(key, -1) < before
        ]
        self._at = now
        return found
