"""`dedup`: duplicates in the source that are dropped before the transform."""

from __future__ import annotations

import re

from delivered.model.dedup import KIND, TABLE, Dedup
from delivered.model.duration import read_ms
from delivered.model.errors import UsageError
from delivered.model.options import Unfit, choice
from delivered.pipeline.changing import changing_in_sql

_CLOCK = re.compile(r"\b(now|current_timestamp|current_date|curdate|localtimestamp)\b", re.IGNORECASE)


def dedup(*by: str, within: str, time: str = "timestamp", late: str = "refuse", memory: str = "state") -> Dedup:
    """Drop duplicates in the source, under every guarantee, before the transform.

    Args:
        by: SQL over the source's columns that names a record: "key", "get_json_object(CAST(value AS STRING), '$.id')".
            A record for which one of them is null duplicates nothing.
        within: "1 hour", "90 seconds": a record whose time is at most this long after its key's first one is dropped.
        time: SQL over the source's columns, a timestamp.
        late: "drop": accept that a record older than the newest one by more than `within` is dropped, even if it is the
            first of its key. "refuse": such a pipeline is refused, with the reason. Not with a table, which only
            drops duplicates.
        memory: where keys are kept. "state": in Spark's state, in the checkpoint. "table": in a table of the sink's
            database (PostgreSQL, MySQL or SQLite), updated in the transaction that decides the batch.

    Raises:
        UsageError: no expression, one whose value changes between runs, or an invalid duration.
    """
    if not by or not all(isinstance(b, str) and b.strip() for b in by):
        raise UsageError(
            "DEDUP_BY",
            f"dedup is by {by!r}; it needs one or more expressions over the source's columns.",
            next_step='write what identifies a record, for example delivered.dedup("key", within="1 hour")',
        )
    for text in (*by, time):
        if changing_in_sql(text) or _CLOCK.search(text):
            raise UsageError(
                "DEDUP_CHANGES",
                f"dedup uses {text!r}, whose value changes between runs: neither deduplication nor the audit could "
                "rely on it.",
                next_step="identify records, and their time, by their content",
            )
    drops = choice(("refuse", "drop")).parse("delivered.dedup", "late", late, 'write late="refuse"') == "drop"
    kind = (
        TABLE
        if choice(("state", "table")).parse("delivered.dedup", "memory", memory, 'write memory="state"') == "table"
        else KIND
    )
    if drops and kind == TABLE:
        raise UsageError(
            "DEDUP_LATE_TABLE",
            "dedup has both late: drop and memory: table. A table drops no record for being late.",
            next_step="remove late",
        )
    try:
        within_ms = read_ms(within)
    except Unfit as why:
        raise UsageError("DEDUP_WITHIN", f"dedup's within {why}.", 'write for example "1 hour"') from None
    return Dedup(tuple(b.strip() for b in by), within_ms, time.strip(), drops, kind)
