"""The audit of a pipeline as it is declared, without the transform, which runs in Spark or in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from delivered.audit.request import AuditRequest, Recompute, Sealing
from delivered.model.capability import APPEND
from delivered.model.errors import Refused, UsageError, did_you_mean
from delivered.model.rows import OnBadRow
from delivered.pipeline.definition import Definition, grouping_columns
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.start import as_started

_KAFKA_READS = ("kafka.", "subscribe", "assign", "includeheaders")
"""How the options of Spark's Kafka source start, in lower case, that say which records it reads."""

_ISOLATION = "kafka.isolation.level"


def request_of(
    pipeline: Definition,
    chosen: Endpoint,
    samples_max: int,
    sink_from: Mapping[str, Any] | None = None,
    recompute: bool = False,
    sealing: Sealing | None = None,
) -> AuditRequest:
    """
    Args:
        sealing: None: read everything, and seal nothing. So it is with `sink_from`.

    Raises:
        UsageError: one of Spark's own sources.
        Refused: only a recompute can judge this.
    """
    if not recompute and pipeline.output_mode != "append" and chosen.sink().capability().write == APPEND:
        raise Refused("AUDIT_OUTPUT_MODE", output_mode=pipeline.output_mode)
    sinks = pipeline.spec.open()
    by = {**pipeline.audit_by, **chosen.audit}
    return AuditRequest(
        pipeline=pipeline.name,
        guarantee=pipeline.guarantee,
        checkpoint=pipeline.checkpoint,
        sources={n: _readable(e).source().planned() for n, e in as_started(pipeline).items()},
        sink=chosen.sink(),
        sink_name=chosen.name,
        dedup=pipeline.dedup,
        id=by.get("id"),
        key=by.get("key"),
        own=by.get("own"),
        samples_max=samples_max,
        sink_from=dict(sink_from) if sink_from is not None else None,
        decided_by=sinks,
        transform_version=pipeline.spec.transform,
        recompute=_recompute(pipeline, chosen) if recompute else None,
        rejects=pipeline.on_bad_row is not OnBadRow.FAIL,
        dead_letters=next((m.name for m in sinks.members if m.dead_letters), None),
        sealing=sealing if sink_from is None else None,
    )


def _readable(endpoint: Endpoint) -> Endpoint:
    """Of Spark's own Kafka source, this package's with the same columns, which reads by the offsets that Spark logged.
    Options that say when a query reads, and how much, do not matter then. Spark's default reads aborted records too.

    Raises:
        UsageError: another one of Spark's own sources.
    """
    if not endpoint.is_spark_own:
        return endpoint
    if endpoint.system.lower() != "kafka":
        raise UsageError("AUDIT_SOURCE", format=endpoint.format, system=endpoint.system)
    chosen = {k: v for k, v in endpoint.options.items() if k.lower().startswith(_KAFKA_READS)}
    if not any(k.lower() == _ISOLATION for k in chosen):
        chosen[_ISOLATION] = "read_uncommitted"
    return replace(endpoint, format="kafka", options=chosen)


def _recompute(pipeline: Definition, sink: Endpoint) -> Recompute:
    facts = pipeline.transform.facts()
    keys = sink.sink().capability().write.keys or grouping_columns(pipeline.transform.sql)
    sql = pipeline.transform.kind == "sql"
    return Recompute(pipeline.output_mode, tuple(keys), facts.changing, pipeline.transform.deterministic, sql)


def chosen_sink(pipeline: Definition, sink: str | None) -> Endpoint:
    """Raises UsageError: no such sink, or several and none named."""
    endpoints = {e.name or e.sink().name: e for e in pipeline.sinks}
    if sink is None and len(endpoints) == 1:
        return next(iter(endpoints.values()))
    if sink not in endpoints:
        reason = "no sink was named" if sink is None else f"no sink is named {sink!r}"
        near = did_you_mean(sink or "", endpoints)
        raise UsageError("AUDIT_SINK.UNNAMED", reason=reason, endpoints=", ".join(endpoints), hint=near)
    return endpoints[sink]
