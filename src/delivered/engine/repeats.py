"""Deduplication by a key table, of one partition of a batch, which holds all records of its keys.

The rows are buffered on disk until all keys are seen. So which duplicate is admitted depends on content, not on order
of arrival: every attempt and every rerun of the batch admits and notes the same rows.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from delivered.contract.sink import KeyMemory
from delivered.model.step import Moment, StepId, reach

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


def without_seen(
    memory: KeyMemory, batch: int, within_us: int, rows: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The rows that duplicate no row of earlier batches or this one, without the helper columns.

    1  read all rows; look up which of their keys earlier batches delivered
    2  dedup.note   the admitted ones are noted durably, but do not count yet
    3  pass them on
    """
    with contextlib.closing(_Waiting()) as waiting:
        for part in rows:
            waiting.add(part)
        keys, codes = waiting.keys()
        chosen = _choose(codes, waiting.columns(), memory.known(batch, keys), keys, within_us)
        reach(StepId.DEDUP_NOTE, Moment.BEFORE, batch=batch)
        named = [keys[c] for c in chosen.codes]
        # The greatest time has no end: it is recognized all the same, as the time is at most `within_us` before that.
        memory.note(batch, named, chosen.times, [min(t + within_us, _TIME_MAX) for t in chosen.times])
        reach(StepId.DEDUP_NOTE, Moment.AFTER, batch=batch)
        yield from waiting.give(chosen.gets_in)


@dataclass(frozen=True)
class _Chosen:
    """
    Attributes:
        gets_in: per row, in order of arrival.
        codes, times: of the records to note.
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


def _choose(
    codes: Int64, columns: _Columns, known: dict[bytes, list[int]], keys: Sequence[bytes], within_us: int
) -> _Chosen:
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
    return _Chosen(gets_in, found_codes, found_times)


class _Waiting:
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
        def whole(name: str) -> pa.ChunkedArray:
            parts = [b.column(b.schema.get_field_index(name)) for b in self._helpers]
            return pa.chunked_array(parts, pa.int64()) if parts else pa.chunked_array([], pa.int64())

        time = whole(TIME)
        return _Columns(
            time.fill_null(0).to_numpy(),
            time.is_null().to_numpy(),
            whole(AT).fill_null(0).to_numpy(),
            whole(TIE).fill_null(0).to_numpy(),
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
