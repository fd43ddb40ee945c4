"""The registered schemas that a pipeline's sources are read with, and its sinks written with."""

from __future__ import annotations

from delivered.checkpoint import schemas
from delivered.checkpoint.folder import is_done, logged
from delivered.contract.schemas import ReadsBySchema, WritesBySchema
from delivered.contract.sink import Sink
from delivered.model.errors import UsageError
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint


def as_started(pipeline: Definition) -> dict[str, Endpoint]:
    """Sources by name, with the versions of the newest start; those of the registry, if there was none."""
    kept = schemas.read(pipeline.checkpoint)
    return {name: _with(endpoint, kept.get(name, {})) for name, endpoint in pipeline.sources.items()}


def sink_as_started(pipeline: Definition, endpoint: Endpoint) -> Sink:
    """A sink that tells which rows it accepts as in the newest batches; as declared, if none was planned."""
    sink = endpoint.sink()
    newest = logged(pipeline.checkpoint)[1]
    if not isinstance(sink, WritesBySchema) or newest is None:
        return sink
    name, known = endpoint.name or sink.name, schemas.written(pipeline.checkpoint, newest) or {}
    ids = {c: known[f"{name}.{c}"] for c in sink.columns if f"{name}.{c}" in known}
    return sink.by_ids(ids) if len(ids) == len(sink.columns) else sink


def for_start(pipeline: Definition) -> dict[str, Endpoint]:
    """Sources by name, with the newest versions, which are stored.

    A batch that is logged and not finished runs again with the versions that it was planned with, and so does this
    start of the query: other columns could give other rows. The next start takes the newest.
    """
    newest = logged(pipeline.checkpoint)[1]
    unfinished = newest is not None and not is_done(pipeline.checkpoint, newest)
    kept = schemas.read(pipeline.checkpoint) if unfinished else {}
    found: dict[str, dict[str, int]] = {}
    for name, endpoint in pipeline.sources.items():
        source = None if endpoint.is_spark_own else endpoint.source()
        if isinstance(source, ReadsBySchema):
            before = kept.get(name, {})
            found[name] = {c: before.get(c, v) for c, v in source.newest_versions().items()}
    if found:
        schemas.keep_read(pipeline.checkpoint, found)
    return {name: _with(endpoint, found.get(name, {})) for name, endpoint in pipeline.sources.items()}


def unfit_for_unfinished(pipeline: Definition, why: str) -> UsageError | None:
    """The error of a transform that does not fit the columns of an unfinished batch; None: there is no such batch, or
    no registered schema.

    Args:
        why: Spark's, as one line.
    """
    newest, kept = logged(pipeline.checkpoint)[1], schemas.read(pipeline.checkpoint)
    if newest is None or not kept or is_done(pipeline.checkpoint, newest):
        return None
    versions = ", ".join(f"{c} of {name} in version {v}" for name, found in kept.items() for c, v in found.items())
    return UsageError(
        "TRANSFORM_UNFINISHED_BATCH",
        f"Batch {newest} is not finished and must run again with the columns that it was planned with ({versions}), "
        f"which the transform does not fit: {why}. Nothing was changed.",
        next_step="start once with the previous transform and the trigger available_now, which finishes the batch; "
        "then start with the new one, which gets the newest columns",
    )


def _with(endpoint: Endpoint, versions: dict[str, int]) -> Endpoint:
    source = endpoint.source() if versions else None
    if not isinstance(source, ReadsBySchema):
        return endpoint
    given = {name.lower() for name in endpoint.options}
    options = {n: v for n, v in source.by_versions(versions).items() if n not in given}
    return endpoint.with_options(**options)
