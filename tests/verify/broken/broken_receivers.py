"""RabbitMQ's receiver as people write it by hand: it acknowledges what it takes, and persists it then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from delivered.connectors.rabbitmq import CONNECTOR, RabbitmqConnector
from delivered.connectors.rabbitmq.options import parse
from delivered.connectors.rabbitmq.queue import RabbitmqQueue
from delivered.connectors.rabbitmq.receiver import RabbitmqReceiver
from delivered.contract.queue import MessageBatch, Queue
from delivered.model.outcome import Ok, Outcome


class HastyReceiver(RabbitmqReceiver):
    def receive(self, count_max: int, wait_s: float) -> MessageBatch:
        taken = super().receive(count_max, wait_s)
        if len(taken):
            super().acknowledge(taken.handles)
        return taken

    def acknowledge(self, handles: Sequence[Any]) -> Outcome[int]:
        return Ok(len(handles))


class HastyQueue(RabbitmqQueue):
    def receiver(self) -> HastyReceiver:
        return HastyReceiver(self.options)


class HastyConnector(RabbitmqConnector):
    def queue(self, options: Mapping[str, str]) -> Queue:
        return HastyQueue(parse(options))


ACKNOWLEDGES_FIRST = HastyConnector(**{**vars(CONNECTOR), "name": "acknowledges_first"})
