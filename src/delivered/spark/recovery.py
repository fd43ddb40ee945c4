"""The adapter between Spark's writers and the engine: where a batch is recovered and planned, committed and aborted."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from delivered.contract.sink import Sink
from delivered.engine.grants import may_send
from delivered.engine.shard import write_shard
from delivered.engine.sinks import Sinks
from delivered.model.bad_row import OnBadRow
from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.model.identity import Scope
from delivered.model.patience import in_query
from delivered.model.rows import Rows
from delivered.model.work import Action, BatchPlan, CheckpointView, ShardMessage
from delivered.spark.task import arm, running_task

if TYPE_CHECKING:
    from delivered.engine.runner import Runner
    from delivered.pipeline.spec import PipelineSpec

# The engine's driver code is imported where it is called: tasks unpickle writers, and must not load it.


@dataclass
class ShardCommit(WriterCommitMessage):
    """Carries a shard's message to the driver."""

    message: ShardMessage


class Recovering:
    """A writer that recovers and plans its batch when Spark pickles it for the tasks.

    Recovery (claim, check, apply, abort orphans) must run on the driver before the first task of a batch, and never
    later, when it would abort what the tasks prepared. PySpark has no hook for that. It creates a stream's writer twice
    per batch, in two long-lived driver processes: one plans, the other commits. A writer learns neither which process
    it is in nor when tasks start. But only the planning process pickles it, once, for the tasks; so does df.write,
    which then commits with the pickled writer. Should a Spark version change that, it is detected: tasks compare their
    query and batch with the plan, and a commit accepts only messages of its own batch and owner (decision 001).
    """

    _stays: tuple[str, ...] = ()
    """Attributes that are not pickled."""

    def __init__(self, spec: PipelineSpec, sinks: Sinks, schema: pa.Schema) -> None:
        self._spec = spec
        self._sinks = sinks
        self._schema = schema
        self._plan: BatchPlan | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._plan is None:
            try:
                self._plan = self._recover()
            except DeliveredError as error:
                # PySpark wraps any other type in "Could not serialize object".
                raise pickle.PicklingError(str(error)) from None
        return {**self.__dict__, **dict.fromkeys(self._stays)}

    def _recover(self) -> BatchPlan:
        raise NotImplementedError

    def _planned(self) -> BatchPlan:
        if self._plan is None:
            raise InvariantBroken(
                "NO_PLAN",
                "A task received a writer without a plan. Nothing was written.",
                next_step="run `delivered doctor`, which checks Spark's version, and report this with its output",
            )
        return self._plan

    def _write(self, batches: Iterator[Rows]) -> WriterCommitMessage:
        arm(self._planned().scope.pipeline)
        in_query()
        task = running_task()
        shard, attempt = task.partitionId(), task.attemptNumber()
        plan = self._planned()
        asks = partial(may_send, plan, shard)
        message = write_shard(self._sinks, plan, shard, attempt, batches, self._schema, asks)
        return ShardCommit(replace(message, task=task.taskAttemptId()))


def plan_next(spec: PipelineSpec, sinks: Sinks, schema: pa.Schema) -> BatchPlan:
    """Recover a stream, and plan its next batch according to the checkpoint."""
    from delivered.checkpoint.folder import holds_state, read_view, repartitions_before

    arm(spec.pipeline)
    checkpoint = checkpoint_of(spec)
    view = read_view(checkpoint)
    if view.batch:
        in_query()
    own = runner(spec, sinks, view.incarnation)
    first = own.is_first(view, spec.start)
    if first:
        view = replace(view, repartitions=repartitions_before(checkpoint, view.batch))
    # In foreachBatch the user decides what is written, perhaps twice to one sink: always compared.
    keeps_state = partial(holds_state, checkpoint) if spec.batch is None else lambda: True
    plan = own.plan(view, schema, start=spec.start, keeps_state=keeps_state)
    if spec.on_bad_row is not OnBadRow.FAIL and (first or spec.rejects):
        from delivered.checkpoint import task_files

        task_files.forget(checkpoint, view.batch, decided=is_decided(plan))
    return plan


def is_decided(plan: BatchPlan) -> bool:
    """Whether the batch was decided, or may have been sent, by an earlier run."""
    return plan.action is not Action.WRITE or bool(plan.rewrite)


def rejected_rows(spec: PipelineSpec, schema: pa.Schema, plan: BatchPlan) -> Rows | None:
    """Records of a batch that its tasks could not turn into rows. None: there are none.

    Runs on the driver, after all tasks.
    """
    if spec.on_bad_row is OnBadRow.FAIL or spec.checkpoint is None:
        return None
    if not (spec.rejects or is_decided(plan)):  # what an earlier start decided may hold some
        return None
    from delivered.checkpoint import task_files
    from delivered.engine.in_band import join, unpack

    found = task_files.gather(spec.checkpoint, plan.batch, spec.start, join)
    return None if found is None else Rows(pa.RecordBatch.from_pylist([], schema=schema), unpack(found))


def with_schemas(spec: PipelineSpec, sinks: Sinks, schema: pa.Schema, plan: BatchPlan) -> Sinks:
    """The sinks with the registered schemas that the rows of a planned batch are written with.

    Those of a decided batch are the ones that it was decided with: rows written again must have the same bytes. An
    undecided batch takes what the registry had at the start of the query; that is stored before its tasks start.
    """
    own = [(m.name, m.sink, rows) for m, rows in sinks.own_schemas(schema)]
    formatted = [(name, each, rows) for name, each, rows in own if each.schema_columns]
    if not formatted or (plan.action is Action.SKIP and not plan.rewrite):
        return sinks
    from delivered.checkpoint import sidecar

    where, decided = spec.checkpoint, is_decided(plan)
    known = sidecar.written_schemas(where, plan.batch) if decided and where is not None else None
    made: dict[str, Sink]
    if known is not None and all(f"{name}.{c}" in known for name, each, _ in formatted for c in each.schema_columns):
        made = {
            name: each.by_ids({c: known[f"{name}.{c}"] for c in each.schema_columns}) for name, each, _ in formatted
        }
    else:
        key = (plan.scope, spec.start)
        if not spec.start or key not in _settled:
            _settled.clear()
            _settled[key] = {name: each.settled(rows) for name, each, rows in formatted}
        made = _settled[key]
        if where is not None and not decided:
            ids = {f"{n}.{c}": i for n, s in made.items() for c, i in s.schema_ids().items()}
            sidecar.keep_written_schemas(where, plan.batch, ids)
    return sinks.with_sinks(made)


def plan_run(spec: PipelineSpec, sinks: Sinks, run: str, schema: pa.Schema) -> BatchPlan:
    """Recover a batch write, and plan it as the only batch of an incarnation that its run id identifies."""
    arm(spec.pipeline)
    return runner(spec, sinks, run).plan(CheckpointView(run, 0, f"run {run}", None, run=True), schema)


def checkpoint_of(spec: PipelineSpec) -> str:
    if spec.checkpoint is None:
        raise InvariantBroken(
            "CHECKPOINT_UNKNOWN",
            "Spark passed no checkpointLocation to the sink. Nothing was written.",
            next_step='set it on the writer: .option("checkpointLocation", "...")',
        )
    return spec.checkpoint


def messages_of(messages: Sequence[WriterCommitMessage | None]) -> list[ShardMessage | None]:
    return [m.message if isinstance(m, ShardCommit) else None for m in messages]


def runner(spec: PipelineSpec, sinks: Sinks, incarnation: str) -> Runner:
    """The runner of a pipeline, opened once per process, which Spark reuses for many batches."""
    from delivered.engine.arbiter import registered
    from delivered.engine.context import Context
    from delivered.engine.owner import located
    from delivered.engine.runner import Runner

    scope = spec.scope(sinks, incarnation)
    key = (scope, spec.owner.id, replace(spec, start="", batch=None).to_option())
    if key in _runners:
        _runners.move_to_end(key)
        return _runners[key]
    opened = Context.open(sinks, scope, spec.guarantee, located(spec.owner), spec.tolerance, spec.transform)
    _runners[key] = Runner(sinks, opened, partial(registered, scope, spec.owner, spec.driver))
    while len(_runners) > _RUNNERS_MAX:
        _, old = _runners.popitem(last=False)
        old.close()
    return _runners[key]


_RUNNERS_MAX = 8
_runners: OrderedDict[tuple[Scope, str, str], Runner] = OrderedDict()
_settled: dict[tuple[Scope, str], dict[str, Sink]] = {}
"""Sinks with their schemas, of the start that was planned last."""
