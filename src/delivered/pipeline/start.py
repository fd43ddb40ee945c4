"""A start of a pipeline, before Spark knows of it: what is stored next to its checkpoint, and what was stored by the
start before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from delivered.checkpoint import sidecar
from delivered.checkpoint.folder import is_done, read_logged, recall
from delivered.contract.sink import Sink
from delivered.contract.source import Offsets, Source
from delivered.model.errors import Refused, UsageError
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.registry import PREFIX
from delivered.pipeline.spec import Reading


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
    """Store what the query that starts now must have in common with the next one: dedup, sources, the deciding sink."""
    sinks, fresh = pipeline.spec.open(), read_logged(pipeline.checkpoint)[0] is None
    sidecar.keep_dedup(pipeline.checkpoint, pipeline.dedup, fresh=fresh, sink=sinks.decider.name)
    sidecar.keep_removed(pipeline.checkpoint, pipeline.sources)
    sidecar.keep_decider(pipeline.checkpoint, sinks.decider.name, several=len(sinks.members) > 1)


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
