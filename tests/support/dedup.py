"""Records for a key table, without Spark: sharded by key as by its shuffle. What a checkpoint keeps of its dedup."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa

from delivered.checkpoint import sidecar
from delivered.engine.keys import AT, HELPER_TYPES, KEY, TIE, TIME, drop_seen
from delivered.model.capability import Dedup
from delivered.model.identity import Scope

Rows = Callable[[], Iterator[pa.RecordBatch]]


def kept_dedup(location: str) -> Dedup | None:
    """The dedup that created the checkpoint's state; None: none."""
    found = sidecar._read_dedup(location)
    return None if found is None else found.dedup


def hashed(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=16).digest()


def with_helpers(batch: pa.RecordBatch, keys: list[bytes | None], times: list[int | None]) -> pa.RecordBatch:
    """Args: times: microseconds."""
    places = list(range(batch.num_rows))
    if "offset" in batch.schema.names:
        places = batch.column("offset").to_pylist()
    given: dict[str, list[Any]] = {
        KEY: [None if k is None else hashed(k) for k in keys], TIME: times, AT: places, TIE: [0] * batch.num_rows
    }  # fmt: skip
    for name, kind in HELPER_TYPES.items():
        batch = batch.append_column(name, pa.array(given[name], kind))
    return batch


def by_key(batch: pa.RecordBatch, shards: int) -> list[pa.RecordBatch]:
    """The rows of each shard: a key is in one shard only."""
    at = [0 if k is None else k[0] % shards for k in batch.column(batch.schema.get_field_index(KEY)).to_pylist()]
    return [batch.filter(pa.array([a == s for a in at], pa.bool_())) for s in range(shards)]


def once(
    sink: Any, scope: Scope, batch: int, within_us: int, rows: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """What a task passes on, as in Spark: the task opens the key memory."""
    with closing(sink.key_memory(scope)) as memory:
        yield from drop_seen(memory, batch, within_us, iter(rows))
