"""Set transactional ids to a chosen epoch in the broker's own log, as if they had been used that often."""

from __future__ import annotations

import struct
import time
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from kafka import KafkaAdminClient

_STATE_TOPIC = "__transaction_state"


def force_epoch(kafka: Any, transactional_ids: list[str], epoch: int) -> None:
    """Rewrite the ids' state and restart the broker, which reads it. Kafka accepts such records from its own tools."""
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    described = admin.describe_transactions(transactional_ids)
    admin.close()
    partitions = len(
        AdminClient({"bootstrap.servers": kafka.bootstrap}).list_topics(_STATE_TOPIC).topics[_STATE_TOPIC].partitions
    )
    failed: list[Any] = []
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "client.id": "__admin_client"})
    for name in transactional_ids:
        key = struct.pack(">hh", 0, len(name)) + name.encode()
        now = int(time.time() * 1000)
        # producer id, epoch, timeout, state Empty, no partitions, last update, no start
        value = struct.pack(">hqhibiqq", 0, described[name].producer_id, epoch, 600_000, 0, -1, now, -1)
        producer.produce(
            _STATE_TOPIC,
            key=key,
            value=value,
            partition=_java_hash(name) % partitions,
            on_delivery=lambda e, _: failed.append(e) if e else None,
        )
    assert producer.flush(30) == 0
    assert not failed, failed
    kafka.broker.kill()
    kafka.broker.restart()


def _java_hash(text: str) -> int:
    h = 0
    for c in text:
        h = (31 * h + ord(c)) & 0xFFFFFFFF
    return h & 0x7FFFFFFF
