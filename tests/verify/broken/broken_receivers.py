"""A naive RabbitMQ receiver: it acknowledges messages before it persists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from delivered.connectors.rabbitmq import CONNECTOR, RabbitmqOptions
from delivered.connectors.rabbitmq.queue import RabbitmqQueue, RabbitmqReceiver
from delivered.contract.connector import Factory
from delivered.contract.source import MessageBatch
from delivered.model.work import Ok, Outcome


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


ACKNOWLEDGES_FIRST = replace(
    CONNECTOR, name="acknowledges_first", queues=Factory(RabbitmqOptions, "broken_receivers:HastyQueue")
)
