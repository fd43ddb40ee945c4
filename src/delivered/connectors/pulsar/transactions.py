"""What tasks and driver share about a sink's transactions: connections, names, markers, records of what was opened.

Two topics beside the sink's own, in its namespace, for each pipeline and sink:

- markers: each shard's transaction ends with one, so it is visible if and only if the rows are.
- opened: the id of each transaction, written before its first message, outside of it. A task that dies leaves its
  transaction open, which hides everything behind it from readers: whoever recovers finds it there.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import urlsplit

from delivered.clients.pulsar.commands import Error, NoAnswer, Rejected
from delivered.clients.pulsar.connection import Cluster, Settings
from delivered.clients.pulsar.producer import TooLong
from delivered.clients.pulsar.transactions import Coordinators, TransactionId
from delivered.connectors.pulsar import Place, PulsarSinkOptions
from delivered.connectors.pulsar.client import Admin, hidden, not_permitted, secret, untrusted, warm_key
from delivered.connectors.pulsar.journal import Topic, topic_name
from delivered.contract.source import Finding
from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, DeliveredError, Refused, Unreachable, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.options import parse_addresses
from delivered.model.patience import left_s
from delivered.model.work import Handle, Prepared, with_format, without_format

_PORT, _PORT_TLS = 6650, 6651
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
            _clusters[key] = Cluster(_settings(options))
        return _clusters[key]


def _settings(options: Place) -> Settings:
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
