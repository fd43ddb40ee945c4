"""The content of a RocketMQ topic."""

from __future__ import annotations

import time
from typing import Any

from tests.broker.receive_help import drained
from tests.support.servers import Rocketmq

from delivered.connectors.rocketmq import RocketmqOptions
from delivered.connectors.rocketmq.queue import RocketmqReceiver


def taken(rocketmq: Rocketmq, topic: str, ordered: bool = False, least: int = 0) -> list[tuple[Any, ...]]:
    """All messages in the topic: id, key, value, in order of arrival.

    A second of silence is taken for the end, but below `least` different values the topic is read again for a minute.
    """
    deadline = time.monotonic() + 60
    while True:
        found = _read(rocketmq, topic, ordered)
        if len({value for _, _, value in found}) >= least or time.monotonic() > deadline:
            return found


def _read(rocketmq: Rocketmq, topic: str, ordered: bool) -> list[tuple[Any, ...]]:
    group = rocketmq.group(ordered)
    options = {"endpoints": rocketmq.url, "topic": topic, "group": group, "log": "/x"}
    receiver = RocketmqReceiver(RocketmqOptions.parse(options))
    batches = drained(receiver)
    return [message for b in batches for message in zip(b.ids, b.keys, b.values, strict=True)]
