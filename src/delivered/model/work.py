"""What driver, tasks and ledger exchange: plans, messages, what was prepared, decisions, totals and archive; and the
outcome of a call that changes something outside: it worked, it did not, or it is unknown."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, ClassVar, Generic, Self, TypeVar, get_args, get_origin, get_type_hints

from delivered.model.capability import Guarantee
from delivered.model.errors import InvariantBroken, Refused
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.limits import TRANSFORM_VERSIONS_BYTES_MAX, TRANSFORM_VERSIONS_KEPT

T = TypeVar("T")


@dataclass(frozen=True)
class Ok(Generic[T]):
    """The change was made."""

    value: T


@dataclass(frozen=True)
class Failed:
    """The change was not made, and will not be later."""

    reason: str


@dataclass(frozen=True)
class Unknown:
    """The change may have been made, or still be made. Fence first, then check; never resend blindly."""

    reason: str


Outcome = Ok[T] | Failed | Unknown


# Format versions of durable records: older formats are read, newer ones are refused.

RECORD_FORMAT = 2
"""Format of records written by this version.

0: records without one, from before formats were numbered. 2: decisions and started batches have a sequence. A release
without it would order them by time."""
LOG_FORMAT = 1
"""Of receivers' logs."""
FORMAT_KEY = "format"
LOG_PROPERTY = "delivered.format"
"""Table property with the format of a receiver's log."""


def with_format(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as written: its format first."""
    return {FORMAT_KEY: RECORD_FORMAT, **record}


def without_format(record: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A record as read, without its format.

    Args:
        what: the record, for the error: "a decision", "a marker".

    Raises:
        Refused: a later version of this package wrote it.
    """
    fields = dict(record)
    check_format(fields.pop(FORMAT_KEY, 0), what)
    return fields


def check_format(version: Any, what: str, newest: int = RECORD_FORMAT) -> None:
    """Raises Refused: this version cannot be read here."""
    if not isinstance(version, int) or not 0 <= version <= newest:
        raise Refused("FORMAT_NEWER", what=what, version=version, newest=newest)


# Running totals of a sink, by version of the transform.


@dataclass(frozen=True)
class Account:
    """Running fingerprints of one sink: decided records, and those that at_most_once gave up."""

    total: Fingerprint = Fingerprint()
    given_up: Fingerprint = Fingerprint()

    def __add__(self, other: Account) -> Account:
        return Account(self.total + other.total, self.given_up + other.given_up)

    def __sub__(self, other: Account) -> Account:
        return Account(self.total - other.total, self.given_up - other.given_up)

    def to_json(self) -> dict[str, str]:
        return {"total": str(self.total), "given_up": str(self.given_up)}

    @classmethod
    def from_json(cls, data: Mapping[str, str]) -> Account:
        return cls(Fingerprint.parse(data["total"]), Fingerprint.parse(data["given_up"]))


@dataclass(frozen=True)
class TransformVersion:
    """A version of the transform, used from one batch on until the next version.

    Attributes:
        fingerprint: of the transform; empty: unknown; `transforms.MIXED`: several.
        batch: the first one.
        after: the sources' offsets at the end of the previous batch; empty: there was none.
        accounts: totals before that batch, by sink name.
    """

    fingerprint: str
    batch: int = 0
    after: str = ""
    accounts: Mapping[str, Account] = field(default_factory=dict)

    def to_json(self, ledger_sink: str) -> dict[str, Any]:
        """A record leaves the name of the ledger's sink empty."""
        return {
            "fingerprint": self.fingerprint,
            "batch": self.batch,
            "after": self.after,
            "accounts": {"" if name == ledger_sink else name: a.to_json() for name, a in self.accounts.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], ledger_sink: str) -> TransformVersion:
        accounts = {name or ledger_sink: Account.from_json(a) for name, a in data["accounts"].items()}
        return cls(data["fingerprint"], data["batch"], data["after"], accounts)


# The permanent archive entry of an incarnation whose decisions a ledger has forgotten: enough to recognise it.
#
# Each run of `df.write` is an incarnation, whose id must be recognised for as long as it may be reused. The entry holds
# a hash of the name, and the number and a digest of the rows: 25 bytes in every ledger.

_ENTRY = struct.Struct(">8sQ8sB")
ENTRY_BYTES = _ENTRY.size
_UNDECIDED, _PARTLY = 1, 2
_NO_ROWS = bytes(8)


@dataclass(frozen=True)
class Archived:
    """
    Attributes:
        key: hash of the incarnation's name.
        rows: records decided, of all batches.
        digest: of their fingerprint.
        decided: False: a batch was started under a weaker guarantee, but none decided.
        partly: at_most_once gave up records: `digest` does not cover all rows.
    """

    key: bytes
    rows: int = 0
    digest: bytes = _NO_ROWS
    decided: bool = True
    partly: bool = False

    @classmethod
    def of(cls, incarnation: str, total: Fingerprint, given_up: Fingerprint) -> Archived:
        """From the running fingerprints in its newest decision."""
        return cls(key_of(incarnation), total.count, digest_of(total), True, bool(given_up.count))

    @classmethod
    def started(cls, incarnation: str) -> Archived:
        return cls(key_of(incarnation), decided=False)

    def holds(self, rows: Fingerprint) -> bool:
        """Whether these are the decided rows, as far as known."""
        return rows.count >= self.rows if self.partly else (rows.count, digest_of(rows)) == (self.rows, self.digest)

    def encode(self) -> bytes:
        return _ENTRY.pack(self.key, self.rows, self.digest, (not self.decided) * _UNDECIDED + self.partly * _PARTLY)

    @classmethod
    def decode(cls, data: bytes) -> Archived:
        key, rows, digest, flags = _ENTRY.unpack(data)
        return cls(key, rows, digest, not flags & _UNDECIDED, bool(flags & _PARTLY))


def key_of(incarnation: str) -> bytes:
    """64 bits: among a million names, two collide in one of 37 million ledgers; then a run is refused."""
    return hashlib.blake2b(incarnation.encode(), digest_size=8).digest()


def digest_of(rows: Fingerprint) -> bytes:
    return hashlib.blake2b(str(rows).encode(), digest_size=8).digest()


class Archive:
    """Any number of archived incarnations, as one string of bytes. Raises InvariantBroken: the bytes are corrupt."""

    def __init__(self, data: bytes = b"", where: str = "the ledger") -> None:
        if len(data) % ENTRY_BYTES:
            raise InvariantBroken(
                "LEDGER_RECORD_MISSING.ARCHIVE", where=where, bytes=len(data), entry_bytes=ENTRY_BYTES
            )
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // ENTRY_BYTES

    def __iter__(self) -> Iterator[Archived]:
        for start in range(0, len(self.data), ENTRY_BYTES):
            yield Archived.decode(self.data[start : start + ENTRY_BYTES])

    def find(self, incarnation: str) -> Archived | None:
        """Of two entries, the decided one counts. Only matches are unpacked."""
        found = [Archived.decode(self.data[at : at + ENTRY_BYTES]) for at in self._places(key_of(incarnation))]
        return max(found, key=lambda entry: entry.decided, default=None)

    def with_more(self, more: Iterable[Archived]) -> Archive:
        """These entries, plus the missing ones of `more`."""
        new = [e.encode() for e in more if e not in self]
        return Archive(self.data + b"".join(new)) if new else self

    def __contains__(self, entry: object) -> bool:
        return isinstance(entry, Archived) and any(
            self.data.startswith(entry.encode(), at) for at in self._places(entry.key)
        )

    def _places(self, key: bytes) -> Iterator[int]:
        at = self.data.find(key)
        while at >= 0:
            if at % ENTRY_BYTES == 0:
                yield at
            at = self.data.find(key, at + 1)


# What was prepared: a writer's handle on it, stored as JSON in the decision, read back by the committer.


@dataclass(frozen=True)
class Handle:
    """All that another process needs to apply or abort a participant; a connector subclasses it as a frozen dataclass.

    Its fields are JSON values, tuples, and frozen dataclasses of these. Default values are not stored.
    """

    FORMAT: ClassVar[int] = 1
    """Version of the fields. Increment it when older code can no longer read them; 0: stored before it existed."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, as `json.loads` returns them."""
        stored = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}
        plain: dict[str, Any] = json.loads(json.dumps({FORMAT_KEY: self.FORMAT, **stored}, default=asdict))
        return plain

    @classmethod
    def of(cls, prepared: Prepared) -> Self:
        """Raises Refused: a later version of this package prepared it."""
        return cls.from_json(prepared.handle)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        check_format(stored.get(FORMAT_KEY, 0), f"a {cls.__name__}", cls.FORMAT)
        made: Self = _typed(cls, stored)
        return made

    def names(self, prepared: Prepared) -> bool:
        """Whether this is the participant's handle."""
        return {**prepared.handle, FORMAT_KEY: self.FORMAT} == self.to_json()


@dataclass(frozen=True)
class Promise:
    """What `Writer.prepare` returns.

    Attributes:
        handle: None: there is nothing to apply or abort.
        given_up: reason -> records that at_most_once sent without acknowledgement; they may have arrived.
    """

    handle: Handle | None = None
    given_up: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A prepared shard at one sink, or what was sent there.

    Attributes:
        fingerprint: of the rows as passed to the sink.
        handle: the connector's `Handle` as JSON. Identifies the rows of this writer: Spark restarts attempts at 0 when
            a batch or stage reruns, so two writers may share one `Work`. Empty if there is nothing to apply or abort.
        given_up: as in `Promise`.
        sink: name of the sink.
    """

    shard: int
    attempt: int
    fingerprint: Fingerprint
    handle: Mapping[str, Any] = field(default_factory=dict)
    given_up: Mapping[str, int] = field(default_factory=dict)
    sink: str = field(kw_only=True)

    @classmethod
    def of(cls, work: Work, fingerprint: Fingerprint, promise: Promise) -> Prepared:
        handle = {} if promise.handle is None else promise.handle.to_json()
        return cls(work.shard, work.attempt, fingerprint, handle, promise.given_up, sink=work.scope.sink)

    def to_json(self, ledger_sink: str) -> dict[str, Any]:
        """A record leaves the name of the ledger's sink empty."""
        return {
            "shard": self.shard,
            "attempt": self.attempt,
            "fingerprint": str(self.fingerprint),
            "handle": dict(self.handle),
            **({"given_up": dict(self.given_up)} if self.given_up else {}),
            **({"sink": self.sink} if self.sink != ledger_sink else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], ledger_sink: str) -> Prepared:
        handle, given_up = dict(data["handle"]), dict(data.get("given_up", {}))
        if "given_up" in handle:  # stored so before it had a field
            handle, given_up = {}, handle.get("reasons") or {"unknown": handle["given_up"]}
        return cls(
            int(data["shard"]),
            int(data["attempt"]),
            Fingerprint.parse(data["fingerprint"]),
            handle,
            given_up,
            sink=str(data.get("sink", ledger_sink)),
        )


def _typed(kind: Any, value: Any) -> Any:
    """A JSON value as the type of its field."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{f.name: _typed(hints[f.name], value[f.name]) for f in fields(kind) if f.name in value})
    if get_origin(kind) is tuple:
        return tuple(_typed(get_args(kind)[0], v) for v in value)
    return value


# Where executors ask the driver whether they may send (`engine/shard.py`).

PORT = "spark.delivered.arbiter.port"
YES, NO = b"yes\n", b"no\n"
"""Answers of the arbiter."""


@dataclass(frozen=True)
class Arbiter:
    """
    Attributes:
        host, port: as executors reach it.
        token: of one plan; void once another plan of the pipeline and sink is made.
    """

    host: str
    port: int
    token: str = field(repr=False)


@dataclass(frozen=True)
class DriverAddress:
    """Where executors reach the driver, from Spark's settings.

    Attributes:
        host: spark.driver.host; empty: unknown.
        bind: spark.driver.bindAddress; empty: the host.
        port: of the arbiter; 0: any.
    """

    host: str = ""
    bind: str = ""
    port: int = 0

    @classmethod
    def of(cls, setting: Callable[[str, str], str | None]) -> DriverAddress:
        """Args: setting: a session's setting of this name, or the default."""
        host = setting("spark.driver.host", "") or ""
        port = setting(PORT, "0") or "0"
        return cls(host, setting("spark.driver.bindAddress", "") or "", int(port) if port.isdigit() else 0)


# Messages between driver and tasks: the checkpoint's view, a batch's plan, a shard's message, a decision.


@dataclass(frozen=True)
class CheckpointView:
    """The content of Spark's checkpoint when a batch is about to run.

    Attributes:
        incarnation: the query's id, from the file `metadata`.
        batch: the batch about to run: the newest file of `offsets/`.
        offsets: the sources' offsets of that batch, one line per source, without Spark's header lines.
        logged: the newest batch in `commits/`; None: none yet.
        run: a run of `df.write`: it has an id instead of offsets, so only its rows show whether it is a rerun.
        repartitions: batches right before `batch` that only repartitioned the query's state; no ledger has them.
    """

    incarnation: str
    batch: int
    offsets: str
    logged: int | None
    run: bool = False
    repartitions: int = 0

    @classmethod
    def of_run(cls, run: str) -> CheckpointView:
        """Of a run of `df.write`: the only batch of an incarnation that its id names."""
        return cls(run, 0, f"run {run}", None, run=True)


class Action(StrEnum):
    """What a task does with its shard."""

    WRITE = "write"
    SKIP = "skip"
    """The shard is already delivered and need not be read."""
    COMPARE = "compare"
    """The shard is already delivered; its rows are read to check that they are the same, and none is written. For runs
    of `df.write`, and for batches of stateful queries: Spark keeps the rerun's state."""
    GIVE_UP = "give_up"
    """at_most_once: an earlier attempt may have sent records; count them, send none."""


@dataclass(frozen=True)
class BatchPlan:
    """The result of recovery, for the tasks of one batch. Pickled into every task.

    Attributes:
        action: for every shard that `rewrite` does not name.
        rewrite: shard -> the sinks (see `Prepared.sink`) whose prepared rows are lost; only these are rewritten.
        guarantee: of the decision, if the batch is already decided: it is finished under that one.
        epoch: the claim under which this plan was made; a later claim voids it.
        targets: as in the batch's `Decision`.
        seconds: how long recovery and this plan took.
        arbiter: at_most_once: which attempt of a shard may send is asked there; None: none may.
        after: the newest batch in the deciding ledger when this was planned; -1: none. A ledger that lacks it at the
            decision lost it in between.
    """

    scope: Scope
    owner: str
    guarantee: Guarantee
    batch: int
    offsets: str
    action: Action
    rewrite: Mapping[int, frozenset[str]] = field(default_factory=dict)
    epoch: int = 0
    targets: Mapping[str, str] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
    arbiter: Arbiter | None = field(default=None, compare=False)
    after: int = -1

    @property
    def is_decided(self) -> bool:
        """Whether the batch was decided, or may have been sent, by an earlier run."""
        return self.action is not Action.WRITE or bool(self.rewrite)

    def action_for(self, shard: int) -> Action:
        return Action.WRITE if shard in self.rewrite else self.action


@dataclass(frozen=True)
class ShardMessage:
    """A task's report to the driver.

    Attributes:
        plan: the plan that the task followed.
        did: what it did. WRITE has a participant per written sink; GIVE_UP the fingerprint of what was not sent.
        given_up: by sink, as `Prepared.sink` names it.
        compared: rows that were only read, by sink: of COMPARE, and of a shard in such a batch that is rewritten to
            other sinks.
        stage_s, prepare_s: how long the task took to read and write its rows, and to prepare them.
        bytes: of the rows it wrote, in memory, at all sinks.
        task: Spark's number of the task, counted over all tasks of the application; None: another driver ran it.
    """

    plan: BatchPlan
    shard: int
    attempt: int
    did: Action
    participants: tuple[Prepared, ...] = ()
    given_up: Mapping[str, Fingerprint] = field(default_factory=dict)
    compared: Mapping[str, Fingerprint] = field(default_factory=dict)
    stage_s: float = field(default=0.0, compare=False)
    prepare_s: float = field(default=0.0, compare=False)
    bytes: int = field(default=0, compare=False)
    task: int | None = field(default=None, compare=False)

    @property
    def prepared(self) -> Prepared | None:
        """At the sink that keeps the ledger."""
        return next((p for p in self.participants if p.sink == self.plan.scope.sink), None)


@dataclass(frozen=True)
class Decision:
    """The durable record that makes a batch count.

    Attributes:
        scope: of the sink that keeps the ledger.
        offsets: the sources' offsets of the batch; a replay must have the same.
        participants: every written shard at every sink, ordered by shard, then by sink.
        accounts: by sink name: running fingerprints of all decided batches of this incarnation, including this one, and
            of what was given up: by at_most_once (an upper bound of its loss), or by `Tolerance.lost_records`.
        decided_at_ms: by the clock of the driver's host, for display. Clocks of hosts differ: it orders nothing.
        revision: 0, plus one for each rewrite of shards after the decision.
        sequence: place in the ledger's order, see `LedgerState.next_sequence`; a revision keeps it. 0: an earlier
            release, which ordered by `decided_at_ms`, made the decision.
        targets: sink name -> identity of its target (see `Committer.targets`), if it has one.
        transforms: the versions of the transform that this incarnation's batches ran with, oldest first, this batch's
            last. Empty: never known. Bounded: the oldest ones are merged.
    """

    scope: Scope
    owner: str
    guarantee: Guarantee
    batch: int
    offsets: str
    participants: tuple[Prepared, ...]
    accounts: Mapping[str, Account]
    decided_at_ms: int
    revision: int = 0
    targets: Mapping[str, str] = field(default_factory=dict)
    transforms: tuple[TransformVersion, ...] = ()
    sequence: int = 0

    @property
    def transform(self) -> str:
        """Fingerprint of the transform that this batch ran with; empty: unknown."""
        return self.transforms[-1].fingerprint if self.transforms else ""

    @property
    def total(self) -> Fingerprint:
        """Running fingerprint at the sink that keeps the ledger."""
        return self.account(self.scope.sink).total

    @property
    def given_up(self) -> Fingerprint:
        """Running fingerprint of what was given up there."""
        return self.account(self.scope.sink).given_up

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of this batch alone, at the sink that keeps the ledger."""
        return sum((p.fingerprint for p in self.of(self.scope.sink)), Fingerprint())

    @property
    def to_move(self) -> tuple[Prepared, ...]:
        """Participants made visible by the deciding transaction, if the ledger's sink commits so: its own, and only in
        a batch's first decision. Later revisions replace participants of other sinks."""
        return () if self.revision else self.of(self.scope.sink)

    @property
    def archived(self) -> Archived:
        """The archive entry of this incarnation, made when this decision, its newest, is forgotten."""
        return Archived.of(self.scope.incarnation, self.total, self.given_up)

    def of(self, sink: str) -> tuple[Prepared, ...]:
        """The participants at the sink of this name."""
        return tuple(p for p in self.participants if p.sink == sink)

    def scope_of(self, prepared: Prepared) -> Scope:
        return replace(self.scope, sink=prepared.sink)

    def work(self, prepared: Prepared) -> Work:
        """A participant's unit of work, at its own sink."""
        return Work(self.scope_of(prepared), self.batch, prepared.shard, prepared.attempt)

    @property
    def other_sinks(self) -> tuple[str, ...]:
        """Sinks of the batch but the one that keeps the ledger."""
        return tuple(sorted(n for n in self.accounts if n != self.scope.sink))

    def account(self, sink: str) -> Account:
        return self.accounts.get(sink, Account())

    def for_sink(self, sink: str) -> Decision:
        """The same decision as another sink's ledger would hold it."""
        return replace(self, scope=replace(self.scope, sink=sink))

    def projected(self, sink: str) -> Decision:
        """This decision as if only `sink` were written, for an audit of that sink."""
        own = self.for_sink(sink)
        return replace(own, participants=own.of(sink), accounts={sink: own.account(sink)})

    def to_json(self) -> str:
        others = {n: a.to_json() for n, a in self.accounts.items() if n != self.scope.sink}
        return json.dumps(
            {
                FORMAT_KEY: RECORD_FORMAT,
                "pipeline": self.scope.pipeline,
                "sink": self.scope.sink,
                "incarnation": self.scope.incarnation,
                "owner": self.owner,
                "guarantee": self.guarantee.value,
                "batch": self.batch,
                "offsets": self.offsets,
                "participants": [p.to_json(self.scope.sink) for p in self.participants],
                "total": str(self.total),
                "given_up": str(self.given_up),
                "decided_at_ms": self.decided_at_ms,
                "revision": self.revision,
                **({"others": others} if others else {}),
                **({"targets": dict(self.targets)} if self.targets else {}),
                **({"sequence": self.sequence} if self.sequence else {}),
                **({"transforms": [t.to_json(self.scope.sink) for t in self.transforms]} if self.transforms else {}),
            },
            separators=(",", ":"),
            sort_keys=True,  # canonical text in any store
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Decision:
        data = without_format(json.loads(text), "a decision")
        own = Account.from_json(data)
        others = {n: Account.from_json(a) for n, a in data.get("others", {}).items()}
        return cls(
            scope=Scope(data["pipeline"], data["sink"], data["incarnation"]),
            owner=data["owner"],
            guarantee=Guarantee(data["guarantee"]),
            batch=data["batch"],
            offsets=data["offsets"],
            participants=tuple(Prepared.from_json(p, data["sink"]) for p in data["participants"]),
            accounts={data["sink"]: own, **others},
            decided_at_ms=data["decided_at_ms"],
            revision=data["revision"],
            sequence=data.get("sequence", 0),
            targets=dict(data.get("targets", {})),
            transforms=tuple(TransformVersion.from_json(t, data["sink"]) for t in data.get("transforms", ())),
        )


STARTED = "begun"
"""How stores name what they hold of started batches: a table, a folder, a part of a key. Durable."""


@dataclass(frozen=True)
class Started:
    """This batch may have sent records outside of any transaction.

    Kept for every batch under at_most_once; under at_least_once only for an incarnation's first batch, so that a later
    change to a stricter guarantee finds it.

    Attributes:
        sequence: as in `Decision`. Databases do not keep it: they number their rows.
    """

    batch: int
    offsets: str
    sequence: int = field(default=0, compare=False)

    def to_json(self) -> str:
        fields = {"batch": self.batch, "offsets": self.offsets, "sequence": self.sequence}
        return json.dumps(with_format(fields), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Started:
        data = without_format(json.loads(text), "a started batch")
        return cls(data["batch"], data["offsets"], data.get("sequence", 0))


@dataclass(frozen=True)
class Owner:
    """The one driver that may decide.

    Attributes:
        id: of the driver's session; new for each Spark session that registers the formats.
        host, process, started_ms: where it runs and since when (`engine.context.started_ms`), so that users and
            `doctor` can see whether it is alive.
        superseded: ids of earlier owners, newest first; none of them may claim again.
    """

    id: str
    host: str = ""
    process: int = 0
    started_ms: int = 0
    superseded: tuple[str, ...] = ()

    def to_json(self, **of_store: Any) -> str:
        """Includes what the store keeps in the same record."""
        return json.dumps(with_format({**asdict(self), **of_store}), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> tuple[Owner, dict[str, Any]]:
        """The owner, and what the store keeps in the same record."""
        data = without_format(json.loads(text), "an owner")
        superseded = tuple(data.pop("superseded"))
        fields = {name: data.pop(name) for name in ("id", "host", "process", "started_ms")}
        return cls(**fields, superseded=superseded), data


@dataclass(frozen=True)
class LedgerState:
    """A ledger's state for one scope.

    Attributes:
        last: newest decision of this incarnation.
        started: newest started batch of this incarnation (at_most_once only).
        earlier: newest decisions of other incarnations of the same pipeline and sink, newest first, in the ledger's
            order (`ledger.state_of`).
        earlier_started: newest started batches of other incarnations without a decision, by incarnation, newest first:
            their records may have been sent.
        followed: number of decisions in `earlier` that are newer than `last`. Each was made after `last` had been
            finished.
        archived: this incarnation's archive entry, if its decisions have been forgotten.
        carried: after a change of the deciding sink, if `last` is in another sink's ledger: the newest batch of this
            incarnation in the deciding one; -1: none. None: `last` is in the deciding one.
        epoch: increases with every claim. Distinguishes two claims of one owner: a query stopped and restarted in one
            session. 0: the ledger has no epochs.
    """

    owner: Owner | None = None
    last: Decision | None = None
    started: Started | None = None
    earlier: tuple[Decision, ...] = ()
    earlier_started: tuple[tuple[str, Started], ...] = ()
    epoch: int = 0
    archived: Archived | None = None
    followed: int = 0
    carried: int | None = None

    @property
    def held(self) -> int:
        """The newest batch of this incarnation that the deciding ledger itself holds; -1: none."""
        if self.carried is not None:
            return self.carried
        return -1 if self.last is None else self.last.batch

    @property
    def oldest_first(self) -> tuple[Decision, ...]:
        """The newest decision of every incarnation, this one's included, in the ledger's order."""
        own = () if self.last is None else (self.last,)
        return tuple(reversed((*self.earlier[: self.followed], *own, *self.earlier[self.followed :])))

    @property
    def next_sequence(self) -> int:
        """Of the next decision or started batch: one more than any in the ledger.

        An owner reads all of them under its claim, and a decision stands only under the claim it was made under. So
        sequences order the decisions of all incarnations as they were made, by claim and within a claim, whatever
        the clocks of their hosts show.
        """
        started = (*(b for _, b in self.earlier_started), *(() if self.started is None else (self.started,)))
        return 1 + max((r.sequence for r in (*self.oldest_first, *started)), default=0)


@dataclass(frozen=True)
class Tolerance:
    """Risks that the user explicitly accepts.

    Attributes:
        new_checkpoint: a new checkpoint may start over although an earlier one wrote to the sink.
        missing_ledger: the ledger may lack some or all batches of the checkpoint.
        repeated_batch: exactly_once may start with a batch that at_least_once may have partly sent.
        new_target: the sink's target may differ from the last batch's.
        lost_records: shards of a decided batch that must be written again may have fewer records than were decided,
            as the source no longer has the others. These are given up.
    """

    new_checkpoint: bool = False
    missing_ledger: bool = False
    repeated_batch: bool = False
    new_target: bool = False
    lost_records: bool = False


# What a batch took, step by step, for those who operate a pipeline. Proves nothing: a crash may leave none behind.

STEPS = ("plan", "stage", "prepare", "decide", "apply")
"""Of a batch, in order. `stage` includes reading the source and the transform."""


@dataclass(frozen=True)
class BatchReport:
    """
    Attributes:
        decided_at_ms: since 1970.
        records: delivered by this batch, by sink.
        rewritten: shards whose prepared rows were lost when the decided batch was finished.
        seconds: by step; of `stage` and `prepare`, the slowest task's.
        bytes: of the rows written by this batch, in memory, at all sinks.
    """

    batch: int
    decided_at_ms: int
    records: Mapping[str, int]
    shards: int
    rewritten: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": {step: round(s, 4) for step, s in self.seconds.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


# Which versions of the transform a pipeline's batches ran with; every decision carries the list.

MIXED = "mixed"
"""Several versions of a transform that a ledger no longer distinguishes."""


def transforms_after(last: Decision | None, fingerprint: str, batch: int) -> tuple[TransformVersion, ...]:
    """`Decision.transforms` of a batch.

    Args:
        last: the decision before it, of the same incarnation; None: this is the first.
        fingerprint: of the transform that the batch ran with; empty: unknown.
    """
    if last is None:
        return (TransformVersion(fingerprint, batch),) if fingerprint else ()
    if last.transform == fingerprint:
        return last.transforms
    sink = last.scope.sink
    known = [
        *(last.transforms or (TransformVersion(""),)),
        TransformVersion(fingerprint, batch, last.offsets, last.accounts),
    ]
    while len(known) > 1 and (
        len(known) > TRANSFORM_VERSIONS_KEPT
        or len(json.dumps([t.to_json(sink) for t in known])) > TRANSFORM_VERSIONS_BYTES_MAX
    ):
        known[:2] = [replace(known[0], fingerprint=MIXED)]
    return tuple(known)
