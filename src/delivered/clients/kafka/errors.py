"""Errors of Kafka's clients by librdkafka's names, and what becomes of a request."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from delivered.model.errors import DeliveredError, Unreachable, UsageError, did_you_mean


def config_error(detail: str, owner: str, name: str | None = None) -> UsageError:
    """librdkafka rejected a setting; `name` if known."""
    found = re.search(r'property:? "([^"]+)"', detail)
    named = name or (found[1] if found else None)
    name = f"'kafka.{named}'" if named else "with the prefix 'kafka.'"
    return UsageError(
        "OPTION_UNKNOWN.LIBRDKAFKA" if found and "No such" in detail else "OPTION_VALUE.LIBRDKAFKA",
        owner=owner,
        name=name,
        detail=detail,
    )


def explain(owner: str, name: str, detail: str, what: str, servers: str, known: Collection[str] = ()) -> DeliveredError:
    """An error of a broker or of librdkafka, in words.

    Args:
        owner: of the options: "delivered_kafka source".
        name: of the error, as Kafka or librdkafka has it: "UNKNOWN_TOPIC_OR_PART".
        what: the requested topic, partition or group.
        known: topics that there are.
    """
    if name in (
        "UNKNOWN_TOPIC_OR_PART",
        "UNKNOWN_TOPIC_OR_PARTITION",
        "_UNKNOWN_TOPIC",
        "_UNKNOWN_PARTITION",
        "UNKNOWN_TOPIC_ID",
    ):
        near = did_you_mean(what, known)
        return UsageError("TOPIC_MISSING.KAFKA_READ", owner=owner, topic=what, servers=servers, hint=near)
    if name in ("TOPIC_EXCEPTION", "INVALID_TOPIC_EXCEPTION", "INVALID_TOPIC"):
        return UsageError("TOPIC_INVALID.BROKER", owner=owner, servers=servers, topic=what)
    if "AUTHORIZATION_FAILED" in name:
        return UsageError("NOT_PERMITTED.KAFKA_READ", owner=owner, what=what, servers=servers, name=name)
    if name in ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "_SSL"):
        return Unreachable("CREDENTIALS_REFUSED", owner=owner, servers=servers, detail=detail)
    return Unreachable("KAFKA_UNREACHABLE.REQUEST", owner=owner, servers=servers, what=what, name=name, detail=detail)


def replaces(name: str, known: str) -> bool:
    """Whether an error replaces the last one: "all brokers down" must not hide its cause ("Connection refused")."""
    return name != "_ALL_BROKERS_DOWN" or not known


class ConnectionErrors:
    """Remembers why connections fail: librdkafka reports that apart from the requests, which merely time out.

    Attributes:
        refused: a TLS or authentication error, which no retry fixes.
    """

    def __init__(self) -> None:
        self.last = ""
        self.refused: tuple[str, str] | None = None

    def __call__(self, error: Any) -> None:
        self.note(error.name(), error.str())

    def note(self, name: str, detail: str) -> None:
        if replaces(name, self.last):
            self.last = detail
        if name in ("_AUTHENTICATION", "_SSL"):
            self.refused = (name, detail)


class ProducerError(Exception):
    """A client error. `name` is librdkafka's, without the prefix.

    Attributes:
        away: no broker answered.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason
        self.fenced = name in ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")
        self.topic_unknown = name in ("_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_OR_PART")
        self.away = name in ("_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "LEADER_NOT_AVAILABLE")
        self.no_permission = name in ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED") or name in _NO_PERMISSION


_NO_PERMISSION = {f"{what}_AUTHORIZATION_FAILED" for what in ("TOPIC", "TRANSACTIONAL_ID", "CLUSTER")}
_CONSEQUENCES = frozenset({"_PURGE_QUEUE", "_PURGE_INFLIGHT"})
"""Errors of records that the client dropped because another record failed."""


@dataclass
class Failures:
    """Undelivered records: how many, and the error of the first one that failed by itself.

    Attributes:
        largest: key and value of the largest, in bytes.
        last_error: the client's last connection error, with its cause.
        fatal: name of the error after which the client stopped sending; later records just fail with "_FATAL".
    """

    count: int = 0
    name: str = ""
    largest: int = 0
    last_error: str = ""
    fatal: str = ""
    by_name: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, name: str, size: int) -> None:
        if self.count == 0 or self.name in _CONSEQUENCES:
            self.name = name
        self.count += 1
        self.largest = max(self.largest, size)
        self.by_name[name] = self.by_name.get(name, 0) + 1

    def note(self, name: str, detail: str) -> None:
        """Keep a connection error of the client."""
        if replaces(name, self.last_error):
            self.last_error = f"{name}: {detail}"

    def hint(self) -> str:
        return f" (last error: {self.last_error})" if self.last_error else ""

    def clear(self) -> None:
        self.count, self.name, self.largest, self.by_name = 0, "", 0, {}


# What a request to a broker may come to, besides its answer.


class NoAnswer(Exception):
    """No response to a request; it is unknown whether it took effect."""


class NotSent(NoAnswer):
    """The request was not sent in full, so it had no effect."""


class Closed(NotSent):
    """The server ended the connection before its first answer: it expects another protocol or other credentials."""


class NoCredentials(NotSent):
    """No token or ticket can be had now: its server does not answer."""


class Rejected(NotSent):
    """TLS or authentication failed, which no retry fixes.

    Attributes:
        tls: the certificate or the protocol of the server, not the credentials.
    """

    def __init__(self, text: str, tls: bool = False) -> None:
        super().__init__(text)
        self.tls = tls


class CredentialsRefused(Rejected):
    """No token or ticket can be had with these settings."""
