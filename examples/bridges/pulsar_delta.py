"""Pulsar -> Spark -> Delta Lake. Pulsar keeps its messages, so there is no receiver."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from examples.bridges.bridge import order, order_id

from delivered_lab.brokers import Broker

PARTITIONS = 3


class PulsarDelta:
    name = "pulsar-delta"
    servers = ("pulsar",)
    received = False

    def open(self, servers: Mapping[str, Broker], folder: Path) -> dict[str, Any]:
        import pulsar

        broker = servers["pulsar"]
        http = f"http://{broker.listeners['HTTP']}"
        request = urllib.request.Request(
            f"{http}/admin/v2/persistent/public/default/orders/partitions",
            data=json.dumps(PARTITIONS).encode(),
            headers={"Content-Type": "application/json"},
            method="PUT",
        )
        urllib.request.urlopen(request, timeout=30).close()
        self._client = pulsar.Client(broker.url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
        self._producer = self._client.create_producer("orders", batching_enabled=True, block_if_queue_full=True)
        self._table = str(folder / "lake" / "orders")
        return {"source.url": broker.url, "source.adminUrl": http, "sink.path": self._table}

    def send(self, numbers: range) -> None:
        failed: list[Any] = []
        for n in numbers:
            self._producer.send_async(
                order(n), lambda said, _: failed.append(said) if said.name != "Ok" else None, partition_key=order_id(n)
            )
        self._producer.flush()
        if failed:
            raise RuntimeError(f"Pulsar did not take all orders: {failed[:3]}")

    def found(self) -> Counter[str]:
        try:
            rows = DeltaTable(self._table).to_pyarrow_table(columns=["id"])
        except TableNotFoundError:
            return Counter()
        return Counter(rows.column("id").to_pylist())

    def close(self) -> None:
        self._client.close()
