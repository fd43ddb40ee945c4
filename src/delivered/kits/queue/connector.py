"""The connector's object for a system that is sent to, and that keeps no ledger; and for a queue, which forgets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delivered.model.errors import Refused
from delivered.model.options import OptionTable

if TYPE_CHECKING:
    from delivered.contract.queue import Queue
    from delivered.contract.sink import Sink
    from delivered.contract.source import Source


@dataclass(frozen=True)
class SendingConnector(ABC):
    """Holds nothing but names: safe to import, to pickle, to list.

    Attributes:
        system: for people.
    """

    name: str
    extra: str
    system: str
    source_options: OptionTable | None
    sink_options: OptionTable | None

    def sink(self, options: Mapping[str, str]) -> Sink:
        del options
        raise Refused(
            "LEDGER_ELSEWHERE",
            f"{self.system} has no place that one driver can own, so batches are recorded in a ledger of another "
            "system.",
            next_step=f"make the sink with delivered.endpoint({self.name!r}, ...), which puts the two together",
        )

    @abstractmethod
    def sink_with_external_ledger(self, options: Mapping[str, str], ledger_sink: Sink) -> Sink:
        """See `delivered.contract.connector.ExternalLedgerConnector`."""


@dataclass(frozen=True)
class QueueConnector(SendingConnector):
    """
    Attributes:
        forgets: why its messages cannot be read again, as a sentence that goes on.
    """

    queue_options: OptionTable
    forgets: str

    @abstractmethod
    def queue(self, options: Mapping[str, str]) -> Queue:
        """See `delivered.contract.queue`."""

    def source(self, options: Mapping[str, str]) -> Source:
        del options
        raise Refused(
            "QUEUE_FORGETS",
            f"{self.forgets}; only the log behind its receivers can be read again.",
            next_step=f"make the source with delivered.endpoint({self.name!r}, ...), which puts the two together",
        )
