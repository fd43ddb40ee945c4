"""A topic of RocketMQ with one queue, read by offset from the broker itself in RocketMQ's own protocol: no proxy,
and nothing is hidden or acknowledged."""

from __future__ import annotations

import json
import struct
from typing import Any

from delivered.brokers import rocketmq
from delivered.verify.clients.base import Row, as_text
from delivered.verify.clients.messages import Messages

_PULL, _MAX_OFFSET, _RUNTIME = 11, 30, 28
_BUNCH = 32
_GROUP = "judge"
_COMPRESSED, _BORN_V6, _STORED_V6 = 0x1, 0x10, 0x20


class RocketTopic(Messages):
    system = "rocketmq"
    kind = "NORMAL"

    def create(self) -> None:
        rocketmq.make_topic(self._broker, self.name, self.kind, queues=1)
        rocketmq.make_group(self._broker, _GROUP)  # which a reader must name

    def sink_options(self) -> dict[str, Any]:
        return {"format": "rocketmq", "endpoints": self._given, "topic": self.name}

    def take(self, after: int | None) -> list[Row]:
        found: list[Row] = []
        at, end = 0 if after is None else after + 1, self._end()
        while at < end:
            for row in self._pulled(at):
                found.append(row)
                at = row.position + 1
        return found

    def all_taken(self) -> bool:
        """What is stored becomes readable by offset a moment later: the broker says how far behind it is."""
        table = json.loads(rocketmq.ask(self._broker, _RUNTIME, {}))["table"]
        behind = int(table["dispatchBehindBytes"])
        return behind == 0 and self._end() == (self._found[-1].position + 1 if self._found else 0)

    def disconnect(self) -> None:
        """Every request has a connection of its own."""

    @property
    def _broker(self) -> str:
        return self._server.listeners["BROKER"]

    def _end(self) -> int:
        fields = {"topic": self.name, "queueId": "0"}
        said, _ = rocketmq.answer(self._broker, _MAX_OFFSET, fields)
        return int(said["offset"])

    def _pulled(self, offset: int) -> list[Row]:
        fields = {
            "consumerGroup": _GROUP,
            "topic": self.name,
            "queueId": "0",
            "queueOffset": str(offset),
            "maxMsgNums": str(_BUNCH),
            "sysFlag": "4",  # the subscription stands in the request
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
    """Of messages that are stored first and shown later."""

    kind = "TRANSACTION"

    def sink_options(self) -> dict[str, Any]:
        servers = self._server.listeners["NAMESRV"]
        return {**super().sink_options(), "messageType": "transaction", "nameServers": servers}
