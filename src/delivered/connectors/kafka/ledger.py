"""The ledger in Kafka: owners and decisions in the pipeline's internal topic, written by one owner at a time.

Who may write is settled by the broker: every change is a transaction under one of two transactional ids of the sink,
and `claim` takes both, which fences whoever held them. Two ids, because an owner's planning process and its deciding
process live side by side and must not fence each other.

    partition 0   ["owner", sink]                     who owns the ledger
                  ["last", sink, incarnation]         its newest decision, whole
                  ["begun", sink, incarnation]        its newest begun batch (at_most_once)
                  ["archive", sink, n]                what is left of incarnations long past: entries of 25 bytes
    partition 1   ["kept", sink, incarnation, n]      decisions for the audit, n = batch % 1000
    partition 2.. ["marker", pipeline, sink, shard]   written by the tasks: see markers.py

The topic is compacted, so it stays as small as its keys are few.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from delivered.connectors.kafka import transactions
from delivered.connectors.kafka.ledger_topic import ensure_topic
from delivered.connectors.kafka.ledger_write import Again, LedgerProducer, Writes, write
from delivered.connectors.kafka.markers import (
    HISTORY_PARTITION,
    STATE_PARTITION,
    CommittedReader,
    ledger_topic,
)
from delivered.connectors.kafka.protocol import NoAnswer, NoTopic, Wire
from delivered.connectors.kafka.sink_options import SinkOptions
from delivered.connectors.kafka.topics import other_ledgers
from delivered.model.archive import Archive, Archived
from delivered.model.errors import Fenced, LedgerBehind, OutcomeUnknown
from delivered.model.identity import OtherLedger, Scope
from delivered.model.limits import (
    LEDGER_HISTORY_BATCHES,
    OUTAGE_PATIENCE_S,
    OWNERS_REMEMBERED,
    RECOVERY_WAIT_S,
)
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.work import Begun, Decision, LedgerState, Owner

LEDGER_TRANSACTION_TIMEOUT_S = 15
"""A ledger transaction is open for milliseconds. If its driver dies there, other sinks wait this long at most."""

_PLAN, _DECIDE = "plan", "decide"
_CLAIM_TRIES = 10
_ARCHIVE_ENTRIES = 400
"""In one record of the archive: 10 kB, which is what a claim writes again when it adds to it."""


class KafkaLedger:
    """See `delivered.contract.sink.Ledger`. Used by one thread at a time."""

    def __init__(self, options: SinkOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope
        self._topic = ledger_topic(scope, options.ledger_topic)
        self._opened: Wire | None = None
        self._reader: CommittedReader | None = None
        self._producers: dict[str, LedgerProducer] = {}
        self._owner_id: str | None = None
        self._owner: Owner | None = None
        self._last: dict[str, Decision] = {}
        self._begun: dict[str, Begun] = {}
        self._archive: dict[int, Archive] = {}
        self._claims = 0

    # -- the contract --------------------------------------------------------------------------------------------

    def claim(self, owner: Owner) -> LedgerState:
        """Take both ids, which ends what is under way; write down who owns the ledger; take the deciding one again.

        Whoever takes an id looks afterwards who owns the ledger: from the record on, the former owner gives up.
        """
        ensure_topic(self._wire, self._topic, self._options.ledger_replication)
        self._owner_id = owner.id
        self._reader = None  # from the start: the topic may be another one by now
        # A driver that was superseded long ago must not disturb the one that owns the ledger now.
        self._read(wait=False)
        self._refuse_superseded(owner)
        # Whatever is under way of anybody is over after these lines.
        for role in (_PLAN, _DECIDE):
            self._take(role)
        self._read()
        self._refuse_superseded(owner)
        # Also for the owner who claimed before: the count tells a query started again in one session from its former
        # self.
        self._record(owner)
        # Until the record was there, the former owner could see himself as such and take his id back: end that.
        self._take(_DECIDE)
        self._read()
        self._refuse_others()
        return self._state()

    def resume(self, owner_id: str) -> LedgerState:
        """Read what is new; it costs one request."""
        self._owner_id = owner_id
        self._read()
        self._refuse_others()
        return self._state()

    def look(self) -> LedgerState:
        """Read only; an empty state if the pipeline has no internal topic yet."""
        try:
            self._read_new()
        except NoTopic:
            return LedgerState()
        return self._state()

    def begin(self, begun: Begun) -> Outcome[None]:
        text = json.dumps({"batch": begun.batch, "offsets": begun.offsets}, separators=(",", ":"))
        return self._write(_PLAN, {STATE_PARTITION: [(self._key("begun", self._scope.incarnation), text.encode())]})

    def decide(self, decision: Decision) -> Outcome[None]:
        """One transaction: the decision as the newest, and as one of those kept for the audit."""
        incarnation = decision.scope.incarnation
        text = decision.to_json().encode()
        n = decision.batch % LEDGER_HISTORY_BATCHES
        return self._write(
            _DECIDE,
            {
                STATE_PARTITION: [(self._key("last", incarnation), text)],
                HISTORY_PARTITION: [(self._key("kept", incarnation, n), text)],
            },
        )

    def history(self) -> Iterator[Decision]:
        """Decisions of this incarnation that are still kept, oldest first."""
        kept: dict[bytes, bytes] = {}
        reader = CommittedReader(self._wire, self._topic, HISTORY_PARTITION)
        start = self._key("kept", self._scope.incarnation)[:-1] + b","
        try:
            for record in reader.read(time.monotonic() + RECOVERY_WAIT_S):
                if record.key.startswith(start) and record.value is not None:
                    kept[record.key] = record.value
        except NoAnswer as error:
            raise self._unreadable(error) from None
        yield from sorted((Decision.from_json(v) for v in kept.values()), key=lambda d: d.batch)

    def others(self) -> list[OtherLedger]:
        """See `delivered.contract.powers.KnowsOthers`."""
        try:
            return other_ledgers(self._wire, self._topic, self._scope)
        except NoAnswer as error:
            raise self._unreadable(error) from None

    def close(self) -> None:
        wire, self._opened = self._opened, None
        self._reader = None
        self._producers = {}
        if wire is not None:
            wire.close()

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def _wire(self) -> Wire:
        if self._opened is None:
            self._opened = Wire(self._options.resolved())
        return self._opened

    def _read(self, wait: bool = True) -> None:
        """Take in what was committed since the last time. Raises LedgerBehind if the topic is gone."""
        try:
            self._read_new(wait)
        except NoTopic:
            raise LedgerBehind(
                "LEDGER_TOPIC_GONE",
                f"The ledger's topic {self._topic!r} does not exist any more: it was deleted while the pipeline was at "
                "work or between two starts. Without it nobody can tell which batches are in the sink.",
                next_step="restore the topic from a copy; or start again and, when LEDGER_MISSING refuses that, "
                'accept once with .option("missingLedger", "accept") that the last batch may be written twice',
            ) from None

    def _read_new(self, wait: bool = True) -> None:
        if self._reader is None:
            self._reader = CommittedReader(self._wire, self._topic, STATE_PARTITION)
            self._owner, self._last, self._begun, self._archive = None, {}, {}, {}
        try:
            newest: dict[bytes, bytes | None] = {}
            for record in self._reader.read(time.monotonic() + RECOVERY_WAIT_S, wait):
                newest[record.key] = record.value
        except NoTopic:
            self._reader = None
            raise
        except NoAnswer as error:
            self._reader = None
            raise self._unreadable(error) from None
        for key, value in newest.items():
            self._take_in(json.loads(key), value)

    def _take_in(self, key: list[Any], value: bytes | None) -> None:
        match key:
            case ["owner", self._scope.sink] if value is not None:
                said = json.loads(value)
                self._claims = said.pop("claims", 0)
                self._owner = Owner(**{**said, "superseded": tuple(said["superseded"])})
            case ["last", self._scope.sink, str(incarnation)]:
                if value is None:
                    self._last.pop(incarnation, None)
                else:
                    self._last[incarnation] = Decision.from_json(value)
            case ["begun", self._scope.sink, str(incarnation)]:
                self._begun.pop(incarnation, None)
                if value is not None:
                    said = json.loads(value)
                    self._begun[incarnation] = Begun(said["batch"], said["offsets"])
            case ["archive", self._scope.sink, int(number)]:
                self._archive[number] = Archive(value or b"", f"topic {self._topic!r}")
            case _:
                pass

    def _state(self) -> LedgerState:
        own = self._scope.incarnation
        earlier = [d for i, d in self._last.items() if i != own]
        earlier.sort(key=lambda d: d.decided_at_ms, reverse=True)
        return LedgerState(
            owner=self._owner,
            last=self._last.get(own),
            begun=self._begun.get(own),
            earlier=tuple(earlier),
            # In the order of the log, newest last.
            earlier_begun=tuple((i, b) for i, b in reversed(self._begun.items()) if i != own and i not in self._last),
            epoch=self._claims,
            archived=None if own in self._last else self._archived(own),
        )

    def _archived(self, incarnation: str) -> Archived | None:
        return next((a for archive in self._archive.values() if (a := archive.find(incarnation)) is not None), None)

    # -- writing -------------------------------------------------------------------------------------------------

    def _write(self, role: str, writes: Writes) -> Outcome[None]:
        """One transaction, if this driver owns the ledger. Failed and Unknown mean exactly that."""
        deadline = time.monotonic() + OUTAGE_PATIENCE_S
        fenced_before = False
        while True:
            if role not in self._producers:
                try:
                    # Whoever was superseded must not take the id from the one who owns the ledger now.
                    self._read()
                    self._refuse_others()
                    self._take(role)
                    self._read()
                    # Between the look and the taking somebody else may have claimed: his word counts.
                    self._refuse_others()
                except Fenced as error:
                    return Failed(str(error))
                except (OutcomeUnknown, LedgerBehind) as error:
                    # Nothing was sent.
                    return Failed(str(error))
            outcome, again = write(self._wire, self._id(role), self._producers[role], self._topic, writes)
            if not isinstance(outcome, Ok):
                del self._producers[role]
            # Of what may be made again nothing got in, for certain. Fenced: if the ledger is still ours, our other
            # process did it. Away: to take the id ends what was written.
            fenced = again is Again.FENCED
            if again is Again.NO or (fenced and fenced_before) or time.monotonic() > deadline:
                return outcome
            fenced_before = fenced

    def _take(self, role: str) -> None:
        deadline = time.monotonic() + RECOVERY_WAIT_S
        self._producers.pop(role, None)
        match transactions.initialise(self._wire, self._id(role), LEDGER_TRANSACTION_TIMEOUT_S * 1000, deadline):
            case Ok(producer):
                self._producers[role] = LedgerProducer(producer.id, producer.epoch)
            case Failed(reason) | Unknown(reason):
                raise OutcomeUnknown(
                    "LEDGER_UNAVAILABLE",
                    f"The ledger in topic {self._topic!r} could not be opened for writing: {reason}.",
                    next_step="start again when the brokers answer; check that the user may write to the topic and "
                    "use transactional ids that start with `delivered.`",
                )

    def _record(self, owner: Owner) -> None:
        """Write down who owns the ledger now. The former owner may take the id back for a last time or two."""
        before = self._owner
        claims = self._claims + 1
        former: tuple[str, ...] = ()
        if before is not None:
            former = before.superseded if before.id == owner.id else (before.id, *before.superseded)
        mine = replace(owner, superseded=former[: OWNERS_REMEMBERED - 1])
        writes = dict(self._outdated())
        writes[STATE_PARTITION] = [(self._key("owner"), _owner_json(mine, claims)), *writes[STATE_PARTITION]]
        reason = ""
        for _ in range(_CLAIM_TRIES):
            producer = self._producers.pop(_PLAN)
            outcome, _ = write(self._wire, self._id(_PLAN), producer, self._topic, writes)
            if isinstance(outcome, Ok):
                self._producers[_PLAN] = producer
                return
            reason = outcome.reason
            # Fenced, or no answer: to take the id settles what became of it.
            self._take(_PLAN)
            self._read()
            if self._claims >= claims:
                # It got in after all, or somebody else was first.
                self._refuse_others()
                return
        raise OutcomeUnknown(
            "OWNER_UNKNOWN",
            f"Who owns the ledger in topic {self._topic!r} could not be recorded: {reason}.",
            next_step="start again when the brokers answer and no other driver starts",
        )

    def _outdated(self) -> Writes:
        """Entries of the oldest incarnations for the archive, and tombstones for the rest of them, so that the ledger
        stays small when each run is one."""
        oldest = sorted(self._last.values(), key=lambda d: d.decided_at_ms)
        old = oldest[: max(0, len(oldest) - LEDGER_HISTORY_BATCHES)]
        old = [d for d in old if d.scope.incarnation != self._scope.incarnation]
        if not old:
            return {STATE_PARTITION: []}
        last = max(self._archive, default=0)
        if len(self._archive.get(last, Archive())) >= _ARCHIVE_ENTRIES:
            last += 1
        entries = self._archive.get(last, Archive()).with_more(d.archived for d in old)
        state = [
            (self._key("archive", last), entries.data),
            *((self._key(kind, d.scope.incarnation), None) for d in old for kind in ("last", "begun")),
        ]
        kept = [
            (self._key("kept", d.scope.incarnation, n), None)
            for d in old
            for n in range(min(d.batch + 1, LEDGER_HISTORY_BATCHES))
        ]
        return {STATE_PARTITION: state, HISTORY_PARTITION: kept}

    # -- who owns it ---------------------------------------------------------------------------------------------

    def _refuse_superseded(self, owner: Owner) -> None:
        if self._owner is not None and owner.id in self._owner.superseded:
            raise self._fenced()

    def _refuse_others(self) -> None:
        if self._owner is None or self._owner.id != self._owner_id:
            raise self._fenced()

    def _fenced(self) -> Fenced:
        now = self._owner
        who = f"{now.id} (host {now.host}, process {now.process})" if now else "nobody"
        return Fenced(
            "FENCED",
            f"Another driver took over pipeline {self._scope.pipeline!r}, sink {self._scope.sink!r}: the ledger's "
            f"owner is {who}, this driver is {self._owner_id}. This driver decides nothing any more.",
            next_step="stop one of the two; a pipeline has one driver",
        )

    # -- names ---------------------------------------------------------------------------------------------------

    def _id(self, role: str) -> str:
        return f"{transactions.id_prefix(self._scope)}ledger.{role}"

    def _key(self, kind: str, *more: str | int) -> bytes:
        return json.dumps([kind, self._scope.sink, *more], separators=(",", ":")).encode()

    def _unreadable(self, error: Exception) -> OutcomeUnknown:
        return OutcomeUnknown(
            "LEDGER_UNREADABLE",
            f"The ledger in topic {self._topic!r} could not be read to its end: {error}.",
            next_step="start again when the brokers answer",
        )


def _owner_json(owner: Owner, claims: int) -> bytes:
    return json.dumps(
        {
            "id": owner.id,
            "host": owner.host,
            "process": owner.process,
            "started_ms": owner.started_ms,
            "superseded": list(owner.superseded),
            "claims": claims,
        },
        separators=(",", ":"),
    ).encode()
