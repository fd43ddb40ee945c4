"""A topic of RocketMQ and a group that receives it as a source, filled over a session of the client library's."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from delivered.brokers import rocketmq
from delivered.verify.clients.queue import ANSWER_TIMEOUT_S, Queue
from delivered.verify.workloads import Record

INVISIBLE_S = 3
_TOGETHER = 100
_LOG_MODULE = "rocketmq.v5.log"


class RocketFeed(Queue):
    """
    Args:
        endpoints: of the proxy, for clients; broker: for who makes topics.
    """

    system = "rocketmq"
    patience_s = 60.0

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
        """Not by the library's own `send`, which sends again by itself what may have arrived."""
        with self._producer() as (producer, endpoints):
            for at in range(0, len(records), _TOGETHER):
                asked = self._request(records[at : at + _TOGETHER])
                answer = producer.rpc_client.send_message_async(
                    endpoints, asked, producer.sign(), timeout=ANSWER_TIMEOUT_S
                ).result()
                if answer.status.message != "OK":
                    raise ConnectionError(f"RocketMQ did not confirm messages: {answer.status.message}")

    def _request(self, records: Sequence[Record]) -> Any:
        from rocketmq.grpc_protocol import Encoding, MessageType, SendMessageRequest

        request = SendMessageRequest()
        for r in records:
            message = request.messages.add(body=r.value.encode())
            message.topic.name = self.name
            system = message.system_properties
            system.message_id, system.message_type = uuid.uuid4().hex, MessageType.NORMAL
            system.keys.append(r.id)
            system.body_encoding, system.born_host = Encoding.IDENTITY, "judge"
            system.born_timestamp.GetCurrentTime()
        return request

    def left(self) -> None:
        """The broker tells how far a group has read, not what it took and did not acknowledge."""

    def address(self) -> dict[str, Any]:
        where = {"endpoints": self.endpoints, "broker": self.broker}
        return {"system": self.system, **where, "name": self.name, "log": str(self.log)}

    @property
    def _group(self) -> str:
        return f"{self.name}-group"

    @contextmanager
    def _producer(self) -> Iterator[tuple[Any, Any]]:
        if _LOG_MODULE not in sys.modules:  # the library's own makes files below the user's home
            import logging

            quiet = ModuleType(_LOG_MODULE)
            quiet.logger = logging.getLogger("rocketmq-python-client")  # type: ignore[attr-defined]
            sys.modules[_LOG_MODULE] = quiet
        from rocketmq import ClientConfiguration, Credentials, Producer

        configuration = ClientConfiguration(self.endpoints, Credentials())
        producer = Producer(configuration, [self.name])
        producer.startup()
        try:
            yield producer, configuration.rpc_endpoints
        finally:
            producer.shutdown()
