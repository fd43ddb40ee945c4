"""The status of a pipeline: what its ledger, sinks, sources and checkpoint say, as `asking.py` puts it together.

Its parts: problems and what fixes them, the pace of records, and the seals of each sink.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import islice, pairwise
from statistics import median
from typing import Any, Self

from delivered import html
from delivered.audit.seal import Seal, Sealed, SealedRange, State, read_sealed
from delivered.checkpoint.history import NewDeadLetters, Run, Sample, Totals
from delivered.checkpoint.sidecar import read_first
from delivered.contract.source import DedupWindow, HeldBack, Offsets, ReceiverReport, Retained, Source
from delivered.ledger import Ledger
from delivered.model.errors import PREFIX, texts
from delivered.model.identity import SOURCE, by_source
from delivered.model.work import BatchReport, Decision
from delivered.operate.transactions import Open
from delivered.pipeline.definition import Cadence
from delivered.pipeline.receive import is_dead

_NAMES = ("id", "sink", "source")
"""Values of a text that say what it is about."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a pipeline, and what fixes it.

    Attributes:
        code: of an error, or DELIVERED_ and one of TRANSACTION_ORPHANED, TRANSACTION_UNAPPLIED, TRANSACTION_OLD,
            TRANSACTION_HANGING, TRANSACTION_BLOCKS, STALLED, STOPPED_WITH_LAG, FALLING_BEHIND, RUN_FAILED,
            DEAD_LETTERS, RECEIVER_GONE, DEDUP_WINDOW_SHORT, AUDIT_BROKEN, RECORDS_GIVEN_UP, AUDIT_NOT_RUN, SEAL_OLD,
            SEAL_BROKEN, SEALS_CHANGED, SEALS_AHEAD, UNSEALED_EXPIRING, UNSEALED_EXPIRED; or of a finding that would
            refuse a start now.
        next_step: what fixes it.
        about: what has it, if a pipeline may have several of a code: a transaction, sink or source.
    """

    code: str
    text: str
    next_step: str | None
    about: str = ""

    @classmethod
    def build(cls, code: str, **values: object) -> Problem:
        """With the texts of the catalogue; `code` with its condition, without the prefix."""
        text, next_step = texts(code, values)
        about = next((str(values[name]) for name in _NAMES if values.get(name)), "")
        return cls(PREFIX + code.partition(".")[0], text, next_step, about)

    @property
    def is_unanswered(self) -> bool:
        """Something did not answer."""
        return self.code.endswith(("UNREACHABLE", "NO_ANSWER", "UNREADABLE", "LOGIN", "CREDENTIALS"))


WINDOW_S = 60.0
_SAMPLES_MIN = 4
_STALE_S = 30.0
_WAITS_S_MIN = 15.0
"""Of input that waits: less is one batch's worth."""


@dataclass(frozen=True)
class Pace:
    """How fast records arrive and leave, by samples that the driver keeps next to its checkpoint:
    over the last minute, or the last batches if they take longer.

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


SEALS_READ = 200
"""Of a sink, the newest. With one every hour, a week; reading takes 0.1 ms a seal."""
_DAY_S = 86_400.0
_FAULTS_SHOWN = 5


@dataclass(frozen=True)
class SealStatus:
    """The seals of a sink: what is proved, what waits to be sealed, and how long the source still has it.

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


_RUNS_SHOWN = 10


class Driver(StrEnum):
    RUNNING = "running"
    STOPPED = "stopped"
    ELSEWHERE = "on another host"
    NONE = "never started"
    UNKNOWN = "unknown"
    """The ledger did not answer."""


@dataclass(frozen=True)
class SinkStatus:
    """
    Attributes:
        records: decided in this checkpoint; None: unknown.
        given_up: at_most_once, an upper bound of what was lost.
        dead_letters: this sink holds them.
        destination: its topic, queue or table, for display.
    """

    name: str
    system: str
    records: int | None
    given_up: int
    dead_letters: bool = False
    destination: str = ""


@dataclass(frozen=True)
class Status:
    """
    Attributes:
        batch, decided_at_ms: of the newest decision in this checkpoint; None: there is none. If the ledger does not
            answer, of the newest batch that this machine knows.
        visible: Spark logged that batch, so its records are visible at every sink.
        owner: "process 12 on host", as the ledger has it.
        drivers_fenced: earlier drivers that the ledger names, a bounded number.
        lag: by source and partition, in the source's offsets; a source that does not count offsets is absent.
        held_back: by source, records that it holds and open transactions hide.
        hidden: by sink, records that open transactions of others hide from its readers.
        pace: rates in and out; None: unknown.
        runs: starts, ends and errors of its drivers, oldest first.
        new_dead_letters: by sink, those since an operator looked at them.
        waiting_since_ms: by source and partition, when the first record was written that waits; sources that date
            their records.
        receivers: by source that they fill: those that run, and those that ended without having been stopped.
        queues: system and name of each source that receivers fill.
        windows: by source, how long its log recognises a message.
        transactions: open at its sinks, of any checkpoint of this pipeline; None: its sinks keep none open.
        wal_held_back: bytes that each outbox slot keeps its server from removing.
        audits: the last one by sink: verdict, seconds since 1970, figures.
        seals: by sink: what audits have sealed.
        asked_ms: when, in milliseconds since 1970.
    """

    pipeline: str
    guarantee: str
    checkpoint: str
    driver: Driver = Driver.UNKNOWN
    owner: str = ""
    drivers_fenced: int = 0
    batch: int | None = None
    decided_at_ms: int | None = None
    visible: bool = False
    sinks: tuple[SinkStatus, ...] = ()
    positions: Mapping[str, str] = field(default_factory=dict)
    lag: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    held_back: Mapping[str, HeldBack] = field(default_factory=dict)
    hidden: Mapping[str, HeldBack] = field(default_factory=dict)
    pace: Pace | None = None
    runs: tuple[Run, ...] = ()
    new_dead_letters: Mapping[str, NewDeadLetters] = field(default_factory=dict)
    waiting_since_ms: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    receivers: Mapping[str, tuple[ReceiverReport, ...]] = field(default_factory=dict)
    queues: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    windows: Mapping[str, DedupWindow] = field(default_factory=dict)
    transactions: tuple[Open, ...] | None = None
    wal_held_back: Mapping[str, int] = field(default_factory=dict)
    last: BatchReport | None = None
    totals: Totals = Totals()
    audits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    seals: Mapping[str, SealStatus] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    asked_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)

    @property
    def decided_age_s(self) -> float | None:
        """Seconds since the newest decision."""
        return None if self.decided_at_ms is None else max(0.0, time.time() - self.decided_at_ms / 1000)

    @property
    def lag_total(self) -> int | None:
        """None: no source counts offsets, or none answered."""
        return sum(sum(partitions.values()) for partitions in self.lag.values()) if self.lag else None

    @property
    def lag_to_end(self) -> int | None:
        """With the offsets that open transactions hide: to the high watermark. None: as `lag_total`."""
        held = sum(h.total for h in self.held_back.values())
        return None if self.lag_total is None else self.lag_total + held

    @property
    def records(self) -> int | None:
        """At all sinks; None: unknown."""
        counts = [s.records for s in self.sinks]
        return None if None in counts or self.driver is Driver.UNKNOWN else sum(n for n in counts if n is not None)

    @property
    def lag_s(self) -> dict[str, dict[str, float]] | None:
        """Seconds since the first waiting record was written, by source and partition; 0: none waits. None: no source
        dates its records, or none answered."""
        now = time.time()
        return {
            source: {p: max(0.0, now - since[p] / 1000) if p in since else 0.0 for p in self.lag.get(source, since)}
            for source, since in self.waiting_since_ms.items()
        } or None

    @property
    def lag_s_max(self) -> float | None:
        """Of the partition that waits the longest."""
        lags = self.lag_s
        return None if lags is None else max((s for of in lags.values() for s in of.values()), default=0.0)

    def _repr_html_(self) -> str:
        head = html.joined((html.element("b", self.pipeline), f" {self.guarantee}"))
        return html.fragment(html.element("p", head), summary(self))

    def to_json(self) -> dict[str, Any]:
        lags = self.lag_s
        return {
            "pipeline": self.pipeline,
            "guarantee": self.guarantee,
            "checkpoint": self.checkpoint,
            "driver": self.driver.value,
            "owner": self.owner,
            "drivers_fenced": self.drivers_fenced,
            "batch": self.batch,
            "decided_at_ms": self.decided_at_ms,
            "decided_age_s": None if self.decided_age_s is None else round(self.decided_age_s, 1),
            "visible": self.visible,
            "sinks": [s.__dict__ for s in self.sinks],
            "positions": {name: _json_or_text(at) for name, at in self.positions.items()},
            "lag": self.lag,
            "lag_total": self.lag_total,
            "lag_to_end": self.lag_to_end,
            "held_back": {n: asdict(h) for n, h in self.held_back.items()},
            "hidden": {n: asdict(h) for n, h in self.hidden.items()},
            "pace": None if self.pace is None else self.pace.to_json(),
            "runs": [r.to_json() for r in self.runs[-_RUNS_SHOWN:]],
            "new_dead_letters": {n: asdict(d) for n, d in self.new_dead_letters.items()},
            "lag_s": None if lags is None else {n: {p: round(s, 1) for p, s in of.items()} for n, of in lags.items()},
            "receivers": {n: [_receiver_json(r) for r in of] for n, of in self.receivers.items()},
            "windows": {name: asdict(window) for name, window in self.windows.items()},
            "transactions": None if self.transactions is None else [t.to_json() for t in self.transactions],
            "wal_held_back": self.wal_held_back,
            "last_batch": self.last.to_json() if self.last is not None else None,
            "totals": self.totals.__dict__,
            "audits": self.audits,
            "seals": {sink: s.to_json() for sink, s in self.seals.items()},
            "problems": [p.__dict__ for p in self.problems],
        }


def unanswered(status: Status) -> bool:
    """Whether ledger, sinks, sources or checkpoint did not all answer."""
    return any(p.is_unanswered for p in status.problems)


def not_ready(status: Status) -> str | None:
    """Why the pipeline is not at work; None: its ledger names a driver that lives on this host and decides, or no
    record waits. A driver claims the ledger with its first batch: one that has nothing to do has not claimed it yet."""
    failed = [p.text for p in status.problems if p.code == "DELIVERED_STALLED" or p.is_unanswered]
    if failed:
        return failed[0]
    if status.driver is Driver.RUNNING or status.lag_total == 0:
        return None
    if status.driver in (Driver.NONE, Driver.UNKNOWN):
        return status.problems[0].text if status.problems else "no driver has claimed the ledger yet"
    waits = "" if status.lag_total is None else f", and {status.lag_total:,} offsets wait"
    return f"the driver that the ledger names is {status.driver.value}{waits}"


def summary(s: Status) -> html.Html:
    """Problems with what fixes them, and the newest figures."""
    figures: list[tuple[str, object]] = [("driver", s.driver.value)]
    if s.runs:
        figures.append(("last run", run_text(s.runs[-1])))
    if s.batch is not None and s.decided_at_ms is not None:
        figures += [("newest batch", s.batch), ("decided", html.utc(s.decided_at_ms))]
    if s.lag_total is not None:
        figures.append(("lag, offsets", lag_text(s)))
    if s.pace is not None:
        figures.append(("pace", s.pace.text))
    if s.lag_s_max is not None:
        figures.append(("lag, seconds", f"{s.lag_s_max:,.0f}"))
    for name, reports in s.receivers.items():
        figures.append((f"receivers{f' of {name}' * (name != SOURCE)}", receivers_text(reports)))
    for w in s.windows.values():
        figures.append(("ids kept, may be redelivered after", f"{w.kept_s:,.0f} s, {w.needed_s:,.0f} s"))
    for sink in s.sinks:
        lost = f", {sink.given_up:,} given up" if sink.given_up else ""
        count = "unknown" if sink.records is None else f"{sink.records:,}"
        figures.append((f"records in {sink.name}", f"{count}{lost}"))
    figures += [(f"sealed{f' in {n}' * (len(s.seals) > 1)}", sealed_text(seal)) for n, seal in s.seals.items()]
    figures += [("WAL held back", f"{held / 1048576:,.1f} MiB") for held in s.wal_held_back.values()]
    return html.joined((*(html.problem(p.code, p.text, p.next_step) for p in s.problems), html.figures(figures)))


def lag_text(s: Status) -> str:
    """To the last stable offset, and what is hidden behind it; for display."""
    held = (s.lag_to_end or 0) - (s.lag_total or 0)
    return "" if s.lag_total is None else f"{s.lag_total:,}" + (f" + {held:,} hidden" if held else "")


def run_text(run: Run) -> str:
    """For display: "failed 2026-11-26 06:12:44 UTC: [DELIVERED_...]"."""
    if run.ended_ms is None:
        return f"since {html.utc(run.started_ms)}"
    return f"failed {html.utc(run.ended_ms)}: [{run.code}]" if run.has_failed else f"stopped {html.utc(run.ended_ms)}"


def receivers_text(reports: Sequence[ReceiverReport]) -> str:
    """How many run, and how many ended without having been stopped."""
    died = sum(map(is_dead, reports))
    return f"{len(reports) - died}" + (f", {died} dead" if died else "")


def _receiver_json(report: ReceiverReport) -> dict[str, Any]:
    owner = report.owner
    return {
        "host": owner.host,
        "process": owner.process,
        "gone": is_dead(report),
        "at_ms": report.at_ms,
        "counts": dict(report.counts),
    }


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
