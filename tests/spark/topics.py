"""Write numbers to a topic and read them back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.kafka_tools import produce, read_committed


def send(kafka: Any, topic: str, values: Iterable[object]) -> None:
    """Each value as text, its own key."""
    produce(kafka.bootstrap, topic, ((str(v).encode(), str(v).encode()) for v in values))


def read_values(kafka: Any, topic: str) -> list[bytes]:
    """All values that a read_committed reader finds in a topic now."""
    return [m.value() for m in read_committed(kafka.bootstrap, topic)]
