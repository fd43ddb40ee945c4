"""A start of a pipeline, before Spark knows of it: what is stored next to its checkpoint, what was stored by the start
before, and a start where another job stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from delivered.checkpoint import holds_state, is_done, newest_offsets, read_logged, read_view, recall, sidecar
from delivered.contract.sink import Sink
from delivered.contract.source import Offsets, Resumption, Source
from delivered.engine.context import open_shared_ledger
from delivered.model.errors import Refused, UsageError, holds_password
from delivered.model.identity import OF_NAMED_SOURCE, by_source
from delivered.model.options import find_option
from delivered.model.work import CheckpointView
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint, datasets
from delivered.pipeline.registry import PREFIX
from delivered.pipeline.spec import OPTION, Reading


def record_sources(pipeline: Definition, endpoints: Mapping[str, Endpoint]) -> dict[str, Source | None]:
    """The sources, opened, whose first offsets are stored from now on; None: one of Spark's own.

    Args:
        endpoints: from `for_start`.
    """
    sources = {n: None if e.is_spark_own else e.source().planned() for n, e in endpoints.items()}
    for name, source in sources.items():
        if source is not None:
            sidecar.keep_first(pipeline.checkpoint, lambda source=source: _initial(source), name)  # type: ignore[misc]
    return sources


def _initial(source: Source) -> Offsets:
    with closing(source.driver()) as driver:
        return driver.initial()


def record_query(pipeline: Definition) -> None:
    """Store what the query that starts now must have in common with the next one: dedup, sources, the deciding sink;
    and how it writes."""
    sinks, fresh = pipeline.spec.open(), read_logged(pipeline.checkpoint)[0] is None
    sidecar.keep_dedup(pipeline.checkpoint, pipeline.dedup, fresh=fresh, sink=sinks.decider.name)
    sidecar.keep_removed(pipeline.checkpoint, pipeline.sources)
    sidecar.keep_decider(pipeline.checkpoint, sinks.decider.name, several=len(sinks.members) > 1)
    sidecar.keep_modes(pipeline.checkpoint, {m.name: m.sink.capability().write.says for m in sinks.members})


def descriptions(sources: Iterable[tuple[str, Mapping[str, str]]]) -> tuple[str, ...]:
    """Of each source of a query of the Spark idiom, for Spark's reports."""
    return tuple(Endpoint(n, options).description if n.startswith(PREFIX) else n for n, options in sources)


def identities(sources: Iterable[tuple[str, Mapping[str, str]]]) -> list[list[str]]:
    """What each source of a query of the Spark idiom reads: its system and its topics, table or path; then the same
    with their servers. Empty: nothing of ours, or a pipeline's.

    Args:
        sources: format and options of each.
    """
    sources = list(sources)
    if any(find_option(options, OPTION) is not None for _, options in sources):
        return []
    found = []
    for format_, options in sources:
        endpoint = Endpoint(format_, {k: v for k, v in options.items() if not holds_password(v)})
        places = [("log", options[k]) for k in options if k.lower() == "log"]
        with suppress(ValueError):  # options of another package's source, which only look like ours
            places += datasets(endpoint)
        names = f"{endpoint.system} {', '.join(name for _, name in places)}".strip()
        found.append([names, " ".join([endpoint.system, *(f"{server}/{name}" for server, name in places)])])
    return found


def record_order(location: str, sources: list[list[str]], *, complete: bool = True) -> None:
    """Check that each source of a query of the Spark idiom gets its own offsets, and store what it reads. A source may
    move to another server, or its path be spelt in another way.

    Args:
        sources: from `identities`.
        complete: no source of the query is missing among them.

    Raises:
        Refused: one would get the offsets of another.
        InvariantBroken: the file is damaged.
        Unreachable: the checkpoint cannot be read or written to.
    """
    lines, before = newest_offsets(location).splitlines(), sidecar.read_order(location)
    if not sources or any(OF_NAMED_SOURCE.match(line) for line in lines):
        return
    number, known = len(sources), ""
    if lines and before is not None and len(before) == number:
        for depth in (1, 0):
            was, now = [s[depth] for s in before], [s[depth] for s in sources]
            for at, (own, other) in enumerate(zip(now, was, strict=True), 1):
                if own != other and (own in was or other in now):
                    order = "; ".join(was)
                    raise Refused(
                        "SOURCE_ORDER.MOVED", location=location, number=at, now=own, before=other, order=order
                    )
    elif lines and before is not None:
        if not complete:
            return
        known = ": " + "; ".join(s[1] for s in before)
        raise Refused("SOURCE_ORDER.NUMBER", location=location, now=number, before=len(before), order=known)
    elif lines and complete and len(set(map(tuple, sources))) > len(lines):
        raise Refused("SOURCE_ORDER.NUMBER", location=location, now=number, before=len(lines), order=known)
    if (before is not None or len(sources) > 1) and sources != before:
        sidecar.keep_order(location, sources)


def read_to_its_end(
    sources: Sequence[tuple[str, Mapping[str, str]]], checkpoint: str | None, version: str
) -> Reading | None:
    """How the source of an available-now query of the Spark idiom is read, on a Spark that ends it after one batch, if
    the source limits the size of one. None: one batch is all, whatever is there.

    Args:
        sources: format and options of each.
        version: of that Spark.

    Raises:
        Refused: there are several sources.
    """
    for name, options in sources:
        if not name.startswith(PREFIX):
            continue
        reading, own = Reading.parse(options)
        if (rows := Endpoint(name, own).source().rows_per_batch_max) is not None:
            if len(sources) > 1:
                raise Refused("AVAILABLE_NOW_LIMIT", version=version, source=name, rows=rows)
            at = reading.checkpoint or checkpoint
            return replace(reading, checkpoint=at, ends=True, store=recall(at or ""))
    return None


# The registered schemas that a pipeline's sources are read with, and its sinks written with.


def as_started(pipeline: Definition) -> dict[str, Endpoint]:
    """Sources by name, with the versions of the newest start; those of the registry, if there was none."""
    kept = sidecar.read_schemas(pipeline.checkpoint)
    return {name: _with(endpoint, kept.get(name, {})) for name, endpoint in pipeline.sources.items()}


def sink_as_started(pipeline: Definition, endpoint: Endpoint) -> Sink:
    """A sink that checks rows as in the newest batches; as declared, if none was planned."""
    sink = endpoint.sink()
    newest = read_logged(pipeline.checkpoint)[1]
    if newest is None or not sink.schema_columns:
        return sink
    name, known = endpoint.name or sink.name, sidecar.read_written_schemas(pipeline.checkpoint, newest) or {}
    ids = {c: known[f"{name}.{c}"] for c in sink.schema_columns if f"{name}.{c}" in known}
    return sink.by_ids(ids) if len(ids) == len(sink.schema_columns) else sink


def for_start(pipeline: Definition) -> dict[str, Endpoint]:
    """Sources by name, with the newest versions, which are stored.

    A batch that is logged and not finished runs again with the versions that it was planned with, and so does this
    start of the query: other columns could give other rows. The next start takes the newest.
    """
    newest = read_logged(pipeline.checkpoint)[1]
    unfinished = newest is not None and not is_done(pipeline.checkpoint, newest)
    kept = sidecar.read_schemas(pipeline.checkpoint) if unfinished else {}
    found: dict[str, dict[str, int]] = {}
    for name, endpoint in pipeline.sources.items():
        versions = {} if endpoint.is_spark_own else endpoint.source().newest_versions()
        before = kept.get(name, {})
        if versions:
            found[name] = {c: before.get(c, v) for c, v in versions.items()}
    if found:
        sidecar.keep_read_schemas(pipeline.checkpoint, found)
    return {name: _with(endpoint, found.get(name, {})) for name, endpoint in pipeline.sources.items()}


def unfit_for_unfinished(pipeline: Definition, why: str) -> UsageError | None:
    """The error of a transform that does not fit the columns of an unfinished batch; None: there is no such batch, or
    no registered schema.

    Args:
        why: Spark's, as one line.
    """
    newest, kept = read_logged(pipeline.checkpoint)[1], sidecar.read_schemas(pipeline.checkpoint)
    if newest is None or not kept or is_done(pipeline.checkpoint, newest):
        return None
    versions = ", ".join(f"{c} of {name} in version {v}" for name, found in kept.items() for c, v in found.items())
    return UsageError("TRANSFORM_UNFINISHED_BATCH", newest=newest, versions=versions, reason=why)


def _with(endpoint: Endpoint, versions: dict[str, int]) -> Endpoint:
    if not versions:
        return endpoint
    given = {name.lower() for name in endpoint.options}
    options = {n: v for n, v in endpoint.source().by_versions(versions).items() if n not in given}
    return endpoint.with_options(**options)


# Where another job stopped: its position becomes the start of a pipeline with a new checkpoint.


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
