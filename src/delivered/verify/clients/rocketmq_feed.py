"""A topic of RocketMQ and a group that receives it as a source, filled with the client library's own producer."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from delivered.brokers import rocketmq
from delivered.verify.clients.queue import ANSWER_TIMEOUT_S, Queue
from delivered.verify.workloads import Record

INVISIBLE_S = 3
_LOG_MODULE = "rocketmq.v5.log"


class RocketFeed(Queue):
    """
    Args:
        endpoints: of the proxy, for clients; broker: for who makes topics.
    """

    system = "rocketmq"
    patience_s = 30.0

    def __init__(self, endpoints: str, broker: str, name: str, log: Path | str, connector: str | None = None) -> None:
        super().__init__(name, log, connector)
        self.endpoints = endpoints
        self.broker = broker

    def create(self) -> None:
        rocketmq.make_topic(self.broker, self.name)
        rocketmq.make_group(self.broker, self._group)

    def place(self) -> dict[str, Any]:
        return {
            "endpoints": self.endpoints,
            "topic": self.name,
            "group": self._group,
            "idFrom": "keys",
            "invisibleSeconds": INVISIBLE_S,
        }

    def send(self, records: Sequence[Record]) -> None:
        with self._producer() as producer:
            from rocketmq import Message

            flying = []
            for r in records:
                message = Message()
                message.topic, message.keys, message.body = self.name, r.id, r.value.encode()
                flying.append(producer.send_async(message))
            for one in flying:
                one.result(ANSWER_TIMEOUT_S)

    def address(self) -> dict[str, Any]:
        where = {"endpoints": self.endpoints, "broker": self.broker}
        return {"system": self.system, **where, "name": self.name, "log": str(self.log)}

    @property
    def _group(self) -> str:
        return f"{self.name}-group"

    @contextmanager
    def _producer(self) -> Iterator[Any]:
        if _LOG_MODULE not in sys.modules:  # the library's own makes files below the user's home
            import logging

            quiet = ModuleType(_LOG_MODULE)
            quiet.logger = logging.getLogger("rocketmq-python-client")  # type: ignore[attr-defined]
            sys.modules[_LOG_MODULE] = quiet
        from rocketmq import ClientConfiguration, Credentials, Producer

        producer = Producer(ClientConfiguration(self.endpoints, Credentials()), [self.name])
        producer.startup()
        try:
            yield producer
        finally:
            producer.shutdown()
