"""What a connector is: where its entry point leads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from delivered.contract.sink import Sink
from delivered.contract.source import Source
from delivered.model.options import OptionTable


@runtime_checkable
class ExternalLedgerConnector(Protocol):
    """What a connector has whose system cannot hold a ledger: its sink takes another one's, a SQLite file named by
    the option `ledger`."""

    sink_options: OptionTable | None

    def sink_with_external_ledger(self, options: Mapping[str, str], ledger_sink: Sink) -> Sink:
        """As `Connector.sink`; `ledger_sink.ledger` is where batches are recorded."""


@runtime_checkable
class Connector(Protocol):
    """One folder of `connectors/`, reached by its entry point in the group `delivered.connectors`.

    Importing it imports no client library.
    """

    name: str
    extra: str
    source_options: OptionTable | None
    sink_options: OptionTable | None

    def source(self, options: Mapping[str, str]) -> Source:
        """Raise UsageError for an unknown or bad option, with a suggestion. Keys in any case."""

    def sink(self, options: Mapping[str, str]) -> Sink:
        """Raise UsageError for an unknown or bad option, with a suggestion. Keys in any case."""
