"""How the data of a pipeline travels: its sources, sinks, and the mechanism of its guarantee."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from delivered import html
from delivered.model.errors import DeliveredError
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.facts import gather
from delivered.planner import Plan, make_plan


@dataclass(frozen=True)
class Flow:
    """How the data of a pipeline travels.

    Attributes:
        sources, sinks: label, "kafka orders", and the mechanism between it and the pipeline.
        mechanism: how the guarantee is kept; empty: the pipeline is refused, or its file cannot be read.
    """

    sources: tuple[tuple[str, str], ...] = ()
    sinks: tuple[tuple[str, str], ...] = ()
    mechanism: str = ""

    def html(self, pipeline: str, guarantee: str) -> html.Html:
        """Empty: the pipeline's file cannot be read."""
        how = f"{guarantee} by {self.mechanism}" if self.mechanism else guarantee
        return html.flow(self.sources, (pipeline, how), self.sinks) if self.sinks else html.Html()


def flow_of(pipeline: Definition) -> Flow:
    """From the definition alone."""
    decides, mechanism = "", ""
    with contextlib.suppress(DeliveredError):
        request = gather(pipeline, None, offline=True, takeover=False)
        plan = make_plan(request)
        mechanism = plan.mechanism if isinstance(plan, Plan) else ""
        decides = request.by_count("", request.decider.name)
    sources = tuple((e.label if n == "source" else f"{n}: {e.label}", _read(e)) for n, e in pipeline.sources.items())
    return Flow(sources, tuple(_written(e, decides) for e in pipeline.all_sinks), mechanism)


def _read(endpoint: Endpoint) -> str:
    if endpoint.is_spark_own:
        return "Spark's own source"
    source = endpoint.source()
    if source.capability().received:
        return "receivers log, then acknowledge; ids recognised"
    return "offsets, replayable" if source.capability().replayable else "not replayable"


def _written(endpoint: Endpoint, decides: str) -> tuple[str, str]:
    sink = endpoint.sink()
    mechanism = sink.capability().mechanism
    label = f"{endpoint.name}: {endpoint.label}" if endpoint.name else endpoint.label
    return label, f"{mechanism}; decides for all" if (endpoint.name or sink.name) == decides else mechanism
