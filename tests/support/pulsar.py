"""Pulsar's source and sink as in a pipeline, and messages through an independent client."""

from __future__ import annotations

import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.support.servers import Pulsar

from delivered.connectors.pulsar import CONNECTOR
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Offsets, Source
from delivered.pipeline.registry import find_sink, find_source
from delivered_lab.brokers.pulsar import version
from delivered_lab.verify.services import wait_for

FULL = "persistent://public/default/"
CHUNK = 5 << 20
"""The broker's default for maxMessageSize: larger messages are chunked."""


def source(pulsar: Pulsar, topic: str, **options: Any) -> Source:
    given = {**pulsar.options, "topics": topic, **options}
    return CONNECTOR.source({k.lower(): str(v) for k, v in given.items()})  # lower case, as PySpark passes them


def rows(count: int, first: int = 0) -> list[bytes]:
    return [b"row %d" % n for n in range(first, first + count)]


def read(src: Source, start: Offsets, end: Offsets) -> pa.Table:
    batches = [b for piece in src.driver().slices(start, end) for b in src.read(piece)]
    return pa.Table.from_batches(batches, schema=src.schema())


def read_all(src: Source) -> pa.Table:
    return read(src, *src.driver().batch())


def values(table: pa.Table) -> list[bytes | None]:
    found: list[bytes | None] = table.column("value").to_pylist()
    return found


def batches(src: Source, limit: int | None, start: Offsets | None = None) -> list[tuple[Offsets, Offsets]]:
    """The current content, split into batches as by a stream."""
    driver = src.driver()
    at = driver.initial() if start is None else start
    found = []
    while (end := driver.latest(at, limit)) != at:
        found.append((at, end))
        at = end
    return found


def sink(folder: Path, pulsar: Pulsar, topic: str, **options: str) -> Any:
    return find_sink("pulsar", {**pulsar.options, "topic": topic, "ledger": str(folder / "ledger.db"), **options})


def taken(pulsar: Pulsar, topic: str) -> list[dict[str, Any]]:
    """All messages in the topic."""
    source = find_source("pulsar", {**pulsar.options, "topics": topic, "includeHeaders": "true"})
    driver = source.driver()
    return [r for piece in driver.slices(*driver.batch()) for b in source.read(piece) for r in b.to_pylist()]


def native(pulsar: Pulsar, topic: str) -> list[Any]:
    """Messages that the brokers' own client reads now. Args: topic: without partitions, or one of them."""
    import pulsar as library

    reader, found = pulsar.client().create_reader(topic, library.MessageId.earliest), []
    with suppress(library.Timeout):  # brokers of 2.10 say that a message is available that is hidden
        while reader.has_message_available():
            found.append(reader.read_next(3_000 if version().startswith("2.") else 60_000))
    reader.close()
    return found


def with_coordinators(pulsar: Pulsar, count: int) -> None:
    """Have so many transaction coordinators, as clusters have 16 of them; a standalone broker has one."""
    url = f"{pulsar.options['adminUrl']}/admin/v3/transactions/transactionCoordinator/replicas"
    request = urllib.request.Request(url, b"%d" % count, {"Content-Type": "application/json"}, method="POST")
    with suppress(urllib.error.HTTPError):  # a slow broker does it twice, and refuses the second time
        urllib.request.urlopen(request, timeout=60).close()
    topic = "persistent/pulsar/system/transaction_coordinator_assign"
    assert pulsar.admin("GET", f"{topic}/partitions")["partitions"] == count


def ids(found: list[dict[str, Any]]) -> list[str]:
    return [h["value"].decode() for r in found for h in r["headers"] if h["key"] == "delivered.id"]


@dataclass
class PulsarTopic:
    """A topic in a namespace of its own, by default without retention, which a subscription holds."""

    pulsar: Any
    folder: Path
    minutes: int = 0
    mebibytes: int = 0

    def __post_init__(self) -> None:
        retention = {"retentionTimeInMinutes": self.minutes, "retentionSizeInMB": self.mebibytes}
        namespace = self.pulsar.namespace(retention=retention, deduplication=False)
        self.name = self.pulsar.topic(namespace=namespace)
        self.path = self.name.replace("://", "/")
        self.create()

    def create(self) -> None:
        self.pulsar.admin("PUT", f"{self.path}/subscription/holds", {"ledgerId": -1, "entryId": -1})

    @property
    def scan(self) -> BoundedScan:
        return sink(self.folder, self.pulsar, self.name).scan()

    def add(self, count: int) -> None:
        """In a ledger of its own."""
        self.pulsar.send(self.name, [b"%d" % n for n in range(count)])
        self.pulsar.admin("PUT", f"{self.path}/unload")

    def acknowledge(self, first_ledgers: int) -> None:
        """What no subscription holds any more is deleted."""
        ledgers = [x["ledgerId"] for x in self.pulsar.admin("GET", f"{self.path}/internalStats")["ledgers"]]
        at = {"ledgerId": ledgers[first_ledgers], "entryId": -1}
        self.pulsar.admin("POST", f"{self.path}/subscription/holds/resetcursor", at)

        def trimmed() -> bool:
            self.pulsar.admin("POST", f"{self.path}/trim", {})
            there = [x["ledgerId"] for x in self.pulsar.admin("GET", f"{self.path}/internalStats")["ledgers"]]
            return bool(there[0] == ledgers[first_ledgers])

        wait_for(trimmed, 120, "ledgers are deleted")

    def count(self, since: Offsets | None = None, until: Offsets | None = None) -> int:
        return sum(b.num_rows for piece in self.scan.slices(since, until) for b in self.scan.read(piece))
