"""Writes the rows of a shard to Parquet files, one or more per table partition, in bounded memory."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delivered.kits.table.stage import Place
from delivered.kits.table.store import Store

GROUP_ROWS = 1 << 20
GROUP_BYTES = 32 << 20
"""Size of a row group; also bounds the buffered rows of all open files together."""
OPEN_FILES_MAX = 100
"""Maximum open files of a shard; with more parts, some are written to several files."""

_SAMPLE_ROWS = 8_192

Part = TypeVar("Part", bound=Hashable)


@dataclass(frozen=True)
class Written(Generic[Part]):
    """A written and closed file.

    Attributes:
        name: in the store.
        size: in bytes.
        footer: Parquet metadata.
        not_a_number: columns that contain NaN.
    """

    name: str
    size: int
    part: Part
    footer: Any
    not_a_number: frozenset[str]

    @property
    def rows(self) -> int:
        return int(self.footer.num_rows)


@dataclass
class _Open(Generic[Part]):
    """A data file being written."""

    name: str
    part: Part
    schema: pa.Schema
    options: Mapping[str, Any]
    sink: Any
    writer: Any = None
    footers: list[Any] = field(default_factory=list)
    not_a_number: set[str] = field(default_factory=set)
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0

    def flush(self) -> None:
        """Write the buffered rows as one row group."""
        if not self.rows:
            return
        rows = pa.Table.from_batches(self.waiting, self.schema)
        for f in self.schema:
            if pa.types.is_floating(f.type) and pc.any(pc.is_nan(rows[f.name])).as_py():
                self.not_a_number.add(f.name)
        if self.writer is None:
            self.writer = pq.ParquetWriter(
                self.sink, self.schema, use_dictionary=_repeating(rows), metadata_collector=self.footers,
                store_schema=False, **self.options,
            )  # fmt: skip
        self.writer.write_table(rows, row_group_size=GROUP_ROWS)
        self.waiting, self.rows, self.bytes = [], 0, 0

    def close(self) -> int:
        """Return the size of the file in bytes."""
        if self.writer is not None:
            self.writer.close()
        size = int(self.sink.tell())
        self.sink.close()
        return size


class PartFiles(Generic[Part]):
    """The files of one shard. Used by one thread.

    Args:
        open_store: called on the first row.
        schema: of the files.
        options: for Arrow's ParquetWriter.
        folder_of: subfolder for the files of a part, with a trailing slash; empty: the writer's folder.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        place: Place,
        schema: pa.Schema,
        options: Mapping[str, Any],
        folder_of: Callable[[Part], str] = lambda _: "",
    ) -> None:
        self._open_store = open_store
        self._place = place
        self._schema = schema
        self._options = options
        self._folder_of = folder_of
        self._store: Store | None = None
        self._open: OrderedDict[Part, _Open[Part]] = OrderedDict()
        self._waiting = 0
        self._names: list[str] = []
        self._done: list[Written[Part]] = []

    def write(self, part: Part, rows: pa.RecordBatch) -> None:
        """Write rows that have the columns of `schema`."""
        file = self._file(part)
        file.waiting.append(rows)
        file.rows += rows.num_rows
        file.bytes += rows.nbytes
        self._waiting += rows.nbytes
        if file.rows >= GROUP_ROWS:
            self._flush(file)
        while self._waiting >= GROUP_BYTES:
            self._flush(max(self._open.values(), key=lambda f: f.bytes))

    def finish(self) -> Sequence[Written[Part]]:
        """Close all files and make them durable."""
        while self._open:
            self._close(next(iter(self._open)))
        if self._store is not None:
            self._store.sync([f.name for f in self._done])
        return self._done

    def discard(self) -> None:
        for file in self._open.values():
            with contextlib.suppress(Exception):
                file.close()
        self._open.clear()
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.remove(self._names)

    def _file(self, part: Part) -> _Open[Part]:
        if part in self._open:
            self._open.move_to_end(part)
            return self._open[part]
        while len(self._open) >= OPEN_FILES_MAX:
            self._close(next(iter(self._open)))
        if self._store is None:
            self._store = self._open_store()
        name = self._place.name(self._folder_of(part), len(self._names))
        self._store.make_folder(name.rpartition("/")[0])
        self._names.append(name)
        self._open[part] = _Open(name, part, self._schema, self._options, self._store.create(name))
        return self._open[part]

    def _flush(self, file: _Open[Part]) -> None:
        self._waiting -= file.bytes
        file.flush()

    def _close(self, part: Part) -> None:
        file = self._open.pop(part)
        self._flush(file)
        size = file.close()
        [footer] = file.footers
        self._done.append(Written(file.name, size, part, footer, frozenset(file.not_a_number)))


def split(keys: pa.RecordBatch, rows: pa.RecordBatch) -> list[tuple[tuple[Any, ...], pa.RecordBatch]]:
    """Group rows by the values of the key columns; keeps the order within a group."""
    numbered = pa.Table.from_batches([keys]).append_column("\0row", pa.array(np.arange(rows.num_rows)))
    groups = numbered.group_by(keys.schema.names, use_threads=False).aggregate([("\0row", "list")])
    members = groups.column("\0row_list").combine_chunks()
    return [
        (tuple(values.values()), rows.take(members[i].values))
        for i, values in enumerate(groups.select(keys.schema.names).to_pylist())
    ]


def _repeating(rows: pa.Table) -> list[str]:
    """Columns whose first values repeat: dictionary encoding only pays off for these."""
    sample = rows.slice(0, _SAMPLE_ROWS)
    return [
        f.name
        for f in rows.schema
        if not pa.types.is_nested(f.type) and 2 * pc.count_distinct(sample[f.name]).as_py() <= sample.num_rows
    ]
