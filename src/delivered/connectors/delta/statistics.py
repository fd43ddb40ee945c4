"""Statistics of a data file for the table's log, so that readers can skip it, from the file's footer.

Bounds are exact or wider, never narrower, and exist for all columns or none: if only some columns have bounds,
deltalake 1.6.6 skips rows of the file when it filters by others. There are none if a column could mislead: floating
point with NaN (which no bound covers), decimals beyond 15 digits (readers convert them to floating point).
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import math
from collections.abc import Collection
from typing import Any

COLUMNS_MAX = 32
"""Columns with bounds, Delta's default for `delta.dataSkippingNumIndexedCols`."""
TEXT_MAX = 32
BYTES_MAX = 4_000
"""Maximum size of a file's statistics, which are part of the size-limited decision."""
_HIGHEST = "\U0010ffff"


def of_file(metadata: Any, not_a_number: Collection[str]) -> str:
    """The statistics of a Parquet file from its footer, as Delta's JSON.

    Args:
        not_a_number: columns that contain NaN.
    """
    bounds: dict[str, tuple[Any, Any]] = {}
    nulls: dict[str, int] = {}
    whole = metadata.num_columns <= COLUMNS_MAX and not not_a_number
    for index in range(metadata.num_columns):
        column = metadata.schema.column(index)
        if "." in column.path or column.max_repetition_level:
            continue
        groups = [metadata.row_group(i).column(index).statistics for i in range(metadata.num_row_groups)]
        if any(s is None or not s.has_null_count for s in groups):
            whole = False
            continue
        nulls[column.path] = sum(s.null_count for s in groups)
        filled = [s for s in groups if s.num_values]
        if column.physical_type == "BYTE_ARRAY" and column.logical_type.type != "STRING":
            continue  # binary has no bounds in Delta
        if filled:
            found = None
            if all(s.has_min_max for s in filled):
                found = _bounds(min(s.min for s in filled), max(s.max for s in filled))
            whole = whole and found is not None
            if found is not None:
                bounds[column.path] = found
    statistics: dict[str, Any] = {"numRecords": metadata.num_rows, "nullCount": nulls}
    if whole and bounds:
        statistics |= {"minValues": {k: low for k, (low, _) in bounds.items()}}
        statistics |= {"maxValues": {k: high for k, (_, high) in bounds.items()}}
    text = json.dumps(statistics, separators=(",", ":"), ensure_ascii=False)
    while len(text.encode()) > BYTES_MAX and len(statistics) > 1:
        statistics.popitem()
        statistics.pop("minValues", None)
        text = json.dumps(statistics, separators=(",", ":"), ensure_ascii=False)
    return text


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
