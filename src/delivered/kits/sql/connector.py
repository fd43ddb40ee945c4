"""The connector's object for a database that is a sink and no source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivered.model.errors import UsageError
from delivered.model.options import OptionTable

if TYPE_CHECKING:
    from delivered.contract.sink import Sink
    from delivered.contract.source import Source


@dataclass(frozen=True)
class SinkConnector(ABC):
    """Holds nothing but names: safe to import, to pickle, to list."""

    name: str
    extra: str
    sink_options: OptionTable | None
    source_options: OptionTable | None = None

    def source(self, options: Mapping[str, str]) -> Source:
        del options
        raise UsageError(
            "NO_SOURCE",
            f"delivered_{self.name} is a sink; a table has no offsets that a stream could replay.",
            next_step="read from delivered_log or delivered_kafka",
        )

    @abstractmethod
    def sink(self, options: Mapping[str, str]) -> Sink:
        """See `delivered.contract.connector.Connector`."""
