"""A durable log without a server: a Delta table whose rows have contiguous offsets.

table.py    the layout: columns, files and the offsets they hold
produce.py  producers: assign offsets, one commit, durable when it returns
read.py     a range of offsets as record batches, found by offset and not by file name
source.py   the contract's source over these
journal.py  the log behind receivers: appends that know what it holds already, and its upkeep
progress.py how far each reader is
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivered.connectors.log.options import SOURCE_OPTIONS, parse
from delivered.model.errors import UsageError
from delivered.model.options import OptionTable

if TYPE_CHECKING:
    from delivered.contract.sink import Sink
    from delivered.contract.source import Source


@dataclass(frozen=True)
class LogConnector:
    """Holds nothing but names: safe to import, to pickle, to list."""

    name: str = "log"
    extra: str = "log"
    source_options: OptionTable | None = SOURCE_OPTIONS
    sink_options: OptionTable | None = None

    def source(self, options: Mapping[str, str]) -> Source:
        from delivered.connectors.log.source import LogSource

        return LogSource(parse(options))

    def sink(self, options: Mapping[str, str]) -> Sink:
        del options
        raise UsageError(
            "NO_SINK",
            "delivered_log is a source; records get into a log through delivered.connectors.log.append.",
            next_step="write to delivered_sqlite or delivered_kafka",
        )


CONNECTOR = LogConnector()


def append(*args: Any, **kwargs: Any) -> Any:
    """See `delivered.connectors.log.produce.append`; imported when called, so that listing connectors is cheap."""
    from delivered.connectors.log.produce import append as run

    return run(*args, **kwargs)


def open_journal(*args: Any, **kwargs: Any) -> Any:
    """See `delivered.connectors.log.journal.LogJournal`."""
    from delivered.connectors.log.journal import LogJournal
    from delivered.connectors.log.options import absolute

    path, *rest = args
    return LogJournal(absolute(path), *rest, **kwargs)
