"""Small files of ours beside Spark's checkpoint, in its folder `delivered`."""

from __future__ import annotations

from pathlib import Path

from pyarrow import fs

from delivered.kits.table.durable import put, put_first, sync
from delivered.model.errors import Unreachable
from delivered.spark.checkpoint import open_folder


def read(location: str, file: str) -> bytes | None:
    """What an earlier start wrote, or None.

    Args:
        location: of the checkpoint, as Spark spells it.
        file: path below it.

    Raises:
        Unreachable: the checkpoint cannot be read.
    """
    filesystem, path = _open(location, file)
    try:
        if filesystem.get_file_info(path).type is not fs.FileType.File:
            return None
        with filesystem.open_input_stream(path) as stream:
            return bytes(stream.read())
    except OSError as error:
        raise _unreachable(location, error) from error


def write(location: str, file: str, data: bytes, *, first: bool) -> None:
    """Write it; durable on a local disk.

    Args:
        first: on a local disk what is there stands; elsewhere and else it is replaced.

    Raises:
        Unreachable: the checkpoint cannot be written to.
    """
    filesystem, path = _open(location, file)
    try:
        if isinstance(filesystem, fs.LocalFileSystem):
            (put_first if first else put)(Path(path), data)
            # Whoever made the folder may have died before its name was durable.
            sync([Path(path).parent.parent])
            return
        filesystem.create_dir(path.rsplit("/", 1)[0], recursive=True)
        with filesystem.open_output_stream(path) as stream:
            stream.write(data)
    except OSError as error:
        raise _unreachable(location, error) from error


def _open(location: str, file: str) -> tuple[fs.FileSystem, str]:
    filesystem, folder = open_folder(location)
    return filesystem, f"{folder.rstrip('/')}/{file}"


def _unreachable(location: str, error: OSError) -> Unreachable:
    return Unreachable(
        "CHECKPOINT_UNREADABLE",
        f"The checkpoint {location!r} cannot be used from Python on the driver: {error}.",
        next_step="make the folder readable and writable for the driver's user",
    )
