"""An in-memory store for tests without a server: both ways to commit, and fault injection.

It works only within one process, so it has no entry point: Spark's workers are other processes.
"""

from __future__ import annotations

from delivered.connectors.memory.options import MemorySinkOptions, MemorySourceOptions
from delivered.contract.connector import Connector, Factory

CONNECTOR = Connector(
    "memory",
    "",
    sources=Factory(MemorySourceOptions, "delivered.connectors.memory.source:MemorySource"),
    sinks=Factory(MemorySinkOptions, "delivered.connectors.memory.sink:MemorySink"),
)
