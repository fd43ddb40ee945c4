"""Rows that a sink cannot hold, and what becomes of every rejected row in a batch: a dead letter, with the reason and
the position in its source."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.contract.sink import DEAD_LETTERS, Sink
from delivered.contract.source import COORDINATES
from delivered.model.bad_row import plain_rows
from delivered.model.identity import Scope
from delivered.model.ranges import first_reason
from delivered.model.rows import Origin, Rejection, Rows

log = logging.getLogger(__name__)


def validated(sink: Sink, rows: Rows) -> Rows:
    """The rows that the sink and its server can hold; the others are rejected."""
    reasons = find_reasons(sink, rows.good) if rows.good.num_rows else None  # without rows, a sink may not be ready
    if reasons is None:
        return rows
    valid, at = pc.is_null(reasons), pc.indices_nonzero(pc.is_valid(reasons))
    sources = rows.good if rows.records is None else rows.records
    topic, partition, offset = (_coordinate(sources, n, at) for n in COORDINATES)
    texts, bad = reasons.take(at).to_pylist(), plain_rows(rows.good.take(at))
    rejected = [
        Rejection(Origin.SINK, texts[n], bad[n], topic[n], partition[n], offset[n], row)
        for n, row in enumerate(at.to_pylist())
    ]
    left = None if rows.records is None else rows.records.filter(valid)
    return Rows(rows.good.filter(valid), [*rows.rejected, *rejected], left)


def find_reasons(sink: Sink, rows: pa.RecordBatch) -> pa.Array | None:
    """Each row's reason for rejection (null: valid), by the sink, then by its server; None if all are valid."""
    reasons = sink.invalid_rows(rows)
    if reasons is not None and reasons.null_count == len(reasons):
        reasons = None
    valid = rows if reasons is None else rows.filter(pc.is_null(reasons))
    refused = sink.refused_rows(valid) if valid.num_rows else None
    if refused is None or reasons is None:
        return reasons if refused is None else refused
    return pc.replace_with_mask(reasons.cast(pa.string()), pc.is_null(reasons), refused)


def refused_row(sink: Sink, rows: pa.RecordBatch) -> tuple[int, str] | None:
    """The first row that the sink or its server rejects, and why; None: there is none, or it cannot be found now."""
    try:
        return first_reason(find_reasons(sink, rows))
    except Exception as error:
        log.warning("which row is to blame could not be found: %s", error)
        return None


def dead_letters(scope: Scope, rejected: Sequence[Rejection], batch: int, shard: int, first: int) -> pa.RecordBatch:
    """One dead letter for each.

    Args:
        scope: of the sink that rejected the rows; of the dead-letter sink, if source or transform did.
        first: number of the first row among those of the rejecting sink in this shard; among what source and transform
            rejected, of the first of these.
    """
    letters = [
        {
            "sink": scope.sink if r.origin is Origin.SINK else r.origin.value,
            "reason": r.reason,
            "batch": batch,
            "shard": shard,
            "row": first + (r.row if r.origin is Origin.SINK else number),
            "topic": r.topic,
            "partition": r.partition,
            "offset": r.offset,
            "record": r.text,
            "pipeline": scope.pipeline,
            "incarnation": scope.incarnation,
        }
        for number, r in enumerate(rejected)
    ]
    return pa.RecordBatch.from_pylist(letters, schema=DEAD_LETTERS)


def _coordinate(rows: pa.RecordBatch, name: str, at: pa.Array) -> list[Any]:
    """One of the rows' coordinates; None: unknown, or a user's column of the same name."""
    if name in rows.schema.names:
        with suppress(pa.ArrowInvalid):
            return list(rows.column(name).take(at).cast(DEAD_LETTERS.field(name).type).to_pylist())
    return [None] * len(at)
