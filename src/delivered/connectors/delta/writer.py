"""A task's side: Parquet files in the table's folder, which the log names later (exactly_once) or at once."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from delivered.connectors.delta import stage, statistics, types
from delivered.connectors.delta.client import Store, explained, require_table
from delivered.connectors.delta.commit import Change, DataFile, commit
from delivered.connectors.delta.options import DeltaOptions
from delivered.connectors.delta.target import required, same_columns
from delivered.model.columns import fitted
from delivered.model.errors import BadRecord, InvariantBroken, OutcomeUnknown
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.model.outcome import Failed, Ok, Unknown

GROUP_ROWS = 1 << 20
GROUP_BYTES = 32 << 20
"""A row group is written when so much waits for it; what waits in all open files together is bounded by it too."""
OPEN_FILES_MAX = 100
"""Files of one shard that are open at once; a shard with more partitions writes some of them in several files."""

_SAMPLE_ROWS = 8_192


@dataclass
class _Open:
    """A data file being written."""

    name: str
    values: dict[str, str | None]
    schema: pa.Schema
    compression: str
    sink: Any
    writer: Any = None
    footers: list[Any] = field(default_factory=list)
    not_a_number: set[str] = field(default_factory=set)
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0

    def flush(self) -> None:
        """Write what waits as one row group."""
        if not self.rows:
            return
        rows = pa.Table.from_batches(self.waiting, self.schema)
        for f in self.schema:
            if pa.types.is_floating(f.type) and pc.any(pc.is_nan(rows[f.name])).as_py():
                self.not_a_number.add(f.name)
        if self.writer is None:
            self.writer = pq.ParquetWriter(
                self.sink, self.schema, compression=self.compression, use_dictionary=_repeating(rows),
                metadata_collector=self.footers, store_schema=False,
            )  # fmt: skip
        self.writer.write_table(rows, row_group_size=GROUP_ROWS)
        self.waiting, self.rows, self.bytes = [], 0, 0

    def close(self) -> int:
        """Returns the size of the file in bytes."""
        if self.writer is not None:
            self.writer.close()
        size = int(self.sink.tell())
        self.sink.close()
        return size


class FileWriter:
    """The files of one shard. Used by one thread."""

    def __init__(self, options: DeltaOptions, work: Work, schema: pa.Schema, direct: bool) -> None:
        self._options = options
        self._schema = types.canonical_schema(schema)
        self._place = stage.new_place(work, direct)
        self._partitions = [name for name in options.partition_by or () if name in self._schema.names]
        self._stored = pa.schema([f for f in self._schema if f.name not in self._partitions])
        self._store: Store | None = None
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._waiting = 0
        self._number = 0
        self._done: list[DataFile] = []
        self._names: list[str] = []

    def write(self, batch: pa.RecordBatch) -> None:
        batch = fitted(batch, self._schema)
        for values, rows in self._split(batch):
            file = self._file(values)
            file.waiting.append(rows)
            file.rows += rows.num_rows
            file.bytes += rows.nbytes
            self._waiting += rows.nbytes
            if file.rows >= GROUP_ROWS:
                self._flush(file)
        while self._waiting >= GROUP_BYTES:
            self._flush(max(self._open.values(), key=lambda f: f.bytes))

    def finish(self) -> list[DataFile]:
        """Close all files, and make them durable."""
        while self._open:
            self._close(next(iter(self._open)))
        if self._store is not None:
            self._store.sync([f.path for f in self._done])
        return self._done

    def discard(self) -> None:
        for file in self._open.values():
            with contextlib.suppress(Exception):
                file.close()
        self._open.clear()
        if self._store is not None:
            with contextlib.suppress(Exception):
                self._store.remove(self._names)

    def _split(self, batch: pa.RecordBatch) -> list[tuple[dict[str, str | None], pa.RecordBatch]]:
        if not self._partitions:
            return [({}, batch)]
        keys = pa.Table.from_batches([batch.select(self._partitions)]).append_column(
            "\0row", pa.array(np.arange(batch.num_rows))
        )
        groups = keys.group_by(self._partitions, use_threads=False).aggregate([("\0row", "list")])
        stored = batch.select(self._stored.names)
        members = groups.column("\0row_list").combine_chunks()
        return [
            ({name: _text(name, value) for name, value in values.items()}, stored.take(members[i].values))
            for i, values in enumerate(groups.select(self._partitions).to_pylist())
        ]

    def _file(self, values: dict[str, str | None]) -> _Open:
        folder = stage.partition_folder(values)
        if folder in self._open:
            self._open.move_to_end(folder)
            return self._open[folder]
        while len(self._open) >= OPEN_FILES_MAX:
            self._close(next(iter(self._open)))
        if self._store is None:
            self._store = Store(self._options)
        name = self._place.name(folder, self._number)
        self._number += 1
        self._store.make_folder(name.rpartition("/")[0])
        self._names.append(name)
        self._open[folder] = _Open(name, values, self._stored, self._options.compression, self._store.create(name))
        return self._open[folder]

    def _flush(self, file: _Open) -> None:
        self._waiting -= file.bytes
        file.flush()

    def _close(self, folder: str) -> None:
        file = self._open.pop(folder)
        self._flush(file)
        size = file.close()
        [footer] = file.footers
        said = statistics.of_file(footer, file.not_a_number)
        self._done.append(DataFile(file.name, size, footer.num_rows, file.values, said, time.time_ns() // 1_000_000))


class StagingWriter:
    """exactly_once: files that nobody sees before the driver's commit names them."""

    def __init__(self, options: DeltaOptions, work: Work, schema: pa.Schema) -> None:
        self._options = options
        self._work = work
        self._files = FileWriter(options, work, schema, direct=False)

    def stage(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            with _as_ours(self._options, self._work):
                self._files.write(batch)

    def prepare(self, fingerprint: Fingerprint) -> dict[str, Any]:
        with _as_ours(self._options, self._work):
            done = self._files.finish()
        _all_rows(self._work, done, fingerprint)
        return {"files": [f.to_json() for f in done]} if done else {}

    def abort(self) -> None:
        self._files.discard()


class DirectWriter:
    """at_least_once, at_most_once: the task commits its files itself. A file named twice in the log is in once."""

    def __init__(self, options: DeltaOptions, work: Work, guarantee: Guarantee, schema: pa.Schema) -> None:
        self._options = options
        self._work = work
        self._guarantee = guarantee
        self._schema = types.canonical_schema(schema)
        self._files = FileWriter(options, work, schema, direct=True)
        self._committed = False

    def stage(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            with _as_ours(self._options, self._work):
                self._files.write(batch)

    def prepare(self, fingerprint: Fingerprint) -> dict[str, Any]:
        with _as_ours(self._options, self._work):
            done = self._files.finish()
        _all_rows(self._work, done, fingerprint)
        if not done:
            return {}
        table = require_table(self._options)
        same_columns(self._options, table, self._schema)
        required(self._options, table, done)
        self._committed = True  # from here on the files may be seen: they are not taken away any more
        match commit(self._options, table, Change(adds=done)):
            case Ok():
                return {}
            case Failed(reason):
                self._committed = False
                raise InvariantBroken(
                    "COMMIT_FAILED",
                    f"Shard {self._work.shard} of batch {self._work.batch} was not committed: {reason}. Nothing of it "
                    "is visible.",
                    next_step="start the pipeline again; the batch runs again",
                )
            case Unknown(reason):
                if self._guarantee is Guarantee.AT_MOST_ONCE:
                    return {"given_up": fingerprint.count}
                raise OutcomeUnknown(
                    "COMMIT_UNKNOWN",
                    f"Whether shard {self._work.shard} of batch {self._work.batch} is visible cannot be told: "
                    f"{reason}. It is sent again, and may then be in twice.",
                    next_step="start the pipeline again when the store answers",
                )

    def abort(self) -> None:
        if not self._committed:
            self._files.discard()


@contextlib.contextmanager
def _as_ours(options: DeltaOptions, work: Work) -> Any:
    with explained(options):
        try:
            yield
        except FileNotFoundError:
            raise InvariantBroken(
                "STAGED_FILE_GONE",
                f"A file of shard {work.shard} of batch {work.batch} was taken away while the task wrote it: a later "
                "start of the pipeline swept what this one left. Nothing of the shard is visible.",
                next_step="nothing, if the later start is running; else start the pipeline again",
            ) from None


def _all_rows(work: Work, done: list[DataFile], fingerprint: Fingerprint) -> None:
    rows = sum(f.rows for f in done)
    if rows != fingerprint.count:
        raise InvariantBroken(
            "ROWS_DIFFER",
            f"Shard {work.shard} of batch {work.batch}: {rows} rows are in its files, the fingerprint counts "
            f"{fingerprint.count}. Nothing of the shard is visible.",
            next_step="start the pipeline again; the batch runs again",
        )


def _repeating(rows: pa.Table) -> list[str]:
    """Columns whose first values repeat: a dictionary pays for these, and costs more than all else for the others."""
    sample = rows.slice(0, _SAMPLE_ROWS)
    return [
        f.name
        for f in rows.schema
        if not pa.types.is_nested(f.type) and 2 * pc.count_distinct(sample[f.name]).as_py() <= sample.num_rows
    ]


def _text(name: str, value: Any) -> str | None:
    """A partition's value as the log writes it."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dt.date):
        return value.isoformat()
    text = str(value)
    if not text:
        raise BadRecord(
            "PARTITION_EMPTY",
            f"Column {name!r} partitions the table, and a row holds an empty text in it: Delta would read it back as "
            "NULL.",
            next_step=f"replace it, for instance: when({name} = '', 'none').otherwise({name})",
        )
    return text
