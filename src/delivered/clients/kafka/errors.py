"""Errors of Kafka's clients by librdkafka's names, which both clients use, and those of reading in words."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from delivered.model.errors import DeliveredError, Unreachable, UsageError


def config_error(detail: str, owner: str, name: str | None = None) -> UsageError:
    """librdkafka rejected a setting; `name` if known."""
    found = re.search(r'property:? "([^"]+)"', detail)
    named = name or (found[1] if found else None)
    name = f"'kafka.{named}'" if named else "with the prefix 'kafka.'"
    return UsageError(
        "OPTION_UNKNOWN" if found and "No such" in detail else "OPTION_VALUE",
        f"{owner}: librdkafka rejected the option {name}: {detail}.",
        next_step="see librdkafka's CONFIGURATION.md for supported names and values",
    )


def explain(owner: str, name: str, detail: str, what: str, servers: str) -> DeliveredError:
    """An error of a broker or of librdkafka, in words.

    Args:
        owner: of the options: "delivered_kafka source".
        name: of the error, as Kafka or librdkafka has it: "UNKNOWN_TOPIC_OR_PART".
        what: the requested topic, partition or group.
    """
    if name in (
        "UNKNOWN_TOPIC_OR_PART",
        "UNKNOWN_TOPIC_OR_PARTITION",
        "_UNKNOWN_TOPIC",
        "_UNKNOWN_PARTITION",
        "UNKNOWN_TOPIC_ID",
    ):
        return UsageError(
            "TOPIC_MISSING",
            f"{owner}: topic or partition {what!r} does not exist at {servers}.",
            next_step="create the topic, or correct its name",
        )
    if name in ("TOPIC_EXCEPTION", "INVALID_TOPIC_EXCEPTION", "INVALID_TOPIC"):
        return UsageError(
            "TOPIC_INVALID",
            f"{owner}: {servers} rejected the topic name {what!r}: up to 249 letters, digits, '.', '_' and '-'.",
            next_step="correct the name of the topic",
        )
    if "AUTHORIZATION_FAILED" in name:
        return UsageError(
            "NOT_PERMITTED",
            f"{owner}: this user is not authorized to read {what!r} at {servers} ({name}).",
            next_step="grant Describe and Read on the topic (and Read on the group)",
        )
    if name in ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "_SSL"):
        return Unreachable(
            "CREDENTIALS_REFUSED",
            f"{owner}: TLS or authentication failed at {servers}: {detail}",
            next_step="check kafka.security.protocol, kafka.sasl.* and kafka.ssl.*",
        )
    return Unreachable(
        "KAFKA_UNREACHABLE",
        f"{owner}: {servers} did not answer about {what!r} ({name}): {detail}",
        next_step="check kafka.bootstrap.servers, and that the brokers are running and reachable from here",
    )


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
    by_name: dict[str, int] = field(default_factory=dict)

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
