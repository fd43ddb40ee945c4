"""What one bridge says of itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from delivered_lab.brokers import Broker

SENT_AGAIN = 7
"""Every so many-th order is sent twice, as by a sender that lost an answer; the receivers are to know it."""


class Bridge(Protocol):
    """From one system to another. Everything but the pipeline itself is done by the systems' own clients."""

    name: str
    """Its pipeline file is NAME.yaml."""
    servers: tuple[str, ...]
    """Kinds, as `delivered brokers start` names them: the source's, then the sink's."""
    received: bool
    """Whether receivers take the messages out of a queue that forgets."""

    def open(self, servers: Mapping[str, Broker], folder: Path) -> dict[str, Any]:
        """Make topics and queues. Returns what the pipeline file is to say here: dotted key -> value."""

    def send(self, numbers: range) -> None:
        """Send these orders; each is acknowledged when this returns."""

    def found(self) -> Counter[str]:
        """Ids of all orders that a reader of the sink sees now."""

    def close(self) -> None:
        """Give connections back."""


def order(n: int) -> bytes:
    return json.dumps({"id": order_id(n), "customer": f"customer-{n % 50}", "cents": 100 + n % 9_900}).encode()


def order_id(n: int) -> str:
    return f"order-{n}"
