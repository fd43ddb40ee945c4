"""The content of a RocketMQ topic."""

from __future__ import annotations

from typing import Any

from tests.broker.receive_help import drained
from tests.support.servers import Rocketmq

from delivered.connectors.rocketmq import RocketmqOptions
from delivered.connectors.rocketmq.queue import RocketmqReceiver


def taken(rocketmq: Rocketmq, topic: str, ordered: bool = False, wait_s: float = 1.0) -> list[tuple[Any, ...]]:
    """All messages in the topic: id, key, value, in order of arrival."""
    group = rocketmq.group(ordered)
    options = {"endpoints": rocketmq.url, "topic": topic, "group": group, "log": "/x"}
    receiver = RocketmqReceiver(RocketmqOptions.parse(options))
    batches = drained(receiver, wait_s)
    return [message for b in batches for message in zip(b.ids, b.keys, b.values, strict=True)]
