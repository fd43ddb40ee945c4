"""Options of `delivered_files`."""

from __future__ import annotations

from pathlib import Path

from delivered.kits.options import PATH, sink_name
from delivered.model.errors import Refused
from delivered.model.options import Options, choice, option
from delivered.model.ranges import RANGES, Range

FORMATS = ("parquet", "json", "csv")


class FilesOptions(Options, owner="delivered_files sink"):
    """
    Attributes:
        path: absolute.
        format: one of FORMATS; also the file suffix.
    """

    path: str = option("path", "Folder that batches are added to; created if missing.", PATH, example="/data/orders")
    format: str = option(
        "fileFormat", "parquet, json (one line per row) or csv (with a header).", choice(FORMATS), default="parquet"
    )

    def check(self, owner: str) -> None:
        """Raise Refused for an object store, which has no rename."""
        if "://" in self.path:
            raise Refused(
                "NO_RENAME",
                f"{owner}: option 'path' is {self.path!r}; a batch is committed by renaming a folder, which object "
                "stores do not support.",
                next_step='write a Delta table there: format("delivered_delta")',
            )

    @property
    def folder(self) -> Path:
        return Path(self.path)

    @property
    def range(self) -> Range:
        """The values that a file of this format stores."""
        return RANGES[self.format]

    @property
    def sink_name(self) -> str:
        """The folder's name. Each folder has its own ledger, whatever the name."""
        return sink_name(self.folder.name)
