"""A pipeline from a log to SQLite, decided without Spark, and the checkpoint that Spark would leave."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

import delivered
from delivered.connectors.log.produce import append
from delivered.engine import Sinks
from delivered.engine.context import Context
from delivered.engine.decide import commit_batch
from delivered.engine.recover import plan_batch
from delivered.engine.shard import write_shard
from delivered.model.identity import Scope
from delivered.model.rows import Rows
from delivered.model.work import CheckpointView, Owner


def pipeline(tmp_path: Path, checkpoint: str = "checkpoint", **options: object) -> delivered.Pipeline:
    append(str(tmp_path / "in"), pa.table({"value": [b"a"]}), idempotence=("test", 1))
    settings: dict[str, object] = {"guarantee": "exactly_once", **options}
    return delivered.Pipeline(
        name="orders",
        checkpoint=tmp_path / checkpoint,
        source=delivered.log(str(tmp_path / "in")),
        sinks=[delivered.sqlite(str(tmp_path / "out.db"), "orders")],
        **settings,  # type: ignore[arg-type]
    )


def offsets_of(batch: int) -> str:
    return json.dumps({"version": batch, "offsets": {"0": batch + 1}})


def decide(made: delivered.Pipeline, batches: int, owner: Owner, incarnation: str = "incarnation-1") -> None:
    """Under the pipeline's guarantee."""
    sink = made.sinks[0].sink()
    sinks, scope = Sinks.one(sink), Scope(made.name, sink.name, incarnation)
    columns = next(iter(made.sources.values())).source().planned().schema()
    context = Context.open(sinks, scope, made.guarantee, owner)
    for batch in range(batches):
        offsets = offsets_of(batch)
        plan = plan_batch(context, CheckpointView(incarnation, batch, offsets, None), first=batch == 0)
        rows = pa.RecordBatch.from_pylist([{"value": b"v"}], schema=columns)
        commit_batch(context, batch, offsets, [write_shard(sinks, plan, 0, 0, iter([Rows(rows)]), columns)])
    context.close()


def checkpoint(made: delivered.Pipeline, batches: int, incarnation: str = "incarnation-1") -> None:
    folder = Path(made.checkpoint)
    (folder / "offsets").mkdir(parents=True)
    (folder / "metadata").write_text(json.dumps({"id": incarnation}))
    for batch in range(batches):
        (folder / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{offsets_of(batch)}")
