"""Transactions of Pulsar, opened by our client, for what reads around them."""

from __future__ import annotations

import time
from typing import Any

from tests.support.pulsar import FULL
from tests.support.servers import Pulsar

from delivered.clients.pulsar.connection import Cluster, Settings
from delivered.clients.pulsar.producer import Flow, Message, Producer
from delivered.clients.pulsar.transactions import Coordinators
from delivered.model.options import parse_address
from delivered.model.work import Ok

HOUR_S = 3_600.0


def soon() -> float:
    return time.monotonic() + 60


def cluster(pulsar: Pulsar) -> Cluster:
    return Cluster(Settings([parse_address(pulsar.broker.url.removeprefix("pulsar://"))]))


class Open:
    """A transaction with a producer in each topic."""

    def __init__(self, at: Cluster, *topics: str, ttl_s: float = HOUR_S, coordinator: int = 0, **more: Any) -> None:
        self.coordinators = Coordinators(at)
        self.id = self.coordinators.begin(coordinator, ttl_s, soon())
        full = [t if "://" in t else f"{FULL}{t}" for t in topics]
        self.coordinators.add(self.id, full, soon())
        self.flow = Flow()
        self.producers = [Producer(at, t, self.flow, soon(), transaction=self.id, **more) for t in full]

    def send(self, *messages: Message) -> None:
        """In one batch in each topic; all are acknowledged when this returns."""
        for producer in self.producers:
            for message in messages:
                producer.send(message, soon())
            producer.end_batch(soon())
        self.flow.drain(soon())

    def end(self, *, commit: bool) -> None:
        self.close()
        assert self.coordinators.end(self.id, commit=commit, deadline=soon()) == Ok(None)

    def close(self) -> None:
        for producer in self.producers:
            producer.close(soon())
