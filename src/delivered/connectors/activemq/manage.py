"""Checks an Artemis broker's queue over its management address."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from delivered.connectors.activemq.client import Session
from delivered.connectors.activemq.options import Place
from delivered.contract.finding import Finding
from delivered.model.answers import JsonAnswer, UnexpectedAnswer
from delivered.model.errors import DeliveredError, Unreachable

_ADDRESS = "activemq.management"
_ANSWER_S = 5.0


class Management:
    """Management requests. Replies arrive in a temporary queue of this session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._replies = f"delivered.replies.{uuid.uuid4().hex}"  # a second subscription to one name is an error
        headers = {"subscription-type": "MULTICAST", "receipt": session.receipt()}
        session.transmit(session.frames.subscribe, self._replies, "replies", headers=headers)
        session.settle("answer the subscription")

    def attribute(self, resource: str, name: str) -> JsonAnswer:
        """Null: the resource does not exist."""
        return self._ask({"_AMQ_ResourceName": resource, "_AMQ_Attribute": name}, "")

    def call(self, resource: str, operation: str, *parameters: str) -> JsonAnswer:
        """Null: the resource does not exist, or rejected the call."""
        return self._ask({"_AMQ_ResourceName": resource, "_AMQ_OperationName": operation}, json.dumps(parameters))

    def _ask(self, headers: dict[str, str], body: str) -> JsonAnswer:
        session = self._session
        session.frames.auto_content_length = False  # the broker only reads text messages here
        sent = {**headers, "reply-to": self._replies}
        session.transmit(session.frames.send, _ADDRESS, body, headers=sent)
        session.wait(lambda: bool(session.arrived), _ANSWER_S, "answer a management request")
        answer = session.arrived.popleft()
        if answer.headers.get("_AMQ_OperationSucceeded") != "true":
            return JsonAnswer.of(None)
        return JsonAnswer.read(answer.body or b"[null]").only()


@dataclass(frozen=True)
class _Settings:
    """
    Attributes:
        creates: the broker creates the address's queues on first use.
        attempts: deliveries of a message.
        dead_letters: where it goes after them.
    """

    creates: bool
    attempts: int
    dead_letters: str
    when_full: str


def _settings(answer: JsonAnswer) -> _Settings:
    return _Settings(
        answer.take("autoCreateQueues", bool, True),
        answer.take("maxDeliveryAttempts", int, 10),
        answer.take("deadLetterAddress", str, ""),
        answer.take("addressFullMessagePolicy", str, ""),
    )


def findings(session: Session, place: Place, receives: bool) -> Iterator[Finding]:
    """Whether a queue is safe against loss. Nothing for Classic, which has no management over STOMP."""
    if not session.is_artemis:
        return
    try:
        management = Management(session)
        address, _, queue = place.queue.partition("::")
        queue = queue or address
        durable = management.attribute(f"queue.{queue}", "durable").value(bool, None)
        kinds = management.attribute(f"address.{address}", "routingTypes").value(list, None)
        text = management.call("broker", "getAddressSettingsAsJSON", address).value(str, None)
        settings = _settings(JsonAnswer.read((text or "{}").encode()))
        readers = management.attribute(f"queue.{queue}", "consumerCount").value(int, None)
        held = management.attribute(f"queue.{queue}", "deliveringCount").value(int, None)
    except (DeliveredError, UnexpectedAnswer) as error:
        detail = error.message if isinstance(error, DeliveredError) else str(error)
        yield Finding(
            "ACTIVEMQ_SETTINGS_UNKNOWN",
            f"ActiveMQ at {place.place} did not return the settings of {place.queue!r}: {detail}",
            False,
            "make sure that it is durable and its address has a dead-letter-address; or grant this user `manage`",
        )
        if isinstance(error, Unreachable):
            return
        return
    yield from _judge(place.queue, queue, durable, kinds, settings, receives)
    if receives:
        yield from held_by_nobody(queue, held, readers)


def held_by_nobody(queue: str, held: int | None, readers: int | None) -> Iterator[Finding]:
    """
    Args:
        held: messages in delivery; None: unknown.
        readers: consumers of the queue; None: unknown.
    """
    if held and readers == 0:
        yield Finding(
            "MESSAGES_STUCK",
            f"{queue!r} has {held} messages in delivery but no consumer: Artemis (2.40) may hold the first message of "
            "a killed receiver until the broker is restarted.",
            False,
            "if the number does not fall, restart the broker: the messages are in its journal and are redelivered",
        )


def _judge(
    name: str, queue: str, durable: bool | None, kinds: list[Any] | None, settings: _Settings, receives: bool
) -> Iterator[Finding]:
    if "::" not in name and kinds == ["MULTICAST"]:
        yield Finding(
            "QUEUE_IS_TOPIC",
            f"{name!r} is a topic (multicast), which stores no messages for disconnected consumers.",
            True,
            "use a queue of it (address::queue), or an anycast address",
        )
    elif durable is None and not settings.creates:
        yield Finding(
            "QUEUE_MISSING",
            f"The queue {queue!r} does not exist, and the broker does not create queues automatically.",
            True,
            "create it (anycast, durable), or correct the option queue",
        )
    elif durable is None:
        yield Finding(
            "QUEUE_NOT_YET",
            f"The queue {queue!r} does not exist yet; the broker creates it (anycast, durable) on first use.",
            False,
        )
    elif durable is False:
        yield Finding(
            "QUEUE_NOT_DURABLE",
            f"The queue {queue!r} is not durable: it loses its messages when ActiveMQ restarts.",
            False,
            "make it durable",
        )
    tries = settings.attempts
    if receives and tries > 0 and not settings.dead_letters:
        yield Finding(
            "QUEUE_DROPS",
            f"{queue!r} has no dead-letter-address, so a message is dropped after {tries} failed deliveries "
            "(max-delivery-attempts).",
            True,
            "set a dead-letter-address for it, or max-delivery-attempts to -1",
        )
    if not receives and settings.when_full == "DROP":
        yield Finding(
            "QUEUE_DROPS",
            f"{queue!r} acknowledges messages and drops them when it is full (address-full-policy DROP).",
            True,
            "set address-full-policy to PAGE, BLOCK or FAIL",
        )
