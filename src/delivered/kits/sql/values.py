"""For each row why it cannot be written: the reasons of several columns put together. No Python object per row."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc


def because(reasons: pa.Array | None, mask: pa.Array, text: str) -> pa.Array | None:
    """The reasons so far and, where `mask` is true and none stands yet, `text`."""
    mask = pc.fill_null(mask, False)
    if not pc.any(mask).as_py():
        return reasons
    here = pc.if_else(mask, text, pa.scalar(None, pa.string()))
    return here if reasons is None else pc.coalesce(reasons, here)


def outside_years(batch: pa.RecordBatch) -> pa.Array | None:
    """Rows with a date or timestamp outside of the years 1 to 9999, which texts of dates cannot hold."""
    reasons: pa.Array | None = None
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if pa.types.is_timestamp(field.type) or pa.types.is_date32(field.type):
            bounds = pc.min_max(column)
            years = [pc.year(bounds[end]).as_py() for end in ("min", "max") if bounds[end].is_valid]
            if any(not 1 <= year <= 9999 for year in years):
                year = pc.year(column)
                outside = pc.or_(pc.less(year, 1), pc.greater(year, 9999))
                reasons = because(reasons, outside, f"column {field.name!r}: outside the years 1 to 9999")
    return reasons
