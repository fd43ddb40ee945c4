"""Whether a sink upserts by the key that changes of its source name their rows by."""

from __future__ import annotations

from collections.abc import Iterator

from delivered.contract.finding import Finding
from delivered.contract.powers import planned
from delivered.contract.source import NamesRows
from delivered.model.capability import WriteMode
from delivered.model.errors import DeliveredError
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint


def check_change_key(pipeline: Definition, sink: Endpoint, mode: WriteMode) -> Iterator[Finding]:
    """A refusal if the sink gets the source's own columns; a warning after SQL, which may give others their names."""
    endpoints = list(pipeline.sources.values())
    if not mode.upserts or len(endpoints) != 1 or endpoints[0].is_spark_own:
        return
    if pipeline.transform.kind not in ("none", "sql"):
        return
    source = endpoints[0].source()
    if not isinstance(source, NamesRows):
        return
    try:
        source = planned(source)
        key, wanted = source.row_key(), {name.lower() for name in mode.keys}
        columns = {name.lower() for name in source.schema().names}
    except DeliveredError:
        return  # said by the source's preflight
    if not key or wanted == {name.lower() for name in key} or not wanted <= columns:
        return
    refuses = pipeline.transform.kind == "none" and sink.projection.is_all
    yield Finding(
        "CHANGE_KEY",
        f"{sink.label} upserts by {', '.join(mode.keys)}, but changes of {endpoints[0].label} name their row by "
        f"{', '.join(key)}: deletes, and changes of {', '.join(mode.keys)}, would leave rows behind",
        refuses,
        f'set keyColumns to "{",".join(key)}"'
        + ("" if refuses else "; or ignore this, if the transform gives other columns these names"),
    )
