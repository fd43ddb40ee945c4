"""A store in memory, for tests of a pipeline's logic without a server: both ways to commit, and every bad moment.

It works within one process, so it is no entry point: Spark's workers are other processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivered.connectors.memory.options import SINK, SOURCE
from delivered.model.options import OptionTable

if TYPE_CHECKING:
    from delivered.contract.sink import Sink
    from delivered.contract.source import Source


@dataclass(frozen=True)
class MemoryConnector:
    name: str = "memory"
    extra: str = ""
    source_options: OptionTable | None = SOURCE
    sink_options: OptionTable | None = SINK

    def source(self, options: Mapping[str, str]) -> Source:
        from delivered.connectors.memory.options import MemorySourceOptions
        from delivered.connectors.memory.source import MemorySource

        return MemorySource(MemorySourceOptions.parse(options))

    def sink(self, options: Mapping[str, str]) -> Sink:
        from delivered.connectors.memory.options import MemorySinkOptions
        from delivered.connectors.memory.sink import MemorySink

        return MemorySink(MemorySinkOptions.parse(options))


CONNECTOR = MemoryConnector()
