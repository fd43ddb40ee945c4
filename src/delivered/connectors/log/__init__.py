"""A durable log without a server: a Delta table whose rows have contiguous offsets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from delivered.contract.connector import Connector, Factory
from delivered.kits.options import absolute, headers_option, rows_max_option, store_in_clear
from delivered.model.options import (
    Options,
    OptionType,
    Unfit,
    check_storage,
    integer,
    option,
    prefixed,
    resolve_secrets,
)

EARLIEST = "earliest"
LATEST = "latest"
Position = str | Mapping[int, int]
"""`earliest`, `latest`, or a partition's next offset; -2 is its earliest, -1 its latest."""


def _position(text: str) -> Position:
    if text.strip().lower() in (EARLIEST, LATEST):
        return text.strip().lower()
    try:
        raw = json.loads(text)
        # Also accepts the result of the driver's `initial`, which is stored next to a checkpoint.
        raw = raw["offsets"] if set(raw) == {"version", "offsets"} else raw
        position = {int(partition): int(offset) for partition, offset in raw.items()}
    except (ValueError, AttributeError, TypeError):
        raise Unfit.build("OPTION_VALUE.LOG_OFFSETS", text=text) from None
    if any(partition < 0 or offset < -2 for partition, offset in position.items()):
        raise Unfit.build("OPTION_VALUE.LOG_OFFSET", text=text)
    return position


def _ending(text: str) -> Position:
    position = _position(text)
    if position == EARLIEST:
        raise Unfit.build("OPTION_VALUE.LOG_END")
    return position


def _reader(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", text):
        raise Unfit.build("OPTION_VALUE.NAME", text=text)
    return text


class LogOptions(Options, owner="delivered_log source"):
    """
    Attributes:
        path: absolute when the log is a local folder.
        reader: name of this pipeline's progress at the log; None: not stored.
        storage: options of the object store's client; values may be references to secrets.
    """

    path: str = option(
        "path", "Folder of the log, or its URL in an object store.", OptionType(absolute), example="/data/log"
    )
    starting: Position = option(
        "startingOffsets",
        'Where a new checkpoint starts: earliest, latest or {"0": 12}.',
        OptionType(_position, str),
        default=EARLIEST,
    )
    ending: Position | None = option(
        "endingOffsets", 'Where a batch read ends: latest or {"0": 12}.', OptionType(_ending, str), default=None
    )
    since_ms: int | None = option(
        "startingTimestamp",
        "Milliseconds since 1970: a new checkpoint starts at each partition's first record of then or later, whatever "
        "startingOffsets says.",
        integer(0),
        default=None,
    )
    rows_max: int | None = rows_max_option("records")
    headers: bool = headers_option("Add the column headers.")
    reader: str | None = option(
        "reader",
        "Name under which the pipeline's progress is stored with the log, for retention.",
        OptionType(_reader),
        default=None,
        example="orders",
    )
    storage: Mapping[str, str] = prefixed("storage.")

    def check(self, owner: str) -> None:
        check_storage(owner, self.path, self.storage)

    @property
    def in_clear(self) -> tuple[str, ...]:
        return store_in_clear(self.path, self.storage)

    @property
    def name(self) -> str:
        """The log's name: the last part of its path."""
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    def storage_resolved(self) -> dict[str, str]:
        """Options for the object store's client, including secrets; do not keep."""
        return resolve_secrets("storage.", self.storage)


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

    path, *rest = args
    return LogJournal(absolute(path), *rest, **kwargs)


def open_receivers(path: str, storage: Any) -> Any:
    """See `delivered.connectors.log.table.Receivers`."""
    from delivered.connectors.log.table import Receivers

    return Receivers(absolute(path), storage)
