"""Run a pipeline's batches without Spark, in this process, with a checkpoint as Spark keeps it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from delivered import Pipeline
from delivered.checkpoint.sidecar import keep_first
from delivered.testing import Batches, Task
from delivered_lab.verify.loop import Checkpoint

RunTasks = Callable[[Sequence[Task]], Iterable[object]]


def all_of(tasks: Sequence[Task]) -> Iterable[object]:
    return (task() for task in tasks)


def deliver(pipeline: Pipeline, run_tasks: RunTasks = all_of, *, only_plan: bool = False) -> int:
    """Deliver what is in the source. Returns the number of batches.

    Args:
        only_plan: the next batch is logged as started, and nothing more happens to it.
    """
    checkpoint, batches, count = Checkpoint(Path(pipeline.checkpoint)), Batches(pipeline), 0
    batches.start(checkpoint.incarnation)
    driver = batches.driver
    first = keep_first(pipeline.checkpoint, driver.initial) or driver.initial()
    try:
        while True:
            newest, logged = checkpoint.newest("offsets"), checkpoint.newest("commits")
            reruns = newest is not None and newest != logged
            batch = 0 if newest is None else newest if reruns else newest + 1
            start = first if batch == 0 else json.loads(checkpoint.offsets(batch - 1))
            if not reruns:
                end = driver.latest(start, batches.rows_max)
                if end == start:
                    return count
                checkpoint.plan(batch, json.dumps(end))
                if only_plan:
                    return count
            offsets = checkpoint.offsets(batch)
            batches.run(batch, offsets, logged, start, json.loads(offsets), run_tasks)  # type: ignore[arg-type]
            checkpoint.log(batch)
            count += 1
    finally:
        driver.close()
