"""Folders of Parquet, JSON or CSV files as a sink: a batch is a folder, committed by one rename."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from delivered.contract.connector import Connector, Factory
from delivered.kits.options import PATH, not_a_folder, sink_name
from delivered.model.errors import DeliveredError, Refused
from delivered.model.identity import Scope
from delivered.model.options import Options, choice, option
from delivered.model.rows import RANGES, Range
from delivered.model.work import STARTED, Handle

# Options of `delivered_files`.

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
            raise Refused("NO_RENAME", owner=owner, path=self.path)

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


# The layout of a sink's folder.
#
#     batch=<incarnation>-<batch>/<shard>.<format>        a decided batch, with its record `_decision.json`
#     batch=<incarnation>-<batch>.<shard>-<nonce>/        a shard under at_least_once or at_most_once
#     _delivered/schema.arrow                             columns and types of all files
#     _delivered/identity                                 identifies this folder: a recreated one has another
#     _delivered/p-<pipeline>/s-<sink>/owner/<epoch>.json
#                                      claims/<epoch>-<nonce>/     where a claim assembles its decisions
#                                      staged/<incarnation>/<batch>-<shard>-<attempt>-<nonce>.staged
#                                      decided/<incarnation>/<batch>.json
#                                      {STARTED}/<incarnation>.json
#                                      archive/<hash>.bin          entries of old incarnations
#
# Readers ignore names that start with `_` or `.`; Spark shows `batch` as a column.

RECORD = "_decision.json"


@dataclass(frozen=True)
class StagedFile(Handle):
    """
    Attributes:
        file: its name, without its folder.
    """

    file: str
    bytes: int
    rows: int


@dataclass(frozen=True)
class Places:
    """Paths of one pipeline and sink."""

    options: FilesOptions
    scope: Scope

    @property
    def root(self) -> Path:
        # The prefix keeps a pipeline named ".." inside.
        return self.options.folder / "_delivered" / f"p-{self.scope.pipeline}" / f"s-{self.scope.sink}"

    def batch(self, incarnation: str, batch: int) -> Path:
        return self.options.folder / f"batch={incarnation}-{batch:010d}"

    def shard(self, incarnation: str, batch: int, shard: int) -> Path:
        return self.options.folder / f"batch={incarnation}-{batch:010d}.{shard}-{uuid.uuid4().hex}"

    def staged(self, incarnation: str) -> Path:
        return self.root / "staged" / incarnation

    def decided(self, incarnation: str) -> Path:
        return self.root / "decided" / incarnation

    def started(self, incarnation: str) -> Path:
        return self.root / STARTED / f"{incarnation}.json"


def schema_file(options: FilesOptions) -> Path:
    return options.folder / "_delivered" / "schema.arrow"


def identity_file(options: FilesOptions) -> Path:
    return options.folder / "_delivered" / "identity"


def numbered(folder: Path) -> dict[int, Path]:
    """Files or folders in `folder` by the number that their names start with."""
    if not folder.is_dir():
        return {}
    folders = {}
    for path in folder.iterdir():
        digits = path.name.partition(".")[0].partition("-")[0]
        if digits.isdigit():
            folders[int(digits)] = path
    return folders


def take_away(path: Path) -> None:
    """Delete a folder or file if it exists. The next claim finds what could not be deleted."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def failed(options: FilesOptions, error: OSError) -> DeliveredError:
    return not_a_folder(options.path) or DeliveredError("FOLDER_STORAGE", path=options.path, error=error)


@contextmanager
def explained(options: FilesOptions) -> Iterator[None]:
    """Translate errors of the file system."""
    try:
        yield
    except OSError as error:
        raise failed(options, error) from error


CONNECTOR = Connector(
    "files",
    "files",
    sinks=Factory(FilesOptions, "delivered.connectors.files.sink:FilesSink"),
    transactions="",
    instead='read a folder with Spark\'s own format("parquet"), format("json") or format("csv")',
)
