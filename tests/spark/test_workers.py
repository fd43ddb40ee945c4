"""Python workers of a session that we made."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _found(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        pass
    tracked = {id(o) for o in gc.get_objects()}
    spared = id(sys.modules["pyarrow.compute"].__dict__) not in tracked
    yield pa.record_batch({"spared": [spared], "loaded": ["delivered.spark.writers" in sys.modules]})


def test_workers_are_forked_with_what_tasks_import(spark: SparkSession) -> None:
    """Before any task of ours: its first collection of garbage is short, too."""
    rows = spark.range(4, numPartitions=2).mapInArrow(_found, "spared boolean, loaded boolean").collect()
    assert [tuple(r) for r in rows] == [(True, True)] * 2
