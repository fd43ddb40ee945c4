"""Translates librdkafka's errors."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from delivered.connectors.kafka.options import OWNER
from delivered.connectors.kafka.sink_options import SinkOptions
from delivered.model.errors import BadRecord, DeliveredError, Fenced, Refused, Unreachable, UsageError


def config_error(detail: str, owner: str = OWNER, name: str | None = None) -> UsageError:
    """librdkafka rejected a setting; `name` if known."""
    found = re.search(r'property:? "([^"]+)"', detail)
    named = name or (found[1] if found else None)
    name = f"'kafka.{named}'" if named else "with the prefix 'kafka.'"
    return UsageError(
        "OPTION_UNKNOWN" if found and "No such" in detail else "OPTION_VALUE",
        f"{owner}: librdkafka rejected the option {name}: {detail}.",
        next_step="see librdkafka's CONFIGURATION.md for supported names and values",
    )


def explain(name: str, detail: str, what: str, servers: str) -> DeliveredError:
    """Translate an error of librdkafka.

    Args:
        name: error code: "UNKNOWN_TOPIC_OR_PART".
        what: the requested topic, partition or group.
    """
    if name in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_ID"):
        return UsageError(
            "TOPIC_MISSING",
            f"{OWNER}: topic or partition {what!r} does not exist at {servers}.",
            next_step="create the topic, or correct its name",
        )
    if name in ("TOPIC_EXCEPTION", "INVALID_TOPIC_EXCEPTION"):
        return UsageError(
            "TOPIC_INVALID",
            f"{OWNER}: {servers} rejected the topic name {what!r}: up to 249 letters, digits, '.', '_' and '-'.",
            next_step="correct the name of the topic",
        )
    if "AUTHORIZATION_FAILED" in name:
        return UsageError(
            "NOT_PERMITTED",
            f"{OWNER}: this user is not authorized to read {what!r} at {servers} ({name}).",
            next_step="grant Describe and Read on the topic (and Read on the group)",
        )
    if name in ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "_SSL"):
        return Unreachable(
            "CREDENTIALS_REFUSED",
            f"{OWNER}: TLS or authentication failed at {servers}: {detail}",
            next_step="check kafka.security.protocol, kafka.sasl.* and kafka.ssl.*",
        )
    return Unreachable(
        "KAFKA_UNREACHABLE",
        f"{OWNER}: {servers} did not answer about {what!r} ({name}): {detail}",
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

    def forget(self) -> None:
        self.last, self.refused = "", None


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


def producer_error(error: ProducerError, topic: str | None, options: SinkOptions) -> DeliveredError:
    """Translate an error of a producer."""
    servers = options.client["bootstrap.servers"]
    if error.fenced:
        return Fenced(
            "PRODUCER_FENCED",
            f"Another attempt or another driver took over this shard's transactional id: {error}. Nothing of this "
            "attempt is visible.",
            next_step="nothing, if another attempt of the task or another driver continues; otherwise start again",
        )
    if error.topic_unknown:
        return UsageError(
            "TOPIC_UNKNOWN",
            f"Topic {topic!r} does not exist at {servers}.",
            next_step=f"create it, for example kafka-topics.sh --create --topic {topic} --bootstrap-server {servers}",
        )
    if error.no_permission:
        return Refused(
            "KAFKA_PERMISSION",
            f"This user is not authorized to write to {topic!r} at {servers}: {error}.",
            next_step="grant Write and Describe on the topic and on the ledger topic, and on transactional ids that "
            "start with `delivered.`; or check the credentials",
        )
    if error.away:
        return Unreachable(
            "KAFKA_UNREACHABLE",
            f"The brokers at {servers} did not answer in time: {error}.",
            next_step="check kafka.bootstrap.servers, and that the brokers are running",
        )
    return DeliveredError(
        "KAFKA_CLIENT",
        f"The Kafka client at {servers} failed: {error}.",
        next_step="start again; if this recurs, check the brokers' logs",
    )


def delivery_error(failures: Failures, options: SinkOptions) -> DeliveredError:
    """The error for undelivered records."""
    if failures.name == "MSG_SIZE_TOO_LARGE":  # the broker's code; librdkafka uses it for its own limit too
        limit = options.client.get("message.max.bytes", "1048588")
        return BadRecord(
            "RECORD_TOO_LARGE",
            f"A record of {failures.largest} bytes (key and value) is too large: the client's limit is {limit} bytes "
            "(kafka.message.max.bytes), and the topic has its own (max.message.bytes). "
            f"{failures.count} records were rejected.",
            next_step="raise both limits, or filter such records",
        )
    error = ProducerError(
        failures.fatal or failures.name, f"{failures.count} records were not delivered{failures.hint()}"
    )
    if error.topic_unknown or error.no_permission or error.fenced or failures.name == "_MSG_TIMED_OUT":
        named = ProducerError("_TIMED_OUT", error.reason) if failures.name == "_MSG_TIMED_OUT" else error
        return producer_error(named, options.topic, options)
    return DeliveredError(
        "DELIVERY_FAILED",
        f"{failures.count} records were not delivered, the first with {failures.name}{failures.hint()}.",
        next_step="fix the cause, then start again; the batch runs again",
    )
