"""A pipeline's OpenLineage events: what it reads and writes, under the names of OpenLineage's naming convention.

OpenLineage's own configuration (OPENLINEAGE_URL, openlineage.yml) says where they go. No batch waits for them: events
leave on a thread of their own, and one that cannot be sent is a warning.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from delivered.checkpoint.history import records_since
from delivered.model.errors import DeliveredError, extra, plain, without_passwords
from delivered.model.options import check_http_url
from delivered.model.translate import from_our_code
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint, datasets

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient
    from openlineage.client.event_v2 import InputDataset, OutputDataset, RunEvent
    from openlineage.client.facet_v2 import DatasetFacet, InputDatasetFacet, JobFacet, OutputDatasetFacet, RunFacet

log = logging.getLogger(__name__)

_FAILURE_LENGTH_MAX = 4_000
_RUNNING_EVERY_S = 60.0


class Lineage:
    """The events of one run of a pipeline, or of one audit. Raises MissingExtra."""

    def __init__(self, pipeline: Definition, run: str, columns: pa.Schema | None = None, job: str = "") -> None:
        configured()
        self._pipeline = pipeline
        self._run = run
        self._columns = columns
        self._job = pipeline.name + job
        self._version = _version_of("delivered")
        self._began_ms, self._reported_s = time.time_ns() // 1_000_000, time.monotonic()

    def started(self) -> None:
        self._send("START")

    def progressed(self) -> None:
        """A batch ended: an event at most every minute."""
        if time.monotonic() - self._reported_s >= _RUNNING_EVERY_S:
            self._reported_s = time.monotonic()
            self._send("RUNNING", self.written())

    def written(self) -> dict[str, int]:
        """Records by sink since the run's start, as far as the checkpoint's history goes back."""
        return records_since(self._pipeline.checkpoint, self._began_ms)

    def ended(self, written: Mapping[str, int], failure: str | None) -> None:
        self._send("COMPLETE" if failure is None else "FAIL", written, failure)

    def audited(self, audit: Mapping[str, Any]) -> None:
        """The verdict, as assertions on the sink's dataset, which an audit reads as it does the source."""
        self._send("COMPLETE", audit=audit)

    def _send(
        self,
        state: str,
        written: Mapping[str, int] | None = None,
        failure: str | None = None,
        audit: Mapping[str, Any] | None = None,
    ) -> None:
        now = datetime.now(UTC).isoformat()
        _emit(lambda: self._event(state, now, written or {}, failure, audit))

    def _event(
        self, state: str, now: str, written: Mapping[str, int], failure: str | None, audit: Mapping[str, Any] | None
    ) -> RunEvent:
        from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
        from openlineage.client.facet_v2 import error_message_run, job_type_job, processing_engine_run, tags_job

        pipeline = self._pipeline
        tag = tags_job.TagsJobFacetFields("delivery.guarantee", pipeline.guarantee.value, "DELIVERED")
        facets: dict[str, JobFacet] = {
            "jobType": job_type_job.JobTypeJobFacet(
                processingType="STREAMING" if audit is None else "BATCH", integration="DELIVERED", jobType="PIPELINE"
            ),
            "tags": tags_job.TagsJobFacet([tag]),
        }
        engine = processing_engine_run.ProcessingEngineRunFacet(
            _version_of("pyspark", "pyspark-client"), "spark", self._version
        )
        run: dict[str, RunFacet] = {"processing_engine": engine}
        if failure is not None:
            run["errorMessage"] = error_message_run.ErrorMessageRunFacet(_failure(failure), "PYTHON")
        return RunEvent(
            eventTime=now,
            eventType=RunState[state],
            producer=f"urn:delivered:{self._version}",
            run=Run(self._run, run),
            job=Job(os.environ.get("OPENLINEAGE_NAMESPACE", "default"), self._job, facets),
            inputs=list(self._inputs(audit)),
            outputs=list(self._outputs(written)) if audit is None else [],
        )

    def _inputs(self, audit: Mapping[str, Any] | None) -> Iterator[InputDataset]:
        from openlineage.client.event_v2 import InputDataset

        for endpoint in self._pipeline.all_sinks:
            if audit is not None and audit["sink"] == endpoint.sink_name:
                for namespace, name in datasets(endpoint):
                    yield InputDataset(namespace, name, {"dataQualityAssertions": _assertions(audit)})
        for source, endpoint in self._pipeline.sources.items():
            facets = _schema(self._source_columns[source])
            for namespace, name in datasets(endpoint):
                yield InputDataset(namespace, name, facets=facets)

    @cached_property
    def _source_columns(self) -> dict[str, pa.Schema | None]:
        """By source; asked once, as some ask a server."""
        sources = self._pipeline.sources.items()
        return {name: None if e.is_spark_own else _columns_of(e) for name, e in sources}

    def _outputs(self, written: Mapping[str, int]) -> Iterator[OutputDataset]:
        from openlineage.client.event_v2 import OutputDataset
        from openlineage.client.facet_v2 import output_statistics_output_dataset

        columns = self._columns if len(self._pipeline.all_sinks) == 1 else None
        for endpoint in self._pipeline.all_sinks:
            sink = endpoint.sink_name
            facets = _schema(columns)
            counted: dict[str, OutputDatasetFacet] = {}
            if sink in written:
                counted["outputStatistics"] = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
                    rowCount=written[sink]
                )
            for namespace, name in datasets(endpoint):
                yield OutputDataset(namespace, name, counted, facets=facets)


def _failure(text: str) -> str:
    """How a query ended, for other systems: our own error, if there is one, without secrets and bounded."""
    own = from_our_code(text)
    return without_passwords(plain(str(own or text)))[:_FAILURE_LENGTH_MAX]


def _columns_of(endpoint: Endpoint) -> pa.Schema | None:
    try:
        return endpoint.source().schema()
    except DeliveredError:
        return None


def _schema(columns: pa.Schema | None) -> dict[str, DatasetFacet]:
    from openlineage.client.facet_v2 import schema_dataset

    if columns is None:
        return {}
    fields = [schema_dataset.SchemaDatasetFacetFields(field.name, str(field.type)) for field in columns]
    return {"schema": schema_dataset.SchemaDatasetFacet(fields)}


def _assertions(audit: Mapping[str, Any]) -> InputDatasetFacet:
    from openlineage.client.facet_v2 import data_quality_assertions_dataset as quality

    counts = audit["counts"]
    held = audit["verdict"] == "held"
    assertions = [quality.Assertion("delivery.guarantee", held, expected="held", actual=audit["verdict"])]
    assertions += [
        quality.Assertion(f"delivery.{damage}", held or not counts[damage], actual=str(counts[damage]))
        for damage in ("lost", "duplicated", "altered")
        if damage in counts
    ]
    return quality.DataQualityAssertionsDatasetFacet(assertions)


def _version_of(*packages: str) -> str:
    """Of the first that is installed; code that was sent with `--py-files` has no version."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"


def new_run() -> str:
    return str(uuid.uuid4())


@cache
def configured() -> OpenLineageClient:
    """The client, as OpenLineage's configuration says.

    Raises:
        MissingExtra: it is not installed. UsageError: nothing can listen at its URL.
    """
    with extra("lineage"):
        from openlineage.client import OpenLineageClient
    if url := os.environ.get("OPENLINEAGE_URL"):
        check_http_url("OPENLINEAGE_URL", url, "OPENLINEAGE_URL=http://localhost:5000")
    client = OpenLineageClient()
    if client.transport.kind == "console":
        log.warning(
            "lineage is on, but OpenLineage is not configured, so events are only logged; set OPENLINEAGE_URL, or "
            "write an openlineage.yml"
        )
    return client


@cache
def _sender() -> ThreadPoolExecutor:
    """One thread: events leave in order. Python waits for it at exit."""
    return ThreadPoolExecutor(1, thread_name_prefix="delivered-lineage")


def _emit(make: Callable[[], RunEvent]) -> None:
    def send() -> None:
        try:
            configured().emit(make())
        except Exception as error:
            log.warning(
                "a lineage event was not sent; the pipeline goes on. Check OPENLINEAGE_URL: %s",
                without_passwords(str(error)),
            )

    _sender().submit(send)
