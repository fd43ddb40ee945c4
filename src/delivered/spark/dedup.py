"""Dedup of a stream by Spark's state.

Helper columns hold the key and the time; Spark's `dropDuplicatesWithinWatermark` keeps one row of state for each key,
in the checkpoint, and lets go of it when the watermark has passed the first one's time by `within`. The watermark is
the newest time of the batches before, minus `within`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException, ParseException

from delivered.model.dedup import Dedup
from delivered.model.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BY = "__delivered_dedup_by_"
ALONE = "__delivered_dedup_alone"
TIME = "__delivered_dedup_time"
_COORDINATES = ("topic", "partition", "offset")


def key_columns(dedup: Dedup) -> list[str]:
    """The helper columns that are equal for repeats, and for them alone."""
    return [*(f"{_BY}{i}" for i in range(len(dedup.by))), ALONE]


def helper_columns(dedup: Dedup) -> list[str]:
    return [*key_columns(dedup), TIME]


def is_placed(frame: DataFrame) -> bool:
    """Whether each record tells its place in the source."""
    return all(c in frame.columns for c in _COORDINATES)


def with_keys(frame: DataFrame, dedup: Dedup) -> DataFrame:
    """The frame with the columns `helper_columns`. No row is added or moved.

    A record without a key must not be taken for a repeat of another one without: it gets a key of its own, its place in
    the source. In a source that tells no place it stops the query.

    Raises:
        UsageError: an expression is no SQL over one row of the source, or the time is no timestamp.
    """
    placed = is_placed(frame)
    missing = " OR ".join(f"{c} IS NULL" for c in key_columns(dedup)[:-1])
    own = "concat_ws('-', `topic`, `partition`, `offset`)" if placed else f"CAST(raise_error('{_KEY_NULL}') AS STRING)"
    # Within CASE: nothing that gives more rows, or one for many.
    texts = {**dict(zip(key_columns(dedup), dedup.by, strict=False)), TIME: dedup.time}
    try:
        keyed = frame.selectExpr("*", *[f"CASE WHEN true THEN ({sql}) END AS `{name}`" for name, sql in texts.items()])
        keyed = keyed.selectExpr("*", f"CASE WHEN {missing} THEN {own} END AS `{ALONE}`")
        types: Mapping[str, str] = dict(keyed.dtypes)  # over Spark Connect nothing is looked at before
    except (AnalysisException, ParseException) as error:
        raise UsageError(
            "DEDUP_EXPRESSION",
            f"dedup is by {dedup.by_text}, its time is {dedup.time}: {str(error).splitlines()[0]}",
            next_step=f"write SQL over one row of the source; its columns are {', '.join(frame.columns)}",
        ) from None
    if types[TIME] != "timestamp":
        raise UsageError(
            "DEDUP_TIME",
            f"dedup's time is {dedup.time}, of type {types[TIME]}; it must be a timestamp.",
            next_step=f"write CAST({dedup.time} AS TIMESTAMP), or to_timestamp(...) with a format",
        )
    return keyed


_KEY_NULL = (
    "[DELIVERED_DEDUP_KEY_NULL] A record has no key: an expression of dedup.by is null, and this source has no columns "
    "topic, partition and offset to tell such records apart. Next: write coalesce(...) into by"
)


def without_repeats(frame: DataFrame, dedup: Dedup) -> DataFrame:
    """The stream without repeats; columns as before. Raises as `with_keys`."""
    keyed = with_keys(frame, dedup).withWatermark(TIME, dedup.within)
    return keyed.dropDuplicatesWithinWatermark(key_columns(dedup)).drop(*helper_columns(dedup))
