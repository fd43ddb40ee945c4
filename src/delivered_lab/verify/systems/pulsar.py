"""Pulsar: a topic as the sink, read from its first message by a reader, which leaves no trace; and a partitioned topic
as the source, filled by a producer in batches."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from delivered import Guarantee
from delivered_lab.verify.proxy import PulsarProxy
from delivered_lab.verify.systems.base import Row, SinkKind, SourceClient, SourceKind, SourcePlace, System, as_text
from delivered_lab.verify.systems.messages import Messages, not_confirmed, sending
from delivered_lab.verify.workloads import PARTITIONS, Record

_READ_MAX = 1_000
_WAIT_MS, _READ_MS, _SEND_MS = 200, 10_000, 10_000
_BATCH = 10
_LAST_IN_ENTRY = (1 << 16) - 1
_POSITION = re.compile(r"(-?\d+):(-?\d+)(?::(\d+))?")


class PulsarTopic(Messages):
    system = "pulsar"
    _client: Any = None
    _reader: Any = None
    _skip = 0

    def create(self) -> None:
        with contextlib.suppress(urllib.error.HTTPError):
            _ask(self._admin, "DELETE", f"{self.name}?force=true")
        _ask(self._admin, "PUT", self.name, {})

    def place(self) -> dict[str, Any]:
        return {"url": f"pulsar://{self._address}", "adminUrl": self._admin, "topic": self.name}

    def take(self, after: int | None) -> list[Row]:
        import pulsar

        if self._reader is None:
            self._client = _client(self._server.url, 5)
            self._reader = self._client.create_reader(self.name, pulsar.MessageId.earliest)
            # A reader always begins at the first message: known ones are read again.
            self._skip = 0 if after is None else after + 1
        at = (-1 if after is None else after) + 1
        found: list[Row] = []
        while len(found) < _READ_MAX and self._reader.has_message_available():
            message = self._reader.read_next(timeout_millis=_WAIT_MS)
            if self._skip:
                self._skip -= 1
                continue
            found.append(Row(self.name, at + len(found), None, as_text(message.data()) or ""))
        return found

    def all_received(self) -> bool:
        return self._reader is not None and not self._reader.has_message_available()

    def disconnect(self) -> None:
        client, self._client, self._reader = self._client, None, None
        if client is not None:
            client.close()

    @property
    def _admin(self) -> str:
        return f"http://{self._server.listeners['HTTP']}"


class PulsarTransactions(PulsarTopic):
    """In transactions, with the ledger in Pulsar, too."""

    def options(self) -> dict[str, Any]:
        return {"format": self.system, **self.place(), **self._extra}

    def open_transactions(self, pipeline: str) -> list[str]:
        """What the topic waits for: a pipeline's transactions have a message there, or hold back nothing."""
        del pipeline
        path = f"/admin/v3/transactions/transactionBufferStats/public/default/{self.name}"
        with urllib.request.urlopen(f"{self._admin}{path}", timeout=30) as reply:  # noqa: S310
            count = int(json.load(reply)["ongoingTxnSize"])
        return [f"{self.name}: {count} open transactions"] * bool(count)


@dataclass
class PulsarSource(SourceClient):
    """
    Attributes:
        url: of the broker; admin: of its HTTP service.
    """

    system = "pulsar"
    url: str
    admin: str
    name: str

    def create(self) -> None:
        _ask(self.admin, "PUT", f"{self.name}/partitions", PARTITIONS)

    def options(self) -> dict[str, Any]:
        place = {"url": self.url, "adminUrl": self.admin, "topics": self.name}
        return {"format": self.system, **place, "startingOffsets": "earliest", "subscription": "pipeline"}

    def send(self, records: Sequence[Record]) -> None:
        import pulsar

        failed: list[Any] = []
        with _connected(self.url) as client:
            producer = client.create_producer(
                self.name,
                batching_enabled=True,
                batching_max_messages=_BATCH,
                block_if_queue_full=True,
                send_timeout_millis=_SEND_MS,
            )
            for r in records:
                producer.send_async(
                    r.value.encode(),
                    lambda result, _: None if result == pulsar.Result.Ok else failed.append(result),
                    partition_key=r.key,
                )
            producer.flush()
        if failed:
            raise not_confirmed("Pulsar", failed, len(records))

    def read(self) -> list[Row]:
        import pulsar

        found: list[Row] = []
        with _connected(self.url) as client:
            for partition in (f"{self.name}-partition-{n}" for n in range(PARTITIONS)):
                reader = client.create_reader(partition, pulsar.MessageId.earliest)
                while reader.has_message_available():
                    message = reader.read_next(timeout_millis=_READ_MS)
                    at = message.message_id()
                    position = _order(at.ledger_id(), at.entry_id(), max(at.batch_index(), 0))
                    found.append(Row(partition, position, message.partition_key(), as_text(message.data()) or ""))
        return found

    def offsets(self, logged: Any) -> dict[str, int]:
        """Positions name the last message read: an entry, or a message in it."""
        found = {}
        for partition, text in logged.get(f"persistent://public/default/{self.name}", {}).items():
            read = _POSITION.match(text)
            if read is None:
                raise ValueError(f"the checkpoint holds {text!r}, which is no position")
            index = _LAST_IN_ENTRY if read[3] is None else int(read[3])
            found[f"{self.name}-partition-{partition}"] = _order(int(read[1]), int(read[2]), index) + 1
        return found


def _order(ledger: int, entry: int, index: int) -> int:
    """A number that grows with the position; ledger and entry are -1 before the first message."""
    return ((ledger + 1) << 48) + ((entry + 1) << 16) + index


def _ask(admin: str, method: str, topic: str, body: Any = None) -> None:
    """Call the HTTP service with the standard library: three requests do not justify a client."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    address = f"{admin}/admin/v2/persistent/public/default/{topic}"
    request = urllib.request.Request(address, data=data, headers=headers, method=method)  # noqa: S310
    urllib.request.urlopen(request, timeout=30).close()  # noqa: S310


def _client(url: str, timeout_s: int) -> Any:
    import logging

    import pulsar

    logger = logging.getLogger("delivered_lab.verify.pulsar")
    logger.setLevel(logging.CRITICAL)
    return pulsar.Client(url, operation_timeout_seconds=timeout_s, logger=logger)


@contextlib.contextmanager
def _connected(url: str) -> Iterator[Any]:
    client = _client(url, 10)
    try:
        yield client
    finally:
        client.close()


def _source(at: SourcePlace) -> PulsarSource:
    return PulsarSource(at.server.url, f"http://{at.server.listeners['HTTP']}", at.queue)


_MESSAGES = sending(PulsarTopic)
_TRANSACTIONS = SinkKind(
    "pulsar-2pc",
    "pulsar",
    PulsarTransactions,
    "pulsar",
    two_phase=True,
    absent=_MESSAGES.absent,
    guarantees=(Guarantee.EXACTLY_ONCE,),
    expires=True,
)
SYSTEM = System(
    (_MESSAGES, _TRANSACTIONS),
    (SourceKind("pulsar", PulsarSource, _source, server="pulsar"),),
    # What a killed server wrote stays in the page cache: no case cuts the power.
    properties={"journalSyncData": "false", "transactionCoordinatorEnabled": "true"},
    proxy=PulsarProxy,
)
