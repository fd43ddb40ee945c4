"""What librdkafka says, as errors of ours."""

from __future__ import annotations

import re
from typing import Any

from delivered.connectors.kafka.options import OWNER
from delivered.model.errors import DeliveredError, Unreachable, UsageError


def config_error(said: str, owner: str = OWNER, name: str | None = None) -> UsageError:
    """librdkafka refused a setting; `name` if it is known."""
    found = re.search(r'property: "([^"]+)"', said)
    named = name or (found[1] if found else None)
    name = f"'kafka.{named}'" if named else "with the prefix 'kafka.'"
    return UsageError(
        "OPTION_UNKNOWN" if found and "No such" in said else "OPTION_VALUE",
        f"{owner}: librdkafka refuses the option {name}: {said}.",
        next_step="see librdkafka's CONFIGURATION.md for the names and values it knows",
    )


def explain(name: str, said: str, what: str, servers: str) -> DeliveredError:
    """An error of librdkafka as one of ours.

    Args:
        name: of the code: "UNKNOWN_TOPIC_OR_PART".
        what: the topic, partition or group that was asked for.
    """
    if name in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_ID"):
        return UsageError(
            "TOPIC_MISSING",
            f"{OWNER}: there is no topic or partition {what!r} at {servers}.",
            next_step="make the topic, or correct its name",
        )
    if name in ("TOPIC_EXCEPTION", "INVALID_TOPIC_EXCEPTION"):
        return UsageError(
            "TOPIC_INVALID",
            f"{OWNER}: {servers} says that {what!r} cannot be a topic: up to 249 letters, digits, '.', '_' and '-'.",
            next_step="correct the name of the topic",
        )
    if "AUTHORIZATION_FAILED" in name:
        return UsageError(
            "NOT_PERMITTED",
            f"{OWNER}: {servers} does not permit to read {what!r} ({name}).",
            next_step="ask for the permissions Describe and Read on the topic (and Read on the group)",
        )
    if name in ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "_SSL"):
        return Unreachable(
            "CREDENTIALS_REFUSED",
            f"{OWNER}: {servers} and this client did not agree on TLS or credentials: {said}",
            next_step="check kafka.security.protocol, kafka.sasl.* and kafka.ssl.*",
        )
    return Unreachable(
        "KAFKA_UNREACHABLE",
        f"{OWNER}: {servers} did not answer about {what!r} ({name}): {said}",
        next_step="check kafka.bootstrap.servers, and that the brokers run and can be reached from here",
    )


def says_more(name: str, known: str) -> bool:
    """Whether an error of the client is to replace what it said before: that all brokers are down follows what says
    why ("Connection refused"), and must not hide it."""
    return name != "_ALL_BROKERS_DOWN" or not known


class ConnectionErrors:
    """Remembers why connections fail: librdkafka tells it beside the requests, which merely time out.

    Attributes:
        refused: what is wrong with TLS or credentials, which no waiting mends.
    """

    def __init__(self) -> None:
        self.last = ""
        self.refused: tuple[str, str] | None = None

    def __call__(self, error: Any) -> None:
        self.note(error.name(), error.str())

    def note(self, name: str, said: str) -> None:
        if says_more(name, self.last):
            self.last = said
        if name in ("_AUTHENTICATION", "_SSL"):
            self.refused = (name, said)

    def forget(self) -> None:
        self.last, self.refused = "", None
