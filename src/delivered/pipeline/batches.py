"""The batches of one write, in a process of its driver: what its checkpoint says of them, and its runner. No task loads
it."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from delivered.checkpoint import holds_state, read_view, repartitions_before, sidecar
from delivered.checkpoint.history import add
from delivered.contract.sink import Sink
from delivered.engine import Sinks
from delivered.engine.context import Context, locate
from delivered.engine.runner import Runner
from delivered.engine.transform import join_rejected, unpack_rejected
from delivered.model.capability import Guarantee
from delivered.model.errors import Fenced, InvariantBroken
from delivered.model.identity import Scope
from delivered.model.rows import OnBadRow, Rows
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Action, BatchPlan, CheckpointView, ShardMessage
from delivered.pipeline.spec import PipelineSpec


@dataclass(frozen=True)
class Batches:
    """Of a stream, whose checkpoint says which batch runs next.

    Attributes:
        sinks: opened from the spec.
        schema: of the rows, before they are routed to the sinks.
    """

    spec: PipelineSpec
    sinks: Sinks
    schema: pa.Schema

    @property
    def checkpoint(self) -> str:
        if self.spec.checkpoint is None:
            raise InvariantBroken("CHECKPOINT_UNKNOWN")
        return self.spec.checkpoint

    def view(self) -> CheckpointView:
        return read_view(self.checkpoint)

    def plan(self, view: CheckpointView) -> BatchPlan:
        """Recover, and plan the batch that the checkpoint says is next. See `Runner.plan`."""
        spec, runner = self.spec, self.runner(view.incarnation)
        first = runner.is_first(view, spec.start or "")
        if first:
            view = replace(view, repartitions=repartitions_before(self.checkpoint, view.batch))
        # In a foreachBatch of their own, users decide what is written, perhaps twice to one sink: always compared.
        own_call = spec.batch is not None and spec.start is None
        keeps_state = (lambda: True) if own_call else partial(holds_state, self.checkpoint)
        plan = runner.plan(view, self.schema, start=spec.start or "", keeps_state=keeps_state)
        if spec.on_bad_row is not OnBadRow.FAIL and (first or spec.rejects):
            sidecar.forget_task_files(self.checkpoint, view.batch, decided=plan.is_decided)
        return plan

    def sinks_for(self, plan: BatchPlan) -> Sinks:
        """The sinks, with the registered schemas that the rows of a planned batch are written with.

        Those of a decided batch are the ones that it was decided with: rows written again must have the same bytes. An
        undecided batch takes what the registry had at the start of the query; that is stored before its tasks start.
        """
        is_done = plan.action is Action.SKIP and not plan.rewrite
        if is_done or not any(m.sink.schema_columns for m in self.sinks.members):
            return self.sinks
        own = [(m.name, m.sink, rows) for m, rows in self.sinks.own_schemas(self.schema) if m.sink.schema_columns]
        where, start, decided = self.spec.checkpoint, self.spec.start, plan.is_decided
        known = (sidecar.read_written_schemas(where, plan.batch) if decided and where is not None else None) or {}
        if all(f"{name}.{c}" in known for name, sink, _ in own for c in sink.schema_columns):
            settled = {
                name: sink.by_ids({c: known[f"{name}.{c}"] for c in sink.schema_columns}) for name, sink, _ in own
            }
        else:
            key = (plan.scope, start)
            if start is None or key not in _settled:
                _settled.clear()
                _settled[key] = {name: sink.settled(rows) for name, sink, rows in own}
            settled = _settled[key]
            if where is not None and not decided:
                ids = {f"{name}.{c}": i for name, sink in settled.items() for c, i in sink.schema_ids().items()}
                sidecar.keep_written_schemas(where, plan.batch, ids)
        return self.sinks.with_sinks(settled)

    def commit(self, batch: int, messages: Sequence[ShardMessage | None]) -> None:
        """Decide the planned batch, and make it visible. See `Runner.commit`."""
        plan = _plan_of(messages)
        if plan is not None:
            incarnation, offsets = plan.scope.incarnation, plan.offsets
        else:
            view = self.view()
            incarnation, offsets = view.incarnation, view.offsets
        report = partial(add, self.checkpoint)
        self.runner(incarnation).commit(batch, offsets, messages, report=report, rejected=self.rejected)
        reach(StepId.LOG, Moment.BEFORE, batch=batch)

    def rejected(self, plan: BatchPlan) -> Rows | None:
        """Records of a batch that its tasks could not turn into rows, after all tasks. None: there are none."""
        spec = self.spec
        if spec.on_bad_row is OnBadRow.FAIL or spec.checkpoint is None:
            return None
        if not (spec.rejects or plan.is_decided):  # what an earlier start decided may hold some
            return None
        records = sidecar.gather_task_files(spec.checkpoint, plan.batch, spec.start or "", join_rejected)
        if records is None:
            return None
        return Rows(pa.RecordBatch.from_pylist([], schema=self.schema), unpack_rejected(records))

    def abort(self, messages: Sequence[ShardMessage | None]) -> None:
        """Abort what the tasks of a failed batch prepared."""
        if (plan := _plan_of(messages)) is not None:
            self.runner(plan.scope.incarnation).abort(messages)

    def runner(self, incarnation: str) -> Runner:
        """Opened once per process, which Spark reuses for many batches."""
        spec = self.spec
        if spec.sender is None:
            raise InvariantBroken("OWNER_UNKNOWN", pipeline=spec.pipeline)
        scope, owner = Scope(spec.pipeline, self.sinks.decider.name, incarnation), spec.sender.owner
        key = (scope, owner.id, spec.key)
        with _lock:
            if key in _runners:
                _runners.move_to_end(key)
                return _runners[key]
        context = Context.open(self.sinks, scope, spec.guarantee, locate(owner), spec.tolerance, spec.transform)
        register = None
        if spec.guarantee is Guarantee.AT_MOST_ONCE:
            from delivered.engine.arbiter import register_plan  # no other guarantee needs it

            register = partial(register_plan, scope, owner, spec.sender.address)
        runner = Runner(self.sinks, context, register)
        # Closed when nobody uses it: in the user's process, other threads write batches of other queries.
        weakref.finalize(runner, context.close).atexit = False
        with _lock:
            runner = _runners.setdefault(key, runner)
            while len(_runners) > _RUNNERS_MAX:
                _runners.popitem(last=False)
        return runner


class Run(Batches):
    """The only batch of a write that is not a stream, in an incarnation that its run id identifies."""

    def view(self) -> CheckpointView:
        return CheckpointView.of_run(self.spec.run)

    def plan(self, view: CheckpointView) -> BatchPlan:
        with _overtaken():
            return self.runner(view.incarnation).plan(view, self.schema)

    def commit(self, batch: int, messages: Sequence[ShardMessage | None]) -> None:
        view = self.view()
        with _overtaken():
            self.runner(view.incarnation).commit(batch, view.offsets, messages, run=True)


@contextmanager
def _overtaken() -> Iterator[None]:
    """A later start writes a stream's rows; those of a run nobody writes."""
    try:
        yield
    except Fenced as error:
        if error.condition != "OWNER":
            raise
        raise Fenced("FENCED.RUN", reason=error.message) from None


def _plan_of(messages: Sequence[ShardMessage | None]) -> BatchPlan | None:
    return next((m.plan for m in messages if m is not None), None)


_RUNNERS_MAX = 8
_lock = threading.Lock()
_runners: OrderedDict[tuple[Scope, str, str], Runner] = OrderedDict()
_settled: dict[tuple[Scope, str | None], dict[str, Sink]] = {}
"""Sinks with the registry's schemas, of the start that was planned last."""
