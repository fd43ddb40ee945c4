"""A store in memory, for tests of a pipeline's logic without a server: both ways to commit, and every bad moment.

It works within one process, so it is no entry point: Spark's workers are other processes.
"""

from __future__ import annotations

from delivered.connectors.memory.options import MemorySinkOptions, MemorySourceOptions
from delivered.contract.connector import Connector, Made

CONNECTOR = Connector(
    "memory",
    "",
    sources=Made(MemorySourceOptions, "delivered.connectors.memory.source:MemorySource"),
    sinks=Made(MemorySinkOptions, "delivered.connectors.memory.sink:MemorySink"),
)
