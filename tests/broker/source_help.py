"""Helpers of tests of the Kafka source."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
from confluent_kafka import IsolationLevel, Producer, TopicPartition
from confluent_kafka.admin import OffsetSpec

from delivered.connectors.kafka import CONNECTOR
from delivered.contract.source import Offsets, Source, SourceDriver

DEFAULTS: dict[str, str] = {}
"""Options of every source of a test, such as its client."""


def source(kafka: Any, options: Mapping[str, Any] | None = None, /, **more: Any) -> Source:
    given = {"kafka.bootstrap.servers": kafka.bootstrap, **DEFAULTS, **(options or {}), **more}
    return CONNECTOR.source({k.lower(): str(v) for k, v in given.items()})  # lower case, as PySpark passes them


def produce(kafka: Any, topic: str, records: Iterable[Any], partition: int | None = 0) -> None:
    """Records are values, or dicts of arguments of `Producer.produce`."""
    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap, "linger.ms": 0, "log_level": 0, "message.max.bytes": 3_000_000}
    )
    failed: list[Any] = []
    for record in records:
        said = record if isinstance(record, dict) else {"value": record}
        given = {"partition": partition, **said} if partition is not None else said
        while True:
            try:
                producer.produce(topic, on_delivery=lambda e, m: failed.append(e) if e else None, **given)
                break
            except BufferError:  # the client's queue is full
                producer.poll(0.1)
    assert producer.flush(30) == 0
    assert not failed, failed


def cut_log(kafka: Any, topic: str, offset: int) -> None:
    """Take the end away from partition 0 of a topic, from this offset on. The broker must be down."""
    folder = kafka.broker.folder / "data" / f"{topic}-0"
    for file in folder.iterdir():
        if file.suffix in (".index", ".timeindex", ".snapshot"):
            file.unlink()
    [segment] = folder.glob("*.log")
    data, at = segment.read_bytes(), 0
    while at < len(data):
        first, size = struct.unpack_from(">qi", data, at)
        if first >= offset:
            break
        at += 12 + size
    assert first == offset, f"a record batch must begin at {offset}"
    segment.write_bytes(data[:at])


class Transactions:
    """Writes committed and aborted transactions, each flushed, so that all leave records."""

    def __init__(self, kafka: Any, name: str) -> None:
        self._kafka = kafka
        self._where = TopicPartition("", 0)
        self._producer = Producer(
            {"bootstrap.servers": kafka.bootstrap, "transactional.id": name, "linger.ms": 0, "log_level": 0}
        )
        self._producer.init_transactions(30)

    def write(self, topic: str, values: Iterable[bytes], commit: bool, partition: int = 0) -> None:
        self.open(topic, values, partition)
        self.end(commit)

    def open(self, topic: str, values: Iterable[bytes], partition: int = 0) -> None:
        self._where = TopicPartition(topic, partition)
        self._producer.begin_transaction()
        for value in values:
            self._producer.produce(topic, value, partition=partition)
        assert self._producer.flush(30) == 0

    def end(self, commit: bool) -> None:
        """Returns once the marker is in the log: the broker replies before it writes it."""
        before = self._end(IsolationLevel.READ_UNCOMMITTED)
        (self._producer.commit_transaction if commit else self._producer.abort_transaction)(30)
        deadline = time.monotonic() + 120
        while self._end(IsolationLevel.READ_COMMITTED) <= before:
            assert time.monotonic() < deadline

    def _end(self, level: IsolationLevel) -> int:
        admin = self._kafka.admin()
        return (
            next(iter(admin.list_offsets({self._where: OffsetSpec.latest()}, isolation_level=level).values()))
            .result()
            .offset
        )


def limit_clients(kafka: Any, quota: str, bytes_per_s: int) -> None:
    """Set a quota of every client of a broker of your own: producer_byte_rate or consumer_byte_rate."""
    from kafka.protocol.admin.client_quotas import AlterClientQuotasRequest

    from delivered.clients.kafka.protocol import Wire

    Entry = AlterClientQuotasRequest.EntryData  # noqa: N806 - a class
    entity = Entry.EntityData(entity_type="client-id", entity_name=None)
    limit = Entry.OpData(key=quota, value=float(bytes_per_s), remove=False)
    wire = Wire({"bootstrap.servers": kafka.bootstrap})
    asked = AlterClientQuotasRequest(entries=[Entry(entity=[entity], ops=[limit])], validate_only=False)
    assert [e.error_code for e in wire.ask(asked).entries] == [0]
    wire.close()


def read_range(src: Source, driver: SourceDriver, start: Offsets, end: Offsets) -> pa.Table:
    batches = [b for piece in driver.slices(start, end) for b in src.read(piece)]
    return pa.Table.from_batches(batches, schema=src.schema())


def read_all(src: Source) -> pa.Table:
    """Read as a batch read does."""
    driver = src.driver()
    try:
        return read_range(src, driver, *driver.batch())
    finally:
        driver.close()


def values(table: pa.Table) -> list[bytes | None]:
    return table.column("value").to_pylist()


def positions(offsets: Offsets) -> dict[str, dict[str, int]]:
    """Offsets without the connector's metadata."""
    return {k: v for k, v in offsets.items() if not k.startswith("#")}
