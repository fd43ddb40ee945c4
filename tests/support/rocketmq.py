"""The content of a RocketMQ topic."""

from __future__ import annotations

from typing import Any

from tests.support.servers import Rocketmq

from delivered.connectors.rocketmq.options import RocketmqOptions
from delivered.connectors.rocketmq.receiver import RocketmqReceiver


def taken(rocketmq: Rocketmq, topic: str, ordered: bool = False, wait_s: float = 1.0) -> list[tuple[Any, ...]]:
    """All messages in the topic: id, key, value, in order of arrival."""
    group = rocketmq.group(ordered)
    options = {"endpoints": rocketmq.url, "topic": topic, "group": group, "log": "/x"}
    receiver = RocketmqReceiver(RocketmqOptions.parse(options))
    found: list[tuple[Any, ...]] = []
    while len(batch := receiver.receive(10_000, wait_s)):
        found += zip(batch.ids, batch.keys, batch.values, strict=True)
        receiver.acknowledge(batch.handles)
    receiver.close()
    return found
