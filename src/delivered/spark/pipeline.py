"""`delivered.Pipeline`: the whole chain, so that the whole chain can be checked. Imports pyspark only when it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delivered.model.bad_row import OnBadRow
from delivered.model.dedup import Dedup
from delivered.model.errors import UsageError
from delivered.model.guarantee import Guarantee
from delivered.model.identity import checked_name
from delivered.model.options import choice
from delivered.pipeline.dedup import dedup as make_dedup
from delivered.pipeline.endpoint import Endpoint, as_text
from delivered.pipeline.load import load_file
from delivered.pipeline.projection import parse_projection
from delivered.pipeline.spec import AuditSpec, DedupSpec, PipelineSpec, SinkSpec, SourceSpec, TransformSpec
from delivered.pipeline.transform import NO_TRANSFORM, Transform, arrow, as_transform, load_function
from delivered.pipeline.transform import transform as declare
from delivered.pipeline.trigger import When, parse_trigger
from delivered.pipeline.version import version_of
from delivered.planner import Plan, Refusal, make_plan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from delivered.audit.report import AuditReport


class Pipeline:
    """A source, a transform, sinks, and the guarantee between them. Making one asks nobody and imports nothing heavy.

    Args:
        name: 1 to 64 letters, digits, '.', '_' or '-'; two pipelines that share a sink need two names.
        guarantee: "at_most_once", "at_least_once" or "exactly_once". There is no default.
        checkpoint: folder or URL where Spark keeps the query's progress.
        source, sinks: from `delivered.kafka`, `delivered.log`, `delivered.sqlite`, `delivered.endpoint`.
        dedup: from `delivered.dedup`: which repeats in the source are dropped, before the transform.
        transform: SQL over the view `source`; or a function DataFrame -> DataFrame; or `delivered.arrow(...)`, the
            fast way; or `delivered.transform(...)`, to declare what is known of it; None: records go through.
        trigger: "available_now", "10 seconds", or {"processing_time": "10 seconds"}; None: batch after batch.
        batch_s_max: how long a batch may take, in seconds; checked against the transaction time-out.
        audit: how the audit tells records apart: {"id": SQL, "key": SQL} over the sink's columns; {"own": SQL} is true
            for this pipeline's records, where others write to the sink too.
        conf, master: of the Spark session, if the pipeline makes one.
        new_checkpoint: start over although an earlier checkpoint wrote to this sink.
        missing_ledger: go on although the ledger lacks batches of this checkpoint.
        new_target: go on although a sink's topic or table was dropped and made anew.
        on_bad_row: of a row that a sink refuses for itself: "fail"; "dead_letter": it goes to that sink, in the same
            batch; "drop": it is left out and counted as given up, at_most_once only.
        dead_letter: the sink of such rows.

    Raises:
        UsageError: a name, guarantee, trigger or transform that is not allowed.
    """

    def __init__(
        self,
        *,
        name: str,
        guarantee: str | Guarantee,
        checkpoint: str | Path,
        source: Endpoint,
        sinks: Sequence[Endpoint],
        dedup: Dedup | None = None,
        transform: str | Callable[[DataFrame], DataFrame] | Transform | None = None,
        trigger: str | Mapping[Any, str] | When | None = None,
        batch_s_max: float | None = None,
        audit: Mapping[str, str] | None = None,
        conf: Mapping[str, Any] | None = None,
        master: str | None = None,
        new_checkpoint: bool = False,
        missing_ledger: bool = False,
        new_target: bool = False,
        on_bad_row: str = "fail",
        dead_letter: Endpoint | None = None,
    ) -> None:
        self.name = checked_name("pipeline", name)
        self.guarantee = Guarantee.parse(guarantee)
        self.checkpoint = _absolute(str(checkpoint))
        self.source = _endpoint("source", source)
        self.sinks = tuple(_endpoint("sinks", s) for s in sinks)
        self.dedup = _dedup(dedup)
        self.transform = as_transform(transform)
        if not self.source.projection.is_all:
            raise UsageError(
                "SOURCE_SELECT",
                "The source has select or where; these belong to a sink.",
                next_step="write them into the transform",
            )
        self.trigger = parse_trigger(trigger)
        self.batch_s_max = batch_s_max
        self.audit_by = dict(audit or {})
        self.conf = {k: as_text(k, v) for k, v in (conf or {}).items()}
        self.master = master
        self.new_checkpoint = new_checkpoint
        self.missing_ledger = missing_ledger
        self.new_target = new_target
        self.on_bad_row = _on_bad_row(on_bad_row, dead_letter)
        self.dead_letter = dead_letter
        for said in (self.audit_by, *(s.audit for s in self.sinks)):
            if unknown := set(said) - set(AuditSpec.model_fields):
                raise UsageError("AUDIT_KEY", f"audit knows no {sorted(unknown)}; known: id, key, own.")
        self._drains: dict[str, Path] = {}

    @classmethod
    def from_file(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Pipeline:
        """Read a YAML file. What `overrides` names ("source.maxOffsetsPerTrigger") stands above environment and file.

        Raises:
            UsageError: every fault of the file, with its line and key.
        """
        return cls.from_spec(load_file(path, overrides), Path(path).parent)

    @classmethod
    def from_spec(cls, spec: PipelineSpec, folder: Path) -> Pipeline:
        """A pipeline as a file in `folder` describes it: relative paths and the transform's modules are looked for
        there."""
        return cls(
            name=spec.pipeline,
            guarantee=spec.guarantee,
            checkpoint=_beside(folder, spec.checkpoint),
            source=_from_spec(spec.source, folder),
            sinks=[_from_spec(s, folder) for s in spec.sinks],
            dedup=_dedup_from_spec(spec.dedup),
            transform=_transform(spec.transform, folder.resolve()),
            trigger=spec.trigger,
            batch_s_max=spec.batch_s_max,
            audit=spec.audit.model_dump(exclude_none=True) if spec.audit else None,
            conf=spec.spark,
            master=spec.master,
            new_checkpoint=spec.new_checkpoint == "accept",
            missing_ledger=spec.missing_ledger == "accept",
            new_target=spec.new_target == "accept",
            on_bad_row=spec.on_bad_row,
            dead_letter=_from_spec(spec.dead_letter, folder) if spec.dead_letter else None,
        )

    def plan(
        self, spark: SparkSession | None = None, *, offline: bool = False, takeover: bool = False
    ) -> Plan | Refusal:
        """What the pipeline will do and what its guarantee rests on; or why it cannot be had, and what can.

        Starts no Spark. Changes nothing in source, sink and checkpoint; a connector may set up its own ledger.

        Args:
            offline: ask neither servers nor checkpoint.
            takeover: plan for fencing another driver that lives.

        Raises:
            UsageError: bad options.
            Unreachable: a server or the checkpoint gave no answer.
        """
        from delivered.spark.facts import gather

        return make_plan(gather(self, spark, offline=offline, takeover=takeover))

    def start(self, spark: SparkSession | None = None, *, takeover: bool = False) -> StreamingQuery:
        """Plan, then start the query.

        Args:
            spark: None: the active session, or a new one.
            takeover: fence another driver that runs this pipeline.

        Raises:
            Refused: the plan is a refusal.
            UsageError, Unreachable: as `plan`.
        """
        from delivered.spark.start import start

        query, drain = start(self, spark, takeover)
        self._drains[str(query.runId)] = drain
        return query

    def stop(self, query: StreamingQuery, timeout_s: float = 120.0, waiting: Callable[[], None] | None = None) -> bool:
        """Let the running batch finish, then stop the query. Returns whether it stopped between two batches.

        Args:
            query: from `start`.
            timeout_s: after so long the query is stopped in mid-batch, which recovery bears.
            waiting: called about every 50 ms.
        """
        from delivered.spark.drain import stop_between_batches

        return stop_between_batches(query, self._drains.pop(str(query.runId), None), timeout_s, waiting)

    def audit(
        self,
        spark: SparkSession | None = None,
        *,
        sink: str | None = None,
        samples_max: int = 20,
        sink_from: Mapping[str, Any] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> AuditReport:
        """Read the source range and the sink back as a Spark job, and say what became of every record.

        Args:
            sink: name of the one to follow, where there are several: each is held against its own rows and columns.
            samples_max: damaged records listed, per class.
            sink_from: offsets of the sink to read it from; what stands before them belongs to others, or to an earlier
                checkpoint. Kafka: {"topic": {"0": 12}}; SQLite: {"rowid": 12}. None: all that the sink holds.
            progress: called with what is being done, a few times.

        Raises:
            UsageError: bad options, several sinks and none named, or a source of Spark's own.
        """
        from delivered.spark.start import audit

        return audit(self, spark, sink, samples_max, sink_from, progress)

    @property
    def transform_version(self) -> str:
        """A fingerprint of the transform with what the sinks select of it; kept with every batch that is decided."""
        projections = zip(self.sink_names, (s.projection for s in self.sinks), strict=True)
        return version_of(self.transform, projections, self.on_bad_row)

    @property
    def all_sinks(self) -> tuple[Endpoint, ...]:
        """The sinks, and the one of dead letters."""
        return self.sinks if self.dead_letter is None else (*self.sinks, self.dead_letter)

    @property
    def sink_names(self) -> tuple[str, ...]:
        """Of every sink, in order: as named, or as its connector names it."""
        return tuple(e.name or e.sink().name for e in self.sinks)

    def __repr__(self) -> str:
        return (
            f"Pipeline(name={self.name!r}, guarantee={self.guarantee.value!r}, checkpoint={self.checkpoint!r}, "
            f"source={self.source!r}, sinks={list(self.sinks)!r})"
        )


def _absolute(location: str) -> str:
    """Spark's driver and our workers may stand in other folders: make a local path absolute."""
    if not location:
        raise UsageError("CHECKPOINT_MISSING", "checkpoint is empty; it must name a folder or a URL.")
    return location if ":" in location.split("/", 1)[0] else str(Path(location).expanduser().absolute())


def _endpoint(what: str, given: object) -> Endpoint:
    if not isinstance(given, Endpoint):
        raise UsageError(
            "ENDPOINT_VALUE",
            f"{what} is {given!r} ({type(given).__name__}); it must be an endpoint.",
            next_step='write it as in delivered.kafka("localhost:9092", topic="orders")',
        )
    return given


def _dedup(given: object) -> Dedup | None:
    if given is None or isinstance(given, Dedup):
        return given
    raise UsageError(
        "DEDUP_VALUE",
        f"dedup is {given!r} ({type(given).__name__}); it must come from delivered.dedup.",
        next_step='write it as in delivered.dedup("key", within="1 hour")',
    )


def _on_bad_row(said: str, dead_letter: Endpoint | None) -> OnBadRow:
    found = choice(OnBadRow).parse("delivered.Pipeline", "on_bad_row", str(said), 'write on_bad_row="fail"')
    if (found is OnBadRow.DEAD_LETTER) != (dead_letter is not None):
        raise UsageError(
            "DEAD_LETTER",
            f"on_bad_row is {found.value!r}, and there is {'a' if dead_letter else 'no'} dead_letter sink; one needs "
            "the other.",
            next_step="write on_bad_row: dead_letter and dead_letter: {format: ...}, or neither",
        )
    if dead_letter is not None and not _endpoint("dead_letter", dead_letter).projection.is_all:
        raise UsageError("DEAD_LETTER", "The dead_letter sink has select or where; it gets letters as they are.")
    return found


def _beside(folder: Path, location: str) -> str:
    """A relative path in a file means: relative to the file."""
    plain = "://" not in location and not location.startswith(("env:", "file:", "~"))
    return str((folder / location).absolute()) if plain else location


def _from_spec(spec: SourceSpec | SinkSpec, folder: Path) -> Endpoint:
    options = {k: as_text(k, v) for k, v in (spec.__pydantic_extra__ or {}).items()}
    for key in [k for k in options if k.lower() == "path"]:
        options[key] = _beside(folder, options[key])
    if isinstance(spec, SourceSpec):
        return Endpoint(spec.format, options)
    audit = spec.audit.model_dump(exclude_none=True) if spec.audit else {}
    return Endpoint(spec.format, options, spec.name, parse_projection(spec.select or (), spec.where), audit)


def _dedup_from_spec(spec: DedupSpec | None) -> Dedup | None:
    return (
        make_dedup(*spec.by, within=spec.within, time=spec.time, late=spec.late, memory=spec.memory)
        if spec is not None
        else None
    )


def _transform(spec: TransformSpec | None, folder: Path) -> Transform:
    if spec is None:
        return NO_TRANSFORM
    if spec.sql is None and spec.python is None:
        return arrow(load_function(spec.arrow, folder) if spec.arrow else None, select=spec.select or ())
    what = spec.sql if spec.sql is not None else load_function(str(spec.python), folder)
    return declare(what, stateful=spec.stateful, deterministic=spec.deterministic)
