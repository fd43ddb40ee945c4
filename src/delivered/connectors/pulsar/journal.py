"""Numbered records in a topic of ours, of which each follows another: of two that follow the same, the first counts.

A record holds its number, the id of the record that it follows, and an id of its own. All readers of a topic see one
order, so all agree on which records count. A writer appends, reads the topic up to its record, and knows if another one
took the number before. No record of a writer that has not read the newest counted one ever counts, be it in flight or
sent later. That fences with certainty; Pulsar's access modes of producers do not (decision 129).

A journal is read from its first record, or from one that holds the state up to it. Such a start is only believed until
a record contradicts it: every record that counts continues the one true chain.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from delivered.connectors.pulsar import START, Place, Position, short_name
from delivered.connectors.pulsar.client import Admin, Bounds, explained, pulsar, warm_client
from delivered.model.errors import DeliveredError, InvariantBroken, OutcomeUnknown, Refused, Unreachable, UsageError
from delivered.model.identity import Scope
from delivered.model.limits import CONNECT_TIMEOUT_S, OUTAGE_PATIENCE_S, REQUEST_TIMEOUT_S
from delivered.model.patience import left_s
from delivered.model.work import Failed, Ok, Outcome, Unknown, with_format, without_format

log = logging.getLogger(__name__)

SUBSCRIPTION = "delivered"
"""Durable, on every topic of ours: what is behind its cursor is not deleted, nor is the topic as an inactive one."""

VOID = "void"
"""A record that only takes a number, so that one with an unknown outcome never counts."""

_NUMBERS_KEPT = 4_096
_PAUSE_S = 0.2
_QUEUE = 1_000


def new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Record:
    """
    Attributes:
        number: from 1; 0: no part of the chain.
        after: id of the record that it follows; empty: it is the first.
        fields: what its writer keeps in it.
    """

    number: int
    after: str
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=new_id)

    def encode(self) -> bytes:
        own = {"number": self.number, "after": self.after, "id": self.id, "kind": self.kind}
        return json.dumps(with_format({**own, **self.fields}), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """Raises ValueError: not written by a journal. Refused: by a later version."""
        try:
            fields = without_format(json.loads(data), "a record of the ledger")
            own = {name: fields.pop(name) for name in ("number", "after", "kind", "id")}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"not a record: {error!r}") from None
        if type(own["number"]) is not int or not all(type(own[name]) is str for name in ("after", "kind", "id")):
            raise ValueError("not a record")
        return cls(**own, fields=fields)


class Verdict(Enum):
    """What a record is in its chain."""

    NEXT = auto()
    START = auto()
    VOID = auto()
    """Another one took its number before it."""
    UNPLACED = auto()
    """The start of the chain is missing so far."""


class Chain:
    """Which records count, in the topic's order.

    Args:
        starts: whether reading can start at a record, other than the first one.

    Attributes:
        number, id: of the newest record that counts; 0: there is none.
        started: number of the record that reading started at.
        proven: two records follow the one that reading started at. Its writer had read them in order, so all count. One
            is no proof: of a message that a client sent twice, the second may be where reading starts.
        unplaced: a record was seen whose predecessor is missing.
    """

    def __init__(self, starts: Callable[[Record], bool]) -> None:
        self._starts = starts
        self.number, self.id, self.started = 0, "", 0
        self.unplaced = False
        self._links = 0
        self._ids: dict[int, str] = {}

    def add(self, record: Record) -> Verdict:
        """Raises ValueError: records before this one are missing."""
        if self.number:
            if record.number <= self.number:
                return Verdict.VOID
            if (record.number, record.after) == (self.number + 1, self.id):
                self._links += 1
                return self._move(record, Verdict.NEXT)
            if self.proven:
                raise ValueError(f"record {record.number} does not follow record {self.number}")
            self.number, self.id = 0, ""  # reading started at a record that never counted
        if (record.number, record.after) == (1, "") or self._starts(record):
            self.started, self._links = record.number, 0
            return self._move(record, Verdict.START)
        self.unplaced = True
        return Verdict.UNPLACED

    @property
    def proven(self) -> bool:
        return self._links > 1

    def is_counted(self, record: Record) -> bool:
        """Of a number that was read recently."""
        return self._ids.get(record.number) == record.id

    def _move(self, record: Record, verdict: Verdict) -> Verdict:
        self.number, self.id = record.number, record.id
        self._ids[record.number] = record.id
        self._ids.pop(record.number - _NUMBERS_KEPT, None)
        return verdict


def topic_name(namespace: str, scope: Scope, role: str) -> str:
    """Names contain no colon, so two scopes never have one topic (P33), nor does one look like a partition."""
    return f"{namespace}/delivered:{scope.pipeline}:{scope.sink}:{role}"


class Topic:
    """A topic of ours: no partitions, one message per entry."""

    def __init__(self, options: Place, name: str) -> None:
        self._options = options
        self.name = name
        self._admin: Admin | None = None
        self._reader: Any = None
        self._producer: Any = None
        self._answered = False

    @property
    def label(self) -> str:
        return short_name(self.name)

    @property
    def admin(self) -> Admin:
        if self._admin is None:
            self._admin = Admin(self._options, patient=self._answered)
        return self._admin

    def bounds(self) -> Bounds | None:
        """None: it does not exist. Asked without creating it, as the client would."""
        try:
            return self.admin.bounds(self.name)
        except UsageError as error:
            if error.code != "DELIVERED_TOPIC_MISSING":
                raise
            return None

    def ensure(self) -> None:
        """Create it, with its subscription, if it is missing."""
        if (bounds := self.bounds()) is None:
            self._create()
            bounds = self.bounds()
        if bounds is None or self.admin.partitions(self.name):
            raise Refused("PULSAR_LEDGER.TOPIC", topic=self.label, name=self.name)
        if SUBSCRIPTION not in bounds.cursors:
            self.admin.move(self.name, SUBSCRIPTION, START, exists=False)

    def hold(self) -> None:
        """Become its only producer, until `close` or the end of this process, once there is no other.

        Raises:
            DeliveredError: there still is one after 30 s, or this client may not.
        """
        library, deadline = pulsar(), time.monotonic() + REQUEST_TIMEOUT_S
        while self._producer is None:
            try:
                self._producer = warm_client(self._options).create_producer(
                    self.name, access_mode=library.ProducerAccessMode.Exclusive
                )
            except library.PulsarException as error:
                is_held = isinstance(error, library.ProducerFenced | library.ProducerBusy)
                if not is_held or time.monotonic() > deadline:
                    raise explained(error, self._options, self.label) from None
                time.sleep(_PAUSE_S)

    def _create(self) -> None:
        """As an administrator, or as brokers do for producers."""
        try:
            self.admin.create(self.name)
        except UsageError as error:
            if error.code != "DELIVERED_NOT_PERMITTED":
                raise
            with suppress(UsageError):  # the topic is still missing
                self._open_producer()

    def messages(self, start: Position, until: Position | None = None) -> Iterator[tuple[Position, bytes]]:
        """What lies after `start`, up to what was stored when the last one was read, or up to `until`.

        Waits for brokers that answered before.
        """
        at = start
        while until is None or at.order[:2] < until.order[:2]:
            message = self._patiently(lambda: self._next(at, wait=until is not None))  # noqa: B023 - called at once
            if message is None:
                return
            id_ = message.message_id()
            place = Position(id_.ledger_id(), id_.entry_id())
            if place.order[:2] > at.order[:2]:
                yield place, message.data()
                at = place

    def forget(self) -> None:
        """The next `messages` opens a new reader: at another position."""
        reader, self._reader = self._reader, None
        self._close(reader)

    def send(self, data: bytes) -> Position:
        """Append a message. Raises OutcomeUnknown: it may be stored, now or later. DeliveredError: nothing was sent."""
        if self._producer is None:
            self._open_producer()
        library = pulsar()
        try:
            id_ = self._producer.send(data)
        except library.MessageTooBig as error:
            raise explained(error, self._options, self.label) from None
        except library.PulsarException as error:
            self._close_producer()
            raise OutcomeUnknown("PULSAR_LEDGER.UNCONFIRMED", topic=self.label, reason=str(error)) from None
        return Position(id_.ledger_id(), id_.entry_id())

    def close(self) -> None:
        """May be called again."""
        self.forget()
        self._close_producer()
        self._admin = None

    def _next(self, after: Position, *, wait: bool) -> Any:
        """The next message; None: there is none. Raises the client's errors."""
        if self._reader is None:
            library = pulsar()
            first = library.MessageId.earliest
            if after != START:
                first = library.MessageId.deserialize(library.MessageId(-1, after.ledger, after.entry, -1).serialize())
            self._reader = warm_client(self._options).create_reader(self.name, first, receiver_queue_size=_QUEUE)
        if not wait and not self._reader.has_message_available():
            return None
        return self._reader.read_next(int(left_s(CONNECT_TIMEOUT_S) * 1000))

    def _patiently(self, ask: Callable[[], Any]) -> Any:
        library, deadline = pulsar(), time.monotonic() + (left_s(OUTAGE_PATIENCE_S) if self._answered else 0)
        while True:
            try:
                answer = ask()
            except library.PulsarException as error:
                self.forget()
                why = explained(error, self._options, self.label)
                if not isinstance(why, Unreachable) or time.monotonic() > deadline:
                    raise why from None
                time.sleep(_PAUSE_S)
            else:
                self._answered = True
                return answer

    def _open_producer(self) -> None:
        library = pulsar()
        try:
            self._producer = warm_client(self._options).create_producer(
                self.name, send_timeout_millis=int(REQUEST_TIMEOUT_S * 1000), batching_enabled=False
            )
        except library.PulsarException as error:
            raise explained(error, self._options, self.label) from None

    def _close_producer(self) -> None:
        producer, self._producer = self._producer, None
        self._close(producer)

    def _close(self, client: Any) -> None:
        if client is not None:
            with suppress(pulsar().PulsarException):  # the connection is lost, and with it what was open
                client.close()


class Journal:
    """The records of one topic. Used by one thread.

    Args:
        starts: see `Chain`.
        apply: called for each record that counts, in order; `restarts`: reading started at it, so it replaces what was
            applied before.
        aside: called for each record that is no part of the chain.
    """

    def __init__(
        self,
        topic: Topic,
        starts: Callable[[Record], bool],
        apply: Callable[[Record, Position, bool], None],
        aside: Callable[[Record, Position], None] = lambda *_: None,
    ) -> None:
        self._topic = topic
        self._starts, self._apply, self._aside = starts, apply, aside
        self._warned = False
        self.restart(START)

    def restart(self, at: Position) -> None:
        """Read from after this position."""
        self._topic.forget()
        self.chain = Chain(self._starts)
        self._at = at

    def read(self, until: Position | None = None) -> None:
        """Apply what was added since the last read. Raises DeliveredError: this is not known."""
        for position, data in self._topic.messages(self._at, until):
            try:
                self._add(position, data)
            except BaseException:
                self._topic.forget()  # it is read again
                raise
            self._at = position

    def append(self, kind: str, fields: Mapping[str, Any], own_id: str = "") -> Outcome[bool]:
        """Add a record that follows the newest one read.

        Args:
            own_id: of the record; empty: a new one.

        Returns:
            Ok(True): it counts. Ok(False): another one took its number, so it never will.
            Failed: nothing was sent. Unknown: it may count, now or later.
        """
        record = Record(self.chain.number + 1, self.chain.id, kind, fields, own_id or new_id())
        sent, deadline = False, time.monotonic() + OUTAGE_PATIENCE_S
        while True:
            try:
                # After an unknown outcome another record takes the number, unless the first one has it.
                position = self._topic.send((replaced(record) if sent else record).encode())
                sent = True
                self.read(position)
            except DeliveredError as error:
                sent = sent or isinstance(error, OutcomeUnknown)
                if not isinstance(error, OutcomeUnknown | Unreachable) or time.monotonic() > deadline:
                    return Unknown(str(error)) if sent else Failed(str(error))
                time.sleep(_PAUSE_S)
            if self.chain.number >= record.number:
                return Ok(self.chain.is_counted(record))

    def add_aside(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Add a record that is no part of the chain. Raises DeliveredError: it may be missing."""
        self._topic.send(Record(0, "", kind, fields).encode())

    def _add(self, position: Position, data: bytes) -> None:
        try:
            record = Record.decode(data)
        except ValueError as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "ignored a message at %s of topic %r: %s. Check who may write to the topic",
                    *(position, self._topic.label, error),
                )
            return
        if not record.number:
            self._aside(record, position)
            return
        try:
            verdict = self.chain.add(record)
            if verdict in (Verdict.NEXT, Verdict.START):
                self._apply(record, position, verdict is Verdict.START)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise damaged(self._topic, position, str(error)) from None


def replaced(record: Record) -> Record:
    """An empty record in its place."""
    return Record(record.number, record.after, VOID)


def damaged(topic: Topic, position: Position, reason: str) -> InvariantBroken:
    return InvariantBroken("PULSAR_LEDGER.DAMAGED", topic=topic.label, position=position, reason=reason)
