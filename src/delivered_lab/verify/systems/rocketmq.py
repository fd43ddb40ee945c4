"""RocketMQ: as the sink, a topic with one queue, read by offset from the broker itself in RocketMQ's own protocol,
without the proxy, so that nothing is hidden or acknowledged; as the source, a topic with a consumer group, filled over
a session of the client library."""

from __future__ import annotations

import json
import logging
import struct
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from delivered import Guarantee
from delivered_lab.brokers import rocketmq
from delivered_lab.verify.systems.base import Row, SinkKind, SourceKind, SourcePlace, System, as_text
from delivered_lab.verify.systems.messages import CONFIRM_TIMEOUT_S, Messages, Queue, sending
from delivered_lab.verify.workloads import Record

_PULL, _MAX_OFFSET, _RUNTIME = 11, 30, 28
_PULL_MAX = 32
_READERS = "judge"
_COMPRESSED, _BORN_V6, _STORED_V6 = 0x1, 0x10, 0x20
INVISIBLE_S = 3
_SEND_MAX = 100
_LOG_MODULE = "rocketmq.v5.log"


class RocketTopic(Messages):
    system = "rocketmq"
    kind = "NORMAL"

    def create(self) -> None:
        rocketmq.make_topic(self._broker, self.name, self.kind, queues=1)
        rocketmq.make_group(self._broker, _READERS)  # readers must name one

    def place(self) -> dict[str, Any]:
        return {"endpoints": self._address, "topic": self.name}

    def take(self, after: int | None) -> list[Row]:
        found: list[Row] = []
        at, end = 0 if after is None else after + 1, self._end()
        while at < end:
            for row in self._pulled(at):
                found.append(row)
                at = row.position + 1
        return found

    def all_received(self) -> bool:
        """Stored messages become readable by offset a moment later: the broker reports how far behind it is."""
        table = json.loads(rocketmq.ask(self._broker, _RUNTIME, {}))["table"]
        behind = int(table["dispatchBehindBytes"])
        return behind == 0 and self._end() == (self._found[-1].position + 1 if self._found else 0)

    def disconnect(self) -> None:
        """Every request has its own connection."""

    @property
    def _broker(self) -> str:
        return self._server.listeners["BROKER"]

    def _end(self) -> int:
        fields, _ = rocketmq.answer(self._broker, _MAX_OFFSET, {"topic": self.name, "queueId": "0"})
        return int(fields["offset"])

    def _pulled(self, offset: int) -> list[Row]:
        fields = {
            "consumerGroup": _READERS,
            "topic": self.name,
            "queueId": "0",
            "queueOffset": str(offset),
            "maxMsgNums": str(_PULL_MAX),
            "sysFlag": "4",  # the subscription is part of the request
            "commitOffset": "0",
            "suspendTimeoutMillis": "0",
            "subscription": "*",
            "subVersion": "0",
            "expressionType": "TAG",
        }
        data = rocketmq.ask(self._broker, _PULL, fields)
        found = []
        while data:
            (size,) = struct.unpack_from(">i", data)
            found.append(self._row(data[:size]))
            data = data[size:]
        return found

    def _row(self, data: bytes) -> Row:
        """One message as the broker stores it."""
        (offset,) = struct.unpack_from(">q", data, 20)
        (flags,) = struct.unpack_from(">i", data, 36)
        if flags & _COMPRESSED:
            raise ValueError(f"message {offset} of {self.name} is compressed, which no sink of ours does")
        at = 40 + 8 + (20 if flags & _BORN_V6 else 8) + 8 + (20 if flags & _STORED_V6 else 8) + 4 + 8
        (length,) = struct.unpack_from(">i", data, at)
        return Row(self.name, offset, None, as_text(data[at + 4 : at + 4 + length]) or "")


class RocketTransactions(RocketTopic):
    """Half messages: stored first, visible later."""

    kind = "TRANSACTION"

    def place(self) -> dict[str, Any]:
        servers = self._server.listeners["NAMESRV"]
        return {**super().place(), "messageType": "transaction", "nameServers": servers}


@dataclass
class RocketSource(Queue):
    """
    Attributes:
        endpoints: of the proxy, for clients; broker: for creating topics.
    """

    system = "rocketmq"
    patience_s = 60.0
    endpoints: str
    broker: str

    def create(self) -> None:
        rocketmq.make_topic(self.broker, self.name)
        rocketmq.make_group(self.broker, self._group)

    def place(self) -> dict[str, Any]:
        place = {"endpoints": self.endpoints, "topic": self.name, "group": self._group}
        return {**place, "idFrom": "keys", "invisibleSeconds": INVISIBLE_S}

    def send(self, records: Sequence[Record]) -> None:
        """Not by the library's `send`, which resends by itself what may have arrived."""
        with self._producer() as (producer, endpoints):
            for at in range(0, len(records), _SEND_MAX):
                request = self._request(records[at : at + _SEND_MAX])
                answer = producer.rpc_client.send_message_async(
                    endpoints, request, producer.sign(), timeout=CONFIRM_TIMEOUT_S
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
        """The broker knows how far a group has read, not which messages are delivered but unacknowledged."""

    @property
    def _group(self) -> str:
        return f"{self.name}-group"

    @contextmanager
    def _producer(self) -> Iterator[tuple[Any, Any]]:
        client = quiet_library()
        configuration = client.ClientConfiguration(self.endpoints, client.Credentials())
        producer = client.Producer(configuration, [self.name])
        producer.startup()
        try:
            yield producer, configuration.rpc_endpoints
        finally:
            producer.shutdown()


def quiet_library() -> Any:
    """RocketMQ's client. Its own log module creates files in the user's home."""
    if _LOG_MODULE not in sys.modules:
        quiet = ModuleType(_LOG_MODULE)
        quiet.logger = logging.getLogger("rocketmq-python-client")  # type: ignore[attr-defined]
        sys.modules[_LOG_MODULE] = quiet
    import rocketmq as library

    return library


def _source(at: SourcePlace) -> RocketSource:
    return RocketSource(at.queue, at.log, at.server.url, at.server.listeners["BROKER"], connector=at.connector)


_NO_PROXY = {"F2": "its client connects to the address that the broker advertises, bypassing a proxy"}
# Requests with many messages overtake each other; ordered messages go one by one.
_MESSAGES = sending(RocketTopic, _NO_PROXY, ordered=False)
# Transaction messages: half messages are prepared.
_TRANSACTIONS = SinkKind(
    "rocketmq-2pc",
    "rocketmq",
    RocketTransactions,
    "rocketmq",
    two_phase=True,
    locked="HALF_MESSAGES_LOCKED",
    absent=_MESSAGES.absent,
    guarantees=(Guarantee.EXACTLY_ONCE,),
    sends=True,
    ordered=False,
)
SYSTEM = System(
    (_MESSAGES, _TRANSACTIONS),
    # A topic without message groups has no order.
    (SourceKind("rocketmq", RocketSource, _source, server="rocketmq", queue=True, ordered=False),),
    properties={
        # Redeliver a killed receiver's messages earlier than the default of ten seconds.
        "proxy.minInvisibleTimeMillsForRecv": "1000",
        # Else a broker 5.5.0 spins on one core after the first transaction, and slows down every other case.
        "transactionOpBatchInterval": "3600000",
    },
)
