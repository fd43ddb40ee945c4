"""What is audited: the parameters, and ranges of decided batches with the source positions that they read. No Spark."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from delivered.audit.evidence import Counts
from delivered.contract.sink import Sink
from delivered.contract.source import Offsets, Slice, Source, SourceDriver
from delivered.engine import Sinks
from delivered.model.capability import Dedup, Guarantee, WriteMode
from delivered.model.errors import DeliveredError, Refused, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import SOURCE, by_source
from delivered.model.rows import backquoted
from delivered.model.work import Account, Decision

SHARES_MAX = 1_000_000
_SHARE = re.compile(r"\s*(?P<fixed>#)?(?P<number>\d+)\s*/\s*(?P<of>[\d,_]+)\s*")
WRONG = (1, 10, 100, 1_000)
"""Numbers of wrong keys for which a report gives the probability."""


@dataclass(frozen=True)
class KeyShare:
    """One of `of` shares of all keys, of about the same size: which one an audit compares.

    A table of one row per key, or of aggregates, has no part that is finished: any batch may change any row. So its
    audit cannot continue where the last one stopped. Instead it can compare a share of the keys, by their hash, with
    the complete source: another share each time.

    Attributes:
        number: from 1 to `of`. 0: the one after the last that was compared.
    """

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> KeyShare:
        """From "1/1000": a thousandth of the keys, the next one; "7/1000" or "#1/1000": this one.

        Raises:
            UsageError: it is none of these.
        """
        found = _SHARE.fullmatch(text)
        if found is None:
            raise UsageError("AUDIT_KEYS.SHARE", text=text, shares_max=f"{SHARES_MAX:,}")
        number, of = int(found["number"]), int(re.sub("[,_]", "", found["of"]) or 0)
        if not 1 <= number <= of <= SHARES_MAX:
            raise UsageError("AUDIT_KEYS.SHARE", text=text, shares_max=f"{SHARES_MAX:,}")
        return cls(0 if number == 1 and not found["fixed"] else number, of)

    @property
    def text(self) -> str:
        """As `parse` reads it."""
        return f"#{self.number}/{self.of}" if self.number else f"1/{self.of}"

    def after(self, audits: Iterable[Mapping[str, Any]], sink: str, seed: str) -> KeyShare:
        """This share; if it has no number, the one after the newest that was compared.

        Args:
            audits: earlier ones, oldest first, as `checkpoint.history` keeps them.
            seed: chooses the first one: audits that are neither recorded nor sealed compare shares at random.
        """
        if self.number:
            return self
        kept = [a["keys"] for a in audits if a["sink"] == sink and a.get("keys", {}).get("of") == self.of]
        before = int(kept[-1]["share"]) if kept else int(hashlib.sha256(seed.encode()).hexdigest(), 16)
        return KeyShare(before % self.of + 1, self.of)

    def found(self, wrong: int) -> float:
        """The probability that this share has one of so many wrong keys, if what went wrong did not depend on the
        keys' hashes."""
        return 1 - (1 - 1 / self.of) ** wrong


@dataclass(frozen=True)
class KeyCheck:
    """What an audit compared of the keys.

    Attributes:
        compared: keys of this share, in the source or in the sink.
        selected: where rows of other keys were dropped, for display.
    """

    share: KeyShare
    compared: int = 0
    selected: str = ""

    @classmethod
    def of_counts(cls, share: KeyShare, counts: Counts, selected: str) -> KeyCheck:
        return cls(share, counts.sent + counts.unexpected + counts.duplicated, selected)

    @property
    def probabilities(self) -> dict[int, float]:
        """By number of wrong keys in the table."""
        return {wrong: self.share.found(wrong) for wrong in WRONG}

    def lines(self) -> list[str]:
        """For a report."""
        chances = ", ".join(f"{n:,}: {_percent(p)}" for n, p in self.probabilities.items())
        return [
            f"share {self.share.number:,} of {self.share.of:,} of the keys: {self.compared:,} keys compared, selected "
            f"{self.selected}; this one again: --keys '{self.share.text}'",
            f"probability that wrong keys would have been found, by their number in the table: {chances}",
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "share": self.share.number,
            "of": self.share.of,
            "compared": self.compared,
            "selected": self.selected,
            "probability_found": {str(n): round(p, 9) for n, p in self.probabilities.items()},
        }


def found_by(keys: Mapping[str, Any]) -> str:
    """What a seal of a share says of it, for display. Args: keys: as `KeyCheck.to_json`."""
    chance = _percent(KeyShare(keys["share"], keys["of"]).found(1))
    return (
        f"{keys['compared']:,} keys compared; a single wrong key would have been found with a probability of {chance}"
    )


def _percent(probability: float) -> str:
    text = f"{100 * probability:.3g}"
    return "> 99.9 %" if text == "100" and probability < 1 else f"{text} %"


SAMPLES_MAX = 20

Transform = Callable[[Mapping[str, Any]], Any]
"""From a Spark DataFrame per source, by name, to another DataFrame."""


@dataclass(frozen=True)
class Recompute:
    """
    Attributes:
        output_mode: of the query.
        keys: columns that identify a row of the result; empty: unknown.
        changing: functions in the transform whose value changes between runs.
        deterministic: as declared; None: not declared.
        sql: the transform is SQL: what it names by value is the same at every start.
    """

    output_mode: str
    keys: tuple[str, ...] = ()
    changing: tuple[str, ...] = ()
    deterministic: bool | None = None
    sql: bool = False


@dataclass(frozen=True)
class Sealing:
    """How an audit continues a chain of seals.

    Attributes:
        full: read everything.
        since: read from the seal before this batch on.
        from_now: compare nothing, and seal everything up to now as never audited.
    """

    full: bool = False
    since: int | None = None
    from_now: bool = False


def sealing(
    *,
    full: bool = False,
    since: int | None = None,
    from_now: bool = False,
    sink_from: bool = False,
    keys: bool = False,
    recompute: bool = False,
) -> Sealing | None:
    """
    Args:
        sink_from: the audit compares a part of the sink that the user names: it seals nothing.
        keys: it compares a share of the keys, and continues nothing.
        recompute: it recomputes all batches.

    Raises:
        UsageError: two of them exclude each other.
    """
    options = {"full": full, "since": since is not None, "from_now": from_now}
    chosen = [name for name, given in options.items() if given]
    if (sink_from or keys or recompute) and chosen:
        raise UsageError("AUDIT_CONTINUES.PART", options=", ".join(chosen))
    if len(chosen) > 1:
        raise UsageError("AUDIT_CONTINUES.SEVERAL", options=", ".join(chosen))
    if since is not None and since < 0:
        raise UsageError("AUDIT_CONTINUES.SINCE", since=since)
    return None if sink_from else Sealing(full or (recompute and not keys), since, from_now)


def check_since(since: int, newest: int | None) -> None:
    """Raises UsageError: no sink can have decided this batch.

    Args:
        newest: batch of the checkpoint; None: it has none.
    """
    if newest is not None and since > newest:
        raise UsageError("AUDIT_CONTINUES.SINCE_AFTER", since=since, newest=newest)


@dataclass(frozen=True)
class AuditRequest:
    """
    Attributes:
        checkpoint: as Spark spells it. It names the incarnation, so an audit covers a single checkpoint.
        sources: by name.
        sink_name: None: the connector's default name.
        dedup: which repeats in the source are dropped before the transform; None: none.
        transform: the pipeline's; None: the records of its only source go through as they are.
        id: SQL over the sink's columns that identifies a record, for example `get_json_object(value, '$.id')`.
            None: all columns do, and an altered record shows as one lost and one unexpected.
        key: SQL over the sink's columns; order is judged within a key. None: the column `key`, if there is one.
        own: SQL over the sink's columns, true for this pipeline's records; the others are foreign. None: not declared.
        samples_max: damaged records listed, per class.
        sink_from: read the sink from here on, if it holds records of others or of earlier checkpoints.
        transform_version: fingerprint of `transform`; batches that ran with another one are not recomputed. Empty:
            every batch is assumed to have run with it.
        dead_letters: name of the sink that gets dead letters; rows that this sink refuses are not expected here then.
        rejects: records that the sources cannot make rows of are dead letters, and not expected in the sink.
        recompute: compare with the transform over the complete range as one batch; None: account for every record.
        decided_by: the sinks among which its batches are decided. None: it decides itself.
        sealing: continue from the last seal, and add one. None: read everything, and seal nothing.
        keys: compare only the rows of this share of the keys, and seal that; None: all.
    """

    pipeline: str
    guarantee: Guarantee
    checkpoint: str
    sources: Mapping[str, Source]
    sink: Sink
    sink_name: str | None = None
    transform: Transform | None = None
    dedup: Dedup | None = None
    id: str | None = None
    key: str | None = None
    own: str | None = None
    samples_max: int = SAMPLES_MAX
    sink_from: Offsets | None = None
    decided_by: Sinks | None = None
    dead_letters: str | None = None
    rejects: bool = False
    transform_version: str = ""
    recompute: Recompute | None = None
    sealing: Sealing | None = None
    keys: KeyShare | None = None

    @property
    def named_sink(self) -> str:
        return self.sink_name or self.sink.name

    @property
    def write_mode(self) -> WriteMode:
        return self.sink.capability().write


class BadExpression(UsageError):
    """The id, the key or the condition `own` is not SQL over the sink's columns."""


class NeedsSpark(Exception):
    """Only Spark can run this audit. The text says why, for the user."""


def id_sql(mode: WriteMode) -> str:
    """SQL that identifies a key of an upsert: as JSON, where Spark's texts of times end with milliseconds; behind a tab
    follows what is finer."""
    keys = [*map(backquoted, mode.keys)]
    micros = "map('timestampFormat', 'SSSSSS', 'timestampNTZFormat', 'SSSSSS')"
    finer = [f"if(typeof({key}) LIKE '%timestamp%', to_json(struct({key}), {micros}), NULL)" for key in keys]
    return f"concat_ws(char(9), to_json(struct({', '.join(keys)})), {', '.join(finer)})"


FINER = r"\}\t\{.*"
"""What follows the milliseconds in a text of `id_sql`, from the brace before it on. Shares of the keys go without."""


def check_write_mode(mode: WriteMode, *, dedup: bool = False) -> None:
    """Raises Refused: the source does not determine the final state."""
    if mode.complete:
        raise Refused("AUDIT_ORDER.COMPLETE")
    if mode.replaces:
        raise Refused("AUDIT_ORDER.OVERWRITE", replaces=", ".join(mode.replaces))
    if mode.expected is not None:
        raise Refused("AUDIT_ORDER.EXPECTED_VERSION", expected=mode.expected)
    if mode.insert and dedup:
        raise Refused("AUDIT_ORDER.DEDUP")
    if mode.upserts and not mode.insert and mode.version is None:
        raise Refused("AUDIT_ORDER.ARRIVAL", keys_text=mode.keys_text)


def check_columns(request: AuditRequest, records: Sequence[str], stored: Sequence[str]) -> None:
    """
    Args:
        records: columns of what was sent, as a reader of the sink sees it.
        stored: those of the sink.

    Raises:
        DeliveredError: the sink lacks some.
    """
    if missing := [n for n in records if n not in stored]:
        raise DeliveredError("AUDIT_COLUMNS", sink=request.named_sink, columns=list(stored), missing=missing)


RANGES_MAX = 200
"""Maximum number of ranges that a source range is split into. With more batches, several share a range."""

Positions = dict[str, Offsets]
"""Offsets by source."""


def parsed(text: str) -> Positions:
    """The offsets of a batch, as stored in the ledger and Spark's offset log."""
    return {name: json.loads(offsets) for name, offsets in by_source(text).items()}


def as_text(positions: Positions) -> str:
    """As `parsed` reads it."""
    lines = {name: json.dumps(offsets, separators=(",", ":")) for name, offsets in positions.items()}
    return lines[SOURCE] if list(lines) == [SOURCE] else "\n".join(f"{name}:{text}" for name, text in lines.items())


def plain(positions: Positions) -> dict[str, Any]:
    """For reports: offsets of a single unnamed source appear alone."""
    return positions[SOURCE] if list(positions) == [SOURCE] else positions


@dataclass(frozen=True)
class SourceRange:
    """The source positions that an audit covers.

    Attributes:
        start: of the first batch.
        end: of the newest batch whose rows a reader sees; None: no batch is visible.
        planned: of the newest batch that started. Rows beyond `end` may be in the sink and need not be.
    """

    start: Positions
    end: Positions | None
    planned: Positions

    @property
    def undecided(self) -> tuple[Positions, Positions] | None:
        """The positions of a batch that started and is not decided; None: there is none."""
        return None if self.planned == self.end else (self.end or self.start, self.planned)


@dataclass(frozen=True)
class BatchRange:
    """Consecutive batches.

    Attributes:
        first, last: their numbers.
        start, end: the source positions where they start and end.
        transform: fingerprint of the transform that they ran with; empty: unknown, or not of interest.
        decided: what they handed to the sink, and what they gave up.
    """

    first: int
    last: int
    start: Positions
    end: Positions
    transform: str = ""
    decided: Account = Account()

    @property
    def several(self) -> bool:
        return self.first != self.last


def split_by_batch(start: Positions, ends: Sequence[tuple[int, Positions]]) -> list[BatchRange]:
    """The source range split where batches ended, into at most `RANGES_MAX` parts.

    Args:
        ends: (batch, its end) as far as the ledger keeps them, oldest first. Batches that it no longer keeps share a
            range with the one after them.
    """
    ranges: list[BatchRange] = []
    for batch, end in dict(ends).items():
        first, at = (ranges[-1].last + 1, ranges[-1].end) if ranges else (0, start)
        ranges.append(BatchRange(first, batch, at, end))
    size = math.ceil(len(ranges) / RANGES_MAX) or 1
    parts = [ranges[i : i + size] for i in range(0, len(ranges), size)]
    return [BatchRange(p[0].first, p[-1].last, p[0].start, p[-1].end) for p in parts]


def split_by_transform(newest: Decision, start: Positions) -> list[BatchRange]:
    """All batches of an incarnation up to `newest`, by the transform that they ran with, from the sink's ledger.

    Args:
        start: where the first batch began.
    """
    total = Account(newest.total, newest.given_up)
    if not newest.transforms:
        return [BatchRange(0, newest.batch, start, parsed(newest.offsets), decided=total)]
    sink, ranges = newest.scope.sink, []
    following = [*((t.batch - 1, t.after, t.accounts.get(sink, Account())) for t in newest.transforms[1:])]
    following.append((newest.batch, newest.offsets, total))
    for version, (last, end, until) in zip(newest.transforms, following, strict=True):
        before = version.accounts.get(sink, Account())
        decided = Account(until.total - before.total, until.given_up - before.given_up)
        at = parsed(version.after) if version.after else start
        ranges.append(BatchRange(version.batch, last, at, parsed(end), version.fingerprint, decided))
    return ranges


def clip(ranges: Sequence[BatchRange], after: int, start: Positions, account: Account) -> list[BatchRange]:
    """The batches after one of them.

    Args:
        ranges: of consecutive batches, from batch 0 on.
        start, account: the source position, and the running totals, after batch `after`.
    """
    clipped, before = [], Account()
    for r in ranges:
        until = before + r.decided
        if r.first <= after < r.last:
            clipped.append(replace(r, first=after + 1, start=start, decided=until - account))
        elif r.last > after:
            clipped.append(r)
        before = until
    return clipped


def until(ranges: Sequence[BatchRange], last: int, end: Positions) -> list[BatchRange]:
    """The batches up to one of them, without what they handed to the sink.

    Args:
        end: the source position after batch `last`.
    """
    bare = [replace(r, decided=Account()) for r in ranges if r.first <= last]
    return [replace(r, last=last, end=end) if r.last > last else r for r in bare]


@dataclass(frozen=True)
class Earlier:
    """Batches that cannot be recomputed: for most, because they ran with a transform other than the audit's.

    Attributes:
        batches: for display: "0 to 4, 9".
        handed: what they handed to the sink, according to the ledger.
        given_up: what they gave up (at_most_once).
        clauses: why they cannot be; empty: for that reason.
        expired: the sink's retention may have removed some of them.
        counted: the fingerprint of `handed` cannot be compared with rows of the sink, its number of records can.
        missing: how many of their records are not in the sink.
        differs: the sink holds as many records as the ledger says, but different ones.
    """

    batches: str
    handed: Fingerprint
    given_up: Fingerprint = Fingerprint()
    missing: int = 0
    differs: bool = False
    clauses: tuple[str, ...] = ()
    counted: bool = False
    expired: bool = False

    @property
    def clause(self) -> str:
        return "; ".join(self.clauses) or (
            f"batches {self.batches} ran with another transform and cannot be recomputed with this one"
        )

    def __add__(self, other: Earlier) -> Earlier:
        return Earlier(
            batches=f"{self.batches}, {other.batches}",
            handed=self.handed + other.handed,
            given_up=self.given_up + other.given_up,
            clauses=(self.clause, other.clause),
            counted=self.counted or other.counted,
            expired=self.expired or other.expired,
        )


def find_earlier(ranges: Sequence[BatchRange], present: str) -> tuple[list[BatchRange], Earlier | None]:
    """The ranges that can be recomputed, and the rest.

    Args:
        present: fingerprint of the current transform; empty: all batches are assumed to have run with it, as are
            batches whose transform is unknown.
    """
    others = [r for r in ranges if present and r.transform not in ("", present)]
    if not others:
        return list(ranges), None
    batches = ", ".join(f"{r.first} to {r.last}" if r.several else str(r.first) for r in others)
    handed = sum((r.decided.total for r in others), Fingerprint())
    given_up = sum((r.decided.given_up for r in others), Fingerprint())
    return [r for r in ranges if r not in others], Earlier(batches, handed, given_up)


def join_adjacent(ranges: Sequence[BatchRange]) -> list[tuple[Positions, Positions]]:
    """Start and end of each range; ranges that follow each other are one."""
    joined: list[tuple[Positions, Positions]] = []
    for r in ranges:
        if joined and joined[-1][1] == r.start:
            joined[-1] = (joined[-1][0], r.end)
        else:
            joined.append((r.start, r.end))
    return joined


_START_UNKNOWN = (
    "the checkpoint sidecar does not record where batch 0 started, and the source may start elsewhere today"
)


class SourceSet:
    """The drivers of all sources, by name.

    Args:
        first: where each source's first batch began: the default for sources missing from a range's start.
    """

    def __init__(self, drivers: Mapping[str, SourceDriver], first: Mapping[str, Offsets | None]) -> None:
        self._drivers = drivers
        self.unknown = [n for n, offsets in first.items() if offsets is None]
        self.first: Positions = {n: drivers[n].initial() if at is None else at for n, at in first.items()}

    def start(self) -> tuple[Positions, str]:
        """Where the pipeline's first batch started, and why that is uncertain; empty if it is certain."""
        return self.first, _START_UNKNOWN if self.unknown else ""

    def newest(self) -> Positions:
        """The current ends. Raises DeliveredError: a source has none."""
        ends = {name: driver.newest() for name, driver in self._drivers.items()}
        known = {name: end for name, end in ends.items() if end is not None}
        if len(known) < len(ends):
            raise DeliveredError("AUDIT_SOURCES.END_UNKNOWN", missing=", ".join(ends.keys() - known.keys()))
        return known

    def slices(self, start: Positions, end: Positions) -> list[Slice]:
        """Slices whose data is (name of the source, its slice).

        Raises:
            DeliveredError: the range names a source that the pipeline does not have.
        """
        if end.keys() - self._drivers.keys():
            raise DeliveredError("AUDIT_SOURCES.CHANGED", sources=", ".join(end), current=", ".join(self._drivers))
        slices = []
        for name in (n for n in self._drivers if n in end):
            prefix = "" if name == SOURCE else f"{name} "
            for piece in self._drivers[name].slices(start.get(name, self.first[name]), end[name]):
                slices.append(Slice((name, piece), prefix + piece.partition if piece.partition else ""))
        return slices

    def slices_by_range(self, ranges: Sequence[BatchRange]) -> tuple[list[Slice], list[int]]:
        """Slices of consecutive ranges, and for each slice the index of its range."""
        slices: list[Slice] = []
        indices: list[int] = []
        for index, part in enumerate(ranges):
            pieces = self.slices(part.start, part.end) if part.start != part.end else []
            slices += pieces
            indices += [index] * len(pieces)
        return slices, indices

    def is_readable(self, start: Positions) -> bool:
        """Whether no source is known to have dropped records behind these positions."""
        for name, driver in self._drivers.items():
            kept = driver.retained(start.get(name, self.first[name]))
            if kept is not None and kept.missing:
                return False
        return True

    def compacted(self) -> list[str]:
        """As `SourceDriver.compacted`, of all sources."""
        return [why for driver in self._drivers.values() for why in driver.compacted()]

    def close(self) -> None:
        for driver in self._drivers.values():
            driver.close()


def slices_of(slices: Sequence[Slice], name: str) -> list[Slice]:
    """The slices of one source."""
    return [s.data[1] for s in slices if s.data[0] == name]
