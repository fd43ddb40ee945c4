"""Which rows are in which shard, when a batch runs again: settings of the session that must not change it.

An expired shard of a decided batch is written again and compared with the decision, perhaps with other cores than
before. Adaptive execution coalesces shuffle partitions by their sizes and the number of cores; since 4.1 Spark uses it
in stateless streaming queries too. Spark's file sources divide files by the number of cores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from pyspark.sql import SparkSession

from delivered.checkpoint import sidecar
from delivered.model.translate import worker_death
from delivered.pipeline.registry import PREFIX
from delivered.pipeline.spec import CHECKPOINT, OPTION
from delivered.spark.frames import with_setting
from delivered.spark.jvm import is_connect

log = logging.getLogger(__name__)

_ADAPTIVE_STREAMS = "spark.sql.adaptive.streaming.stateless.enabled"
_COALESCES = "spark.sql.adaptive.coalescePartitions.enabled"
_PARALLELISM = "spark.sql.leafNodeDefaultParallelism"
FOREACH_BATCH = "foreachBatch"
"""Spark's name of a writer's format."""
_SHUFFLES = "spark.sql.shuffle.partitions"
_SETTINGS = (
    _SHUFFLES,
    "spark.sql.files.maxPartitionBytes",
    "spark.sql.files.openCostInBytes",
    "spark.sql.files.minPartitionNum",
    "spark.sql.files.maxPartitionNum",
)


@contextmanager
def same_shards(spark: SparkSession, checkpoint: str | None) -> Iterator[None]:
    """A query that starts while the context is open divides an unfinished batch as the start before did.

    Args:
        checkpoint: as Spark spells it. None, and over Spark Connect, where it may be on another machine: only adaptive
            execution is off.
    """
    with ExitStack() as held:
        held.enter_context(with_setting(spark, _ADAPTIVE_STREAMS, "false"))
        if checkpoint is not None and not is_connect(spark):
            now = _now(spark)
            for name, value in sidecar.keep_shards(checkpoint, now).items():
                if name == _SHUFFLES or value == now.get(name):
                    held.enter_context(with_setting(spark, name, value))
                else:
                    _pin(spark, name, value)
        yield


def _pin(spark: SparkSession, name: str, value: str) -> None:
    """For the session's life: Spark's file sources do not read the query's own copy of the settings."""
    log.warning(
        "%s is %s in this session from now on: an unfinished batch was divided into shards with it", name, value
    )
    spark.conf.set(name, value)


def shards_of(spark: Any, format_: str, options: Mapping[str, str]) -> AbstractContextManager[None]:
    """What a streaming write of the Spark API starts with: one of ours, or one with `foreachBatch`, which may call
    `write_batch`. A `Pipeline` has done it already."""
    if any(k.lower() == OPTION for k in options):
        return nullcontext()
    if format_.lower().startswith(PREFIX):
        return same_shards(spark, next((v for k, v in options.items() if k.lower() == CHECKPOINT.lower()), None))
    return same_shards(spark, None) if format_ == FOREACH_BATCH else nullcontext()


def formatted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `format` of readers and writers: classic ones do not show theirs."""

    def format_(self: Any, source: str) -> Any:
        self._delivered = str(source).lower().startswith(PREFIX)
        return original(self, source)

    return format_


def saved(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `DataFrameWriter.save`: a run has as many shards as its last shuffle has partitions, on any cores."""

    def save(self: Any, path: str | None = None, format: str | None = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        if format is not None:
            self.format(format)
        if not getattr(self, "_delivered", False):
            return original(self, path, None, *args, **kwargs)
        with with_setting(self._spark, _COALESCES, "false"):
            return original(self, path, None, *args, **kwargs)

    return save


def surviving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a call of a reader or writer: one that a dead process of Spark ended says so."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except Exception as error:
            died = worker_death(error) if getattr(self, "_delivered", False) else None
            if died is None:
                raise
            raise died from error

    return call


def _now(spark: SparkSession) -> dict[str, str]:
    found = {name: spark.conf.get(name, None) for name in (_PARALLELISM, *_SETTINGS)}
    found[_PARALLELISM] = found[_PARALLELISM] or str(spark.sparkContext.defaultParallelism)
    return {name: str(value) for name, value in found.items() if value is not None}
