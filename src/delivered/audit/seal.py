"""Seals: what audits proved of a sink, one after the other, each with the hash of the one before it. Pure.

A seal closes a range of decided batches. The next audit begins behind it, in the source and in the sink, so that what
was proved once stays proved when the source has dropped its records. The seals of a sink are one chain, over all
checkpoints of its pipeline; sums start again with each checkpoint, as the ledger's do.

Where batches meet sink positions, an audit of a running pipeline cannot cut sharply. So a seal says two things of the
position where it stopped reading the sink: all rows of batches up to `settled` lie before it, and all rows of batches
after `last` at or behind it. Rows of the batches in between, which are sealed, may be found again by the next audit.

A seal of a share of the keys is of all batches, but of these keys alone. It is a link of the chain, and nothing else:
audits continue from the newest seal of all keys, and ranges of batches consist of those.

Together the seals of a sink say which batches were proved, which were not, and when the newest was. So do those of a
chain of pipelines. If a hop delivered every record of its source, and the next hop read all that the first one
delivered and delivered that in turn, then the records arrived from end to end, and no row needs to be read again. That
holds where the seals join: each chain of seals covers its checkpoint from the first batch on, and the next hop read
from the first row on. Damage at one hop is damage from end to end; of damage at two, seals do not say what is left.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import pairwise
from typing import Any, Self

from delivered.audit.evidence import Counts, Verdict, breaches
from delivered.contract.source import Offsets
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, Refused, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, batches_text
from delivered.model.work import Account, check_format

UNPROVED_MAX = 20

SEAL_FORMAT = 2
"""Version of the fields. Seals of a later version are refused, as other durable records are. 2: of a share of the keys,
which version 1 would take for one of all keys."""
_OF_ALL_KEYS = 1

_PLAIN = {"int": int, "str": str, "bool": bool}


class State(StrEnum):
    """Of a range of batches: the verdict of its audit, or that it had none."""

    HELD = "held"
    BROKEN = "broken"
    UNKNOWN = "unknown"
    NEVER_AUDITED = "never audited"


@dataclass(frozen=True)
class Sums:
    """What was counted over a range of batches.

    Attributes:
        sent: the transform's output, reread from the source.
        ledger: what the tasks handed to the sink, and what was given up.
        delivered: read back from the sink.
    """

    counts: Counts = Counts()
    sent: Fingerprint = Fingerprint()
    ledger: Account = Account()
    delivered: Fingerprint = Fingerprint()

    def __add__(self, other: Sums) -> Sums:
        ledger = Account(self.ledger.total + other.ledger.total, self.ledger.given_up + other.ledger.given_up)
        return Sums(self.counts + other.counts, self.sent + other.sent, ledger, self.delivered + other.delivered)

    def to_json(self) -> dict[str, Any]:
        return {
            "counts": asdict(self.counts),
            "sent": str(self.sent),
            "ledger": self.ledger.to_json(),
            "delivered": str(self.delivered),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        known = {f.name for f in fields(Counts)}
        counts = Counts(**{name: int(n) for name, n in data["counts"].items() if name in known})
        ledger = Account.from_json(data["ledger"])
        return cls(counts, Fingerprint.parse(data["sent"]), ledger, Fingerprint.parse(data["delivered"]))


@dataclass(frozen=True)
class Seal:
    """
    Attributes:
        number: in the chain, from 0.
        before: hash of the seal before it; empty: it is the first.
        first, last: batches of this incarnation. The first one follows those of the seal before it; or, if an audit
            compared sealed batches once more, those of an earlier seal, or is 0.
        start, end: source positions where they start and end, as in a decision's offsets by source (`request.parsed`).
        sink_start, sink_end: where reading the sink began and stopped (`BoundedScan.position`); None: from its start,
            and nowhere: it has no positions.
        sink_read: all rows of batches up to `last` lie before this position; what lies between `sink_end` and here was
            compared already. None: the sink was read to its end.
        sink_kept: facts about what lies before `sink_end`, to be compared by the next audit (`BoundedScan.kept`).
        settled: all rows of batches up to this one lie before `sink_end`; at most `last`. Below `first`: of none.
        settled_end: source position where batch `settled` ends.
        audited: False: nobody compared these batches, for the reason in `unknowns`.
        sums: of these batches.
        total: of all batches of this incarnation up to `last` that were audited.
        account: the ledger's running totals at `last`, of all batches.
        unproved: ranges of this checkpoint that earlier seals did not prove, the newest `UNPROVED_MAX`, oldest first:
            state ("broken", "unknown", "never audited"), first, last, records, reason.
        transform: fingerprint of the transform that the batches were recomputed with; empty: unknown.
        sealed_at_ms: by the auditor's clock, for display; it orders nothing.
        auditor: name and version of the program.
        keys: the share of the keys that was compared, as `KeyCheck.to_json`; None: all keys.
        full: with `keys`, the number of the newest seal of all keys before it; -1: there is none.
    """

    scope: Scope
    number: int
    before: str
    first: int
    last: int
    start: str
    end: str
    verdict: Verdict
    sums: Sums
    total: Sums
    account: Account
    settled: int
    settled_end: str
    sink_start: Offsets | None = None
    sink_end: Offsets | None = None
    sink_read: Offsets | None = None
    sink_kept: Mapping[str, Any] | None = None
    audited: bool = True
    breaches: tuple[str, ...] = ()
    unknowns: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unproved: tuple[Mapping[str, Any], ...] = ()
    transform: str = ""
    sealed_at_ms: int = 0
    auditor: str = ""
    keys: Mapping[str, Any] | None = None
    full: int = -1
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a later version of the same format, kept so that the text stays as it was."""

    @property
    def text(self) -> str:
        """Canonical: what is stored, and hashed."""
        without = ("scope", "extra", *(("keys", "full") if self.keys is None else ()))
        data: dict[str, Any] = {
            "format": _OF_ALL_KEYS if self.keys is None else SEAL_FORMAT,
            "pipeline": self.scope.pipeline,
            "sink": self.scope.sink,
            "incarnation": self.scope.incarnation,
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in without},
            "verdict": self.verdict.value,
            "sums": self.sums.to_json(),
            "total": self.total.to_json(),
            "account": self.account.to_json(),
            **self.extra,
        }
        return json.dumps(data, separators=(",", ":"), sort_keys=True)

    @property
    def sealed_at(self) -> datetime:
        return datetime.fromtimestamp(self.sealed_at_ms / 1000, UTC)

    @property
    def digest(self) -> str:
        return digest_of(self.text)

    @property
    def state(self) -> State:
        return State(self.verdict.value) if self.audited else State.NEVER_AUDITED

    @property
    def share(self) -> str:
        """For display: "share 7 of 1,000 of the keys"; empty: it is of all keys."""
        return "" if self.keys is None else f"share {self.keys['share']:,} of {self.keys['of']:,} of the keys"

    @property
    def unproved_until(self) -> tuple[Mapping[str, Any], ...]:
        """`unproved`, and its own range if its guarantee is not known to hold: what the seal that continues it says."""
        if self.state is State.HELD or self.keys is not None:
            return self.unproved
        own = {
            "state": self.state.value,
            "first": self.first,
            "last": self.last,
            "records": self.sums.ledger.total.count,
            "reason": next(iter((*self.breaches, *self.unknowns)), ""),
        }
        return (*self.unproved, own)[-UNPROVED_MAX:]

    @classmethod
    def parse(cls, text: str) -> Self:
        """
        Raises:
            Refused: a later version of this package wrote it.
            ValueError: it is no seal.
        """
        try:
            return cls._parsed(json.loads(text.encode()))  # what cannot be encoded has no hash
        except Refused:
            raise
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, UsageError) as error:
            raise ValueError(f"not a seal: {error!r}") from error

    @classmethod
    def _parsed(cls, data: Any) -> Self:
        check_format(data.pop("format", 0), "a seal", SEAL_FORMAT)
        scope = Scope(data.pop("pipeline"), data.pop("sink"), data.pop("incarnation"))
        own = {f.name: data.pop(f.name) for f in fields(cls) if f.name in data}
        for name in ("breaches", "unknowns", "notes", "unproved"):
            own[name] = tuple(own.get(name, ()))
        plain = [(f.name, _PLAIN[str(f.type)], own[f.name]) for f in fields(cls) if f.type in _PLAIN and f.name in own]
        plain += [(name, str, text) for name in ("breaches", "unknowns", "notes") for text in own[name]]
        if wrong := next((f"{name} is {value!r}" for name, kind, value in plain if type(value) is not kind), None):
            raise TypeError(wrong)
        own |= {"verdict": Verdict(own["verdict"]), "account": Account.from_json(own["account"])}
        own |= {name: Sums.from_json(own[name]) for name in ("sums", "total")}
        keys = own.get("keys")
        if keys is not None and not all(type(keys[name]) is int for name in ("share", "of", "compared")):
            raise TypeError(f"keys is {keys!r}")
        return cls(scope=scope, **own, extra=data)


def stored_seal(text: str, sink: str) -> Seal:
    """A seal of a sink's ledger.

    Raises:
        Refused: a later version of this package wrote it.
        DeliveredError: it is no seal.
    """
    try:
        return Seal.parse(text)
    except ValueError as error:
        raise DeliveredError("AUDIT_SEAL.CHANGED", sink=sink, faults=error) from error


def digest_of(text: str) -> str:
    """SHA-256 of a seal as it is stored, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def chain_faults(texts: Iterable[str]) -> Iterator[str]:
    """Where a chain of seals, oldest first, does not hold: changed, missing or reordered seals, as sentences.

    The first text need not be seal 0. A seal that was cut off at the end does not show: compare the newest number and
    hash with what was written down elsewhere.
    """
    for _, faults in checked(texts):
        yield from faults


def checked(texts: Iterable[str]) -> Iterator[tuple[Seal | None, list[str]]]:
    """Each seal of a chain, None for what is none, and where the chain does not hold there (`chain_faults`)."""
    before: tuple[Seal, str] | None = None
    full: Seal | None = None
    ends: dict[int, Seal] = {}
    for at, text in enumerate(texts):
        try:
            seal = Seal.parse(text)
        except ValueError as error:
            before, full, ends = None, None, {}
            yield None, [f"the seal at place {at} cannot be read: {error}"]
            continue
        faults = [] if seal.text == text else [f"seal {seal.number} is not stored as it was written"]
        if before is not None:
            faults += _link_faults(*before, seal)
        elif seal.number == 0 and seal.before:
            faults.append("seal 0 names a seal before it")
        before = (seal, digest_of(text))
        if seal.keys is not None:
            if full is not None and seal.full != full.number:
                named = f"seal {seal.number} names seal {seal.full} as the last one of all keys"
                faults.append(f"{named}, not {full.number}")
            yield seal, faults
            continue
        if full is not None:
            faults += _range_faults(full, seal, ends)
            if full.scope.incarnation != seal.scope.incarnation:
                ends = {}
        full, ends[seal.last] = seal, seal
        yield seal, faults


def _link_faults(last: Seal, digest: str, seal: Seal) -> Iterator[str]:
    if seal.number != last.number + 1:
        yield f"seal {seal.number} follows seal {last.number}"
    elif seal.before != digest:
        yield f"seal {last.number} has changed since seal {seal.number} was made: its hash is another one"


def _range_faults(last: Seal, seal: Seal, ends: Mapping[int, Seal]) -> Iterator[str]:
    """
    Args:
        last: the newest one of all keys before it.
        ends: the seals of its checkpoint that are known, by their last batch.
    """
    if seal.scope.incarnation != last.scope.incarnation:
        if seal.first != 0:
            yield f"seal {seal.number} is the first of its checkpoint, and starts with batch {seal.first}"
        return
    if seal.first > last.last + 1:
        yield f"seal {seal.number} starts with batch {seal.first}, and seal {last.number} ends with {last.last}"
        return
    follows = ends.get(seal.first - 1)
    if follows is not None and seal.start != follows.end:
        yield f"seal {seal.number} starts in the source where seal {follows.number} does not end"
    elif seal.audited and (follows is not None or seal.first == 0):
        total = follows.total if follows is not None else Sums()
        if seal.total != total + seal.sums:
            base = f"that of seal {follows.number} and its own sums" if follows is not None else "its own sums"
            yield f"seal {seal.number}: its total is not {base}"


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
