"""Connections to Pulsar: tokens and TLS, the brokers' admin API over HTTP, warm clients, translation of their errors.

Tokens are resolved on use, checked, and described in errors, never shown. A process keeps one client per options.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import urllib3

from delivered.connectors.pulsar import PREFIX, Place, Position, short_name
from delivered.model.answers import AnswerTooLarge, JsonAnswer, TimedAnswer, UnexpectedAnswer
from delivered.model.errors import REDACTED, BadRecord, DeliveredError, Unreachable, UsageError, extra
from delivered.model.limits import CONNECT_TIMEOUT_S, SOURCE_PATIENCE_S
from delivered.model.options import is_reference, resolve_secret
from delivered.model.patience import left_s

_warm: dict[tuple[int, str], Any] = {}


def pulsar() -> Any:
    """The client library, imported on use. Raises MissingExtra."""
    with extra("pulsar"):
        import pulsar
    return pulsar


def version_schema() -> Any:
    """A reader schema that makes `Message.value` the message's schema version, -1 for none.

    Only schemas get the version from the client; its own `schema_version` decodes bytes as text.
    """

    class Versions(pulsar().schema.BytesSchema):  # type: ignore[misc]
        def decode_message(self, message: Any) -> int:
            return int(message.int_schema_version())

    return Versions()


def warm_client(options: Place) -> Any:
    """This process's client with these options."""
    if (key := warm_key(options)) not in _warm:
        _warm[key] = _new_client(options)
    return _warm[key]


def warm_key(options: Place) -> tuple[int, str]:
    """Connections of one process that may be shared have the same."""
    return os.getpid(), repr((options.url, options.token, options.trusted, options.certificate, options.key))


def _new_client(options: Place) -> Any:
    library = pulsar()
    secret(options)  # fail early if it cannot be read
    if (found := tls_error(options)) is not None:
        raise found
    try:
        return library.Client(
            options.url,
            authentication=_authentication(library, options),
            operation_timeout_seconds=int(CONNECT_TIMEOUT_S),
            connection_timeout_ms=int(CONNECT_TIMEOUT_S * 1000),
            # The client library takes one file; with none it uses certifi's.
            tls_trust_certs_file_path=options.trusted or ssl.get_default_verify_paths().cafile,
            tls_validate_hostname=True,
            tls_certificate_file_path=options.certificate,
            tls_private_key_file_path=options.key,
            # By default it prints every connection attempt to the standard output.
            logger=library.ConsoleLogger(library.LoggerLevel.Error),
        )
    except library.PulsarException as error:
        raise explained(error, options, options.url) from None


def _authentication(library: Any, options: Place) -> Any:
    """By the token if there is one; the connection then presents the certificate."""
    if options.token is not None:
        return library.AuthenticationToken(supplier(options))
    if options.certificate is not None:
        return library.AuthenticationTLS(options.certificate, options.key)
    return None


def explained(error: Exception, options: Place, what: str) -> DeliveredError:
    """Translate an error of the client. Args: what: the requested topic."""
    library = pulsar()
    detail = hidden(options, str(error) or type(error).__name__)
    match error:
        case library.TopicNotFound():
            return UsageError("TOPIC_MISSING.PULSAR", topic=what, url=options.url, detail=detail)
        case library.AuthenticationError() | library.AuthorizationError() | library.ErrorGettingAuthenticationData():
            return not_permitted(options, f"this client is not authorized to use {what!r} at {options.url}: {detail}")
        case library.IncompatibleSchema():
            return UsageError("SCHEMA_INCOMPATIBLE.PRODUCER", url=options.url, what=what)
        case library.MessageTooBig():
            return BadRecord("RECORD_TOO_LARGE.PULSAR_BROKER", what=what, url=options.url, detail=detail)
    return (
        tls_error(options)
        or _refusal(options, what)
        or Unreachable("PULSAR_UNREACHABLE.BROKER", url=options.url, what=what, detail=detail)
    )


def _refusal(options: Place, what: str) -> UsageError | None:
    """Ask the HTTP service: brokers reject a token by closing the connection, and the client just reconnects."""
    topic = re.sub(r"-partition-\d+$", "", what)
    try:
        Admin(options).partitions(topic if topic.startswith("persistent://") else f"{PREFIX}{topic}")
    except UsageError as error:
        return error
    except DeliveredError:
        pass
    return None


# The admin API.

T = TypeVar("T")

_PAUSE_S = 0.3

_REDIRECTS_MAX = 5

_BUSY = (408, 429)
"""It has no time for this request now."""

_DETAIL_MAX = 200

_COORDINATOR_SETTING = "transactionCoordinatorEnabled"

_NO_SNAPSHOT = "NoSnapshot"
_RECOVERED = ("Ready", _NO_SNAPSHOT)
"""States of a topic's transactions in which its broker knows which are open."""

_PARTITIONS_MAX = 100_000

_ANSWER_BYTES_MAX = 64 << 20
"""More than any entry, or the statistics of any topic."""


@dataclass(frozen=True)
class Bounds:
    """Contents of a partition, or of a topic without partitions.

    Attributes:
        ledgers: (id, number of entries) of the retained ones, oldest first.
        last: up to which readers receive entries now: before the first open transaction.
        stored: the last entry.
        cursors: subscription -> its mark-delete position.
        size: of the retained ledgers, in bytes.
    """

    ledgers: tuple[tuple[int, int], ...]
    last: Position
    stored: Position
    cursors: Mapping[str, Position]
    size: int = 0


@dataclass(frozen=True)
class Entry:
    """
    Attributes:
        messages: number of messages in it, as the producer batched them.
        chunk: number of the chunk, from 0; None: not a chunk.
        chunks: of the message.
        chunked: identifies the message.
        hidden: readers do not receive it: a marker of the broker, or of an aborted transaction.
        published_ms: since 1970, by the producer's clock; None: unknown.
        encrypted: by its producer. Readers without its key do not receive it.
    """

    messages: int
    chunk: int | None
    chunks: int
    chunked: str
    hidden: bool
    published_ms: int | None = None
    encrypted: bool = False


@dataclass(frozen=True)
class Opened:
    """
    Attributes:
        state: OPEN, COMMITTING, ABORTING ...
        started_ms: since 1970.
        timeout_ms: its time to live.
        topics: full names of the partitions that it wrote to.
    """

    state: str
    started_ms: int
    timeout_ms: int
    topics: tuple[str, ...]


@dataclass(frozen=True)
class Retention:
    """Of messages that no subscription waits for. Pulsar deletes complete ledgers, the oldest first, by either limit.

    Attributes:
        minutes, mebibytes: -1: without bounds; both 0: they are not retained.
    """

    minutes: int
    mebibytes: int

    @property
    def keeps_all(self) -> bool:
        return self.minutes < 0 and self.mebibytes < 0


@dataclass(frozen=True)
class Policies:
    """
    Attributes:
        keeps_all: acknowledged messages are retained without bounds.
        ttl_s: after which unread messages are acknowledged; 0: never.
        evicts: messages are acknowledged for subscriptions with too large a backlog.
        expiry_min: after which subscriptions without consumers are deleted; 0: never.
    """

    keeps_all: bool
    ttl_s: int
    evicts: bool
    expiry_min: int


@dataclass(frozen=True)
class Registered:
    """A version of a topic's schema.

    Attributes:
        kind: AVRO, JSON, STRING ...
        text: as it was registered.
    """

    version: int
    kind: str
    text: str


class Missing(Exception):
    """The requested resource does not exist."""


class NotPlaced(Unreachable):
    """A broker could not store a subscription's cursor; retriable."""


class TransactionsOff(Exception):
    """The brokers have no transaction coordinator."""


class Existing(DeliveredError):
    """What was to be created exists."""


class Admin:
    """Keeps connections open between requests. Not thread-safe."""

    def __init__(self, options: Place, patient: bool = False) -> None:
        """
        Args:
            patient: the brokers answered before, so wait for a restart.

        Raises:
            UsageError: the file of trusted certificates is invalid.
        """
        self._options = options
        self._patient = patient
        checks = options.tls_context() if options.admin_url.startswith("https") else None
        self._pool = urllib3.PoolManager(retries=False, ssl_context=checks)
        self._pool.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}

    def partitions(self, topic: str) -> int:
        """Number of partitions; 0: the topic has none, or does not exist."""
        try:
            return self._read(
                self._path(topic) + "/partitions?checkAllowAutoCreation=false",
                lambda a: a.number("partitions", 0, _PARTITIONS_MAX),
            )
        except Missing:
            return 0

    def create(self, topic: str) -> None:
        """Create a topic without partitions, unless it exists. Raises UsageError: only administrators may."""
        with suppress(Existing):
            self._ask("PUT", self._path(topic), {})

    def topics(self, namespace: str) -> list[str]:
        """Full names of topics. Args: namespace: `persistent://tenant/namespace`."""
        try:
            return self._read(self._path(namespace), lambda a: [name.value(str) for name in a.each()])
        except Missing:
            return []

    def policies(self, topic: str) -> Policies:
        """As they apply to a topic; to its namespace, if there is no such topic yet, without the brokers' defaults.

        Raises:
            UsageError: only administrators may see them.
        """
        quotas = JsonAnswer.of(self._policy(topic, "backlogQuotaMap").value(dict, {})).named().values()
        return Policies(
            keeps_all=self.retention(topic).keeps_all,
            ttl_s=self._policy(topic, "messageTTL").value(int, 0),
            evicts=any(q.take("policy", str, "") == "consumer_backlog_eviction" for q in quotas),
            expiry_min=self._policy(topic, "subscriptionExpirationTime", of_topic=False).value(int, 0),
        )

    def retention(self, topic: str) -> Retention:
        """As `policies`."""
        found = self._policy(topic, "retention")
        if found.value(dict, None) is None:
            return Retention(0, 0)
        return Retention(found.take("retentionTimeInMinutes", int), found.take("retentionSizeInMB", int))

    def _policy(self, topic: str, name: str, *, of_topic: bool = True) -> JsonAnswer:
        namespace = "/admin/v2/namespaces/" + "/".join(topic.partition("://")[2].split("/")[:2])
        paths = [f"{self._path(topic)}/{name}?applied=true"] * of_topic + [f"{namespace}/{name}"]
        for path in paths:
            with suppress(Missing):
                return self._read(path, lambda a: a)
        return JsonAnswer.of(None)

    def bounds(self, physical: str) -> Bounds:
        """Raises UsageError if the topic does not exist. This does not create it, as the client would."""
        try:
            ledgers, confirmed, cursors, size = self._read(self._path(physical) + "/internalStats", _stored)
            dispatchable = self._read(self._path(physical) + "/lastMessageId", _message_id)
        except Missing:
            raise self._missing(physical) from None
        if dispatchable.entry >= 0 and dispatchable.order < confirmed.order:
            confirmed = dispatchable
        stable = self._stable(physical)
        last = confirmed if stable is None else min(confirmed, _entry_at(stable, ledgers), key=lambda p: p.order)
        return Bounds(tuple(ledgers), last, confirmed, cursors, size)

    def _stable(self, physical: str) -> Position | None:
        """Before the first open transaction, which lastMessageId does not stop at; None: there are no transactions."""
        found = self._transactions(physical)
        return None if found is None else found[1]

    def lacks_snapshot(self, physical: str) -> bool | None:
        """Whether the topic has never held a transaction; None: it does not exist, or its brokers have none.

        Brokers know it of topics that they have loaded: a new partition is loaded by its first use.
        """
        found = self._transactions(physical)
        if found is None:
            with suppress(Missing):
                self._read(self._path(physical) + "/internalStats", _stored)
            found = self._transactions(physical)
        return None if found is None else found[0] == _NO_SNAPSHOT

    def _transactions(self, physical: str) -> tuple[str, Position] | None:
        """State of a topic's transactions, and the position before the first open one; None: there are none.

        A broker that has just loaded the topic does not know it yet: waits for it.
        """
        path = "/admin/v3/transactions/transactionBufferStats/" + self._path(physical).partition("/persistent/")[2]
        deadline = time.monotonic() + left_s(SOURCE_PATIENCE_S)
        while True:
            try:
                state, position = self._read(path, _stable_position)
            except (Missing, TransactionsOff):
                return None
            if state in _RECOVERED:
                return state, position
            if time.monotonic() > deadline:
                raise self._unreachable(f"of {path}: the transactions of the topic are {state}")
            time.sleep(_PAUSE_S)

    def entry(self, physical: str, ledger: int, entry: int) -> Entry | None:
        """Contents of an entry; None: it no longer exists."""
        try:
            headers = self._ask("GET", f"{self._path(physical)}/ledger/{ledger}/entry/{entry}")[0]
        except Missing:
            return None
        chunks = _integer(headers, "X-Pulsar-PROPERTY-TOTAL-CHUNKS", 0)
        return Entry(
            messages=_integer(headers, "X-Pulsar-num-batch-message", 1),
            chunk=_integer(headers, "X-Pulsar-PROPERTY-CHUNK-ID", 0) if chunks > 1 else None,
            chunks=chunks,
            chunked=headers.get("X-Pulsar-uuid", ""),
            hidden="X-Pulsar-marker-type" in headers or self._was_aborted(physical, headers),
            published_ms=_time(headers.get("X-Pulsar-publish-time", "")),
            encrypted=headers.get("X-Pulsar-Is-Encrypted", "").lower() == "true",
        )

    def _was_aborted(self, physical: str, headers: Mapping[str, str]) -> bool:
        """Whether an entry is of an aborted transaction. Brokers of 2.10 name the transaction only."""
        if (stated := headers.get("X-Pulsar-txn-aborted")) is not None:
            return stated.lower() == "true"
        most, least = (headers.get(f"X-Pulsar-txnid-{part}-bits", "") for part in ("most", "least"))
        if not (most.isdecimal() and least.isdecimal()):
            return False
        name = "/".join(quote(part, safe="") for part in physical.partition("://")[2].split("/"))
        try:
            return self._read(
                f"/admin/v3/transactions/transactionInBufferStats/{name}/{most}/{least}",
                lambda a: a.take("aborted", bool, False),
            )
        except Missing:
            return False

    def entry_digest(self, physical: str, ledger: int, entry: int) -> str | None:
        """What a producer and the broker gave an entry, hashed; None: it no longer exists."""
        try:
            headers, body = self._ask("GET", f"{self._path(physical)}/ledger/{ledger}/entry/{entry}")
        except Missing:
            return None
        properties = sorted((k.lower(), v) for k, v in headers.items() if k.lower().startswith("x-pulsar-"))
        return hashlib.blake2b(repr(properties).encode() + body, digest_size=16).hexdigest()

    def before(self, physical: str, ms: int) -> Position:
        """The last entry published before a time."""
        position = self._read(f"{self._path(physical)}/messageid/{ms}", _message_id)
        return Position(position.ledger, position.entry - 1)

    def deduplicates(self, physical: str) -> bool | None:
        """Whether deduplication is enabled on this topic; None: unknown."""
        try:
            status = self._read(self._path(physical) + "/stats", lambda a: a.take("deduplicationStatus", str, ""))
        except Missing:
            raise self._missing(physical) from None
        return status == "Enabled" if status else None

    def schema(self, topic: str, version: int | None = None) -> Registered | None:
        """A topic's schema; None: it has none, or not this version. Args: version: from 0; None: the newest."""
        _, _, rest = topic.partition("://")
        path = "/admin/v2/schemas/" + "/".join(quote(part, safe="") for part in rest.split("/")) + "/schema"
        try:
            return self._read(
                path if version is None else f"{path}/{version}",
                lambda a: Registered(a.take("version", int), a.take("type", str), a.take("data", str)),
            )
        except Missing:
            return None

    def version(self) -> tuple[int, int] | None:
        """Of a broker: (4, 0); None: it does not say, as in a build of one's own."""
        found = re.match(rb"(\d+)\.(\d+)", self._ask("GET", "/admin/v2/brokers/version")[1])
        return None if found is None else (int(found[1]), int(found[2]))

    def transaction(self, most: int, least: int) -> Opened | None:
        """A transaction that has not ended; None: its coordinator does not know it. The coordinator must be loaded."""

        def read(answer: JsonAnswer) -> Opened:
            topics = sorted(answer.take("producedPartitions", dict, {}))
            started, timeout = answer.number("openTimestamp", 0), answer.number("timeoutAt", 0)
            return Opened(answer.take("status", str), started, timeout, tuple(topics))

        try:
            found = self._read(f"/admin/v3/transactions/transactionMetadata/{most}/{least}", read)
        except Missing:
            return None
        return None if found.state in ("COMMITTED", "ABORTED") else found

    def consumers(self, physical: str, subscription: str) -> int:
        """Number of connected consumers."""

        def count(answer: JsonAnswer) -> int:
            return len(
                JsonAnswer.of(answer.take("subscriptions", dict).get(subscription, {})).take("consumers", list, [])
            )

        return self._read(self._path(physical) + "/stats", count)

    def move(self, physical: str, subscription: str, to: Position, exists: bool) -> None:
        """Move a subscription's cursor to `to`, which counts as acknowledged; create the subscription if needed."""
        path = f"{self._path(physical)}/subscription/{quote(subscription, safe='')}"
        body = {"ledgerId": to.ledger, "entryId": to.entry, "partitionIndex": -1, "excluded": True}
        if not exists:
            with suppress(NotPlaced, Existing):  # then it was created, at the end
                self._ask("PUT", path, body)
                return
        self._ask("POST", f"{path}/resetcursor", body)

    def _path(self, topic: str) -> str:
        domain, _, rest = topic.partition("://")
        return "/admin/v2/" + domain + "/" + "/".join(quote(part, safe="") for part in rest.split("/"))

    def _missing(self, topic: str) -> UsageError:
        return UsageError("TOPIC_MISSING.PULSAR_ADMIN", topic=short_name(topic), admin_url=self._options.admin_url)

    def _read(self, path: str, read: Callable[[JsonAnswer], T]) -> T:
        data = self._ask("GET", path)[1]
        try:
            return read(JsonAnswer.read(data or b"null"))
        except UnexpectedAnswer as why:
            raise self._unreachable(f"of {path}, {hidden(self._options, str(why))}") from None

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[Mapping[str, str], bytes]:
        deadline = time.monotonic() + (left_s(SOURCE_PATIENCE_S) if self._patient else 0)
        while True:
            try:
                answer = self._once(method, self._options.admin_url + path, body)
            except Unreachable as error:
                again = not (isinstance(error, NotPlaced) and method == "PUT")  # a retry would fail: it exists
                if not again or time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)
            else:
                self._patient = True
                return answer

    def _once(self, method: str, url: str, body: Any) -> tuple[Mapping[str, str], bytes]:
        headers = {"Content-Type": "application/json"}
        if (token := secret(self._options)) is not None:
            headers["Authorization"] = f"Bearer {token}"
        for _ in range(_REDIRECTS_MAX):
            try:
                # Redirects are followed here: the library would send the token to any host, or to none.
                reply = self._pool.request(
                    method,
                    url,
                    json=body,
                    headers=headers,
                    timeout=left_s(CONNECT_TIMEOUT_S),
                    redirect=False,
                    preload_content=False,
                    decode_content=False,
                )
                data = _body(reply)
            except (urllib3.exceptions.HTTPError, AnswerTooLarge) as error:
                reason = error.args[-1] if error.args else error
                if isinstance(reason, ssl.SSLCertVerificationError):
                    parts = urlsplit(url)
                    raise untrusted(self._options, f"{parts.scheme}://{parts.netloc}", reason) from None
                raise self._unreachable(str(error) or type(error).__name__) from None
            if reply.status in (307, 308) and urlsplit(reply.headers.get("Location", "")).scheme in ("http", "https"):
                url = self._followed(url, reply.headers["Location"])
            elif reply.status >= 300:
                raise self._explained(reply.status, url, data)
            else:
                return reply.headers, data
        raise self._unreachable(f"it sent {_REDIRECTS_MAX} redirects for {url}")

    def _followed(self, url: str, location: str) -> str:
        """The URL of the broker that owns the topic; it receives the token too."""
        if url.startswith("https") and not location.startswith("https"):
            raise UsageError("REDIRECT_WITHOUT_TLS", admin_url=self._options.admin_url, location=location)
        return location

    def _explained(self, code: int, url: str, answer: bytes) -> Exception:
        detail = hidden(self._options, _words(answer))
        if code == 404:
            return Missing(url)
        if code in (401, 403):
            path = urlsplit(url).path
            return not_permitted(
                self._options, f"{self._options.admin_url} does not permit {path}: {code}, {detail.rstrip('.')}"
            )
        if code == 409:
            return Existing("PULSAR_ADMIN", admin_url=self._options.admin_url, number=code, url=url, detail=detail)
        if code == 503 and _COORDINATOR_SETTING in detail:
            return TransactionsOff(detail)
        if code >= 500 or code in _BUSY:
            return self._unreachable(f"{code} {detail}")
        if code == 412 and ("unable to persist" in detail or "fence subscription" in detail):
            # Seen right after a broker's start and under load, and when two create the subscription at once.
            return NotPlaced("PULSAR_UNREACHABLE.CURSOR", admin_url=self._options.admin_url, url=url, detail=detail)
        return DeliveredError("PULSAR_ADMIN", admin_url=self._options.admin_url, number=code, url=url, detail=detail)

    def _unreachable(self, detail: str) -> Unreachable:
        return Unreachable("PULSAR_UNREACHABLE.ADMIN", admin_url=self._options.admin_url, detail=detail)


def _stored(answer: JsonAnswer) -> tuple[list[tuple[int, int]], Position, dict[str, Position], int]:
    """Ledgers, last entry, cursors and size in a partition's internal statistics."""
    ledgers = [(x.number("ledgerId", 0), x.number("entries", 0)) for x in answer.at("ledgers").each()]
    if ledgers:  # the open ledger's count is a separate field
        ledgers[-1] = (ledgers[-1][0], max(ledgers[-1][1], answer.number("currentLedgerEntries", 0)))
    cursors = {n: _position(c, "markDeletePosition") for n, c in answer.at("cursors").named().items()}
    return ledgers, _position(answer, "lastConfirmedEntry"), cursors, answer.number("totalSize", 0)


def _time(text: str) -> int | None:
    """Milliseconds since 1970, of an ISO 8601 time."""
    with suppress(ValueError):
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    return None


def _position(answer: JsonAnswer, name: str) -> Position:
    text = answer.take(name, str)
    try:
        return Position.from_text(text)
    except ValueError:
        raise UnexpectedAnswer(f"{name} is {ascii(text)[:_DETAIL_MAX]}, not the position of a message") from None


def _stable_position(answer: JsonAnswer) -> tuple[str, Position]:
    return answer.take("state", str), _position(answer, "maxReadPosition")


def _entry_at(position: Position, ledgers: Sequence[tuple[int, int]]) -> Position:
    """The last entry up to a position, which may lie before the first one of its ledger."""
    if position.entry >= 0:
        return position
    before = [Position(ledger, count - 1) for ledger, count in ledgers if ledger < position.ledger and count]
    return before[-1] if before else position


def _message_id(answer: JsonAnswer) -> Position:
    return Position(answer.number("ledgerId", -1), answer.number("entryId", -1))


class _Connection(urllib3.connection.HTTPConnection):
    response_class = TimedAnswer


class _SecureConnection(urllib3.connection.HTTPSConnection):
    response_class = TimedAnswer


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


def _body(reply: urllib3.BaseHTTPResponse) -> bytes:
    """As it was sent: an answer compressed without being requested is not unpacked.

    Raises:
        AnswerTooLarge
    """
    try:
        body = reply.read(_ANSWER_BYTES_MAX + 1, decode_content=False)
        if len(body) > _ANSWER_BYTES_MAX:
            reply.close()
            raise AnswerTooLarge(f"its answer has more than {_ANSWER_BYTES_MAX:,} bytes")
        return body
    finally:
        reply.release_conn()


def _words(answer: bytes) -> str:
    """Reason of an error: brokers send JSON, or an HTML page with the reason in its title."""
    text = answer.decode(errors="replace")
    try:
        return JsonAnswer.read(answer).take("reason", str)[:_DETAIL_MAX]
    except UnexpectedAnswer:
        title = re.search(r"<title>(.*?)</title>", text, re.DOTALL | re.IGNORECASE)
        return " ".join((title[1] if title else text).split())[:_DETAIL_MAX]


def _integer(headers: Mapping[str, str], name: str, missing: int) -> int:
    """A header's number. A sender's property may have the name of one that the broker sets, and any text."""
    texts = (text.strip() for text in headers.get(name, "").split(","))
    return next((int(text) for text in texts if re.fullmatch("[0-9]{1,9}", text)), missing)


# The token: resolved on use, checked for its form, described in errors. Never shown.

_FORM = re.compile(r"[\x21-\x7e]+")

_SHORT = 8


def secret(options: Place) -> str | None:
    """The token; do not keep it, as it may change.

    Raises:
        UsageError: the variable or file of the reference is missing, or does not contain a token.
    """
    if options.token is None:
        return None
    token = resolve_secret("token", options.token).strip()
    if not _FORM.fullmatch(token):
        what = f"{len(token)} characters, some of which are invalid in a token" if token else "nothing"
        raise UsageError("OPTION_VALUE.TOKEN", reference=_reference(options), what=what)
    return token


def supplier(options: Place) -> Callable[[], str]:
    """For a long-lived client: the next connection uses a replaced token.

    It is called in the client's threads, which must not raise: an unreadable token is empty, so it is rejected.
    """

    def supply() -> str:
        try:
            return secret(options) or ""
        except UsageError:
            return ""

    return supply


def hidden(options: Place, detail: str) -> str:
    """A message without the token."""
    try:
        token = secret(options)
    except UsageError:
        return detail
    # A short one is a mistake, and its letters occur elsewhere in the text.
    return detail if token is None or len(token) < _SHORT else detail.replace(token, REDACTED)


def not_permitted(options: Place, what: str) -> UsageError:
    """Args: what: what was rejected, and by whom; a sentence without its full stop."""
    description, step = _described(options)
    return UsageError("NOT_PERMITTED.PULSAR", what=hidden(options, what), description=description, step=step)


def _described(options: Place) -> tuple[str, str]:
    """The token's own claims (unverified), and the next step."""
    if options.token is None:
        return "No token was given", "set the option token to env:NAME or file:PATH"
    try:
        token = secret(options)
    except UsageError as error:
        return error.message.rstrip("."), "store the token there again"
    claims = _claims(token or "")
    name = f"The token ({_reference(options)})"
    if claims is None:
        return f"{name} is not a JSON Web Token", "store a Pulsar token there: pulsar tokens create --subject ROLE"
    role = claims.get("sub")
    known = f"{name} has the role {role!r}" if role is not None else f"{name} names no role"
    expires = claims.get("exp")
    if isinstance(expires, int | float) and 0 < expires <= time.time():
        at = datetime.fromtimestamp(expires, UTC)
        return f"{known}, and expired at {at:%Y-%m-%d %H:%M:%S} UTC", "store a new token there, and start again"
    return known, (
        "check that it was signed with the brokers' key, and its role's permissions: pulsar-admin namespaces "
        f"permissions TENANT/NAMESPACE; reading needs consume, writing produce (grant-permission --role "
        f"{role or 'ROLE'} --actions ...)"
    )


def _claims(token: str) -> dict[str, Any] | None:
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, RecursionError):
        return None
    return claims if isinstance(claims, dict) else None


def _reference(options: Place) -> str:
    token = options.token or ""
    return token if is_reference(token) else "given literally, not as env:NAME or file:PATH"


# TLS to the brokers: trusted certificates, and why a handshake failed.

_PORT = 6651


def untrusted(options: Place, where: str, error: ssl.SSLCertVerificationError) -> UsageError:
    """The error for a rejected certificate at `where`, a URL."""
    return options.untrusted(where, error, "url and adminUrl")


def tls_error(options: Place) -> DeliveredError | None:
    """The certificate error at `url`, which the client library does not report; None: no error, or no answer."""
    parts = urlsplit(options.url)
    if parts.scheme != "pulsar+ssl":
        return None
    try:
        checks = options.tls_context()
    except UsageError as error:
        return error
    for address in parts.netloc.split(","):
        host, port = _split(address)
        try:
            with (
                socket.create_connection((host, port), left_s(CONNECT_TIMEOUT_S)) as peer,
                checks.wrap_socket(peer, server_hostname=host),
            ):
                pass
        except ssl.SSLCertVerificationError as error:
            return untrusted(options, f"pulsar+ssl://{address}", error)
        except OSError:
            continue
    return None


def _split(address: str) -> tuple[str, int]:
    parts = urlsplit(f"//{address}")
    return parts.hostname or "", parts.port or _PORT
