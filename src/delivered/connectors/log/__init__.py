"""A durable log without a server: a Delta table whose rows have contiguous offsets."""

from __future__ import annotations

from typing import Any

from delivered.connectors.log.options import LogOptions
from delivered.contract.connector import Connector, Factory

CONNECTOR = Connector(
    "log",
    "log",
    sources=Factory(LogOptions, "delivered.connectors.log.source:LogSource"),
    instead="write to delivered_sqlite or delivered_kafka; a log is filled by delivered.connectors.log.append",
)


def append(*args: Any, **kwargs: Any) -> Any:
    """See `delivered.connectors.log.produce.append`; imported when called, so that listing connectors is cheap."""
    from delivered.connectors.log.produce import append as run

    return run(*args, **kwargs)


def open_journal(*args: Any, **kwargs: Any) -> Any:
    """See `delivered.connectors.log.produce.LogJournal`."""
    from delivered.connectors.log.produce import LogJournal
    from delivered.kits.options import absolute

    path, *rest = args
    return LogJournal(absolute(path), *rest, **kwargs)


def open_receivers(path: str, storage: Any) -> Any:
    """See `delivered.connectors.log.table.Receivers`."""
    from delivered.connectors.log.table import Receivers
    from delivered.kits.options import absolute

    return Receivers(absolute(path), storage)
