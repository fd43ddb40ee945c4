"""Where a pipeline's source began, kept beside Spark's checkpoint.

Spark logs where a batch ends, and takes where batch 0 begins from the source, again if batch 0 runs again. With
startingOffsets "latest" that would be another place, and what lies between would be lost. So the first start writes
the offsets down, once, and every start passes them as explicit `startingOffsets`.
"""

from __future__ import annotations

import json
from pathlib import Path

from pyarrow import fs

from delivered.contract import Offsets, Source
from delivered.model.errors import InvariantBroken, Unreachable
from delivered.spark.checkpoint import open_folder
from delivered.storage.durable import put_first, sync

FILE = "delivered/source-offsets.json"


def kept(location: str) -> Offsets | None:
    """The offsets that an earlier start wrote down, or None.

    Raises:
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read.
    """
    filesystem, folder = open_folder(location)
    path = f"{folder.rstrip('/')}/{FILE}"
    try:
        if filesystem.get_file_info(path).type is not fs.FileType.File:
            return None
        with filesystem.open_input_stream(path) as stream:
            text = bytes(stream.read())
    except OSError as error:
        raise _unreachable(location, error) from error
    try:
        found: Offsets = json.loads(text)["offsets"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvariantBroken(
            "SOURCE_OFFSETS_DAMAGED",
            f"{path!r} holds {text[:80]!r}; it must be what the first start of the pipeline wrote.",
            next_step="restore the file from the checkpoint's backup",
        ) from error
    return found


def keep(location: str, source: Source) -> Offsets:
    """The offsets that the first start wrote down; written now if this is the first.

    Runs on the driver, before the query starts. May be called again: the first one stands.
    """
    found = kept(location)
    if found is not None:
        return found
    driver = source.driver()
    try:
        offsets = driver.initial()
    finally:
        driver.close()
    text = json.dumps({"offsets": offsets}, separators=(",", ":")).encode()
    filesystem, folder = open_folder(location)
    path = f"{folder.rstrip('/')}/{FILE}"
    try:
        if isinstance(filesystem, fs.LocalFileSystem):
            put_first(Path(path), text)
            # Whoever made the folder may have died before its name was durable.
            sync([Path(path).parent.parent])
        else:
            filesystem.create_dir(path.rsplit("/", 1)[0], recursive=True)
            with filesystem.open_output_stream(path) as stream:
                stream.write(text)
    except OSError as error:
        raise _unreachable(location, error) from error
    # Another start may have been first: what the file holds is what counts.
    return kept(location) or offsets


def _unreachable(location: str, error: OSError) -> Unreachable:
    return Unreachable(
        "CHECKPOINT_UNREADABLE",
        f"The checkpoint {location!r} cannot be used from Python on the driver: {error}.",
        next_step="make the folder readable and writable for the driver's user",
    )
