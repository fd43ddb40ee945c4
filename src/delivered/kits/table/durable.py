"""Local files whose content and names survive a power loss (decision 010)."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from pathlib import Path


def sync(paths: Iterable[Path]) -> None:
    """fsync files or folders. A file's name is durable when its folder is."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(folder: Path) -> Path:
    """Create a folder and its parents durably."""
    missing, path = [], folder
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync([path.parent])
    return folder


def write_new(path: Path, data: bytes) -> None:
    """Create a file in an existing folder. Its content is durable, its name not yet."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def put(path: Path, data: bytes) -> None:
    """Create or replace a file atomically and durably."""
    make_folder(path.parent)
    draft = _draft(path)
    try:
        write_new(draft, data)
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync([path.parent])


def put_first(path: Path, data: bytes) -> bool:
    """Create a file atomically and durably. Returns False if it exists."""
    make_folder(path.parent)
    draft = _draft(path)
    try:
        write_new(draft, data)
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
        sync([path.parent])
    return True


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def sync_versions(table: Path, first: int, last: int) -> None:
    """fsync the existing commits among first..last, and their folder."""
    folder = table / "_delta_log"
    there = [folder / f"{version:020d}.json" for version in range(max(first, 0), last + 1)]
    sync([*(p for p in there if p.exists()), folder])


def sync_checkpoint(table: Path, version: int) -> None:
    """fsync the checkpoint of one version, `_last_checkpoint`, and their folder."""
    folder = table / "_delta_log"
    sync([*folder.glob(f"{version:020d}.checkpoint*"), folder / "_last_checkpoint", folder])
