"""Names in a folder, and what makes them durable.

    batch=<incarnation>-<batch>/<shard>.<format>        a batch that counts, with its record `_decision.json`
    batch=<incarnation>-<batch>.<shard>-<nonce>/        a shard under at_least_once or at_most_once
    _delivered/schema.arrow                             columns and types of all files
    _delivered/p-<pipeline>/s-<sink>/owner/<epoch>.json
                                     claims/<epoch>-<nonce>/     where a claim's decisions are put together
                                     staged/<incarnation>/<batch>-<shard>-<attempt>-<nonce>.staged
                                     decided/<incarnation>/<batch>.json
                                     begun/<incarnation>.json

Readers leave names alone that start with `_` or `.`; Spark shows `batch` as a column.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from delivered.connectors.files.options import FilesOptions
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope

RECORD = "_decision.json"


@dataclass(frozen=True)
class Places:
    """Where the files of one sink of one pipeline lie."""

    options: FilesOptions
    scope: Scope

    @property
    def root(self) -> Path:
        # Prefixed, so that a pipeline named ".." stays inside.
        return self.options.folder / "_delivered" / f"p-{self.scope.pipeline}" / f"s-{self.scope.sink}"

    def batch(self, incarnation: str, batch: int) -> Path:
        return self.options.folder / f"batch={incarnation}-{batch:010d}"

    def shard(self, incarnation: str, batch: int, shard: int) -> Path:
        return self.options.folder / f"batch={incarnation}-{batch:010d}.{shard}-{uuid.uuid4().hex}"

    def staged(self, incarnation: str) -> Path:
        return self.root / "staged" / incarnation

    def decided(self, incarnation: str) -> Path:
        return self.root / "decided" / incarnation

    def begun(self, incarnation: str) -> Path:
        return self.root / "begun" / f"{incarnation}.json"


def schema_file(options: FilesOptions) -> Path:
    return options.folder / "_delivered" / "schema.arrow"


def numbered(folder: Path) -> dict[int, Path]:
    """Number -> path of the files or folders in `folder` whose names start with it."""
    if not folder.is_dir():
        return {}
    found = {}
    for path in folder.iterdir():
        digits = path.name.partition(".")[0].partition("-")[0]
        if digits.isdigit():
            found[int(digits)] = path
    return found


def make_folder(folder: Path) -> Path:
    """A folder whose name is durable, and those above it."""
    missing, path = [], folder
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync([path.parent])
    return folder


def write_new(path: Path, data: bytes) -> None:
    """A file in a folder that is there; durable, its name not yet."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def put(path: Path, data: bytes) -> None:
    """Whole or not at all, in place of what was there; durable."""
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_new(draft, data)
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync([path.parent])


def sync(paths: Iterable[Path]) -> None:
    """fsync files or folders."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def take_away(path: Path) -> None:
    """A folder or a file, if it is there. What cannot be taken away now is found at the next claim."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def failed(options: FilesOptions, error: OSError) -> DeliveredError:
    return DeliveredError(
        "FOLDER_STORAGE",
        f"Files in {options.path!r} cannot be read or written: {error}.",
        next_step="make room on the disk, or give the user the right to write there; the batch runs again",
    )
