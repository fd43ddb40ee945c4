"""The files of a checkpoint: Spark's own, and the sidecar files.

Uses pyarrow's file systems, so it works wherever the driver's Python can read: a local folder, HDFS, an object store.
Layout (Spark 3 and 4): `metadata` holds the query's id; `offsets/N` a version line, a metadata line, then a line per
source, `name:offsets` if it has a name; `commits/N` exists once batch N is done; `state/` once a stateful query has run
a batch.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pyarrow import fs

from delivered.checkpoint.location import from_uri, recall
from delivered.kits.table.store import put, put_first, sync
from delivered.model.errors import DeliveredError, InvariantBroken, Unreachable
from delivered.model.identity import SOURCE
from delivered.model.limits import OFFSETS_BYTES_MAX
from delivered.model.work import CheckpointView, with_format, without_format

T = TypeVar("T")
_HADOOP = "spark.hadoop."
_settings: dict[str, Mapping[str, str]] = {}
"""By location, in this process."""
_STATE_PARTITIONS = "spark.sql.shuffle.partitions"
"""Spark's key in a batch's metadata for the number of state partitions."""
_OWN_LINES = 2
"""Spark's header lines in an offsets file: version, and metadata with a timestamp that replays keep."""


def configure(location: str, conf: Mapping[str, str]) -> None:
    """Spark's configuration, for a process that opens the location before a session says how."""
    _settings[location] = {k.removeprefix(_HADOOP): v for k, v in conf.items() if k.startswith(_HADOOP)}


def open_folder(location: str) -> tuple[fs.FileSystem, str]:
    """File system and path of a checkpoint location in Spark's notation.

    Raises:
        Unreachable: Python has no file system for it, or not with these settings.
    """
    store, settings = recall(location), _settings.get(location)
    try:
        if not (store or settings or location.startswith("hdfs:") or "HADOOP_CONF_DIR" in os.environ):
            return from_uri(location)
        from delivered.checkpoint.location import hadoop_files, open_location, store_of

        return open_location(location, store or store_of(location, {**hadoop_files(), **(settings or {})}))
    except DeliveredError:
        raise
    except Exception as error:
        raise Unreachable("CHECKPOINT_UNREADABLE.LOCATION", location=location, error=error) from error


def read_view(location: str) -> CheckpointView:
    """Read the checkpoint, after Spark logged the offsets of the batch about to run.

    Raises:
        InvariantBroken: the files are not in Spark's format.
        Unreachable: they cannot be read.
    """
    filesystem, path = open_folder(location)
    try:
        incarnation = str(json.loads(_read(filesystem, f"{path}/metadata"))["id"])
        batch = _newest(filesystem, f"{path}/offsets")
        if batch is None:
            raise InvariantBroken("CHECKPOINT_EMPTY", location=location)
        offsets = _offsets(filesystem, f"{path}/offsets/{batch}")
        logged = _newest(filesystem, f"{path}/commits")
    except OSError as error:
        raise _unreadable(location, error) from error
    if len(offsets) > OFFSETS_BYTES_MAX:
        raise InvariantBroken("OFFSETS_TOO_LARGE", batch=batch, bytes=len(offsets), offsets_bytes_max=OFFSETS_BYTES_MAX)
    return CheckpointView(incarnation, batch, offsets, logged)


def repartitions_before(location: str, batch: int) -> int:
    """Number of batches right before `batch` that only repartitioned the query's state: no sink saw them.

    Spark's `repartition` logs a batch without input. Different from a batch that ran, it has the offsets and the
    timestamp of the previous one; and it has another number of partitions.

        Raises:
            Unreachable: the checkpoint cannot be read.
    """
    count = 0
    while _is_repartition(_read_logged(location, batch - count - 2), _read_logged(location, batch - count - 1)):
        count += 1
    return count


def batch_metadata(location: str, batch: int) -> dict[str, Any] | None:
    """What Spark logged with a batch's offsets: `batchWatermarkMs`, `batchTimestampMs`, `conf`; None: it is not logged.

    Raises:
        Unreachable: the checkpoint cannot be read.
    """
    found = _read_logged(location, batch)
    return None if found is None else found[0]


def _read_logged(location: str, batch: int) -> tuple[dict[str, Any], str] | None:
    """Spark's metadata of a batch, and its offsets; None: it is not logged."""
    lines = (read(location, f"offsets/{batch}") or b"").decode("utf-8").split("\n") if batch >= 0 else []
    return (json.loads(lines[1]), "\n".join(lines[_OWN_LINES:]).strip()) if len(lines) > _OWN_LINES else None


def _is_repartition(before: tuple[dict[str, Any], str] | None, after: tuple[dict[str, Any], str] | None) -> bool:
    if before is None or after is None or before[1] != after[1]:
        return False
    confs = [logged[0].get("conf", {}).get(_STATE_PARTITIONS) for logged in (before, after)]
    return before[0].get("batchTimestampMs") == after[0].get("batchTimestampMs") and confs[0] != confs[1]


def newest_offsets(location: str) -> str:
    """The sources' offsets of the newest batch that Spark logged, a line per source; empty: none.

    Raises:
        Unreachable: the checkpoint cannot be read.
    """
    filesystem, path = open_folder(location)
    try:
        batch = _newest(filesystem, f"{path}/offsets")
        return "" if batch is None else _offsets(filesystem, f"{path}/offsets/{batch}")
    except OSError as error:
        raise _unreadable(location, error) from error


def holds_state(location: str) -> bool:
    """Whether the query has state here, of any state store and format.

    Raises:
        Unreachable: the checkpoint cannot be read.
    """
    filesystem, path = open_folder(location)
    try:
        return bool(filesystem.get_file_info(fs.FileSelector(f"{path}/state", allow_not_found=True)))
    except OSError as error:
        raise _unreadable(location, error) from error


def holds(location: str, below: str, suffix: str) -> bool:
    """Whether the folder `below` has a file with this suffix.

    Raises:
        Unreachable: the checkpoint cannot be read.
    """
    filesystem, path = open_folder(location)
    try:
        found = filesystem.get_file_info(fs.FileSelector(f"{path}/{below}", allow_not_found=True))
    except OSError as error:
        raise _unreadable(location, error) from error
    return any(info.base_name.endswith(suffix) for info in found)


def read_logged(location: str) -> tuple[str | None, int | None]:
    """Incarnation and newest batch of a checkpoint whose query is stopped; None, None for a new one.

    Raises:
        Unreachable: the checkpoint cannot be read.
    """
    filesystem, folder = open_folder(location)
    try:
        if filesystem.get_file_info(f"{folder}/metadata").type is not fs.FileType.File:
            return None, None
        incarnation = str(json.loads(_read(filesystem, f"{folder}/metadata"))["id"])
        return incarnation, _newest(filesystem, f"{folder}/offsets")
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(location, error) from error


def started_ms(location: str) -> int | None:
    """When the checkpoint was made, in milliseconds since 1970; None: it is not there, or its store does not say."""
    filesystem, folder = open_folder(location)
    made = filesystem.get_file_info(f"{folder}/metadata").mtime_ns
    return None if made is None else made // 1_000_000


def is_done(location: str, batch: int) -> bool:
    """Whether Spark logged the batch as committed."""
    filesystem, folder = open_folder(location)
    return filesystem.get_file_info(f"{folder}/commits/{batch}").type is fs.FileType.File


def find_damaged(location: str, newest: int) -> tuple[str, int] | None:
    """The log and batch of a file that Spark will read at its next start, and that a power failure has cut off.

    Spark renames its log files into place without fsync: the name may outlast the bytes.

    Args:
        newest: batch in the log of offsets.

    Raises:
        Unreachable: the checkpoint cannot be read.
    """
    filesystem, folder = open_folder(location)
    try:
        committed = _newest(filesystem, f"{folder}/commits")
        for log, batch, lines in (("offsets", newest, _OWN_LINES + 1), ("commits", committed, _OWN_LINES)):
            if batch is not None and not _is_complete(filesystem, f"{folder}/{log}/{batch}", lines):
                return log, batch
    except OSError as error:
        raise _unreadable(location, error) from error
    return None


def _is_complete(filesystem: fs.FileSystem, path: str, lines: int) -> bool:
    """Whether a log file begins as Spark's do and has this many lines, and each object in it ends."""
    with filesystem.open_input_stream(path) as stream:
        found = bytes(stream.read()).split(b"\n")
    if re.fullmatch(rb"v\d+", found[0]) is None or len(found) < lines or not all(found[:lines]):
        return False
    try:
        for line in found:
            if line.startswith(b"{"):
                json.loads(line)
    except ValueError:
        return False
    return True


def find_unwritable(location: str) -> str | None:
    """Why a local folder is not writable; None: it is, or it is remote, and Spark will find out."""
    filesystem, path = open_folder(location)
    if not isinstance(filesystem, fs.LocalFileSystem):
        return None
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is a file"
    try:
        with tempfile.TemporaryFile(dir=folder):  # not os.access: it knows no read-only or pseudo file system
            return None
    except OSError as error:
        return f"{folder} takes no file ({error.strerror})"


def sidecar(file: str, source: str) -> str:
    """A source's sidecar file; for a source without a name, the plain file name."""
    folder, name = file.rsplit("/", 1)
    return file if source == SOURCE else f"{folder}/{source}.{name}"


def read(location: str, file: str) -> bytes | None:
    """A small file of an earlier start, or None.

    Args:
        location: of the checkpoint, in Spark's notation.
        file: path below it.

    Raises:
        Unreachable: the checkpoint cannot be read.
    """
    filesystem, folder = open_folder(location)
    path = f"{folder.rstrip('/')}/{file}"
    try:
        if filesystem.get_file_info(path).type is not fs.FileType.File:
            return None
        with filesystem.open_input_stream(path) as stream:
            return bytes(stream.read())
    except OSError as error:
        raise unusable(location, error) from error


def write(location: str, file: str, data: bytes, *, first: bool) -> None:
    """Write a small file; durable on a local disk.

    Args:
        first: on a local disk, keep an existing file. Otherwise it is replaced.

    Raises:
        Unreachable: the checkpoint cannot be written to.
    """
    filesystem, folder = open_folder(location)
    path = f"{folder.rstrip('/')}/{file}"
    try:
        if isinstance(filesystem, fs.LocalFileSystem):
            (put_first if first else put)(Path(path), data)
            # The process that created the folder may have died before its name was durable.
            sync([Path(path).parent.parent])
            return
        filesystem.create_dir(path.rsplit("/", 1)[0], recursive=True)
        with filesystem.open_output_stream(path) as stream:
            stream.write(data)
    except OSError as error:
        raise unusable(location, error) from error


def read_record(location: str, file: str, what: str, of: Callable[[dict[str, Any]], T], damaged: str) -> T | None:
    """The record in a sidecar file, or None if there is no such file.

    Args:
        what: the record, for errors: "a source's first offsets".
        of: makes the record of its fields.
        damaged: code of the error if the file is damaged.

    Raises:
        InvariantBroken: the file is damaged.
        Refused: a later version of this package wrote it.
        Unreachable: the checkpoint cannot be read.
    """
    text = read(location, file)
    if text is None:
        return None
    try:
        return of(without_format(json.loads(text), what))
    except (ValueError, KeyError, TypeError) as error:
        raise InvariantBroken(damaged, file=file, location=location, text=text[:80]) from error


def write_record(location: str, file: str, record: Mapping[str, Any], *, first: bool = False) -> None:
    """Write a record to a sidecar file, with its format. As `write`."""
    write(location, file, json.dumps(with_format(record), separators=(",", ":")).encode(), first=first)


def _unreadable(location: str, error: Exception) -> Unreachable:
    if isinstance(error, FileNotFoundError):
        return Unreachable("CHECKPOINT_UNREADABLE.ABSENT", location=location, error=error)
    return Unreachable("CHECKPOINT_UNREADABLE.READ", location=location, error=error)


def unusable(location: str, error: OSError) -> Unreachable:
    return Unreachable("CHECKPOINT_UNREADABLE.USE", location=location, error=error)


def _offsets(filesystem: fs.FileSystem, path: str) -> str:
    return "\n".join(_read(filesystem, path).split("\n")[_OWN_LINES:]).strip()


def _read(filesystem: fs.FileSystem, path: str) -> str:
    with filesystem.open_input_stream(path) as stream:
        return bytes(stream.read()).decode("utf-8")


def _newest(filesystem: fs.FileSystem, folder: str) -> int | None:
    infos = filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True))
    return max((int(i.base_name) for i in infos if i.base_name.isdigit()), default=None)
