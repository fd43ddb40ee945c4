"""The seals of each sink as operators see them: what is proved, what waits to be sealed, and how long the source still
has it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Self

from delivered.audit.seal import Seal, State
from delivered.audit.sealed import Sealed, SealedRange, read_sealed
from delivered.checkpoint.sidecar import read_first
from delivered.contract.source import Offsets, Retained, Source
from delivered.ledger import Ledger
from delivered.model.identity import by_source
from delivered.model.schedule import Cadence
from delivered.model.work import Decision
from delivered.operate.problem import Problem

SEALS_READ = 200
"""Of a sink, the newest. With one every hour, a week; reading takes 0.1 ms a seal."""
_DAY_S = 86_400.0
_FAULTS_SHOWN = 5


@dataclass(frozen=True)
class SealStatus:
    """
    Attributes:
        sealed: the newest seals, at most `SEALS_READ`.
        cadence: how often the pipeline's file says that it is audited; None: it does not.
        started_ms: when the checkpoint was made, in milliseconds since 1970; None: not asked.
        unsealed_from: the first batch of this checkpoint that is not sealed.
        unsealed_batches, unsealed_records: decided in this checkpoint after the last seal.
        ahead: the newest decided batch, where the last seal ends after it; None: it does not.
        retained: by source, what it still has of the records that are not sealed; absent: it does not know.
    """

    sealed: Sealed = Sealed()
    cadence: Cadence | None = None
    started_ms: int | None = None
    unsealed_from: int = 0
    unsealed_batches: int = 0
    unsealed_records: int = 0
    ahead: int | None = None
    retained: Mapping[str, Retained] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        sealed: Sealed,
        last: Decision | None,
        sink: str,
        cadence: Cadence | None = None,
        started_ms: int | None = None,
    ) -> Self:
        """Args: last: the newest decision, read after the seals."""
        if last is None:
            return cls(sealed, cadence, started_ms)
        total, seal = last.for_sink(sink).total.count, sealed.last
        if seal is None or seal.scope.incarnation != last.scope.incarnation:
            return cls(sealed, cadence, started_ms, 0, last.batch + 1, total)
        ahead = last.batch if seal.last > last.batch else None
        records = max(0, total - seal.account.total.count)
        return cls(sealed, cadence, started_ms, seal.last + 1, max(0, last.batch - seal.last), records, ahead)

    def with_retained(self, source: str, kept: Retained) -> SealStatus:
        return replace(self, retained={**self.retained, source: kept})

    @property
    def is_watched(self) -> bool:
        """Whether somebody audits this pipeline: only then it matters what its source drops."""
        return self.cadence is not None or self.last is not None

    @property
    def last(self) -> Seal | None:
        return self.sealed.last

    @property
    def age_s(self) -> float | None:
        """Seconds since the last seal; None: there is none."""
        return self.sealed.age_s(_now_ms())

    @property
    def is_late(self) -> bool:
        """Records have waited for several intervals."""
        if self.cadence is None or not self.unsealed_batches:
            return False
        since_ms = self.started_ms if self.last is None else self.last.sealed_at_ms
        return since_ms is not None and (_now_ms() - since_ms) / 1000 > self.cadence.late_s

    @property
    def never_audited(self) -> int:
        """Records of this checkpoint in batches that no audit compared, up to the last seal."""
        return 0 if self.last is None else self.last.account.total.count - self.last.total.ledger.total.count

    @property
    def missing(self) -> int:
        """Offsets that were not sealed before their source dropped them; at least, if it does not say how many."""
        return sum(max(1, count) for r in self.retained.values() for count in r.missing.values())

    @property
    def expires(self) -> tuple[float, str, str] | None:
        """Seconds until a source may drop the first record that is not sealed, at the earliest; its source and
        partition. None: it keeps all, does not know, or everything is sealed."""
        due = [(ms, s, p) for s, r in self.retained.items() for p, ms in r.until_ms.items()]
        if not due or not self.unsealed_batches:
            return None
        ms, source, partition = min(due)
        return max(0.0, (ms - _now_ms()) / 1000), source, partition

    @property
    def retention(self) -> str:
        """For display: how long the source keeps what is not sealed."""
        if self.missing:
            counts = [count for r in self.retained.values() for count in r.missing.values()]
            return f"the source has dropped {dropped(counts)} of them"
        if self.expires is not None:
            return f"the source keeps them for at least {span(self.expires[0])}"
        reasons = "; ".join(r.unknown for r in self.retained.values() if r.unknown)
        if self.retained and not reasons:
            return "the source keeps them for good"
        return "how long the source keeps them is unknown" + (f": {reasons}" if reasons else "")

    @property
    def recent_broken(self) -> Iterator[SealedRange]:
        """Broken ranges of the last day, and that of the last seal."""
        for r in self.sealed.of(State.BROKEN):
            last = self.last is not None and r.last_seal == self.last.number
            if last or (_now_ms() - r.sealed_at_ms) / 1000 < _DAY_S:
                yield r

    def to_json(self) -> dict[str, Any]:
        return {
            **self.sealed.to_json(),
            "age_s": None if self.age_s is None else round(self.age_s, 1),
            "every_s": None if self.cadence is None else self.cadence.every_s,
            "unsealed_batches": self.unsealed_batches,
            "unsealed_records": self.unsealed_records,
            "never_audited_records": self.never_audited,
            "expires_s": None if self.expires is None else round(self.expires[0], 1),
            "retention": self.retention,
            "missing_offsets": self.missing,
        }


def read_seals(ledger: Ledger, sink: str, newest: int = SEALS_READ) -> Sealed:
    """The newest seals of a sink, and the last one of all keys.

    Raises:
        Refused: a later version wrote one.
        DeliveredError
    """
    last = ledger.last_seal(sink)
    if last is None:
        return Sealed()
    number = 0
    with contextlib.suppress(ValueError, KeyError, TypeError):  # `read_sealed` reports it
        number = int(json.loads(last)["number"])
    first = max(0, number + 1 - newest)
    texts = list(ledger.seals(sink, first))
    found = read_sealed(texts)
    if found.last is None and found.shares and (full := found.shares[-1].full) >= 0:
        # Behind them, so many shares of the keys were sealed.
        older = read_sealed(islice(ledger.seals(sink, full), 1))
        found = replace(found, ranges=older.ranges, last=older.last, digest=older.digest)
    if len(texts) < number + 1 - first:
        missing = f"{number + 1 - first - len(texts)} of the seals {first} to {number} are missing"
        found = replace(found, faults=(missing, *found.faults))
    return found


def unsealed_from(status: SealStatus, incarnation: str | None, checkpoint: str, source: str) -> Offsets | None:
    """Where a source's records start that are not sealed; None: unknown."""
    seal = status.last
    if seal is None or seal.scope.incarnation != incarnation:
        return read_first(checkpoint, source)
    text = by_source(seal.end).get(source)
    offsets: Offsets | None = None if text is None else json.loads(text)
    return offsets


def retained_by(source: Source, at: Offsets) -> Retained | None:
    """What it still has from there on. Raises DeliveredError."""
    with contextlib.closing(source.driver()) as driver:
        return driver.retained(at)


def seal_problems(seals: Mapping[str, SealStatus]) -> Iterator[Problem]:
    for sink, s in seals.items():
        if s.sealed.faults:
            yield Problem.build("SEALS_CHANGED", sink=sink, faults="; ".join(s.sealed.faults[:_FAULTS_SHOWN]))
        for r in s.recent_broken:
            yield Problem.build(
                "SEAL_BROKEN", sink=sink, number=r.last_seal, first=r.first, last=r.last, breaches="; ".join(r.reasons)
            )
        for seal in s.sealed.broken_shares:
            breaches = f"{seal.share}: {'; '.join(seal.breaches)}"
            yield Problem.build(
                "SEAL_BROKEN", sink=sink, number=seal.number, first=seal.first, last=seal.last, breaches=breaches
            )
        if s.ahead is not None and s.last is not None:
            yield Problem.build("SEALS_AHEAD", sink=sink, number=s.last.number, last=s.last.last, batch=s.ahead)
        if s.is_late and s.cadence is not None:
            since = "no audit has sealed a batch" if s.age_s is None else f"the last seal is {span(s.age_s)} old"
            yield Problem.build(
                "SEAL_OLD", sink=sink, sealed=since, every=s.cadence.every, records=records(s.unsealed_records)
            )
        yield from _retention_problems(sink, s)


def _retention_problems(sink: str, s: SealStatus) -> Iterator[Problem]:
    for source, kept in s.retained.items():
        if kept.missing:
            partitions = ", ".join(sorted(kept.missing)[:_FAULTS_SHOWN])
            offsets = dropped(kept.missing.values())
            yield Problem.build("UNSEALED_EXPIRED", sink=sink, source=source, offsets=offsets, partitions=partitions)
    if s.expires is None:
        return
    left_s, source, partition = s.expires
    limit_s = s.cadence.late_s if s.cadence is not None else _DAY_S
    if left_s < limit_s or (s.is_late and left_s < _DAY_S):
        yield Problem.build("UNSEALED_EXPIRING", sink=sink, source=source, left=span(left_s), partition=partition)


def sealed_text(s: SealStatus) -> str:
    """For display: "until batch 41 (held), 3 min ago"."""
    newest = s.sealed.shares[-1] if s.sealed.shares else None
    share = f"; {newest.share} ({newest.state.value}), until batch {newest.last}" if newest is not None else ""
    if s.last is None or s.age_s is None:
        return f"never{share}"
    waits = f"; {records(s.unsealed_records)} not sealed" if s.unsealed_records else ""
    return f"until batch {s.last.last} ({s.last.state.value}), {span(s.age_s)} ago{waits}{share}"


def records(count: int) -> str:
    """For display."""
    return f"{count:,} record{'' if count == 1 else 's'}"


def dropped(counts: Collection[int]) -> str:
    """For display: "1,204 offsets". Args: counts: as in `Retained.missing`."""
    return f"{sum(counts):,} offsets" if all(counts) else "an unknown number of records"


def span(seconds: float) -> str:
    """For display: "3 d", "2 h", "90 s"."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _now_ms() -> int:
    return int(time.time() * 1000)
