"""Records that a batch's source could not turn into rows, on their way past the transform, in the checkpoint's sidecar.

The tasks that read the source store them; once all tasks are done, the driver gathers them, and writes them to the
dead-letter sink as one more shard of the batch. What it gathered is kept until the next batch, for a repair of that
shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
from pyarrow import fs

from delivered.checkpoint import folder
from delivered.contract.source import REJECTED

_FOLDER = "delivered/rejected"
_GATHERED = "gathered.arrow"
_SCHEMA = pa.schema([REJECTED])


def put(location: str, batch: int, start: str, name: str, records: pa.Array) -> None:
    """Store rejected records of a running batch. Runs on an executor; may be called again by another attempt.

    Args:
        start: of the query.
        name: unique among those of a start and batch, the same in every attempt.
        records: as REJECTED holds them.

    Raises:
        Unreachable: the checkpoint cannot be written to from here.
    """
    folder.write(location, f"{_FOLDER}/{batch}/{start}/{name}.arrow", _packed(records), first=False)


def forget(location: str, batch: int, *, decided: bool) -> None:
    """Remove what earlier batches left, and what an undecided run of this batch did. Before the batch's tasks start."""
    filesystem, where = _place(location)

    def remove() -> None:
        for found in filesystem.get_file_info(fs.FileSelector(where, allow_not_found=True)):
            if found.base_name != str(batch) or not decided:
                filesystem.delete_dir(found.path)

    _guarded(location, remove)


def gather(location: str, batch: int, start: str) -> pa.Array | None:
    """All that were stored of a batch, the same at every call after the first; None: none. Runs on the driver."""
    known = folder.read(location, f"{_FOLDER}/{batch}/{_GATHERED}")
    if known is not None:
        return _unpacked([known])
    filesystem, where = _place(location)
    selector = fs.FileSelector(f"{where}/{batch}/{start}", allow_not_found=True)

    def names() -> list[str]:
        files = filesystem.get_file_info(selector)
        return sorted(f.base_name for f in files if f.base_name.endswith(".arrow"))

    stored = [folder.read(location, f"{_FOLDER}/{batch}/{start}/{n}") for n in _guarded(location, names)]
    if not stored:
        return None
    records = _unpacked([s for s in stored if s is not None])
    folder.write(location, f"{_FOLDER}/{batch}/{_GATHERED}", _packed(records), first=False)
    return records


def _place(location: str) -> tuple[fs.FileSystem, str]:
    filesystem, path = folder.open_folder(location)
    return filesystem, f"{path.rstrip('/')}/{_FOLDER}"


def _guarded(location: str, act: Callable[[], folder.T]) -> folder.T:
    try:
        return act()
    except OSError as error:
        raise folder.unusable(location, error) from error


def _packed(records: pa.Array) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([records], schema=_SCHEMA))
    return bytes(sink.getvalue())


def _unpacked(files: Sequence[bytes]) -> pa.Array:
    tables = [pa.ipc.open_stream(data).read_all() for data in files]
    return pa.concat_tables(tables).column(0).combine_chunks()
