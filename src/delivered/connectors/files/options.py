"""Options of `delivered_files`, checked once and frozen."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from delivered.model.errors import Refused, UsageError
from delivered.model.limits import NAME_LENGTH_MAX
from delivered.model.options import Option, OptionTable, choice

OWNER = "delivered_files sink"
FORMATS = ("parquet", "json", "csv")

SINK_OPTIONS = OptionTable(
    OWNER,
    (
        Option("path", "The folder that batches are added to; made if it is not there.", required=True),
        Option("fileFormat", "parquet, json (a line for each row) or csv (with a header).", "parquet"),
    ),
)


@dataclass(frozen=True)
class FilesOptions:
    """
    Attributes:
        path: absolute.
        format: one of FORMATS; also the files' suffix.
    """

    path: str
    format: str = "parquet"

    @property
    def folder(self) -> Path:
        return Path(self.path)

    @property
    def sink_name(self) -> str:
        """The folder's name, made fit for a sink's name. Each folder has its own ledger, whatever the name."""
        last = self.folder.name
        plain = re.sub(r"[^A-Za-z0-9._-]", "_", last)[: NAME_LENGTH_MAX - 9]
        if plain == last:
            return plain
        return f"{plain}-{hashlib.blake2b(last.encode(), digest_size=4).hexdigest()}"


def parse(given: Mapping[str, str]) -> FilesOptions:
    """
    Raises:
        UsageError: unknown option, missing path, or a value out of bounds.
        Refused: an object store, which has no rename.
    """
    options = SINK_OPTIONS.restore(given)
    path = options["path"].removeprefix("file://")
    if not path.strip():
        raise UsageError("OPTION_VALUE", f"{OWNER}: option 'path' is empty.")
    if "://" in path:
        raise Refused(
            "NO_RENAME",
            f"{OWNER}: option 'path' is {path!r}; a batch appears by the rename of a folder, which an object store "
            "does not have.",
            next_step='write a Delta table there: format("delivered_delta")',
        )
    return FilesOptions(
        path=str(Path(path).expanduser().absolute()),
        format=choice(OWNER, "fileFormat", options.get("fileFormat", "parquet"), FORMATS),
    )
