"""The registered schemas that the rows of a batch are written with: the same ones when it runs again."""

from __future__ import annotations

import pyarrow as pa

from delivered.checkpoint import sidecar
from delivered.contract.sink import Sink
from delivered.engine.sinks import Sinks
from delivered.model.identity import Scope
from delivered.model.work import Action, BatchPlan
from delivered.pipeline.spec import PipelineSpec

_settled: dict[tuple[Scope, str | None], dict[str, Sink]] = {}
"""Sinks with their schemas, of the start that was planned last."""


def with_schemas(spec: PipelineSpec, sinks: Sinks, schema: pa.Schema, plan: BatchPlan) -> Sinks:
    """The sinks with the registered schemas that the rows of a planned batch are written with.

    Those of a decided batch are the ones that it was decided with: rows written again must have the same bytes. An
    undecided batch takes what the registry had at the start of the query; that is stored before its tasks start.
    """
    own = [(m.name, m.sink, rows) for m, rows in sinks.own_schemas(schema)]
    formatted = [(name, each, rows) for name, each, rows in own if each.schema_columns]
    if not formatted or (plan.action is Action.SKIP and not plan.rewrite):
        return sinks
    where, decided = spec.checkpoint, plan.is_decided
    known = sidecar.read_written_schemas(where, plan.batch) if decided and where is not None else None
    if known is not None and all(f"{name}.{c}" in known for name, each, _ in formatted for c in each.schema_columns):
        settled = {
            name: each.by_ids({c: known[f"{name}.{c}"] for c in each.schema_columns}) for name, each, _ in formatted
        }
    else:
        key = (plan.scope, spec.start)
        if spec.start is None or key not in _settled:
            _settled.clear()
            _settled[key] = {name: each.settled(rows) for name, each, rows in formatted}
        settled = _settled[key]
        if where is not None and not decided:
            ids = {f"{n}.{c}": i for n, s in settled.items() for c, i in s.schema_ids().items()}
            sidecar.keep_written_schemas(where, plan.batch, ids)
    return sinks.with_sinks(settled)
