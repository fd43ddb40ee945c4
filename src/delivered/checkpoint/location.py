"""Where a checkpoint is, and how this process opens it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pyarrow import fs

Store = Mapping[str, str]
"""How Python opens a location, if Hadoop's settings say so (`hadoop.py`). May hold secrets."""
SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*:")
_stores: dict[str, Store] = {}
"""By location, in this process."""


def remember(location: str | None, store: Store) -> None:
    """From now on, this process opens the location so. An empty store: as its configuration says."""
    if location is not None and store:
        _stores[location] = store
    elif location is not None:
        _stores.pop(location, None)


def remembered(location: str) -> Store:
    """Empty: nothing is."""
    return _stores.get(location, {})


def is_relative(location: str) -> bool:
    return not location.startswith("/") and not SCHEME.match(location)


def from_uri(location: str) -> tuple[fs.FileSystem, str]:
    if not SCHEME.match(location):
        return fs.LocalFileSystem(), location
    uri = re.sub(r"^file:/+", "file:///", location)
    found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(re.sub(r"^s3[an]:", "s3:", uri))
    return found
