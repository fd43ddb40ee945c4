"""Dedup, which drops duplicates in the source before the transform: what is declared, and the SQL of its keys.

Helper columns hold a record's key and time. They are equal for duplicates, and only for them; records without a key are
not duplicates of each other: each is keyed by its position in the source.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from delivered.contract.sink import KEY_BYTES
from delivered.contract.source import COORDINATES
from delivered.engine.keys import AT, KEY, TIE
from delivered.engine.keys import TIME as SEEN_AT
from delivered.model.dedup import KIND, TABLE, Dedup, read_ms
from delivered.model.errors import BadRecord, UsageError
from delivered.model.options import Unfit, check_argument, choice
from delivered.model.ranges import backquoted
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
        raise UsageError("DEDUP_BY", by=by)
    for key, value, example in (("within", within, "1 hour"), ("time", time, "timestamp")):
        check_argument("delivered.dedup", key, value, str, "text", f'..., {key}="{example}"')
    for text in (*by, time):
        if changing_in_sql(text) or _CLOCK.search(text):
            raise UsageError("DEDUP_CHANGES", text=text)
    drops = choice(("refuse", "drop")).parse("delivered.dedup", "late", late, 'write late="refuse"') == "drop"
    kind = (
        TABLE
        if choice(("state", "table")).parse("delivered.dedup", "memory", memory, 'write memory="state"') == "table"
        else KIND
    )
    if drops and kind == TABLE:
        raise UsageError("DEDUP_LATE_TABLE")
    try:
        within_ms = read_ms(within)
    except Unfit as why:
        raise UsageError("DEDUP_WITHIN", reason=why) from None
    return Dedup(tuple(b.strip() for b in by), within_ms, time.strip(), drops, kind)


# The SQL that computes the helper columns.

_BY = "__delivered_dedup_by_"
ALONE = "__delivered_dedup_alone"
TIME = "__delivered_dedup_time"
_AS_TEXT = ("boolean", "tinyint", "smallint", "int", "bigint", "date")


def key_columns(dedup: Dedup) -> list[str]:
    """The helper columns that are equal for duplicates, and only for them."""
    return [*(f"{_BY}{i}" for i in range(len(dedup.by))), ALONE]


def helper_columns(dedup: Dedup) -> list[str]:
    return [*key_columns(dedup), TIME]


def key_sql(dedup: Dedup) -> dict[str, str]:
    """By helper column, but the last: `alone_sql`. CASE rules out generators and aggregates."""
    own = {**dict(zip(key_columns(dedup), dedup.by, strict=False)), TIME: dedup.time}
    return {name: f"CASE WHEN true THEN ({sql}) END" for name, sql in own.items()}


def alone_sql(dedup: Dedup, columns: Collection[str]) -> str:
    """Keys a record whose key is null. It fails the query if the source has no positions."""
    no_key = f"CAST(raise_error('{BadRecord('DEDUP_KEY_NULL')}') AS STRING)"
    own = "concat_ws('-', `topic`, `partition`, `offset`)" if _is_placed(columns) else no_key
    return f"CASE WHEN {_missing(dedup)} THEN {own} END"


def seen_sql(dedup: Dedup, types: Mapping[str, str], keyed: Mapping[str, str]) -> dict[str, str]:
    """By column of `engine.keys`, for a key table.

    Args:
        types: of the source's columns, as Spark names them; keyed: of the helper columns too.

    Raises:
        UsageError: a key of a type that has no text.
    """
    names = key_columns(dedup)[:-1]
    parts = [f"coalesce({_text(by, keyed[name], name)}, '')" for by, name in zip(dedup.by, names, strict=True)]
    digest = f"unhex(substr(sha2(CAST(concat_ws(',', {', '.join(parts)}) AS BINARY), 256), 1, {2 * KEY_BYTES}))"
    if _is_placed(types):
        at, tie = "`offset`", "xxhash64(`topic`, `partition`, `offset`)"
    else:
        plain = [backquoted(name) for name, kind in types.items() if "map<" not in kind]
        at, tie = "0", f"xxhash64({', '.join(plain)})"
    return {
        KEY: f"CASE WHEN {_missing(dedup)} THEN NULL ELSE {digest} END",
        SEEN_AT: f"unix_micros({TIME})",
        AT: f"CAST({at} AS BIGINT)",
        TIE: tie,
    }


def _missing(dedup: Dedup) -> str:
    return " OR ".join(f"`{name}` IS NULL" for name in key_columns(dedup)[:-1])


def _is_placed(columns: Collection[str]) -> bool:
    """Whether they hold a record's position in the source."""
    return all(c in columns for c in COORDINATES)


def _text(value: str, kind: str, column: str) -> str:
    """A text unique per value, whatever the session's time zone; null stays null."""
    if kind in ("string", "binary"):
        return f"hex(`{column}`)"
    if kind in _AS_TEXT or kind.startswith("decimal"):
        return f"CAST(`{column}` AS STRING)"
    if kind == "timestamp":
        return f"CAST(unix_micros(`{column}`) AS STRING)"
    raise UsageError("DEDUP_KEY_TYPE", value=value, kind=kind)
