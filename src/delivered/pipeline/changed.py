"""What differs between two definitions of a pipeline, and what their checkpoint makes of it (docs/checkpoint.md)."""

from __future__ import annotations

from collections.abc import Iterator

from delivered.model.offsets import SOURCE
from delivered.pipeline.definition import Definition


def changes(before: Definition, now: Definition) -> Iterator[str]:
    """A line for each. What the checkpoint refuses, and a stateless transform that changed, are the plan's to say."""
    if before.guarantee is not now.guarantee:
        yield f"the guarantee is {now.guarantee.value} from the next batch on; it was {before.guarantee.value}"
    if before.transform_version != now.transform_version and now.transform.facts().stateful:
        yield "the transform changed and keeps state: Spark continues with the same operators and keys, else refuses it"
    for name in before.sources.keys() & now.sources.keys():
        if before.sources[name] != now.sources[name]:
            what = "the source" if name == SOURCE else f"the source {name}"
            yield f"{what} changed: from the next batch on; startingOffsets count on a new checkpoint alone"
    sinks = [dict(zip(d.sink_names, d.sinks, strict=True)) for d in (before, now)]
    for name in sinks[1].keys() - sinks[0].keys():
        yield f"the sink {name} is new: it gets the rows from the next batch on"
    for name in sinks[0].keys() - sinks[1].keys():
        yield f"the sink {name} is removed: what it has stays"
    for name in sinks[0].keys() & sinks[1].keys():
        if sinks[0][name] != sinks[1][name]:
            yield f"the sink {name} changed: from the next batch on"
