"""One batch after another: plan -> shards -> commit, for everything that drives batches.

Spark splits a batch over processes, and so does this module. Which half runs where:

    plan     the driver's process that plans         `Runner.plan`: recover, then what each task does
    shards   each task, on an executor               `shard.write_shard`, which knows no runner
    commit   the driver's process that commits       `Runner.commit`, or `Runner.abort`; the shard of rows that were
                                                     rejected before the transform

Each driver process has a runner of its own; they share the owner's id. Whoever drives a batch in one process calls
`plan`, then `finish`. Several threads may call: one after the other, as ledgers and clients need it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa

from delivered.engine import Sinks
from delivered.engine.context import Context
from delivered.engine.decide import abort_batch, abort_unreported, commit_batch
from delivered.engine.recover import plan_batch
from delivered.engine.shard import may_send, write_shard
from delivered.model.capability import Guarantee
from delivered.model.rows import Rows
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Arbiter, BatchPlan, BatchReport, CheckpointView, Decision, ShardMessage

Messages = Sequence[ShardMessage | None]
"""Of all tasks of a batch. None: a task failed, and sent none."""


@dataclass
class Runner:
    """The batches of a pipeline, in one process of its driver.

    Attributes:
        register: at_most_once: announces the batch to an arbiter, which grants each shard to one attempt. None: the
            caller itself runs one attempt of each shard.
    """

    sinks: Sinks
    context: Context
    register: Callable[[], Arbiter] | None = None
    _planned: _Planned | None = None
    _turn: threading.RLock = field(default_factory=threading.RLock)

    def is_first(self, view: CheckpointView, start: str = "") -> bool:
        """Whether the batch is not the one that follows this process's last plan: it recovers in full."""
        return self._planned is None or not self._planned.is_followed_by(view, start)

    def plan(
        self,
        view: CheckpointView,
        schema: pa.Schema | None,
        *,
        start: str = "",
        keeps_state: Callable[[], bool] = lambda: False,
    ) -> BatchPlan:
        """Recover, and plan the batch that is about to run. See `plan_batch`, also for what it raises.

        Args:
            schema: of the rows, before they are routed to the sinks. None: their targets exist, and stay as they are.
            start: identifies the start of the query.
        """
        with self._turn:
            return self._plan(view, schema, start, keeps_state)

    def _plan(
        self, view: CheckpointView, schema: pa.Schema | None, start: str, keeps_state: Callable[[], bool]
    ) -> BatchPlan:
        began = time.monotonic()
        first, before = self.is_first(view, start), self._planned
        self._planned = None  # if this plan fails, the next one recovers in full
        if not first:
            reach(StepId.LOG, Moment.AFTER, batch=view.batch - 1)
        elif schema is not None:
            self.sinks.ready_target(schema)
        arbiter = None
        if self.register is not None and self.context.guarantee is Guarantee.AT_MOST_ONCE:
            arbiter = self.register()  # before the ledger records that the batch may send
        plan = plan_batch(
            self.context,
            view,
            first=first,
            since=before.epoch if before is not None else None,
            keeps_state=keeps_state,
            add_columns=partial(self.sinks.add_columns, schema) if schema is not None else lambda: None,
        )
        self._planned = _Planned(view.batch, plan.epoch, start)
        return replace(plan, seconds=time.monotonic() - began, arbiter=arbiter)

    def commit(
        self,
        batch: int,
        offsets: str,
        messages: Messages,
        *,
        run: bool = False,
        report: Callable[[BatchReport], None] = lambda _: None,
        rejected: Callable[[BatchPlan], Rows | None] = lambda _: None,
    ) -> Decision | None:
        """Decide the batch, and make it visible. See `commit_batch`; if it raises, call `abort`.

        Args:
            rejected: what the batch's tasks rejected and could not pass on to those that write: one more shard, which
                is written here.
        """
        with self._turn:
            more = self._shard_of_rejected([m for m in messages if m is not None], rejected)
            try:
                return commit_batch(self.context, batch, offsets, [*messages, *more], run=run, report=report)
            except Exception:
                self.abort(more)
                raise

    def _shard_of_rejected(
        self, messages: Sequence[ShardMessage], rejected: Callable[[BatchPlan], Rows | None]
    ) -> list[ShardMessage]:
        rows = rejected(messages[0].plan) if messages else None
        if rows is None:
            return []
        plan, shard = messages[0].plan, len(messages)
        return [write_shard(self.sinks, plan, shard, 0, iter([rows]), rows.good.schema, partial(may_send, plan, shard))]

    def abort(self, messages: Messages) -> None:
        """Abort what the tasks of a failed batch prepared. See `abort_batch`."""
        with self._turn:
            abort_batch(self.context, messages)

    def abort_unreported(self, plan: BatchPlan) -> None:
        """Abort what the tasks of a failed batch prepared, of which there are no messages."""
        with self._turn:
            abort_unreported(self.context, plan)

    def finish(
        self, plan: BatchPlan, write: Callable[[list[ShardMessage | None]], None], *, run: bool = False
    ) -> Decision | None:
        """Run the tasks of a planned batch and commit it, or abort what they prepared.

        Args:
            write: appends each task's message when it is there; raises if a task failed.
        """
        messages: list[ShardMessage | None] = []
        try:
            write(messages)
            return self.commit(plan.batch, plan.offsets, messages, run=run)
        except Exception:
            self.abort(messages)
            raise

    def close(self) -> None:
        self.context.close()


@dataclass(frozen=True)
class _Planned:
    """The batch that a process planned last.

    Attributes:
        epoch: ledger epoch of its plan.
        start: identifies the start of its query.
    """

    batch: int
    epoch: int
    start: str

    def is_followed_by(self, view: CheckpointView, start: str) -> bool:
        """Whether Spark logged it and runs the next batch in the same start of the query: no claim is needed."""
        return self.batch == view.batch - 1 == view.logged and self.start == start
