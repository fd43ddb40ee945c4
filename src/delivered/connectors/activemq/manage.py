"""What an Artemis broker says of a queue when it is asked over its management address, and what that means for us."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from delivered.connectors.activemq.client import Session
from delivered.connectors.activemq.options import Place
from delivered.contract.finding import Finding
from delivered.model.errors import DeliveredError, Unreachable

_ADDRESS = "activemq.management"
_ANSWER_S = 5.0


class Management:
    """Questions to the broker. Answers come to a queue of this session's own, which ends with it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._replies = f"delivered.replies.{uuid.uuid4().hex}"  # a second subscription to one name is an error
        headers = {"subscription-type": "MULTICAST", "receipt": session.receipt()}
        session.transmit(session.frames.subscribe, self._replies, "replies", headers=headers)
        session.settle("answer the subscription")

    def attribute(self, resource: str, name: str) -> Any:
        """None: there is no such resource."""
        return self._ask({"_AMQ_ResourceName": resource, "_AMQ_Attribute": name}, "")

    def call(self, resource: str, operation: str, *parameters: str) -> Any:
        """None: there is no such resource, or it refused."""
        return self._ask({"_AMQ_ResourceName": resource, "_AMQ_OperationName": operation}, json.dumps(parameters))

    def _ask(self, headers: dict[str, str], body: str) -> Any:
        session = self._session
        session.frames.auto_content_length = False  # a text message: the broker reads no other
        given = {**headers, "reply-to": self._replies}
        session.transmit(session.frames.send, _ADDRESS, body, headers=given)
        session.wait(lambda: bool(session.arrived), _ANSWER_S, "answer a question about its queues")
        answer = session.arrived.popleft()
        if answer.headers.get("_AMQ_OperationSucceeded") != "true":
            return None
        (found,) = json.loads(answer.body or b"[null]")
        return found


def findings(session: Session, place: Place, receives: bool) -> Iterator[Finding]:
    """Whether a queue keeps what is in it. Nothing for Classic, which cannot be asked over STOMP."""
    if not session.is_artemis:
        return
    try:
        management = Management(session)
        address, _, queue = place.queue.partition("::")
        queue = queue or address
        durable = management.attribute(f"queue.{queue}", "durable")
        kinds = management.attribute(f"address.{address}", "routingTypes")
        settings = json.loads(management.call("broker", "getAddressSettingsAsJSON", address) or "{}")
        readers = management.attribute(f"queue.{queue}", "consumerCount")
        held = management.attribute(f"queue.{queue}", "deliveringCount")
    except (DeliveredError, ValueError) as error:
        said = error.message if isinstance(error, DeliveredError) else str(error)
        yield Finding(
            "ACTIVEMQ_NOT_ASKED",
            f"ActiveMQ at {place.place} did not say how {place.queue!r} is set up: {said}",
            False,
            "see that it is durable, and that its address has a dead-letter-address; or grant this user `manage`",
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
        held: messages in delivery; readers: consumers of the queue. None: the broker did not say.
    """
    if held and readers == 0:
        yield Finding(
            "MESSAGES_HELD_BY_NOBODY",
            f"Messages of {queue!r} in delivery: {held}, and nobody receives from it: Artemis (2.40) may keep the "
            "first message of a receiver that was killed until the broker is restarted.",
            False,
            "if the number stays, restart the broker: they are in its journal, and come then",
        )


def _judge(
    name: str, queue: str, durable: bool | None, kinds: list[str] | None, settings: dict[str, Any], receives: bool
) -> Iterator[Finding]:
    if "::" not in name and kinds == ["MULTICAST"]:
        yield Finding(
            "QUEUE_IS_TOPIC",
            f"{name!r} is a topic (multicast): it keeps nothing for who is not there.",
            True,
            "use a queue of it (address::queue), or an anycast address",
        )
    elif durable is None and not settings.get("autoCreateQueues", True):
        yield Finding(
            "QUEUE_MISSING",
            f"There is no queue {queue!r}, and the broker makes none by itself.",
            True,
            "make it (anycast, durable), or mend the option queue",
        )
    elif durable is None:
        yield Finding(
            "QUEUE_NOT_YET",
            f"There is no queue {queue!r} yet; the broker makes it (anycast, durable) for the first who comes.",
            False,
        )
    elif durable is False:
        yield Finding(
            "QUEUE_NOT_DURABLE",
            f"The queue {queue!r} is not durable: a restart of ActiveMQ takes what nobody received yet.",
            False,
            "make it durable",
        )
    tries = int(settings.get("maxDeliveryAttempts", 10))
    if receives and tries > 0 and not settings.get("deadLetterAddress"):
        yield Finding(
            "QUEUE_DROPS",
            f"{queue!r} has no dead-letter-address, and a message that receivers died with {tries} times "
            "(max-delivery-attempts) would be dropped.",
            True,
            "set a dead-letter-address for it, or max-delivery-attempts to -1",
        )
    if not receives and settings.get("addressFullMessagePolicy") == "DROP":
        yield Finding(
            "QUEUE_DROPS",
            f"{queue!r} drops messages when it is full (address-full-policy DROP), and says that it took them.",
            True,
            "set address-full-policy to PAGE, BLOCK or FAIL",
        )
