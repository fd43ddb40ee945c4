"""Options of `delivered_log`, checked once and frozen."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from delivered.model.errors import UsageError
from delivered.model.options import Option, OptionTable, flag, resolve_secret, whole_number

EARLIEST = "earliest"
LATEST = "latest"
Position = str | Mapping[int, int]
"""`earliest`, `latest`, or a partition's next offset; -2 stands for its earliest, -1 for its latest."""

SOURCE_OPTIONS = OptionTable(
    "delivered_log source",
    (
        Option("path", "The log's folder, or its URL in an object store.", required=True),
        Option("startingOffsets", 'Where a new checkpoint starts: earliest, latest or {"0": 12}.', EARLIEST),
        Option("endingOffsets", 'Where a batch read ends: latest or {"0": 12}.', LATEST),
        Option("maxOffsetsPerTrigger", "At most about so many records in one batch; none: no bound."),
        Option("includeHeaders", "Whether there is a column headers.", "false"),
        Option("reader", "Name under which this pipeline's progress is kept beside the log, for its retention."),
    ),
    passthrough=("storage.",),
)


@dataclass(frozen=True)
class LogOptions:
    """
    Attributes:
        path: absolute when the log is a local folder.
        reader: name of this pipeline's progress beside the log; None: it keeps none.
        storage: options of the object store's client; values may be references to secrets.
    """

    path: str
    starting: Position = EARLIEST
    ending: Position = LATEST
    rows_max: int | None = None
    headers: bool = False
    reader: str | None = None
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """The log's name: the last part of its path."""
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    def storage_resolved(self) -> dict[str, str]:
        """Options for the object store's client, secrets filled in; use at once, do not keep."""
        return {key: resolve_secret(f"storage.{key}", value) for key, value in self.storage.items()}


def parse(given: Mapping[str, str]) -> LogOptions:
    """
    Raises:
        UsageError: unknown option, missing path, or a value out of bounds.
    """
    owner = SOURCE_OPTIONS.owner
    options = SOURCE_OPTIONS.restore(given)
    rows_max = options.get("maxOffsetsPerTrigger")
    reader = options.get("reader")
    if reader is not None and not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", reader):
        raise UsageError(
            "OPTION_VALUE", f"{owner}: option 'reader' is {reader!r}; it must be a name of letters, digits, . _ -"
        )
    ending = _position(owner, "endingOffsets", options.get("endingOffsets", LATEST))
    if ending == EARLIEST:
        raise UsageError("OPTION_VALUE", f"{owner}: option 'endingOffsets' is 'earliest'; a read cannot end there.")
    return LogOptions(
        path=absolute(options["path"]),
        starting=_position(owner, "startingOffsets", options.get("startingOffsets", EARLIEST)),
        ending=ending,
        rows_max=None if rows_max is None else whole_number(owner, "maxOffsetsPerTrigger", rows_max, 1),
        headers=flag(owner, "includeHeaders", options.get("includeHeaders", "false")),
        reader=reader,
        storage={k.removeprefix("storage."): v for k, v in options.items() if k.startswith("storage.")},
    )


def absolute(path: str) -> str:
    """Tasks may run in another working folder than the driver: make a local path absolute."""
    path = path.removeprefix("file://")
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _position(owner: str, name: str, value: str) -> Position:
    if value.strip().lower() in (EARLIEST, LATEST):
        return value.strip().lower()
    try:
        raw = json.loads(value)
        # What the driver's `initial` returned is understood too: it is kept as text beside a checkpoint.
        raw = raw["offsets"] if set(raw) == {"version", "offsets"} else raw
        position = {int(partition): int(offset) for partition, offset in raw.items()}
    except (ValueError, AttributeError, TypeError):
        raise UsageError(
            "OPTION_VALUE",
            f"{owner}: option {name!r} is {value!r}; it must be earliest, latest or a JSON object from partition to "
            "offset.",
            next_step=f"""write .option("{name}", '{{"0": 12}}')""",
        ) from None
    if any(partition < 0 or offset < -2 for partition, offset in position.items()):
        raise UsageError("OPTION_VALUE", f"{owner}: option {name!r} is {value!r}; offsets are -2, -1, 0 or more.")
    return position
