"""Our engine and a sink with one Python process per core, without Spark: what the guarantee itself costs."""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.tables import CORES, batches, files, shares


def one_batch(guarantee: str = "exactly_once") -> Callable[[Path, Any], None]:
    """Called with a folder of Parquet files and a sink: one batch, a shard per core."""
    pool = multiprocessing.get_context("spawn").Pool(CORES)

    def run(folder: Path, sink: Any) -> None:
        from delivered.engine import Sinks
        from delivered.engine.context import Context
        from delivered.engine.decide import commit_batch
        from delivered.engine.recover import plan_batch
        from delivered.model.capability import Guarantee
        from delivered.model.identity import Scope
        from delivered.model.work import CheckpointView, Owner

        sink.ready_target(pq.read_schema(files(folder)[0]))
        scope = Scope(uuid.uuid4().hex, sink.name, "i")
        context = Context.open(Sinks.one(sink, scope.sink), scope, Guarantee.parse(guarantee), Owner("o"))
        plan = plan_batch(context, CheckpointView("i", 0, "{}", None), first=True)
        said = pool.starmap(_shard, [(sink, plan, i, share) for i, share in enumerate(shares(folder))], chunksize=1)
        commit_batch(context, 0, "{}", said)
        context.close()

    return run


def _shard(sink: Any, plan: Any, shard: int, share: Sequence[str]) -> Any:
    from delivered.engine import Sinks
    from delivered.engine.shard import write_shard
    from delivered.model.rows import Rows

    return write_shard(
        Sinks.one(sink, plan.scope.sink), plan, shard, 0, map(Rows, batches(share)), pq.read_schema(share[0])
    )
