"""What runs of `spark-pipelines` need of PySpark's client of Spark Connect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pyspark.errors import AnalysisException

_IN_QUERY_FUNCTION = "ATTEMPT_ANALYSIS_IN_PIPELINE_QUERY_FUNCTION"


def analyse(frame: Any) -> None:
    """Resolve a frame now, so that option errors are raised; not in a pipeline's flow, which Spark resolves later."""
    try:
        _ = frame.schema
    except AnalysisException as error:
        if _IN_QUERY_FUNCTION not in str(error):
            raise


def without_accumulators(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """PySpark 4.3.0 fails a run at its end with UNKNOWN_RESPONSE: for the accumulators of a Python source's workers."""

    def execute(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return original(_EventsAlone(self), *args, **kwargs)

    return execute


class _EventsAlone:
    """A client whose iterator leaves out observed metrics."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _execute_and_fetch_as_iterator(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for found in self._client._execute_and_fetch_as_iterator(*args, **kwargs):
            if type(found).__name__ != "PlanObservedMetrics":
                yield found
