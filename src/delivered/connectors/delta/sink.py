"""The sink `delivered_delta`: Parquet files in the table's folder, committed later (exactly_once) or at once; a scan.

A file's statistics, read from its footer, are stored in the table's log, so that readers can skip it. Bounds are exact
or wider, never narrower, and exist for all columns or none: if only some columns have bounds, deltalake 1.6.6 skips
rows of the file when it filters by others. There are none if a column could mislead: floating point with NaN (which no
bound covers), decimals beyond 15 digits (readers convert them to floating point).
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from delivered.connectors.delta import DeltaOptions
from delivered.connectors.delta.client import (
    DataFile,
    StagedFiles,
    Store,
    TableChange,
    commit,
    explained,
    open_table,
    require_table,
)
from delivered.connectors.delta.target import (
    TYPES,
    Part,
    active_files,
    filled,
    open_file,
    part_folder,
    required,
    same_columns,
    table_schema,
    text,
    unstorable_parts,
)
from delivered.contract.sink import BoundedScan, Changes, Parts, Writer
from delivered.contract.source import Offsets, Slice
from delivered.kits.sql.merge import check_rows
from delivered.kits.table import shard, target
from delivered.kits.table import store as storage
from delivered.kits.table.changes import Added, FileCommit, added_since
from delivered.kits.table.shard import PartFiles, shard_writer, split
from delivered.kits.table.target import FileTableSink, Nowhere, but_missing, trial_work, unwritable
from delivered.model.capability import Commit, Guarantee, SinkCapability
from delivered.model.errors import Refused
from delivered.model.identity import Work
from delivered.model.limits import LEDGER_HISTORY_BATCHES
from delivered.model.rows import check_storable, fitted
from delivered.model.work import Outcome


@dataclass(frozen=True)
class DeltaSink(FileTableSink):
    options: DeltaOptions

    types = TYPES
    parts = Parts(
        __package__,
        check="target:check",
        ready="target:ready",
        open_table="client:open_table",
        compare="target:compare",
        check_created="target:check_created",
        unstorable_parts="target:unstorable_parts",
        writer="sink:writer",
        trial="sink:DeltaTrial",
        scan="sink:DeltaScan",
        store="store:DeltaStore",
        committer="store:DeltaCommitter",
    )

    def capability(self) -> SinkCapability:
        return SinkCapability(
            system="delta",
            commit=Commit.ONE_TRANSACTION,
            mechanism="application transaction in the table's log",
            stage="Parquet files in the table's folder, not yet in its log",
            prepare="files closed and durable, with their statistics",
            decide="one version of the table's log: files of all shards, batch and ledger record",
            apply="nothing to do; the decision made the rows visible",
            send="one commit of the log per shard, visible when it completes",
            batch_atomic=True,
            validates=True,
            write=self.options.write,
            adds_columns=self.options.merge_schema,
            no_position=self.options.write.no_position,
            local=self.options.local,
            assumes=(
                "the table's folder is backed up and restored as one, with _delivered in it",
                "the object store creates a log version only if it does not exist (S3 conditional writes, Azure, GCS)",
            )
            if not self.options.local
            else ("the table's folder is backed up and restored as one, with _delivered in it",),
            limits=(
                f"decisions of the last {LEDGER_HISTORY_BATCHES} batches are kept; the newest one permanently",
                "each batch adds a version of the table and a file per shard: run OPTIMIZE regularly",
            ),
        )


def writer(options: DeltaOptions, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
    exactly_once = guarantee is Guarantee.EXACTLY_ONCE
    return shard_writer(work, guarantee, DeltaFiles(options, work, schema, not exactly_once, Required(options)))


class DeltaFiles:
    """See `delivered.kits.table.shard.ShardFiles`. Adding a file to the log twice has no effect.

    Args:
        requires: checks nulls within the columns of rows.
        into: what keeps the files; default: the table's folder.
    """

    def __init__(
        self,
        options: DeltaOptions,
        work: Work,
        schema: pa.Schema,
        direct: bool,
        requires: Required | None = None,
        into: Callable[[], storage.Store] | None = None,
    ) -> None:
        self._options = options
        self._requires = requires
        self._schema = TYPES.canonical_schema(schema)
        # An upsert's rows are staged unchanged: the driver writes the table's files.
        partitions = () if options.write.upserts else options.partition_by or ()
        self._partitions = [name for name in partitions if name in self._schema.names]
        self._stored = pa.schema([f for f in self._schema if f.name not in self._partitions])
        self._place = shard.new_place(work, direct)
        self._files: PartFiles[Part] = PartFiles(
            into or partial(Store, options), self._place, self._stored, {"compression": options.compression},
            part_folder,
        )  # fmt: skip
        self._done: list[DataFile] = []
        self._table: Any = None

    def write(self, batch: pa.RecordBatch) -> None:
        TYPES.check_values(batch)
        check_storable(TYPES.system, batch, unstorable_parts(self._options.partition_by or (), batch))
        batch = fitted(batch, self._schema)
        check_rows(self._options.write, batch)
        if self._requires is not None:
            self._requires.check(batch)
        with but_missing(explained(self._options)):
            if not self._partitions:
                self._files.write((), batch)
                return
            for values, rows in split(batch.select(self._partitions), batch.select(self._stored.names)):
                part = tuple((n, text(v)) for n, v in zip(self._partitions, values, strict=True))
                self._files.write(part, rows)

    def finish(self) -> int:
        now = time.time_ns() // 1_000_000
        with but_missing(explained(self._options)):
            self._done = [
                DataFile(f.name, f.size, f.rows, dict(f.part), file_statistics(f.footer, f.not_a_number), now)
                for f in self._files.finish()
            ]
        return sum(f.rows for f in self._done)

    @property
    def done(self) -> list[DataFile]:
        """After `finish`."""
        return self._done

    @property
    def stem(self) -> str:
        """Common stem of its file names."""
        return self._place.stem

    def handle(self) -> StagedFiles | None:
        return StagedFiles(tuple(self._done)) if self._done else None

    def check(self) -> None:
        self._table = require_table(self._options)
        same_columns(self._options, self._table, self._schema)
        required(self._options, self._table, self._done)

    def commit(self) -> Outcome[None]:
        return commit(self._options, self._table, TableChange(adds=self._done))

    def discard(self) -> None:
        self._files.discard()


class Required:
    """Reads the table when rows have the first null that it may refuse."""

    def __init__(self, options: DeltaOptions) -> None:
        self._options = options
        self._table: pa.Schema | None = None

    def check(self, batch: pa.RecordBatch) -> None:
        """Raises BadRecord for a null within a column. Nulls of columns themselves are found by the files' statistics
        when they are committed, which reads the table anyway."""
        if target.has_nested_nulls(batch):
            target.check(self._options.where, batch, self._within(batch, [f.with_nullable(True) for f in self._schema]))

    def reasons(self, batch: pa.RecordBatch) -> pa.Array | None:
        """For each row, why the table refuses a null of it."""
        if not any(c.null_count for c in batch.columns) and not target.has_nested_nulls(batch):
            return None
        return self._within(batch, list(self._schema))

    @property
    def _schema(self) -> pa.Schema:
        if self._table is None:
            table = open_table(self._options)  # none yet: the commit says so
            self._table = pa.schema([] if table is None else table.schema().to_arrow())
        return self._table

    def _within(self, batch: pa.RecordBatch, fields: Sequence[pa.Field]) -> pa.Array | None:
        return target.unfilled(self._options.write, pa.schema(fields), batch)


COLUMNS_MAX = 32
"""Columns with bounds, Delta's default for `delta.dataSkippingNumIndexedCols`."""

TEXT_MAX = 32

STATISTICS_BYTES_MAX = 4_000
"""Maximum size of a file's statistics, which are part of the size-limited decision."""

_HIGHEST = "\U0010ffff"


def file_statistics(metadata: Any, not_a_number: Collection[str]) -> str:
    """The statistics of a Parquet file from its footer, as Delta's JSON.

    Args:
        not_a_number: columns that contain NaN.
    """
    bounds: dict[str, tuple[Any, Any]] = {}
    nulls: dict[str, int] = {}
    complete = metadata.num_columns <= COLUMNS_MAX and not not_a_number
    for index in range(metadata.num_columns):
        column = metadata.schema.column(index)
        if "." in column.path or column.max_repetition_level:
            continue
        groups = [metadata.row_group(i).column(index).statistics for i in range(metadata.num_row_groups)]
        if any(s is None or not s.has_null_count for s in groups):
            complete = False
            continue
        nulls[column.path] = sum(s.null_count for s in groups)
        filled = [s for s in groups if s.num_values]
        if column.physical_type == "BYTE_ARRAY" and column.logical_type.type != "STRING":
            continue  # binary has no bounds in Delta
        if filled:
            limits = _column_bounds(filled)
            complete = complete and limits is not None
            if limits is not None:
                bounds[column.path] = limits
    statistics: dict[str, Any] = {"numRecords": metadata.num_rows, "nullCount": nulls}
    if complete and bounds:
        statistics |= {"minValues": {k: low for k, (low, _) in bounds.items()}}
        statistics |= {"maxValues": {k: high for k, (_, high) in bounds.items()}}
    text = json.dumps(statistics, separators=(",", ":"), ensure_ascii=False)
    while len(text.encode()) > STATISTICS_BYTES_MAX and len(statistics) > 1:
        statistics.popitem()
        statistics.pop("minValues", None)
        text = json.dumps(statistics, separators=(",", ":"), ensure_ascii=False)
    return text


def _column_bounds(groups: Sequence[Any]) -> tuple[Any, Any] | None:
    """Of a column, from its statistics in all row groups that have values."""
    if not all(s.has_min_max for s in groups):
        return None
    try:
        return _bounds(min(s.min for s in groups), max(s.max for s in groups))
    except OverflowError:  # a date or time outside Python's years
        return None


def _bounds(low: Any, high: Any) -> tuple[Any, Any] | None:
    if isinstance(low, bool | int):
        return low, high
    if isinstance(low, float):
        return (low, high) if math.isfinite(low) and math.isfinite(high) else None
    if isinstance(low, str):
        return low[:TEXT_MAX], high if len(high) <= TEXT_MAX else high[:TEXT_MAX] + _HIGHEST
    if isinstance(low, dt.datetime):
        if high.year >= 9999:
            return None
        return _milliseconds(low), _milliseconds(high + dt.timedelta(microseconds=-high.microsecond % 1000))
    if isinstance(low, dt.date):
        return low.isoformat(), high.isoformat()
    if isinstance(low, decimal.Decimal) and max(len(d.as_tuple().digits) for d in (low, high)) <= 15:
        return float(low), float(high)
    return None


def _milliseconds(value: dt.datetime) -> str:
    """Truncated to milliseconds, as the client writes them; in UTC if zoned."""
    plain = value.replace(tzinfo=None) if value.tzinfo is None else value.astimezone(dt.UTC).replace(tzinfo=None)
    return plain.isoformat(" " if value.tzinfo is None else "T", "milliseconds") + ("" if value.tzinfo is None else "Z")


class DeltaTrial:
    """See `delivered.kits.table.target.Trial`."""

    def __init__(self, options: DeltaOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = TYPES.canonical_schema(schema)
        self._required = Required(options)

    def refused(self, batch: pa.RecordBatch) -> pa.Array | None:
        return unwritable(batch, self._write, self._required.reasons(fitted(batch, self._schema)))

    def _write(self, rows: pa.RecordBatch) -> None:
        files = DeltaFiles(self._options.appending, trial_work(), self._schema, direct=False, into=Nowhere)
        try:
            files.write(rows)
            files.finish()
        finally:
            files.discard()


# A scan of the table's rows, between versions of its log.

BATCH_ROWS = 65_536


@dataclass(frozen=True)
class DeltaScan(BoundedScan):
    """See `delivered.contract.sink.BoundedScan`. Its files must not be vacuumed meanwhile."""

    options: DeltaOptions

    def schema(self) -> pa.Schema:
        return table_schema(require_table(self.options))

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"version": v}: reads what later versions added.

        Raises:
            UsageError: the table has deletion vectors.
            Refused: what later versions added cannot be distinguished from older rows.
        """
        table = require_table(self.options)
        if until is not None and not _same(table, until):
            return []
        files: Sequence[Mapping[str, Any]]
        if since is not None and _same(table, since):
            added = self._added(since, table.version() if until is None else int(until["version"]))
            if added.mixed:
                raise Refused("POSITION_LOST", where=self.options.path, position=since, reason=added.mixed)
            files = list(added.files.values())
        else:
            files = active_files(
                self.options, table if until is None else require_table(self.options, until["version"])
            )
        schema = table_schema(table).serialize().to_pybytes()
        return [
            Slice({"files": group, "schema": schema}) for group in storage.packed(files, lambda file: int(file["size"]))
        ]

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        schema = pa.ipc.read_schema(pa.py_buffer(piece.data["schema"]))
        with explained(self.options):
            store = Store(self.options)
            for file in piece.data["files"]:
                with open_file(store, file["path"]) as source:
                    for batch in pq.ParquetFile(source, pre_buffer=False).iter_batches(BATCH_ROWS, use_threads=False):
                        yield filled(batch, schema, file["partition"])

    def position(self) -> Offsets | None:
        """None: the table does not exist yet."""
        table = open_table(self.options) if self.options.write.only_adds else None
        return None if table is None else {"version": table.version(), "table": str(table.metadata().id)}

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:
        """By the log alone, which says what happened since."""
        del before
        table = open_table(self.options)
        if table is None or not _same(table, position):
            return Changes.deleted(f"the table at {self.options.path}", recreated=table is not None)
        if table.version() < int(position["version"]):
            back = f"the table at {self.options.path} is at version {table.version()}, and was at {position['version']}"
            return Changes(altered=(back,), continues=False)
        return self._added(position, table.version()).changes()

    def _added(self, since: Offsets, until: int) -> Added[dict[str, Any]]:
        """By the versions after `since`, up to `until`."""
        store, first = Store(self.options), int(since["version"]) + 1
        with explained(self.options):
            texts = [(version, store.get(f"_delta_log/{version:020d}.json")) for version in range(first, until + 1)]
            if missing := [version for version, text in texts if text is None]:
                return Added(mixed=f"versions {missing[0]} to {missing[-1]} are no longer in its log")
            added = added_since(c for version, text in texts if text is not None for c in _commits(version, text))
            if added.compacted:
                there = store.files("")
                added.keep_existing(there.__contains__)
        if any(file["deletions"] for file in added.files.values()):
            added.mixed = "rows that were added since were deleted by deletion vectors"
        return added


def _same(table: Any, position: Offsets) -> bool:
    known = str(table.metadata().id)
    return bool(position.get("table", known) == known)


def _commits(version: int, text: bytes) -> Iterator[FileCommit[dict[str, Any]]]:
    """A version of the log. Compaction keeps partitions apart, so each is a commit of its own."""
    actions = [json.loads(line) for line in text.splitlines() if line.strip()]
    adds = [a["add"] for a in actions if "add" in a]
    removes = [a["remove"] for a in actions if "remove" in a]
    info: Mapping[str, Any] = next((a["commitInfo"] for a in actions if "commitInfo" in a), {})
    metrics = info.get("operationMetrics") or {}
    deleted = metrics.get("num_deleted_rows", metrics.get("numDeletedRows"))
    what = info.get("operation", "") + (f", {deleted} rows deleted" if deleted is not None else "")
    same_rows = not any(a.get("dataChange", True) for a in (*adds, *removes))
    parts: list[Any] = [None]
    if same_rows and all(r.get("partitionValues") is not None for r in removes):
        parts = [dict(part) for part in {tuple(sorted(a["partitionValues"].items())) for a in (*adds, *removes)}]
    for part in parts:
        yield FileCommit(
            f"version {version} ({what})",
            {unquote(a["path"]): _file(a) for a in adds if part in (None, a["partitionValues"])},
            [unquote(r["path"]) for r in removes if part in (None, r.get("partitionValues"))],
            same_rows,
        )


def _file(add: Mapping[str, Any]) -> dict[str, Any]:
    """As `active_files`, but for partition values, which are texts."""
    return {
        "path": unquote(add["path"]),
        "size": int(add["size"]),
        "partition": {name: value or None for name, value in (add.get("partitionValues") or {}).items()},  # "" is null
        "deletions": add.get("deletionVector") is not None,
    }
