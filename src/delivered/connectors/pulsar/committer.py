"""Transactions that tasks leave open for the driver: their connections, names and markers; and the driver's committer.

Two topics beside the sink's own, in its namespace, for each pipeline and sink:

- markers: each shard's transaction ends with one, so it is visible if and only if the rows are.
- opened: the id of each transaction, written before its first message, outside of it. A task that dies leaves its
  transaction open, which hides everything behind it from readers: whoever recovers finds it there.
"""

from __future__ import annotations

import json
import logging
import os
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import urlsplit

from delivered.clients.pulsar.connection import Cluster, Error, NoAnswer, Rejected, Settings
from delivered.clients.pulsar.producer import Flow, Message, Producer, TooLong
from delivered.clients.pulsar.transactions import Coordinators, TransactionId
from delivered.connectors.pulsar import START, Place, Position, PulsarSinkOptions, physical, short_name
from delivered.connectors.pulsar.client import Admin, Opened, hidden, not_permitted, secret, untrusted, warm_key
from delivered.connectors.pulsar.journal import SUBSCRIPTION, Topic, topic_name
from delivered.contract.sink import Committer, OpenTransaction, Shards
from delivered.contract.source import Finding
from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, DeliveredError, OutcomeUnknown, Refused, Unreachable, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.options import parse_addresses
from delivered.model.patience import left_s
from delivered.model.work import Failed, Handle, Ok, Outcome, Prepared, Unknown, with_format, without_format

log = logging.getLogger(__name__)

_PORT, _PORT_TLS = 6650, 6651
_FIRST_S = 2 * REQUEST_TIMEOUT_S
_CLOSED = "the broker closed the producer"
"""In an error of the client. A broker closes producers when a topic moves, and when it cannot store their messages."""
CLIENT_ERRORS = (NoAnswer, Rejected, TooLong, ssl.SSLError)
"""What a client's call raises; see `explained_client`."""

_lock = threading.Lock()
_clusters: dict[tuple[int, str], Cluster] = {}


@dataclass(frozen=True)
class Transaction(Handle):
    """A transaction that a task left open.

    Attributes:
        most, least: its id.
        markers: topic of its marker, at this ledger and entry.
    """

    most: int
    least: int
    markers: str
    ledger: int
    entry: int

    @property
    def id(self) -> TransactionId:
        return TransactionId(self.most, self.least)

    def names(self, prepared: Prepared) -> bool:
        """By its id alone, which is never used again: a record of its opening knows no marker."""
        return Transaction.of(prepared).id == self.id


def cluster(options: Place) -> Cluster:
    """This process's connections with these options."""
    with _lock:
        if (key := warm_key(options)) not in _clusters:
            _clusters[key] = Cluster(settings(options))
        return _clusters[key]


def settings(options: Place) -> Settings:
    parts = urlsplit(options.url)
    with_tls = parts.scheme == "pulsar+ssl"

    def token() -> tuple[str, bytes]:
        return "token", (secret(options) or "").encode()

    credentials = token if options.token is not None else None
    if credentials is None and options.certificate is not None:
        credentials = lambda: ("tls", b"")  # noqa: E731 - the certificate is the connection's
    addresses = parse_addresses(parts.netloc, _PORT_TLS if with_tls else _PORT)
    return Settings(addresses, options.tls_context if with_tls else None, credentials)


def soon() -> float:
    """Deadline of a request, in time.monotonic()."""
    return time.monotonic() + left_s(REQUEST_TIMEOUT_S)


def explained_client(error: Exception, options: Place, what: str) -> DeliveredError:
    """Translate an error of the client. Args: what: the requested topic, or what was done."""
    detail = hidden(options, str(error) or type(error).__name__)
    if isinstance(error, ssl.SSLCertVerificationError):
        return untrusted(options, options.url, error)
    if isinstance(error, TooLong):
        return BadRecord("RECORD_TOO_LARGE.PULSAR_BROKER", what=what, url=options.url, detail=detail)
    if isinstance(error, Rejected):
        match error.code:
            case Error.AUTHENTICATION | Error.AUTHORIZATION:
                return not_permitted(options, f"this client may not use {what!r} at {options.url}: {detail}")
            case Error.TOPIC_NOT_FOUND:
                return UsageError("TOPIC_MISSING.PULSAR", topic=what, url=options.url, detail=detail)
            case Error.INCOMPATIBLE_SCHEMA:
                return UsageError("SCHEMA_INCOMPATIBLE.PRODUCER", url=options.url, what=what)
            case Error.NOT_ALLOWED:
                return Refused("PULSAR_TRANSACTIONS_OFF", url=options.url, detail=detail)
            case Error.TXN_NOT_FOUND | Error.INVALID_TXN_STATUS | Error.TXN_CONFLICT:
                return DeliveredError("PULSAR_TRANSACTION_ENDED", what=what, url=options.url, detail=detail)
    if _CLOSED in detail:
        return Unreachable("PULSAR_UNREACHABLE.CLOSED", url=options.url, what=what, detail=detail)
    return Unreachable("PULSAR_UNREACHABLE.BROKER", url=options.url, what=what, detail=detail)


# Names of the topics.


def markers_topic(options: PulsarSinkOptions, scope: Scope) -> str:
    return topic_name(options.namespace, scope, "markers")


def opened_topic(options: PulsarSinkOptions, scope: Scope) -> str:
    return topic_name(options.namespace, scope, "opened")


_ensured: set[tuple[int, str, str]] = set()


def ensure_topics(options: PulsarSinkOptions, scope: Scope) -> None:
    """Create both, each with the subscription that keeps its messages; once in a process."""
    for name in (opened_topic(options, scope), markers_topic(options, scope)):
        key = (os.getpid(), options.admin_url, name)
        if key not in _ensured:
            topic = Topic(options, name)
            topic.ensure()
            topic.close()
            _ensured.add(key)


_prepared: set[tuple[int, str, str]] = set()


def open_to_transactions(options: PulsarSinkOptions, scope: Scope, topics: Sequence[str] = ()) -> None:
    """Send the first transactional message of each topic alone, and abort it; asked once in a process.

    A broker takes a topic's first snapshot at its first transactional message. Without apache/pulsar#24945, two such
    messages at once leave it refusing every later one until the topic is unloaded; and the tasks of a first batch send
    them at once. A start prepares all; tasks ask, too, for partitions that were added since. Best effort: tasks report
    what they lack.

    Args:
        topics: those to prepare; empty: all partitions and the topic of markers.

    Raises:
        Unreachable: the brokers did not answer.
    """
    process = os.getpid(), options.admin_url
    if topics and all((*process, t) in _prepared for t in topics):
        return
    admin = Admin(options)
    try:
        count = 0 if topics else admin.partitions(options.topic)
        own = topics or [physical((options.topic, n)) for n in (range(count) if count else (-1,))]
        lacking = {t: admin.lacks_snapshot(t) for t in own}
        if lacking[own[0]] is None:
            return
        if not topics:
            ensure_topics(options, scope)
            markers = markers_topic(options, scope)
            lacking = {markers: admin.lacks_snapshot(markers), **lacking}
        fresh = [t for t, lacks in lacking.items() if lacks]
    except Unreachable:
        raise
    except DeliveredError as error:
        log.info("%s: its transactions were not prepared: %s", options.label, error)
        return
    if fresh:
        # Other processes may prepare them now, too: one at a time.
        turn = Topic(options, f"{options.namespace}/delivered:first")
        try:
            turn.ensure()
            turn.hold()
            if fresh := [t for t in fresh if admin.lacks_snapshot(t)]:
                _send_first(options, fresh)
        except DeliveredError as error:
            log.info("%s: its transactions were not prepared: %s", options.label, error)
            return
        finally:
            turn.close()
    _prepared.update((*process, t) for t, lacks in lacking.items() if lacks is not None)


def _send_first(options: PulsarSinkOptions, topics: Sequence[str]) -> None:
    connections, flow = cluster(options), Flow()
    coordinators = Coordinators(connections)
    transaction: TransactionId | None = None
    try:
        # It ends by itself soon: no record of it is needed for the next start.
        transaction = coordinators.begin(0, _FIRST_S, soon())
        coordinators.add(transaction, topics, soon())
        for topic in topics:
            producer = Producer(connections, topic, flow, soon(), transaction=transaction)
            producer.send(Message(b""), soon())
            producer.end_batch(soon())
            flow.drain(soon())
            producer.close(soon())
    except CLIENT_ERRORS as error:
        raise explained_client(error, options, "it") from None
    finally:
        if transaction is not None:
            coordinators.end(transaction, commit=False, deadline=soon())


# Their messages.


@dataclass(frozen=True)
class Marker:
    """What a shard's transaction says of itself, or a record of its opening, which has no fingerprint yet."""

    incarnation: str
    batch: int
    shard: int
    attempt: int
    transaction: TransactionId
    fingerprint: Fingerprint | None = None

    @classmethod
    def of(cls, work: Work, transaction: TransactionId, fingerprint: Fingerprint | None = None) -> Self:
        return cls(work.scope.incarnation, work.batch, work.shard, work.attempt, transaction, fingerprint)

    def to_json(self) -> bytes:
        own: dict[str, Any] = {
            "incarnation": self.incarnation,
            "batch": self.batch,
            "shard": self.shard,
            "attempt": self.attempt,
            "transaction": [*self.transaction],
        }
        if self.fingerprint is not None:
            own["fingerprint"] = str(self.fingerprint)
        return json.dumps(with_format(own), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self | None:
        """None: another application wrote these bytes. Raises Refused: a later version of this package wrote it."""
        try:
            record = without_format(json.loads(data), "a marker")
            text = record.get("fingerprint")
            return cls(
                str(record["incarnation"]),
                int(record["batch"]),
                int(record["shard"]),
                int(record["attempt"]),
                TransactionId(*map(int, record["transaction"])),
                None if text is None else Fingerprint.parse(text),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


# Whether the brokers have transactions that this user may use, before the first batch.


_OLDEST = (2, 10)
_RIGHTS = (
    "this client may not use the transaction coordinators of {url}, whose topics are in the namespace pulsar/system: "
    "pulsar-admin namespaces grant-permission pulsar/system --role ROLE --actions consume"
)


def check_transactions(options: PulsarSinkOptions, admin: Admin) -> Sequence[Finding]:
    """What rules out exactly_once. Loads each coordinator, so that a broker that cannot is found here.

    Raises:
        DeliveredError: the brokers did not answer.
    """
    only = Guarantee.EXACTLY_ONCE
    version = admin.version()
    if version is not None and version < _OLDEST:
        text = ".".join(map(str, version))
        return [Finding.build("PULSAR_TOO_OLD", refuses=True, only=only, version=text, url=options.url)]
    coordinators = Coordinators(cluster(options))
    try:
        coordinators.load(range(coordinators.count(soon())), soon())
    except CLIENT_ERRORS as error:
        why = explained_client(error, options, "transactions")
        if isinstance(error, Rejected) and error.code == Error.AUTHORIZATION:
            why = not_permitted(options, _RIGHTS.format(url=options.url))
        if isinstance(why, Unreachable):
            raise why from None
        return [replace(Finding.refusal(why), only=only)]
    return []


# The driver's committer: commits and aborts what tasks prepared; whether it ended, by the markers.
#
# A coordinator says the same of a transaction that was committed, aborted or expired: it does not know it. The marker
# tells. Its place is in the handle, so it is looked up and never searched for.

_ABORTED_AT_ONCE = 100


class PulsarCommitter(Committer):
    """See `delivered.contract.sink.Committer`."""

    def __init__(self, options: PulsarSinkOptions, scope: Scope) -> None:
        self._options, self._scope = options, scope
        self._coordinators = Coordinators(cluster(options))
        self._before_newest = START
        """Before the markers of the newest decision applied here: a start applies that of the logged batch again."""

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        return self.commit_all([(work, prepared)])[0]

    def commit_all(self, shards: Shards) -> Sequence[Outcome[None]]:
        """See `delivered.contract.sink.Committer`."""
        handles = [Transaction.of(p) for _, p in shards]
        self._before_newest = self._find_before(handles)
        outcomes = self._coordinators.end_all([h.id for h in handles], commit=True, deadline=soon())
        return [
            Ok(None) if isinstance(outcome, Failed) and self._is_visible(Transaction.of(p), work) else outcome
            for (work, p), outcome in zip(shards, outcomes, strict=True)
        ]

    def was_committed(self, work: Work, prepared: Prepared) -> bool:
        """Whether a reader sees the marker at its place.

        A message sent without a transaction is hidden as long as a transaction before it is open. So a reader that sees
        that one would see the marker by now.

        Raises:
            OutcomeUnknown: nobody can tell: it is hidden by an open transaction, or was deleted.
        """
        held = Transaction.of(prepared)
        place, topic = Position(held.ledger, held.entry), Topic(self._options, held.markers)
        try:
            bounds = topic.bounds()
            if bounds is None or held.ledger not in [number for number, _ in bounds.ledgers]:
                raise OutcomeUnknown(
                    "PULSAR_MARKER_DELETED", shard=work.shard, batch=work.batch, topic=topic.label, place=place
                )
            barrier = topic.send(b"")
            for at, data in topic.messages(Position(held.ledger, held.entry - 1), until=barrier):
                if at.order[:2] >= place.order[:2]:
                    return _is_its_marker(at, data, held, work)
        except Unreachable as error:
            raise OutcomeUnknown("MARKER_UNREADABLE", shard=work.shard, batch=work.batch, error=error) from None
        finally:
            topic.close()
        return False

    def visible_shards(self, batch: int) -> Sequence[int]:
        """By markers that a reader sees. See `delivered.contract.sink.Committer`."""
        topic = Topic(self._options, markers_topic(self._options, self._scope))
        try:
            bounds = topic.bounds()
            if bounds is None:
                return ()
            start = max(bounds.cursors.get(SUBSCRIPTION, START), self._before_newest, key=lambda at: at.order[:2])
            markers = [m for _, data in topic.messages(start, until=topic.send(b"")) if (m := Marker.from_json(data))]
        finally:
            topic.close()
        return sorted(
            {
                m.shard
                for m in markers
                if m.incarnation == self._scope.incarnation and m.batch >= batch and m.fingerprint
            }
        )

    def abort(self, prepared: Prepared) -> Outcome[None]:
        if not prepared.handle:
            return Ok(None)
        outcome = self._coordinators.end(Transaction.of(prepared).id, commit=False, deadline=soon())
        return Ok(None) if isinstance(outcome, Failed) else outcome  # it has ended

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Abort what tasks recorded as opened, except `keep`; forget records and markers that are no longer needed."""
        kept = [Transaction.of(p) for p in keep if p.handle]
        opened = Topic(self._options, opened_topic(self._options, self._scope))
        aborted = 0
        try:
            recorded = self._recorded(opened)
            held = {k.id for k in kept}
            orphans = [m.transaction for _, m in recorded if m.transaction not in held]
            for at in range(0, len(orphans), _ABORTED_AT_ONCE):
                outcomes = self._coordinators.end_all(
                    orphans[at : at + _ABORTED_AT_ONCE], commit=False, deadline=soon()
                )
                if (unknown := next((o for o in outcomes if isinstance(o, Unknown)), None)) is not None:
                    return unknown
                aborted += sum(isinstance(o, Ok) for o in outcomes)  # the others had ended
            if recorded:
                first_kept = next((at for at, m in recorded if m.transaction in held), None)
                end = recorded[-1][0]
                self._forget(opened, end if first_kept is None else Position(first_kept.ledger, first_kept.entry - 1))
                self._forget_markers(kept)
            return Ok(aborted)
        except (Unreachable, OutcomeUnknown) as error:
            return Unknown(str(error))
        finally:
            opened.close()

    def _recorded(self, opened: Topic) -> list[tuple[Position, Marker]]:
        """Records of what was opened, behind the subscription."""
        if (bounds := opened.bounds()) is None:
            return []
        start = bounds.cursors.get(SUBSCRIPTION, START)
        return [(at, m) for at, data in opened.messages(start) if (m := Marker.from_json(data))]

    def open_transactions(self) -> list[OpenTransaction]:
        """Of those that tasks recorded, the ones that their coordinators have not ended, oldest first."""
        opened = Topic(self._options, opened_topic(self._options, self._scope))
        try:
            recorded = [m.transaction for _, m in self._recorded(opened)]
            self._coordinators.load(sorted({t.most for t in recorded}), soon())
            found = [(t, opened.admin.transaction(*t)) for t in recorded]
        except CLIENT_ERRORS as error:
            raise explained_client(error, self._options, "transactions") from None
        finally:
            opened.close()
        shown = [_shown(t, now) for t, now in found if now is not None]
        return sorted(shown, key=lambda t: t.started_ms or 0)

    def end_by_id(self, transactional_id: str, commit: bool, handle: Handle | None = None) -> Outcome[None]:  # noqa: ARG002
        """See `delivered.contract.sink.Committer`."""
        found = next((t for t in self.open_transactions() if t.transactional_id == transactional_id), None)
        if found is None:
            raise UsageError("TRANSACTION_NOT_OPEN.PULSAR", transactional_id=transactional_id)
        most, least = map(int, transactional_id.split("-"))
        return self._coordinators.end(TransactionId(most, least), commit=commit, deadline=soon())

    def set_up(self, guarantee: Guarantee, *, decides: bool) -> None:  # noqa: ARG002
        """Prepare the topics for transactions of several tasks at once. See `delivered.contract.sink.Committer`."""
        if guarantee is Guarantee.EXACTLY_ONCE:
            open_to_transactions(self._options, self._scope)

    def _is_visible(self, held: Transaction, work: Work) -> bool:
        """Whether a reader sees the marker now. False: not yet, or never."""
        topic = Topic(self._options, held.markers)
        try:
            at, data = next(topic.messages(Position(held.ledger, held.entry - 1)), (START, b""))
            return _is_its_marker(at, data, held, work)
        except DeliveredError as error:
            log.warning("%s: the marker of shard %d could not be read: %s", topic.label, work.shard, error)
            return False
        finally:
            topic.close()

    def _forget_markers(self, kept: Sequence[Transaction]) -> None:
        """Those before the newest decision's: only they are ever asked for. A start keeps none of a logged batch."""
        if (until := self._find_before(kept) if kept else self._before_newest) != START:
            self._forget(Topic(self._options, markers_topic(self._options, self._scope)), until)

    def _find_before(self, kept: Sequence[Transaction]) -> Position:
        name = markers_topic(self._options, self._scope)
        ledger, entry = min(((k.ledger, k.entry) for k in kept if k.markers == name), default=(-1, 0))
        return START if ledger < 0 else Position(ledger, entry - 1)

    def _forget(self, topic: Topic, until: Position) -> None:
        """Move the subscription, so that Pulsar may delete what lies before."""
        if until.entry < 0:
            return
        try:
            topic.admin.move(topic.name, SUBSCRIPTION, until, exists=True)
        except DeliveredError as error:
            log.warning("%s: what is no longer needed was not forgotten: %s", topic.label, error)


def _is_its_marker(at: Position, data: bytes, held: Transaction, work: Work) -> bool:
    found = Marker.from_json(data) if (at.ledger, at.entry) == (held.ledger, held.entry) else None
    own = Marker.of(work, held.id)
    return found is not None and replace(found, attempt=own.attempt, fingerprint=None) == own


def _shown(transaction: TransactionId, now: Opened) -> OpenTransaction:
    return OpenTransaction(
        f"{transaction.most}-{transaction.least}",
        now.state,
        Transaction(transaction.most, transaction.least, "", -1, -1),
        tuple(short_name(topic) for topic in now.topics),
        now.started_ms,
        now.timeout_ms / 1000,
    )
