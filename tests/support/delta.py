"""A Delta sink for tests."""

from __future__ import annotations

from pathlib import Path

from delivered.connectors.delta import CONNECTOR
from delivered.connectors.delta.sink import DeltaSink


def sink_at(path: Path, **given: str) -> DeltaSink:
    sink = CONNECTOR.sink({"path": str(path / "t"), **given})
    assert isinstance(sink, DeltaSink)
    return sink
