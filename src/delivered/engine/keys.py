"""Keys that occur twice, in a shard: refused by output mode update, and dropped by a dedup with a key table.

Both see all rows of the shard first. What they keep of them until then is in a temporary file beyond some size.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from delivered.contract.sink import KeyMemory
from delivered.engine import Member, Sinks
from delivered.model.errors import UsageError
from delivered.model.fingerprint import U64, record_hashes
from delivered.model.rows import Rows, plain_rows
from delivered.model.step import Moment, StepId, reach

_SEED, _OTHER = 0x64656C69, 0x76657265
KEY, TIME, AT, TIE = (f"__delivered_seen_{n}" for n in ("key", "time", "at", "tie"))
"""Helper columns: the key's hash, null: no duplicates; the time in microseconds; among duplicates of equal time, the
lowest (`AT`, `TIE`) comes first."""
HELPERS = (KEY, TIME, AT, TIE)
HELPER_TYPES = {KEY: pa.binary(), TIME: pa.int64(), AT: pa.int64(), TIE: pa.int64()}
SPILL_BYTES = 32 << 20
"""Rows beyond this size are spilled to disk."""

Int64 = np.ndarray[tuple[int], np.dtype[np.int64]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]


_TIME_MAX = (1 << 63) - 1
"""In microseconds: what a database stores as a number."""


def check_keys_unique(sinks: Sinks, batches: Iterator[Rows]) -> Iterator[Rows]:
    """Pass the rows through unchanged. The sink detects a key in two shards.

    Memory: 16 bytes per row of the shard, and at its end 60 (measured: 279 MiB for 5 million rows). The keys themselves
    are in a temporary file, which is read only to name a repeated one.

    Raises:
        UsageError: two rows have the same key, and there is no version.
    """
    modes = [(m, m.sink.capability().write) for m in sinks.members]
    with ExitStack() as files:
        seen = [_Keys(m, mode.keys, files) for m, mode in modes if mode.upserts and mode.version is None]
        for rows in batches:
            for keys in seen:
                keys.add(rows.good)
            yield rows
        for keys in seen:
            keys.check()


def drop_seen(
    memory: KeyMemory, batch: int, within_us: int, rows: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The rows that duplicate no row of earlier batches or this one, without the helper columns.

    Of one partition of a batch, which holds all records of its keys; all of them are read first. So which duplicate is
    admitted depends on content, not on order of arrival: every attempt and every rerun of the batch admits and records
    the same rows.

    1  read all rows; look up which of their keys earlier batches delivered
    2  dedup.note   the admitted ones are recorded durably, but do not count yet
    3  pass them on
    """
    with contextlib.closing(_SpilledRows()) as waiting:
        for part in rows:
            waiting.add(part)
        keys, codes = waiting.keys()
        chosen = _admit(codes, waiting.columns(), memory.known(batch, keys), keys, within_us)
        reach(StepId.DEDUP_NOTE, Moment.BEFORE, batch=batch)
        named = [keys[c] for c in chosen.codes]
        # The greatest time has no end: it is recognized all the same, as the time is at most `within_us` before that.
        memory.note(batch, named, chosen.times, [min(t + within_us, _TIME_MAX) for t in chosen.times])
        reach(StepId.DEDUP_NOTE, Moment.AFTER, batch=batch)
        yield from waiting.give(chosen.gets_in)


class _Keys:
    """The keys of one shard for one sink."""

    def __init__(self, member: Member, names: tuple[str, ...], files: ExitStack) -> None:
        self._member, self._names, self._files = member, list(names), files
        self._hashes: list[tuple[U64, U64]] = []
        self._file: Any = None
        self._writer: Any = None

    def add(self, batch: pa.RecordBatch) -> None:
        rows = self._member.route(batch) if self._member.route is not None else batch
        keys = self._member.sink.records(rows.select(self._names)).select(self._names)
        if self._writer is None:
            self._file = self._files.enter_context(tempfile.TemporaryFile(prefix="delivered-keys-"))  # noqa: SIM115
            self._writer = pa.ipc.new_stream(self._file, keys.schema)
        self._writer.write_batch(keys)
        self._hashes.append((record_hashes(keys, _SEED), record_hashes(keys, _OTHER)))

    def check(self) -> None:
        """Raises UsageError: a key is there twice."""
        if self._writer is None:
            return
        total = sum(len(first) for first, _ in self._hashes)
        hashes = np.empty(total, dtype=[("one", np.uint64), ("other", np.uint64)])
        at = 0
        for first, second in self._hashes:
            here = slice(at, at + len(first))
            hashes["one"][here], hashes["other"][here] = first, second
            at += len(first)
        self._hashes.clear()
        order = np.argsort(hashes["one"])  # of the few that are equal, both hashes decide
        sorted_hashes = hashes["one"][order]
        equal = np.append(sorted_hashes[1:] == sorted_hashes[:-1], False)
        suspects = hashes[order[equal | np.roll(equal, 1)]]
        pairs, counts = np.unique(suspects, return_counts=True)
        if (counts > 1).any():
            self._refuse(pairs[counts > 1][0])

    def _refuse(self, hashes: Any) -> None:
        """Name the key with these hashes."""
        self._writer.close()
        self._file.seek(0)
        shown, count = "", 0
        for keys in pa.ipc.open_stream(self._file):
            same = (record_hashes(keys, _SEED) == hashes["one"]) & (record_hashes(keys, _OTHER) == hashes["other"])
            rows = plain_rows(keys.filter(pa.array(same)))
            count += len(rows)
            shown = shown or ", ".join(f"{k} = {str(v)[:60]!r}" for row in rows[:1] for k, v in row.items())
        raise UsageError("KEY_TWICE", count=count, key=shown, sink=self._member.name)


@dataclass(frozen=True)
class _Admitted:
    """
    Attributes:
        gets_in: per row, in order of arrival.
        codes, times: of the records to remember.
    """

    gets_in: Flags
    codes: list[int]
    times: list[int]


@dataclass(frozen=True)
class _Columns:
    time: Int64
    timeless: Flags
    at: Int64
    tie: Int64


def _admit(
    codes: Int64, columns: _Columns, known: dict[bytes, list[int]], keys: Sequence[bytes], within_us: int
) -> _Admitted:
    """For each key, in time order: a record is admitted if no remembered or previously admitted one is within
    `within_us` of it. A record without a time is admitted if it is the only one of its key."""
    gets_in = codes < 0
    order = np.lexsort((columns.tie, columns.at, columns.time, columns.timeless, codes))
    order = order[codes[order] >= 0]
    sorted_codes = codes[order]
    starts = np.flatnonzero(np.r_[True, sorted_codes[1:] != sorted_codes[:-1]]) if len(order) else np.array([], int)
    ends = np.r_[starts[1:], len(order)].astype(int)
    again = np.array([k in known for k in keys], bool)
    alone = (ends - starts == 1) & ~again[sorted_codes[starts]] if len(starts) else np.array([], bool)
    single = order[starts[alone]]
    gets_in[single] = True
    single = single[~columns.timeless[single]]
    found_codes, found_times = codes[single].tolist(), columns.time[single].tolist()
    for start, end in zip(starts[~alone].tolist(), ends[~alone].tolist(), strict=True):
        code = int(sorted_codes[start])
        before = [until - within_us for until in known.get(keys[code], ())]
        let_in: list[int] = []
        for row in order[start:end].tolist():
            if columns.timeless[row]:
                if before or let_in or row != order[start]:
                    continue
            else:
                time = int(columns.time[row])
                if (let_in and time - let_in[-1] <= within_us) or any(abs(time - b) <= within_us for b in before):
                    continue
                let_in.append(time)
            gets_in[row] = True
        found_codes += [code] * len(let_in)
        found_times += let_in
    return _Admitted(gets_in, found_codes, found_times)


class _SpilledRows:
    """Rows of one partition, spilled beyond `SPILL_BYTES`; their helper columns in memory, about 60 bytes per row."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(SPILL_BYTES)  # noqa: SIM115
        self._writer: pa.RecordBatchStreamWriter | None = None
        self._helpers: list[pa.RecordBatch] = []

    def add(self, batch: pa.RecordBatch) -> None:
        self._helpers.append(batch.select(list(HELPERS)))
        batch = batch.drop_columns(list(HELPERS))
        if self._writer is None:
            self._writer = pa.ipc.new_stream(self._file, batch.schema)
        self._writer.write_batch(batch)

    def keys(self) -> tuple[list[bytes], Int64]:
        """The keys, and for each row the index of its key; -1: none."""
        if not self._helpers:
            return [], np.array([], np.int64)
        column = pa.chunked_array([b.column(b.schema.get_field_index(KEY)) for b in self._helpers])
        encoded = column.cast(pa.binary()).combine_chunks().dictionary_encode()
        return encoded.dictionary.to_pylist(), encoded.indices.fill_null(-1).cast(pa.int64()).to_numpy()

    def columns(self) -> _Columns:
        def column(name: str) -> pa.ChunkedArray:
            parts = [b.column(b.schema.get_field_index(name)) for b in self._helpers]
            return pa.chunked_array(parts, pa.int64()) if parts else pa.chunked_array([], pa.int64())

        time = column(TIME)
        return _Columns(
            time.fill_null(0).to_numpy(),
            time.is_null().to_numpy(),
            column(AT).fill_null(0).to_numpy(),
            column(TIE).fill_null(0).to_numpy(),
        )

    def give(self, gets_in: Flags) -> Iterator[pa.RecordBatch]:
        if self._writer is None:
            return
        self._writer.close()
        self._file.seek(0)
        at = 0
        with pa.ipc.open_stream(self._file) as reader:
            for batch in reader:
                picked = gets_in[at : at + batch.num_rows]
                at += batch.num_rows
                if picked.any():
                    yield batch if picked.all() else batch.filter(pa.array(picked))

    def close(self) -> None:
        self._helpers.clear()
        self._file.close()
