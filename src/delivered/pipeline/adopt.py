"""Take over where another job stopped: its position becomes the start of a pipeline with a new checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from delivered.checkpoint import sidecar
from delivered.checkpoint.folder import holds_state, read_logged, read_view
from delivered.contract.source import Resumption
from delivered.engine.context import open_shared_ledger
from delivered.model.errors import Refused, UsageError
from delivered.model.identity import by_source
from delivered.model.work import CheckpointView
from delivered.pipeline.definition import Definition


@dataclass(frozen=True)
class Adoption:
    """What `adopt` will write, or wrote.

    Attributes:
        origin: where the old job's position was read.
        checkpoint: the pipeline's, where the start is kept.
        partitions: source partition -> (first offset that the pipeline reads, records ahead of it now).
        notes: what the user must know.
        written: whether the start is kept in the checkpoint.
    """

    origin: str
    checkpoint: str
    partitions: Mapping[str, tuple[int, int]]
    notes: tuple[str, ...]
    written: bool = False

    def to_json(self) -> dict[str, Any]:
        partitions = {p: {"offset": offset, "ahead": ahead} for p, (offset, ahead) in self.partitions.items()}
        return {**self.__dict__, "partitions": partitions, "notes": list(self.notes)}


def adopt(
    pipeline: Definition,
    *,
    checkpoint: str | Path | None = None,
    group: str | None = None,
    timestamp_ms: int | None = None,
    write: bool = True,
) -> Adoption:
    """See `delivered.Pipeline.adopt`.

    Idempotent, even after a kill: batch 0 starts from one file in the checkpoint, which is written once.
    """
    origins = {"checkpoint": checkpoint, "group": group, "timestamp": timestamp_ms}
    origin_names = [name for name, value in origins.items() if value is not None]
    if len(origin_names) != 1:
        raise UsageError("ADOPT_ORIGIN", origins=" and ".join(origin_names) or "none")
    name, source = next(iter(pipeline.sources.items()))
    origin = None if len(pipeline.sources) > 1 or source.is_spark_own else source.source()
    unfit = UsageError("ADOPT_SOURCE", sources=", ".join(pipeline.sources), system=source.system)
    if origin is None:
        raise unfit
    _check_not_started(pipeline)
    view = None
    if checkpoint is not None:
        view = _find_finished(str(checkpoint))
        lines = by_source(view.offsets)
        if len(lines) != 1:
            raise Refused("ADOPT_SOURCES", checkpoint=str(checkpoint), source_count=len(lines))
        resumption = origin.resumption(_offsets(next(iter(lines.values())), str(checkpoint)))
        where = f"batch {view.batch} of the checkpoint {str(checkpoint)!r}, its last one, committed"
    elif group is not None:
        resumption = origin.resumption(group)
        where = f"the committed offsets of the consumer group {group!r}, without members"
    else:
        resumption = origin.resumption(int(timestamp_ms or 0))
        where = f"the first records at or after {timestamp_ms} ms"
    if resumption is None:
        raise unfit
    adoption = Adoption(where, pipeline.checkpoint, resumption.partitions, (*resumption.notes, *_notes(view, group)))
    _keep(pipeline, name, resumption, write=False)
    if not write:
        return adoption
    if view is not None and read_view(str(checkpoint)) != view:
        raise Refused("ADOPT_RUNNING.QUERY", checkpoint=str(checkpoint))
    _keep(pipeline, name, resumption, write=True)
    return replace(adoption, written=True)


def _check_not_started(pipeline: Definition) -> None:
    """Raises Refused: the checkpoint, or the ledger, has a batch of this pipeline."""
    _, batch = read_logged(pipeline.checkpoint)
    if batch is not None:
        raise Refused("ADOPT_STARTED.CHECKPOINT", checkpoint=pipeline.checkpoint, batch=batch)
    spec = pipeline.spec
    sinks = spec.open()
    ledger = open_shared_ledger(sinks, spec.scope(sinks))
    try:
        state = ledger.look()
    finally:
        ledger.close()
    if state.last is not None or state.earlier or state.started is not None or state.earlier_started:
        raise Refused("ADOPT_STARTED.LEDGER", pipeline=pipeline.name)


def _find_finished(location: str) -> CheckpointView:
    """The last batch of a query with Spark's own source.

    Raises:
        Refused: it is not committed, the query keeps state, or it uses a delivered source.
    """
    incarnation, batch = read_logged(location)
    if incarnation is None or batch is None:
        raise Refused("ADOPT_CHECKPOINT_EMPTY", location=location)
    view = read_view(location)
    if sidecar.is_ours(location):
        raise Refused("ADOPT_OURS", location=location)
    if holds_state(location):
        raise Refused("ADOPT_STATE", location=location)
    if view.logged != view.batch:
        raise Refused("ADOPT_UNFINISHED", batch=view.batch, location=location, offsets=view.offsets[:300])
    return view


def _offsets(text: str, location: str) -> dict[str, Any]:
    try:
        offsets = json.loads(text)
    except ValueError:
        offsets = None
    if not isinstance(offsets, dict):
        raise Refused("ADOPT_OFFSETS", location=location, text=text[:100])
    return offsets


def _keep(pipeline: Definition, source: str, resumption: Resumption, *, write: bool) -> None:
    """Raises Refused: the checkpoint keeps another start."""
    stored = sidecar.read_first(pipeline.checkpoint, source)
    if stored is None and write:
        stored = sidecar.keep_first(pipeline.checkpoint, lambda: resumption.offsets, source)
    if stored is not None and stored != resumption.offsets:
        raise Refused("ADOPT_STARTED.OTHER_START", checkpoint=pipeline.checkpoint, stored=json.dumps(stored)[:300])


def _notes(view: CheckpointView | None, group: str | None) -> tuple[str, ...]:
    sink = "the old job's sink is left as it is"
    if view is not None:
        return (
            f"{sink}. If that job was at-least-once, records of batches that it ran again are there twice; its last "
            "batch is finished. The audit counts from this start: name these records with audit: own, or write to a "
            "new target",
            "an idle query looks like a stopped one: stop it before the pipeline starts",
        )
    if group is not None:
        return (
            f"{sink}. Records that it wrote and whose offsets it had not committed are written again; records whose "
            "offsets it committed before it wrote them are skipped",
            "a consumer with assign() is no member: stop it before the pipeline starts",
        )
    return (
        f"{sink}. A timestamp says nothing of what it read: records before are skipped, records from then on are "
        "delivered, whether it wrote them or not",
    )
