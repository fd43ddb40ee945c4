"""Output mode update: one row per key in a shard, or the batch fails, as nothing shows which of two rows is newer."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from delivered.contract.sink import Member, Sink, SinkGroup
from delivered.model.errors import UsageError


def one_of_each_key(sink: Sink | SinkGroup, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass the rows through unchanged. Holds the keys of one shard; the sink detects a key in two shards.

    Raises:
        UsageError: two rows have the same key, and there is no version.
    """
    members = sink.members if isinstance(sink, SinkGroup) else (Member(sink.name, sink),)
    modes = [(m, m.sink.capability().write) for m in members]
    keyed = [(m, mode) for m, mode in modes if mode.upserts and mode.version is None]
    seen: list[list[pa.RecordBatch]] = [[] for _ in keyed]
    for batch in batches:
        for (member, mode), found in zip(keyed, seen, strict=True):
            rows = member.route(batch) if member.route is not None else batch
            found.append(rows.select(list(mode.keys)))
        yield batch
    for (member, mode), found in zip(keyed, seen, strict=True):
        if not found:
            continue
        counted = pa.Table.from_batches(found).group_by(list(mode.keys)).aggregate([([], "count_all")])
        twice = counted.filter(pc.greater(counted.column("count_all"), 1)).slice(0, 1).to_pylist()
        if twice:
            shown = ", ".join(f"{k} = {str(twice[0][k])[:60]!r}" for k in mode.keys)
            raise UsageError(
                "KEY_TWICE",
                f"A batch holds {twice[0]['count_all']} rows of the key {shown} for the sink {member.name!r}. "
                "Nothing tells which of them is the newest; nothing of the batch is visible.",
                next_step='list all columns that identify a row with .option("keyColumns", ...), or a column that '
                'orders them with .option("versionColumn", ...)',
            )
