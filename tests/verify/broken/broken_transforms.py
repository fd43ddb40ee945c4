"""Wrong operators, each in one way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame

from delivered_lab.verify import operators


def forgets_state(frame: DataFrame) -> DataFrame:
    """Running totals that restart with every batch."""

    def by_key(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        del state  # never read, never kept
        amounts = [int(a) for part in frames for a in part["amount"]]
        yield pd.DataFrame({"key": [key[0]], "value": [f"{len(amounts)} {sum(amounts)}"]})

    grouped = operators._events(frame).groupBy("k")
    return grouped.applyInPandasWithState(by_key, "key string, value string", "n bigint", "update", "NoTimeout")


def counts_late_records(frame: DataFrame) -> DataFrame:
    """Windows without a watermark: late records are counted, too."""
    kept = operators._timed
    try:
        operators._timed = operators._events
        return operators.windows(frame)
    finally:
        operators._timed = kept
