"""Changes by key."""

from __future__ import annotations

import pyarrow as pa

SCHEMA = pa.schema(
    [
        pa.field("region", pa.string()), pa.field("id", pa.int64()), pa.field("version", pa.int64()),
        pa.field("text", pa.string()), pa.field("gone", pa.bool_()),
    ]
)  # fmt: skip
Row = tuple[str, int, int, str | None, bool | None]


def rows(given: list[Row], delete: bool = True) -> pa.RecordBatch:
    batch = pa.RecordBatch.from_arrays(
        [pa.array([r[i] for r in given], f.type) for i, f in enumerate(SCHEMA)], schema=SCHEMA
    )
    return batch if delete else batch.drop_columns(["gone"])
