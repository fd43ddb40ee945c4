"""Gathers what the planner wants to know: from the pipeline as named, its checkpoint, its ledger, the live systems."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pyarrow import fs

from delivered.contract.finding import Finding
from delivered.contract.powers import ValidatesRows
from delivered.contract.sink import Sink
from delivered.engine.context import open_ledger
from delivered.model.capability import SourceCapability
from delivered.model.errors import MissingExtra, Refused, Unreachable
from delivered.model.extras import missing_extra
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope
from delivered.model.work import LedgerState, Owner
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.transform import changes_between_runs
from delivered.planner import (
    CheckpointFacts,
    EarlierFacts,
    Execution,
    OwnerFacts,
    Request,
    SinkFacts,
    SourceFacts,
    TransformFacts,
)
from delivered.spark.checkpoint import open_folder
from delivered.spark.dedup_kept import changed
from delivered.spark.driver import jvm_of
from delivered.spark.sinks import opened, without_async

if TYPE_CHECKING:
    from delivered.spark.pipeline import Pipeline

ASYNC_PROGRESS = "asyncprogresstrackingenabled"
_ASYNC_CONF = f"spark.sql.streaming.{ASYNC_PROGRESS}"
_OWNER_START_TOLERANCE_MS = 2_000
_NO_INCARNATION = "new"

_SPARK_SOURCES_REPLAYABLE = frozenset(
    {"kafka", "delta", "iceberg", "parquet", "json", "csv", "text", "orc", "avro", "rate", "rate-micro-batch"}
)
"""Sources of Spark and its neighbours whose offsets can be read again."""


def gather(pipeline: Pipeline, spark: Any, *, offline: bool, takeover: bool) -> Request:
    """Everything about a pipeline, for `make_plan`.

    Args:
        spark: a session, or None: there is none yet.
        offline: ask no server and no checkpoint; the plan is then of the names alone.

    Raises:
        UsageError: bad options.
        Unreachable: the checkpoint or the ledger cannot be read.
    """
    source = _source(pipeline.source, offline)
    made = [(e, without_async(e).sink()) for e in pipeline.all_sinks]
    sinks = tuple(_sink(e, s, pipeline.guarantee, offline) for e, s in made)
    checkpoint = CheckpointFacts(pipeline.checkpoint, takeover=takeover)
    findings = [*source.findings, *(f for s in sinks for f in s.findings)]
    blocked = any(f.refuses for f in findings) or len({s.name for s in sinks}) < len(sinks) or not sinks
    if not offline and not blocked:
        checkpoint = _checkpoint(pipeline, spark, takeover)
    transform = _transform(pipeline)
    if spark is not None and not offline and not blocked:
        from delivered.spark.check import checked_transform

        transform = replace(transform, findings=checked_transform(pipeline, spark))
    return Request(
        pipeline=pipeline.name,
        guarantee=pipeline.guarantee,
        source=source,
        sinks=sinks,
        checkpoint=checkpoint,
        transform=transform,
        execution=_execution(pipeline, spark),
        on_bad_row=pipeline.on_bad_row,
        validating=tuple(n.name for (_, s), n in zip(made, sinks, strict=True) if isinstance(s, ValidatesRows)),
        dead_letters=sinks[-1].name if pipeline.dead_letter is not None else None,
        dedup=pipeline.dedup,
    )


def _transform(pipeline: Pipeline) -> TransformFacts:
    """The transform with what sinks select of it: both must give the same rows when a batch runs again."""
    facts = pipeline.transform.facts()
    texts = " ".join(text for e in pipeline.sinks for text in e.projection.texts)
    if not texts:
        return facts
    kind = "sql" if facts.kind == "none" else facts.kind
    deterministic = False if facts.deterministic is None and changes_between_runs(texts) else facts.deterministic
    return replace(facts, kind=kind, deterministic=deterministic)


def _source(endpoint: Endpoint, offline: bool) -> SourceFacts:
    if endpoint.is_spark_own:
        known = endpoint.system.lower() in _SPARK_SOURCES_REPLAYABLE
        capability = SourceCapability(
            system=endpoint.system,
            replayable=known,
            sent_twice=endpoint.system.lower() == "kafka",
            why_not="" if known else "nothing is known of this format",
            assumes=(f"Spark's source {endpoint.system!r} gives the same records for the same offsets",),
        )
        return SourceFacts(endpoint.label, capability)
    source = endpoint.source()
    findings = () if offline else _asked(source.preflight)
    return SourceFacts(endpoint.label, source.capability(), findings)


def _sink(endpoint: Endpoint, sink: Sink, guarantee: Guarantee, offline: bool) -> SinkFacts:
    findings = () if offline else _asked(lambda: sink.preflight(guarantee))
    return SinkFacts(endpoint.name or sink.name, endpoint.label, sink.capability(), findings)


def _asked(preflight: Any) -> tuple[Finding, ...]:
    """A preflight that raises refuses: a server that is down is not a reason to show a traceback."""
    try:
        return tuple(preflight())
    except (Refused, MissingExtra) as error:
        return (Finding.refusal(error),)
    except ModuleNotFoundError as error:
        found = missing_extra(str(error))
        if found is None:
            raise
        return (Finding.refusal(found),)


def _execution(pipeline: Pipeline, spark: Any) -> Execution:
    options = {k.lower(): v.lower() for e in pipeline.all_sinks for k, v in e.options.items()}
    conf = {k.lower(): str(v).lower() for k, v in pipeline.conf.items()}
    asynchronous = "true" in (options.get(ASYNC_PROGRESS), conf.get(_ASYNC_CONF))
    master = pipeline.master or "local"
    if spark is not None:
        asynchronous = asynchronous or spark.conf.get(_ASYNC_CONF, "false").lower() == "true"
        master = spark.conf.get("spark.master", "local")
    return Execution(
        trigger=pipeline.trigger.kind,
        async_progress=asynchronous,
        cluster=not master.startswith("local"),
        batch_s_max=pipeline.batch_s_max,
    )


def _checkpoint(pipeline: Pipeline, spark: Any, takeover: bool) -> CheckpointFacts:
    sink_name, sink = opened(pipeline)
    incarnation, newest = logged(pipeline.checkpoint)
    # Before the ledger, which a pipeline that runs moves on.
    done = newest is not None and _is_done(pipeline.checkpoint, newest)
    ledger = open_ledger(sink, Scope(pipeline.name, sink_name, incarnation or _NO_INCARNATION))
    try:
        state = ledger.look()
    finally:
        ledger.close()
    # Over Spark Connect the owner's process is the server, which lives on after the query.
    connect = spark is not None and not hasattr(spark, "_jvm")
    return CheckpointFacts(
        location=pipeline.checkpoint,
        incarnation=incarnation,
        newest=newest,
        ledger_newest=_newest(state),
        owner=None if connect else living(state.owner, jvm_of(spark)),
        unwritable=_unwritable(pipeline.checkpoint),
        ledger_missing=newest is not None
        and _newest(state) is None
        and not pipeline.missing_ledger
        and (newest > 0 or done),
        ledger_behind=newest is not None and not pipeline.missing_ledger and _is_behind(state, newest + int(done)),
        takeover=takeover,
        earlier=_earlier(state),
        accepts_new=pipeline.new_checkpoint,
        transform_changed=_transform_changed(state, pipeline.transform_version),
        other_dedup=changed(pipeline.checkpoint, pipeline.dedup, sink_name) if incarnation is not None else None,
    )


def _is_behind(state: LedgerState, following: int) -> bool:
    """Whether a ledger that knows the checkpoint lacks batches before the one that Spark runs first."""
    newest = _newest(state)
    decided = -1 if state.last is None else state.last.batch
    return newest not in (None, following) and decided < following - 1


def _newest(state: LedgerState) -> int | None:
    return max((r.batch for r in (state.last, state.begun) if r is not None), default=None)


def _transform_changed(state: LedgerState, now: str) -> tuple[int, int] | None:
    if state.last is None or state.last.transform in ("", now):
        return None
    return state.last.transforms[-1].batch, state.last.batch


def _earlier(state: LedgerState) -> EarlierFacts | None:
    if state.last is not None or state.begun is not None or not state.earlier:
        return None
    earlier = state.earlier[0]
    return EarlierFacts(earlier.scope.incarnation, earlier.batch, earlier.offsets)


def logged(location: str) -> tuple[str | None, int | None]:
    """Incarnation and newest batch of a checkpoint whose query does not run; None, None for a new one."""
    filesystem, folder = open_folder(location)
    try:
        if filesystem.get_file_info(f"{folder}/metadata").type is not fs.FileType.File:
            return None, None
        with filesystem.open_input_stream(f"{folder}/metadata") as stream:
            incarnation = str(json.loads(bytes(stream.read()))["id"])
        infos = filesystem.get_file_info(fs.FileSelector(f"{folder}/offsets", allow_not_found=True))
    except (OSError, ValueError, KeyError) as error:
        raise Unreachable(
            "CHECKPOINT_UNREADABLE",
            f"The checkpoint {location!r} cannot be read from Python on the driver: {error}.",
            next_step="make the folder readable for the driver's user",
        ) from error
    return incarnation, max((int(i.base_name) for i in infos if i.base_name.isdigit()), default=None)


def _is_done(location: str, batch: int) -> bool:
    filesystem, folder = open_folder(location)
    return filesystem.get_file_info(f"{folder}/commits/{batch}").type is fs.FileType.File


def _unwritable(location: str) -> str | None:
    """Why a folder of this machine cannot be written; None: it can, or it is elsewhere, where Spark finds out."""
    filesystem, path = open_folder(location)
    if not isinstance(filesystem, fs.LocalFileSystem):
        return None
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is a file"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"no permission to write in {folder}"


def living(owner: Owner | None, jvm: psutil.Process | None = None) -> OwnerFacts | None:
    """The owner, if it is another driver on this machine and its process lives. Of other machines nothing is known;
    the ledger fences them.

    Args:
        jvm: of the session that is to run the pipeline.
    """
    if owner is None or owner.host != socket.gethostname() or owner.process in _own_processes():
        return None
    if jvm is not None and owner.process == jvm.pid:
        return None
    try:
        process = psutil.Process(owner.process)
        same = abs(process.create_time() * 1000 - owner.started_ms) < _OWNER_START_TOLERANCE_MS
        if not same or process.status() == psutil.STATUS_ZOMBIE:
            return None
    except psutil.Error:
        return None
    return OwnerFacts(owner.host, owner.process)


def _own_processes() -> set[int]:
    """This process, the JVM it started, and the JVM that started it (spark-submit)."""
    own = psutil.Process(os.getpid())
    return {own.pid, *(p.pid for p in own.children(recursive=True)), *(p.pid for p in own.parents())}
