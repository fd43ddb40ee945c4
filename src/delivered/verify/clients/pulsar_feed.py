"""A partitioned topic of Pulsar as a source, filled by a producer in batches and read by readers."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Sequence
from typing import Any

from delivered.verify.clients.base import Row, as_text
from delivered.verify.clients.pulsar import quiet
from delivered.verify.workloads import PARTITIONS, Record

_WAIT_MS = 10_000
_SEND_MS = 10_000
_BATCH = 10
_WHOLE = (1 << 16) - 1
_POSITION = re.compile(r"(-?\d+):(-?\d+)(?::(\d+))?")


class PulsarFeed:
    """
    Args:
        url: of the broker; admin: of its HTTP service.
    """

    system = "pulsar"

    def __init__(self, url: str, admin: str, name: str) -> None:
        self.url = url
        self.admin = admin
        self.name = name

    def create(self) -> None:
        address = f"{self.admin}/admin/v2/persistent/public/default/{self.name}/partitions"
        headers = {"Content-Type": "application/json"}
        body = json.dumps(PARTITIONS).encode()
        request = urllib.request.Request(address, data=body, headers=headers, method="PUT")  # noqa: S310
        urllib.request.urlopen(request, timeout=30).close()  # noqa: S310

    def options(self) -> dict[str, Any]:
        return {
            "format": self.system,
            "url": self.url,
            "adminUrl": self.admin,
            "topics": self.name,
            "startingOffsets": "earliest",
            "subscription": "pipeline",
        }

    def send(self, records: Sequence[Record]) -> None:
        import pulsar

        client = pulsar.Client(self.url, operation_timeout_seconds=10, logger=quiet())
        try:
            producer = client.create_producer(
                self.name,
                batching_enabled=True,
                batching_max_messages=_BATCH,
                block_if_queue_full=True,
                send_timeout_millis=_SEND_MS,
            )
            failed: list[Any] = []
            for r in records:
                producer.send_async(
                    r.value.encode(),
                    lambda said, _: None if said == pulsar.Result.Ok else failed.append(said),
                    partition_key=r.key,
                )
            producer.flush()
        finally:
            client.close()
        if failed:
            raise ConnectionError(f"Pulsar did not confirm {len(failed)} of {len(records)} messages: {failed[0]}")

    def read(self) -> list[Row]:
        import pulsar

        client = pulsar.Client(self.url, operation_timeout_seconds=10, logger=quiet())
        found: list[Row] = []
        try:
            for partition in (f"{self.name}-partition-{n}" for n in range(PARTITIONS)):
                reader = client.create_reader(partition, pulsar.MessageId.earliest)
                while reader.has_message_available():
                    message = reader.read_next(timeout_millis=_WAIT_MS)
                    at = message.message_id()
                    position = _order(at.ledger_id(), at.entry_id(), max(at.batch_index(), 0))
                    found.append(Row(partition, position, message.partition_key(), as_text(message.data()) or ""))
        finally:
            client.close()
        return found

    def offsets(self, logged: Any) -> dict[str, int]:
        """Positions name the message that was read last: an entry, or a message in it."""
        found = {}
        for partition, text in logged.get(f"persistent://public/default/{self.name}", {}).items():
            read = _POSITION.match(text)
            if read is None:
                raise ValueError(f"the checkpoint holds {text!r}, which is no position")
            index = _WHOLE if read[3] is None else int(read[3])
            found[f"{self.name}-partition-{partition}"] = _order(int(read[1]), int(read[2]), index) + 1
        return found

    def address(self) -> dict[str, Any]:
        return {"system": self.system, "url": self.url, "admin": self.admin, "name": self.name}


def _order(ledger: int, entry: int, index: int) -> int:
    """One number that grows as positions do; ledger and entry are -1 before the first message."""
    return ((ledger + 1) << 48) + ((entry + 1) << 16) + index
