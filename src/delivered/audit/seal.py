"""Seals: what audits proved of a sink, one after the other, each with the hash of the one before it. Pure.

A seal closes a range of decided batches. The next audit begins behind it, in the source and in the sink, so that what
was proved once stays proved when the source has dropped its records. The seals of a sink are one chain, over all
checkpoints of its pipeline; sums start again with each checkpoint, as the ledger's do.

Where batches meet sink positions, an audit of a running pipeline cannot cut sharply. So a seal says two things of the
position where it stopped reading the sink: all rows of batches up to `settled` lie before it, and all rows of batches
after `last` at or behind it. Rows of the batches in between, which are sealed, may be found again by the next audit.

A seal of a share of the keys is of all batches, but of these keys alone. It is a link of the chain, and nothing else:
audits continue from the newest seal of all keys, and ranges of batches consist of those.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

from delivered.audit.evidence import Counts, Verdict
from delivered.contract.source import Offsets
from delivered.model.errors import DeliveredError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
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
        except (AttributeError, KeyError, OverflowError, RecursionError, TypeError) as error:
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
