"""A pipeline in a thread, driven as by Spark, while its database is taken away."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
from tests.support.sinks import Rig

from delivered.engine import Sinks
from delivered.engine.context import Context
from delivered.engine.decide import commit_batch
from delivered.engine.recover import plan_batch
from delivered.engine.shard import write_shard
from delivered.model.capability import Guarantee
from delivered.model.identity import Scope
from delivered.model.rows import Rows
from delivered.model.work import BatchPlan, CheckpointView, Owner, ShardMessage, Tolerance

if TYPE_CHECKING:
    from tests.support.servers import PostgresPair

SCHEMA = pa.schema([("id", pa.int64())])


class Running(threading.Thread):
    """Batch after batch, from a source that holds the numbers from 0 on, until it is stopped or raises.

    Args:
        like: goes on with its checkpoint, as a new start does.
        start: the source's position, in a new checkpoint.
        batches: ends by itself after so many.

    Attributes:
        position: the source's, behind the last finished batch; batch: the next one.
    """

    SHARDS: ClassVar = 2
    ROWS: ClassVar = 40
    _starts = itertools.count()

    def __init__(
        self,
        sink: Any,
        *,
        like: Running | None = None,
        start: int = 0,
        batches: int | None = None,
        incarnation: str = "i0",
        tolerance: Tolerance | None = None,
        rig: Rig | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self.rig = like.rig if like else rig or Rig(sink, schema=SCHEMA)
        self.batch = like.batch if like else 0
        self.position = like.position if like else start
        self.error: BaseException | None = None
        self._incarnation, self._until = incarnation, None if batches is None else self.batch + batches
        self._stopping = threading.Event()
        self._since: int | None = None
        self._sinks = Sinks.one(sink)
        scope = Scope(self.rig.pipeline, sink.name, incarnation)
        owner = Owner(f"owner-{next(self._starts)}")
        self.context = Context.open(self._sinks, scope, Guarantee.EXACTLY_ONCE, owner, tolerance or Tolerance())
        self.start()

    def run(self) -> None:
        try:
            while not self._stopping.is_set() and self.batch != self._until:
                self.commit(self.plan())
        except BaseException as error:
            self.error = error

    def plan(self) -> BatchPlan:
        offsets = json.dumps({"0": self.position + self.SHARDS * self.ROWS})
        view = CheckpointView(self._incarnation, self.batch, offsets, self.batch - 1 if self.batch else None)
        plan = plan_batch(self.context, view, first=self._since is None, since=self._since)
        self._since = plan.epoch
        return plan

    def commit(self, plan: BatchPlan) -> None:
        self.decide(plan, self.write(plan))

    def write(self, plan: BatchPlan) -> list[ShardMessage]:
        return [
            write_shard(self._sinks, plan, shard, 0, map(Rows, self._pieces(shard)), SCHEMA)
            for shard in range(self.SHARDS)
        ]

    def decide(self, plan: BatchPlan, shards: list[ShardMessage]) -> None:
        commit_batch(self.context, plan.batch, plan.offsets, shards)
        self.batch, self.position = plan.batch + 1, self.position + self.SHARDS * self.ROWS

    def go_on(self, batches: int = 3, timeout_s: float = 200) -> None:
        """Wait until so many more batches are finished."""
        until, deadline = self.batch + batches, time.monotonic() + timeout_s
        while self.batch < until:
            if self.error is not None:
                raise self.error
            assert time.monotonic() < deadline, f"batch {self.batch} does not end"
            time.sleep(0.02)

    def stop(self) -> int:
        """Number of rows that must be visible."""
        self._stopping.set()
        self.finish()
        return self.position

    def finish(self) -> None:
        """Wait until it has ended by itself."""
        self.join(200)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error

    def raised(self) -> None:
        """Raise the error that ends it."""
        self.finish()
        raise AssertionError("it ended without an error")

    def _pieces(self, shard: int) -> Iterator[pa.RecordBatch]:
        """A shard's rows, slowly enough that some outages hit the middle."""
        first, size = self.position + shard * self.ROWS, self.ROWS // 4
        for at in range(first, first + self.ROWS, size):
            yield pa.record_batch([pa.array(range(at, at + size))], schema=SCHEMA)
            time.sleep(0.01)


def judge(server: Any, table: str, rows: int) -> None:
    """By a client that is not ours: the numbers below `rows`, each once."""
    found = server.execute(f"SELECT count(*), count(DISTINCT id), min(id), max(id) FROM {table}")
    assert found == [(rows, rows, 0, rows - 1)]


def sink_of_pair(pair: PostgresPair, mechanism: str) -> tuple[Any, str]:
    """A sink that knows both servers, and its table."""
    from delivered.connectors.postgres import CONNECTOR

    table = pair.primary.table("id bigint")
    return CONNECTOR.sink({"url": pair.url, "dbtable": table, "mechanism": mechanism}), table
