"""What the tasks of a batch leave for its driver, as files in the checkpoint's sidecar: rows that were rejected before
the transform, which go past it.

What the driver gathered once all tasks were done is kept until the next batch, so that a repair finds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyarrow import fs

from delivered.checkpoint import folder

_FOLDER = "delivered/rejected"
_GATHERED = "gathered.arrow"


def put(location: str, batch: int, start: str, name: str, data: bytes) -> None:
    """Store a task's file of a running batch. Runs on an executor; may be called again by another attempt.

    Args:
        start: of the query.
        name: unique among those of a start and batch, the same in every attempt.

    Raises:
        Unreachable: the checkpoint cannot be written to from here.
    """
    folder.write(location, f"{_FOLDER}/{batch}/{start}/{name}.arrow", data, first=False)


def forget(location: str, batch: int, *, decided: bool) -> None:
    """Remove what earlier batches left, and what an undecided run of this batch did. Before the batch's tasks start."""
    filesystem, where = _place(location)

    def remove() -> None:
        for found in filesystem.get_file_info(fs.FileSelector(where, allow_not_found=True)):
            if found.base_name != str(batch) or not decided:
                filesystem.delete_dir(found.path)

    _guarded(location, remove)


def gather(location: str, batch: int, start: str, join: Callable[[Sequence[bytes]], bytes]) -> bytes | None:
    """A batch's files, joined; the same at every call after the first. None: there are none. Runs on the driver."""
    known = folder.read(location, f"{_FOLDER}/{batch}/{_GATHERED}")
    if known is not None:
        return known
    filesystem, where = _place(location)
    selector = fs.FileSelector(f"{where}/{batch}/{start}", allow_not_found=True)

    def names() -> list[str]:
        files = filesystem.get_file_info(selector)
        return sorted(f.base_name for f in files if f.base_name.endswith(".arrow"))

    stored = [folder.read(location, f"{_FOLDER}/{batch}/{start}/{n}") for n in _guarded(location, names)]
    if not stored:
        return None
    data = join([s for s in stored if s is not None])
    folder.write(location, f"{_FOLDER}/{batch}/{_GATHERED}", data, first=False)
    return data


def _place(location: str) -> tuple[fs.FileSystem, str]:
    filesystem, path = folder.open_folder(location)
    return filesystem, f"{path.rstrip('/')}/{_FOLDER}"


def _guarded(location: str, act: Callable[[], folder.T]) -> folder.T:
    try:
        return act()
    except OSError as error:
        raise folder.unusable(location, error) from error
