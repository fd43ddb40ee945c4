"""Take over where another job stopped: its position becomes the start of a pipeline with a new checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from delivered.checkpoint import sidecar
from delivered.checkpoint.folder import holds_state, logged, read_view
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
        raise UsageError(
            "ADOPT_ORIGIN",
            f"adopt takes the old job's position from one origin, but got {' and '.join(origin_names) or 'none'}.",
            next_step="name its checkpoint, its consumer group, or a timestamp",
        )
    name, source = next(iter(pipeline.sources.items()))
    origin = None if len(pipeline.sources) > 1 or source.is_spark_own else source.source()
    unfit = UsageError(
        "ADOPT_SOURCE",
        f"The pipeline's source is {', '.join(pipeline.sources)} ({source.system}); adopt needs one source, Kafka.",
        next_step="continue on the old checkpoint (docs/migrate.md)",
    )
    if origin is None:
        raise unfit
    _not_started(pipeline)
    view = None
    if checkpoint is not None:
        view = _finished(str(checkpoint))
        lines = by_source(view.offsets)
        if len(lines) != 1:
            raise Refused(
                "ADOPT_SOURCES",
                f"The query of {str(checkpoint)!r} has {len(lines)} sources; adopt supports one.",
                next_step="continue on the old checkpoint (docs/migrate.md)",
            )
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
        raise Refused(
            "ADOPT_RUNNING",
            f"The query of {str(checkpoint)!r} began another batch in the meantime: it is still running.",
            next_step="stop it, then repeat",
        )
    _keep(pipeline, name, resumption, write=True)
    return replace(adoption, written=True)


def _not_started(pipeline: Definition) -> None:
    """
    Raises:
        Refused: the checkpoint, or the ledger, has a batch of this pipeline.
    """
    _, batch = logged(pipeline.checkpoint)
    if batch is not None:
        raise Refused(
            "ADOPT_STARTED",
            f"The checkpoint {pipeline.checkpoint!r} already has batch {batch} and continues from there.",
            next_step="give the pipeline a new checkpoint",
        )
    spec = pipeline.spec
    sinks = spec.open()
    ledger = open_shared_ledger(sinks, spec.scope(sinks))
    try:
        state = ledger.look()
    finally:
        ledger.close()
    if state.last is not None or state.earlier or state.begun is not None or state.earlier_begun:
        raise Refused(
            "ADOPT_STARTED",
            f"The ledger already holds batches of pipeline {pipeline.name!r} from another checkpoint.",
            next_step="give the pipeline a new name; or continue with its own checkpoint",
        )


def _finished(location: str) -> CheckpointView:
    """The last batch of a query with Spark's own source.

    Raises:
        Refused: it is not committed, the query keeps state, or it uses a delivered source.
    """
    incarnation, batch = logged(location)
    if incarnation is None or batch is None:
        raise Refused(
            "ADOPT_CHECKPOINT_EMPTY",
            f"The checkpoint {location!r} has no batch.",
            next_step="correct the path: the folder with metadata, offsets and commits",
        )
    view = read_view(location)
    if sidecar.is_ours(location):
        raise Refused(
            "ADOPT_OURS",
            f"The checkpoint {location!r} belongs to a source of delivered.",
            next_step=f"continue on it: checkpoint: {location}",
        )
    if holds_state(location):
        raise Refused(
            "ADOPT_STATE",
            f"The query of {location!r} keeps state, which a new checkpoint would not have.",
            next_step="continue on the old checkpoint (docs/migrate.md)",
        )
    if view.logged != view.batch:
        raise Refused(
            "ADOPT_UNFINISHED",
            f"Batch {view.batch} of {location!r} is logged but not committed: the query is running, or died in it. "
            f"Of the batch's records, up to {view.offsets[:300]}, the old sink may hold none, some or all.",
            next_step="run the old query once more with trigger(availableNow=True), so that it finishes the batch",
        )
    return view


def _offsets(text: str, location: str) -> dict[str, Any]:
    try:
        offsets = json.loads(text)
    except ValueError:
        offsets = None
    if not isinstance(offsets, dict):
        raise Refused(
            "ADOPT_OFFSETS",
            f"The offsets in {location!r} are not those of a Kafka source: {text[:100]!r}.",
            next_step="adopt needs a query with format('kafka')",
        )
    return offsets


def _keep(pipeline: Definition, source: str, resumption: Resumption, *, write: bool) -> None:
    """
    Raises:
        Refused: the checkpoint keeps another start.
    """
    stored = sidecar.kept_first(pipeline.checkpoint, source)
    if stored is None and write:
        stored = sidecar.keep_first(pipeline.checkpoint, lambda: resumption.offsets, source)
    if stored is not None and stored != resumption.offsets:
        raise Refused(
            "ADOPT_STARTED",
            f"The checkpoint {pipeline.checkpoint!r} already has another start: {json.dumps(stored)[:300]}.",
            next_step="give the pipeline a new checkpoint; or start it as it is, at the stored start",
        )


def _notes(view: CheckpointView | None, group: str | None) -> tuple[str, ...]:
    sink = "the old job's sink is left as it is"
    if view is not None:
        return (
            f"{sink}. If that job was at-least-once, records of batches that it ran again are there twice; its last "
            "batch is finished. The audit counts from this start: name these records with audit: own, or write to a "
            "new target",
            "an idle query cannot be told from a stopped one: stop it before the pipeline starts",
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
