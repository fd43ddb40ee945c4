"""How far each reader of a log is, kept beside the table for whoever takes away what is behind all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from delivered.connectors.log import table as layout
from delivered.model import record_format

PROGRESS = "_progress"
"""Folder beside the table's own; Delta leaves names with an underscore alone."""


def write_progress(path: str, storage: Mapping[str, str], reader: str, offsets: Mapping[int, int]) -> None:
    """Leave how far a reader is, beside the log. It may be older than the truth, never newer."""
    fs, target = layout.filesystem(path, storage), f"{PROGRESS}/{reader}.json"
    local = layout.is_local(path)
    draft = f"{PROGRESS}/.{reader}.draft" if local else target  # an object store shows an object whole or not at all
    fs.create_dir(PROGRESS, recursive=True)
    # Buffered: the object store's handler takes bytes, and not what pyarrow would hand on as it is.
    with fs.open_output_stream(draft, buffer_size=65_536) as file:
        file.write(json.dumps(record_format.numbered({"offsets": {str(p): o for p, o in offsets.items()}})).encode())
    if local:
        fs.move(draft, target)


def read_progress(path: str, storage: Mapping[str, str], reader: str) -> dict[int, int] | None:
    """As `write_progress` left it; None: nothing is known of that reader."""
    fs = layout.filesystem(path, storage)
    try:
        with fs.open_input_stream(f"{PROGRESS}/{reader}.json") as file:
            found = json.loads(file.read())
    except (FileNotFoundError, ValueError):
        return None
    return {int(p): int(o) for p, o in record_format.known(found, "a reader's progress")["offsets"].items()}
