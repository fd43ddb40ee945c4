"""Trials of a pipeline: its batches without Spark, and what its file and its source hold.

`delivered.crash` says what happens to a process at a named step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from delivered.checkpoint.sidecar import stream_driver
from delivered.contract.source import Offsets, Slice, SourceDriver
from delivered.crash import install_from_environment
from delivered.engine import Sinks
from delivered.engine.arbiter import register_plan
from delivered.engine.context import Context, new_owner
from delivered.engine.runner import Runner
from delivered.engine.shard import may_send, write_shard
from delivered.engine.transform import ArrowTransform, Direct, pack_slice
from delivered.entry import Pipeline
from delivered.model.errors import DeliveredError
from delivered.model.rows import OnBadRow
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import BatchPlan, CheckpointView, DriverAddress, ShardMessage
from delivered.pipeline.file import load_file

__all__ = ["Batches", "Task", "definition", "first_records"]


@dataclass(frozen=True)
class Task:
    """One attempt of a shard of a batch, numbered from 0. Picklable; called in the process that runs it, and returns
    its message."""

    sinks: Sinks
    direct: Direct
    plan: BatchPlan
    shard: int
    piece: Slice
    attempt: int = 0

    def __call__(self) -> ShardMessage:
        install_from_environment()
        rows = self.direct.rows(iter([pack_slice(self.piece)]))
        asks = partial(may_send, self.plan, self.shard)
        return write_shard(self.sinks, self.plan, self.shard, self.attempt, rows, self.direct.schema(), asks)


class Batches:
    """The batches of a pipeline without Spark, by its own connectors and commit engine. The caller keeps the checkpoint
    as Spark does, and runs the tasks. Raises DeliveredError: only Spark can run its transform or its sinks."""

    driver: SourceDriver
    """Offsets of the source, from `start` on."""

    def __init__(self, pipeline: Pipeline) -> None:
        transform = pipeline.transform
        if transform.kind not in ("none", "arrow"):
            raise DeliveredError("LOOP_TRANSFORM", kind=transform.kind)
        if not all(s.projection.is_all for s in pipeline.sinks):
            raise DeliveredError("LOOP_SINKS")
        self.pipeline = pipeline
        (source,) = pipeline.sources.values()
        self.source = source.source().planned()
        self.rows_max = self.source.rows_per_batch_max
        self.sinks = pipeline.spec.open()
        rejects = pipeline.on_bad_row is not OnBadRow.FAIL
        self._direct = Direct(self.source, ArrowTransform(transform.select, transform.function), rejects)

    def runner(self, incarnation: str) -> Runner:
        """Its commit engine, as a new driver of this process. `incarnation`: id in the checkpoint's `metadata`."""
        spec, owner = self.pipeline.spec, new_owner(psutil.Process())
        scope = spec.scope(self.sinks, incarnation)
        context = Context.open(self.sinks, scope, self.pipeline.guarantee, owner, spec.tolerance, spec.transform)
        return Runner(self.sinks, context, partial(register_plan, scope, owner, DriverAddress()))

    def start(self, incarnation: str, *, takeover: bool = False) -> None:
        """Check the pipeline as a start of it does, and fix the end of what is delivered. Raises Refused."""
        error = getattr(self.pipeline.plan(takeover=takeover), "error", None)
        if error is not None:
            raise error
        self.sinks.check_schema(self._direct.schema())
        self.driver = stream_driver(self.source, str(self.pipeline.checkpoint))
        self.driver.freeze()
        self._incarnation, self._runner = incarnation, self.runner(incarnation)

    def run(
        self,
        batch: int,
        offsets: str,
        logged: int | None,
        start: Offsets,
        end: Offsets,
        run_tasks: Callable[[list[Task]], Iterable[ShardMessage | None]],
    ) -> None:
        """Plan a batch, let its tasks run, and commit it; if a task failed, abort what the others prepared.

        Args:
            offsets: its end, as the checkpoint holds it.
            logged: newest batch in the checkpoint's commit log.
            run_tasks: yields the message of each task that succeeds; raises if one fails.
        """
        view = CheckpointView(self._incarnation, batch, offsets, logged)
        plan = self._runner.plan(view, self._direct.schema())
        pieces = self.driver.slices(start, end)
        tasks = [Task(self.sinks, self._direct, plan, shard, piece) for shard, piece in enumerate(pieces)]

        def write(messages: list[ShardMessage | None]) -> None:
            for message in run_tasks(tasks):
                messages.append(message)

        self._runner.finish(plan, write)
        reach(StepId.LOG, Moment.BEFORE, batch=batch)

    def finished(self, batch: int) -> None:
        """The last batch is in the commit log."""
        reach(StepId.LOG, Moment.AFTER, batch=batch)

    def accounts(self, incarnation: str) -> dict[str, int]:
        """Records decided and given up, by the ledger."""
        last = self.runner(incarnation).context.ledger.look().last
        accounts = [] if last is None else list(last.accounts.values())
        return {"decided": sum(a.total.count for a in accounts), "given_up": sum(a.given_up.count for a in accounts)}


def definition(path: Path) -> dict[str, Any]:
    """A pipeline file as data, without defaults. Raises UsageError: it is not a pipeline."""
    return load_file(path).model_dump(mode="json", exclude_none=True, exclude_defaults=True)


def first_records(path: Path, rows_max: int) -> list[tuple[bytes | None, bytes | None]]:
    """Key and value of the first records that the source of a pipeline file holds. Acknowledges nothing."""
    (source,) = Pipeline.from_file(path, {"source.startingOffsets": "earliest"}).sources.values()
    reads = source.source().planned()
    driver = reads.driver()
    with closing(driver):
        start = driver.initial()
        slices = driver.slices(start, driver.latest(start, rows_max))
        batches = (batch for piece in slices for batch in reads.read(piece))
        return [(row["key"], row["value"]) for batch in batches for row in batch.to_pylist()][:rows_max]
