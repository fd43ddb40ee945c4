"""Set-up of a process that works for a query: crash points and warnings; the running task and its batch; the task of a
dedup."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark import TaskContext

from delivered.model.errors import InvariantBroken
from delivered.model.step import show_warnings, work_for
from delivered.spark.internals import BATCH_ID, QUERY_ID

if TYPE_CHECKING:
    import pyarrow as pa

    from delivered.contract.sink import Sink
    from delivered.model.identity import Scope

_armed = False
_modules_frozen = 0
"""How many modules were imported when the collector was last exempted from them."""


def arm(pipeline: str | None = None) -> None:
    """Install the handler of `delivered.crash` if the environment names a crash point. Cheap otherwise.

    Args:
        pipeline: that this process works for now.
    """
    task = TaskContext.get()
    if task is None:
        work_for(pipeline)
    else:
        batch = running_batch(task)[1]
        work_for(pipeline, batch=int(batch) if batch is not None else None, shard=task.partitionId())
    _spare_the_collector()
    arm_driver()


def arm_driver() -> None:
    """The part of `arm` for the user's own process, whose memory and whose current work are the user's."""
    global _armed
    show_warnings()
    if _armed or not os.environ.get("DELIVERED_CRASH"):
        return
    from delivered.crash import install_from_environment  # loaded only if needed

    install_from_environment()
    _armed = True


def running_task() -> TaskContext:
    """The running task.

    Raises:
        InvariantBroken: no task runs here.
    """
    task = TaskContext.get()
    if task is None:
        raise InvariantBroken("NO_TASK.ROWS")
    return task


def running_batch(task: TaskContext) -> tuple[str | None, str | None]:
    """Query and batch of a task; None outside a stream."""
    return task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID)


@dataclass(frozen=True)
class DedupTask:
    """Drops duplicates in a task, by a key table. Picklable; holds no connection."""

    sink: Sink
    scope: Scope
    within_us: int

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from delivered.engine.keys import drop_seen  # other tasks do not load it

        arm(self.scope.pipeline)
        query, batch = running_batch(running_task())
        if batch is None or query is None:
            raise InvariantBroken("NO_TASK.DEDUP")
        with closing(self.sink.key_memory(replace(self.scope, incarnation=query))) as memory:
            yield from drop_seen(memory, int(batch), self.within_us, rows)


def _spare_the_collector() -> None:
    """Exempt what is imported from garbage collection: PySpark's daemon runs a full collection after every task.

    Again whenever modules were imported since: the first task imports as much as all that Spark itself needs. Not by
    gc.get_freeze_count, which walks all that is frozen.
    """
    global _modules_frozen
    if len(sys.modules) != _modules_frozen:
        _modules_frozen = len(sys.modules)
        gc.freeze()
