"""Audits of a running query in its own Spark application: in a session and a scheduler pool of their own, which gets
what the query leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from delivered.model.schedule import Load
from delivered.pipeline.progress import plain_report
from delivered.source import lag
from delivered.spark.internals import IDLE, is_connect
from delivered.spark.settings import AUDIT_POOL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PROPERTY, _JOB_GROUP = "spark.scheduler.pool", "spark.jobGroup.id"


def load_of(query: Any) -> Load:
    """What a query does now. It is behind if more offsets wait than its last batch took."""
    if not query.isActive:
        return Load(idle=True, behind=False)
    idle, last = query.status["message"] in IDLE, query.lastProgress
    if last is None:
        return Load(idle)
    behind = None
    for source in plain_report(last)["sources"]:
        waits = lag(source)
        took = lag({"endOffset": source.get("startOffset"), "latestOffset": source.get("endOffset")})
        if waits is not None and took is not None:
            behind = bool(behind) or waits > took
    return Load(idle, behind)


class AuditSession:
    """Where the audits of a pipeline run, one at a time.

    Args:
        spark: of the query.
        name: of the pipeline.
        own: in a session of their own, so that settings of an audit are not the query's. Views of the user are not
            there.
    """

    def __init__(self, spark: SparkSession, name: str, *, own: bool) -> None:
        self._spark = spark.newSession() if own else spark
        self._context = None if is_connect(spark) else spark.sparkContext
        self._group = f"{AUDIT_POOL}-{name}"

    @contextlib.contextmanager
    def low_priority(self) -> Iterator[SparkSession]:
        """The jobs of this thread, and only these, are in the pool, and `cancel` ends them."""
        context = self._context
        if context is None:
            yield self._spark
            return
        context.setJobGroup(self._group, "audit", interruptOnCancel=True)
        context.setLocalProperty(_PROPERTY, AUDIT_POOL)
        try:
            yield self._spark
        finally:
            for name in (_PROPERTY, _JOB_GROUP):
                context.setLocalProperty(name, None)  # type: ignore[arg-type]

    def cancel(self) -> None:
        """End the jobs of a running audit."""
        if self._context is not None:
            self._context.cancelJobGroup(self._group)
