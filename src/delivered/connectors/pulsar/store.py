"""The ledger's store in Pulsar: owners and decisions in a journal of its own, seals of audits in another.

    NAMESPACE/delivered:PIPELINE:SINK:ledger    claims, started batches, decisions
    NAMESPACE/delivered:PIPELINE:SINK:seals     never trimmed

Every change continues the newest record that this process has read, so a claim fences whoever has not read it
(`journal`). The state is written anew after some thousand records. What lies before an earlier such copy, and is no
kept decision, is left to Pulsar to delete: the cursor of our subscription moves there.
"""

from __future__ import annotations

import logging
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

from delivered.connectors.pulsar import START, Place, Position, short_name
from delivered.connectors.pulsar.client import Admin, Bounds
from delivered.connectors.pulsar.journal import SUBSCRIPTION, Journal, Record, Topic, new_id, topic_name
from delivered.contract.source import Finding
from delivered.ledger import Change, Head, not_next, outdated, state_of
from delivered.model.errors import DeliveredError, InvariantBroken, LedgerBehind, UsageError
from delivered.model.identity import OTHERS_MAX, OtherLedger, Scope, named_first
from delivered.model.limits import LEDGER_HISTORY_BATCHES
from delivered.model.work import (
    ENTRY_BYTES,
    Archive,
    Archived,
    Decision,
    Failed,
    LedgerState,
    Ok,
    Outcome,
    Owner,
    Started,
    Unknown,
)

log = logging.getLogger(__name__)

CLAIM, STARTED, DECISION, COPY, PART = "claim", "started", "decision", "copy", "part"
_CLAIM_TRIES = 10
_ARCHIVE_ENTRIES = 10_000
"""In one record: 333 kB."""
_COPIES_KEPT = 16


def scope_of(topic: str, incarnation: str) -> Scope | None:
    """The scope whose ledger is in a topic; None: it is none of ours."""
    match topic.rpartition("/")[2].split(":"):
        case ["delivered", pipeline, sink, "ledger"]:
            with suppress(UsageError):
                return Scope(pipeline, sink, incarnation)
    return None


@dataclass
class State:
    """What the records up to one say.

    Attributes:
        last, started: by incarnation; newest last.
        decided, copied: how many decisions and records since reading started, or since the newest copy.
        copies: where copies start, with the number of decisions read before; oldest first.
    """

    owner: Owner | None = None
    epoch: int = 0
    last: dict[str, Decision] = field(default_factory=dict)
    started: dict[str, Started] = field(default_factory=dict)
    archive: Archive = field(default_factory=Archive)
    decided: int = 0
    copied: int = 0
    copies: list[tuple[Position, int]] = field(default_factory=list)

    def parts(self) -> Iterator[dict[str, Any]]:
        for decision in self.last.values():
            yield {"decision": decision.to_json()}
        for incarnation, started in self.started.items():
            yield {"incarnation": incarnation, "started": started.to_json()}
        step = _ARCHIVE_ENTRIES * ENTRY_BYTES
        for at in range(0, len(self.archive.data), step):
            yield {"archive": b64encode(self.archive.data[at : at + step]).decode()}

    def take_part(self, fields: Mapping[str, Any]) -> None:
        if "decision" in fields:
            self._decide(Decision.from_json(fields["decision"]))
        elif "started" in fields:
            self.started[fields["incarnation"]] = Started.from_json(fields["started"])
        else:
            self.archive = Archive(self.archive.data + b64decode(fields["archive"]))

    def take(self, record: Record) -> None:
        fields = record.fields
        self.copied += 1
        match record.kind:
            case "claim":
                self.owner, self.epoch = Owner.from_json(fields["owner"])[0], fields["epoch"]
                for incarnation in fields["forgotten"]:
                    self.last.pop(incarnation, None)
                    self.started.pop(incarnation, None)
                entries = Archive(b64decode(fields["archived"]))
                self.archive = self.archive.with_more(entries)
            case "started":
                self.started.pop(fields["incarnation"], None)
                self.started[fields["incarnation"]] = Started.from_json(fields["started"])
            case "decision":
                self._decide(Decision.from_json(fields["decision"]))
                self.decided += 1

    def _decide(self, decision: Decision) -> None:
        self.last.pop(decision.scope.incarnation, None)
        self.last[decision.scope.incarnation] = decision


def check_protected(options: Place, namespace: str, scope: Scope) -> list[Finding]:
    """Whether Pulsar may delete records of a ledger. Its cursor keeps them, unless policies move or delete cursors.

    Raises:
        Unreachable
    """
    topic, admin = topic_name(namespace, scope, "ledger"), Admin(options)
    place = namespace.partition("://")[2]
    try:
        policies = admin.policies(topic)
    except UsageError as error:
        if error.code != "DELIVERED_NOT_PERMITTED":
            raise
        return [Finding.build("PULSAR_LEDGER_UNSEEN", refuses=False, namespace=place)]
    threats = [
        *([f"messages expire after {policies.ttl_s:,} s (message TTL)"] if policies.ttl_s > 0 else ()),
        *(["backlogs are evicted (consumer_backlog_eviction)"] if policies.evicts else ()),
        *([f"subscriptions expire after {policies.expiry_min:,} min"] if policies.expiry_min > 0 else ()),
    ]
    if policies.keeps_all or not threats:
        return []
    return [
        Finding.build(
            "PULSAR_LEDGER_UNPROTECTED",
            refuses=True,
            topic=short_name(topic),
            threats="; ".join(threats),
            namespace=place,
        )
    ]


class PulsarStore:
    """See `delivered.ledger.Store`. Args: namespace: `persistent://tenant/namespace`."""

    def __init__(self, options: Place, namespace: str, scope: Scope) -> None:
        self._options = options
        self._namespace = namespace
        self._scope = scope
        self._topic = Topic(options, topic_name(namespace, scope, "ledger"))
        self._state = State()
        self._parts: dict[str, list[tuple[Position, Mapping[str, Any]]]] = {}
        self._journal = Journal(self._topic, self._can_start, self._apply, self._aside)
        self._read_before = False
        self._seals: dict[str, Seals] = {}

    @property
    def where(self) -> str:
        return f"in topic {self._topic.label!r}"

    def read(self) -> LedgerState:
        if not self._read():
            raise LedgerBehind("LEDGER_TOPIC_GONE", topic=self._topic.label)
        return self._ledger_state()

    def peek(self) -> LedgerState:
        return self._ledger_state() if self._read() else LedgerState()

    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]:
        self._topic.ensure()
        self._read_before = False  # the topic may have been recreated
        for _ in range(_CLAIM_TRIES):
            self._read()
            owner, epoch = successor(self._head()), self._state.epoch + 1
            old = outdated(self._ledger_state())
            entries = b64encode(b"".join(e.encode() for e in old.entries)).decode()
            claim = {
                "owner": owner.to_json(), "epoch": epoch, "forgotten": old.incarnations, "archived": entries,
            }  # fmt: skip
            match self._journal.append(CLAIM, claim):
                case Ok(counts):
                    if counts:
                        self._copy_if_due()
                        return Ok(epoch)
                case Failed() | Unknown() as outcome:
                    return outcome
        return Failed("other drivers keep claiming it")

    def write(self, rule: Callable[[Head], Change | None]) -> Outcome[None]:
        while True:
            self._read()
            if (change := rule(self._head())) is None:
                return Ok(None)
            match self._journal.append(*self._record(change)):
                case Ok(counts):
                    if counts:
                        self._copy_if_due()
                        return Ok(None)
                case Failed() | Unknown() as outcome:
                    return outcome

    def history(self) -> list[Decision]:
        found: dict[int, Decision] = {}

        def keep(record: Record, position: Position, restarts: bool) -> None:
            del position
            if restarts:
                found.clear()
            if record.kind == DECISION:
                decision = Decision.from_json(record.fields["decision"])
                if decision.scope.incarnation == self._scope.incarnation:
                    found[decision.batch] = decision

        if (start := self._start()) is None:
            return []
        topic = Topic(self._options, self._topic.name)
        try:
            journal = Journal(topic, lambda record: record.kind == COPY, keep)
            journal.restart(start)
            journal.read()
        finally:
            topic.close()
        horizon = max(found, default=0) - LEDGER_HISTORY_BATCHES
        return [found[batch] for batch in sorted(found) if batch > horizon]

    def others(self) -> list[OtherLedger]:
        """Skips topics that this user may not read."""
        try:
            names = self._topic.admin.topics(self._namespace)
        except DeliveredError:
            return []
        scopes = [s for n in names if n != self._topic.name and (s := scope_of(n, self._scope.incarnation))]
        own = self._scope.prefix
        scopes.sort(key=lambda s: (-SequenceMatcher(None, own, s.prefix).ratio(), s.prefix))
        found = []
        for scope in scopes[:OTHERS_MAX]:
            store = PulsarStore(self._options, self._namespace, scope)
            try:
                state = store.peek()
            except DeliveredError:
                continue
            finally:
                store.close()
            found.append(OtherLedger(scope.pipeline, scope.sink, bool(state.last or state.started)))
        return named_first(found)

    def last_seal(self, sink: str) -> str | None:
        return self._sealed(sink).last()

    def seals(self, sink: str, first: int = 0) -> list[str]:
        return self._sealed(sink).texts(first)

    def add_seal(self, sink: str, number: int, text: str) -> Outcome[None]:
        return self._sealed(sink).add(number, text)

    def close(self) -> None:
        self._topic.close()
        self._read_before = False
        for seals in self._seals.values():
            seals.close()
        self._seals = {}

    def _sealed(self, sink: str) -> Seals:
        if sink not in self._seals:
            scope = replace(self._scope, sink=sink)
            self._seals[sink] = Seals(sink, Topic(self._options, topic_name(self._namespace, scope, "seals")))
        return self._seals[sink]

    # -- reading -------------------------------------------------------------------------------------------------

    def _read(self) -> bool:
        """Apply what was added since the last read. False: there is no ledger."""
        if self._read_before:
            self._journal.read()
            return True
        if (start := self._start()) is None:
            return False
        for at in dict.fromkeys((start, START)):  # the cursor may have been moved by others
            self._state, self._parts = State(), {}
            self._journal.restart(at)
            self._journal.read()
            chain = self._journal.chain
            is_empty = at == START and not chain.unplaced and not self._parts
            self._read_before = bool(chain.number) or is_empty
            if self._read_before:
                return True
        raise InvariantBroken("PULSAR_LEDGER.SHORT", topic=self._topic.label, subscription=SUBSCRIPTION)

    def _start(self) -> Position | None:
        """Where reading starts; None: there is no topic."""
        bounds = self._topic.bounds()
        return None if bounds is None else bounds.cursors.get(SUBSCRIPTION, START)

    def _can_start(self, record: Record) -> bool:
        return record.kind == COPY and len(self._parts.get(record.id, ())) == record.fields["parts"]

    def _aside(self, record: Record, position: Position) -> None:
        if record.kind == PART:
            self._parts.setdefault(record.fields["copy"], []).append((position, record.fields))
            while len(self._parts) > _COPIES_KEPT:  # of drivers that died while they wrote one
                del self._parts[next(iter(self._parts))]

    def _apply(self, record: Record, position: Position, restarts: bool) -> None:
        if record.kind != COPY:
            if restarts:
                self._state = State()
            self._state.take(record)
            return
        parts = self._parts.pop(record.id, [])
        state = self._state
        if restarts:
            state = State(Owner.from_json(record.fields["owner"])[0], record.fields["epoch"])
            for _, fields in parts:
                state.take_part(fields)
        first = parts[0][0] if parts else position
        self._state = replace(state, copied=0, copies=[*state.copies, (first, state.decided)])

    def _head(self) -> Head:
        own = self._scope.incarnation
        state, last = self._state, self._state.last.get(self._scope.incarnation)
        return Head(
            state.owner, state.epoch, None if last is None else last.batch, lambda: last, lambda: state.started.get(own)
        )

    def _ledger_state(self) -> LedgerState:
        state = self._state
        return state_of(self._scope, state.owner, state.epoch, state.last.values(), state.started, self._archived)

    def _archived(self, incarnation: str) -> Archived | None:
        return self._state.archive.find(incarnation)

    # -- writing -------------------------------------------------------------------------------------------------

    def _record(self, change: Change) -> tuple[str, dict[str, Any]]:
        if change.decision is not None:
            return DECISION, {"decision": change.decision.to_json()}
        if change.started is None:
            raise InvariantBroken("NO_TARGET.LEDGER", where=self.where)
        return STARTED, {"incarnation": self._scope.incarnation, "started": change.started.to_json()}

    def _copy_if_due(self) -> None:
        """Write the state, and leave what lies before an earlier copy to Pulsar. Never raises: what was to be written
        is written, and the next record tries again."""
        if self._state.copied < 2 * LEDGER_HISTORY_BATCHES or self._state.owner is None:
            return
        copy = new_id()
        try:
            parts = [*self._state.parts()]
            for part in parts:
                self._journal.add_aside(PART, {"copy": copy, **part})
            fields = {"owner": self._state.owner.to_json(), "epoch": self._state.epoch, "parts": len(parts)}
            self._journal.append(COPY, fields, copy)
            enough = [
                at for at, decided in self._state.copies if self._state.decided - decided >= LEDGER_HISTORY_BATCHES
            ]
            if enough:
                at = enough[-1]
                self._topic.admin.move(self._topic.name, SUBSCRIPTION, replace(at, entry=at.entry - 1), exists=True)
                self._state.copies = [c for c in self._state.copies if c[0].order >= at.order]
        except DeliveredError as error:
            log.warning("the state of the ledger %s was not copied: %s", self.where, error)


# Seals of audits in a journal of their own, which is read from its end, and never trimmed.


SEAL = "seal"
_FEW = 16
"""Records that are read at first to find the newest seal."""


class Seals:
    """The seals of one sink."""

    def __init__(self, sink: str, topic: Topic) -> None:
        self._sink = sink
        self._topic = topic
        self._texts: dict[int, str] = {}
        self._journal = Journal(topic, lambda _: True, self._apply)
        self._start: Position | None = None

    def last(self) -> str | None:
        self._read_end()
        return self._texts.get(self._last)

    def texts(self, first: int) -> list[str]:
        self._read_all()
        return [self._texts[number] for number in sorted(self._texts) if number >= first]

    def add(self, number: int, text: str) -> Outcome[None]:
        """See `delivered.ledger.Store.add_seal`."""
        self._topic.ensure()
        while True:
            self._read_end()
            if number < self._last and number not in self._texts:
                self._read_all()
            if self._texts.get(number) == text:
                return Ok(None)
            if number != self._last + 1:
                return not_next(self._sink, number, self._last)
            match self._journal.append(SEAL, {"seal_number": number, "seal": text}):
                case Failed() | Unknown() as outcome:
                    return outcome

    def close(self) -> None:
        """May be called again."""
        self._topic.close()
        self._start = None

    @property
    def _last(self) -> int:
        return max(self._texts, default=-1)

    def _read_end(self) -> None:
        """Read enough to know the newest seal. A record that nothing follows may not count, unless it is the first."""
        if self._start is not None:
            self._journal.read()
            return
        if (bounds := self._topic.bounds()) is None:
            return
        for start in starts(bounds):
            self._read_from(start)
            if start == START or (self._journal.chain.proven and self._texts):
                return

    def _read_all(self) -> None:
        if self._start == START:
            self._journal.read()
        elif self._topic.bounds() is not None:
            self._read_from(START)

    def _read_from(self, start: Position) -> None:
        self._texts = {}
        self._journal.restart(start)
        self._journal.read()
        self._start = start
        chain = self._journal.chain
        if start == START and chain.started > 1:
            raise InvariantBroken("PULSAR_LEDGER.SEALS", topic=self._topic.label, first=chain.started)

    def _apply(self, record: Record, position: Position, restarts: bool) -> None:
        del position
        if restarts:
            self._texts = {}
        if record.kind == SEAL:
            self._texts[record.fields["seal_number"]] = record.fields["seal"]


def starts(bounds: Bounds) -> Iterator[Position]:
    """Positions from which to read, ever further from the end; the last one is START."""
    few = _FEW
    while few < sum(count for _, count in bounds.ledgers):
        left = few
        for ledger, count in reversed(bounds.ledgers):
            if left <= count:
                yield Position(ledger, count - left - 1)
                break
            left -= count
        few *= _FEW
    yield START
