"""Settings that a session has while a query starts, or a job runs.

An expired shard of a decided batch is written again and compared with the decision, perhaps with other cores than
before. So a batch that runs again must be divided into the same shards. Adaptive execution coalesces and splits the
partitions of a shuffle, or reads them where they were written, by measured sizes and the number of cores; since 4.1
Spark uses it in stateless streaming queries too. Spark's file sources divide files by the number of cores.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, MapType, StructType

from delivered.checkpoint import sidecar
from delivered.spark.internals import Setting, is_connect

log = logging.getLogger(__name__)

_DIVIDES = (Setting.PARALLELISM, Setting.SHUFFLE_PARTITIONS, *(s for s in Setting if s.name.startswith("FILE_")))
"""What a query without state is divided by."""
_NESTED_ROWS_MAX = 512
AUDIT_POOL = "delivered-audit"
AUDITED = {
    "spark.scheduler.mode": "FAIR",
    "spark.scheduler.allocation.file": Path(__file__).with_name("pools.xml").as_uri(),
}
"""Of a session whose pipeline is audited while it runs: jobs in the pool of audits get what the query's leave."""

_one_setting = threading.Lock()
_held: WeakKeyDictionary[SparkSession, dict[str, list[str | None]]] = (
    WeakKeyDictionary()
)  # the user's, then of contexts


@contextmanager
def with_setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Configure the session, while the context is open, also if other threads do the same meanwhile."""
    with _one_setting:
        values = _held.setdefault(spark, {}).setdefault(name, [spark.conf.get(name, None)])
        values.append(value)
        spark.conf.set(name, value)
    try:
        yield
    finally:
        with _one_setting:
            del values[len(values) - 1 - values[::-1].index(value)]
            if len(values) == 1:
                del _held[spark][name]
            if (before := values[-1]) is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, before)


@contextmanager
def same_shards(spark: SparkSession, checkpoint: str | None) -> Iterator[None]:
    """A query that starts while the context is open divides an unfinished batch as the start before did.

    Args:
        checkpoint: as Spark spells it. None, and over Spark Connect, where it may be on another machine: only adaptive
            execution is off.
    """
    with unadapted_stream(spark), unadapted(spark), ExitStack() as held:
        if checkpoint is not None and not is_connect(spark):
            now = _now(spark)
            for name, value in sidecar.keep_shards(checkpoint, now).items():
                if name == Setting.SHUFFLE_PARTITIONS or value == now.get(name):
                    held.enter_context(with_setting(spark, name, value))
                else:
                    _pin(spark, name, value)
        yield


def _now(spark: SparkSession) -> dict[str, str]:
    now = {name.value: spark.conf.get(name, None) for name in _DIVIDES}
    now[Setting.PARALLELISM.value] = now[Setting.PARALLELISM] or str(spark.sparkContext.defaultParallelism)
    return {name: str(value) for name, value in now.items() if value is not None}


def _pin(spark: SparkSession, name: str, value: str) -> None:
    """For the session's life: Spark's file sources do not read the query's own copy of the settings."""
    log.warning(
        "%s is %s in this session from now on: an unfinished batch was divided into shards with it", name, value
    )
    spark.conf.set(name, value)


def unadapted(spark: SparkSession) -> AbstractContextManager[None]:
    """A job or query that starts while the context is open keeps the partitions of its shuffles, on any cores."""
    return with_setting(spark, Setting.ADAPTIVE, "false")


def unadapted_stream(spark: SparkSession) -> AbstractContextManager[None]:
    """The same of a stateless query that starts meanwhile, but not of the jobs of its `foreachBatch`."""
    return with_setting(spark, Setting.ADAPTIVE_STREAMS, "false")


def batches_fit_for(spark: SparkSession, *schemas: StructType) -> AbstractContextManager[None]:
    """Send rows of these schemas to Python in batches whose size suits their columns, while the context is open.

    Spark measures the batch at every row (4.3.0, `ArrowWriter.sizeInBytes`). For a list or a struct, such as Kafka's
    headers, that walks all rows again: measured 180 us per record with batches of 32,768, and 3 us with these.
    """
    nested = any(isinstance(f.dataType, ArrayType | MapType | StructType) for schema in schemas for f in schema)
    return with_setting(spark, Setting.ARROW_BATCH_ROWS, str(_NESTED_ROWS_MAX)) if nested else nullcontext()
