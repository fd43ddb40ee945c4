"""A pipeline as it travels to Spark's processes: one value, in one option of the Spark format.

`Pipeline` makes it from its definition. In the Spark idiom, `df.writeStream.format("delivered_kafka").option(...)`, the
same value is made from the user's options. Both happen here, in `PipelineSpec.parse`, and nowhere else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from delivered.contract.sink import Sink
from delivered.contract.source import Offsets
from delivered.engine.sinks import Columns, Sinks
from delivered.model.bad_row import OnBadRow
from delivered.model.errors import Refused, UsageError
from delivered.model.guarantee import Guarantee
from delivered.model.identity import SOURCE, Scope, checked_name, fitted_name
from delivered.model.options import Option, OptionTable, choice
from delivered.model.work import DriverAddress, Owner, Tolerance
from delivered.pipeline.registry import PREFIX, find_sink

OPTION = "delivered.spec.secret"
"""Holds the spec, as JSON. The name makes Spark redact its value, which contains the sinks' options."""

VERSION = 2
"""Version of the JSON. Client and server of Spark Connect may run different releases."""

PIPELINE_OPTIONS = OptionTable(
    "delivered",
    (
        Option("guarantee", "at_most_once, at_least_once or exactly_once.", required=True),
        Option("pipeline", "Name of the pipeline; two pipelines that share a sink need two names.", "the query's name"),
        Option("sink", "Name of this sink in its pipeline.", "made from its target"),
        Option("newCheckpoint", "accept: start over although an earlier checkpoint wrote to this sink.", "refuse"),
        Option("missingLedger", "accept: go on although the ledger lacks batches of this checkpoint.", "refuse"),
        Option("repeatedBatch", "accept: exactly_once may repeat a batch that a weaker guarantee began.", "refuse"),
        Option("newTarget", "accept: continue although the sink's topic or table was dropped and recreated.", "refuse"),
        Option("lostRecords", "accept: give up what a decided batch held, and sink and source have no more.", "refuse"),
        Option(
            "runId",
            "df.write only: names these rows. Given again, they are written once, and other rows are refused.",
        ),
        Option("checkpointLocation", "Spark's: where the query keeps its checkpoint."),
        Option("queryName", "Spark's: the query's name."),
    ),
)

CHECKPOINT = "checkpointLocation"
"""Spark's option. On a source, to which Spark does not pass it: the checkpoint of its query."""
_SPARKS_OWN = (CHECKPOINT.lower(), "queryname")
NO_INCARNATION = "new"
"""Stands for the incarnation of a checkpoint without a batch."""
_UNKNOWN = DriverAddress()
_ASYNC = "asyncprogress"
_ASYNC_ENABLED = "asyncprogresstrackingenabled"


@dataclass(frozen=True)
class SinkSpec:
    """
    Attributes:
        system: "kafka".
        options: the connector's, as the user named them.
        name: in the pipeline; None: the connector's default.
        route: which of the batch's rows and columns it gets; None: all.
    """

    system: str
    options: Mapping[str, str]
    name: str | None = None
    route: Columns | None = None

    def open(self) -> Sink:
        """Raises UsageError for a bad option, or a system that cannot be written."""
        return find_sink(self.system, self.options)

    def to_json(self) -> dict[str, Any]:
        return {
            "system": self.system,
            "options": dict(self.options),
            "name": self.name,
            "route": asdict(self.route) if self.route is not None else None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SinkSpec:
        route = data["route"]
        columns = Columns.from_json(route) if route is not None else None
        return cls(data["system"], dict(data["options"]), data["name"], columns)


@dataclass(frozen=True)
class StartCheck:
    """A request to check whether a query with this write could start.

    Attributes:
        columns: of its rows, as Spark's JSON of a StructType.
    """

    columns: Mapping[str, Any]
    output_mode: str


@dataclass(frozen=True)
class PipelineSpec:
    """
    Attributes:
        sinks: in the user's order; empty for a read.
        dead_letter: the sink of rows that fail the validation of another one.
        checkpoint: as Spark spells it; None for a write that is not a stream.
        transform: fingerprint of the pipeline's transform; empty: unknown.
        direct: tasks read the source themselves: an `engine.transform.Direct`, pickled by value.
        drain: a path; once it exists, the source offers no new records.
        run_id: identifies the rows of a write that is not a stream.
        start: differs at each start of a query, whose processes outlive it; empty: unknown.
        owner: the driver. Not part of the option: the registered class carries it (`spark/session.py`).
        driver: where executors reach it. Like `owner`.
        check: a check of the start, not a write.
        batch: this write is that batch of a query with `foreachBatch`; None: it is a stream, or a run.
        one_of_each: a key of an upsert without version occurs once in a batch.
        source: name of the source, for a read.
        until: offsets at which a read ends, if it is bounded: a replay. It acknowledges nothing.
        rejects: tasks may store records that cannot be decoded in the checkpoint.
        raw: a source that decodes records passes on their bytes too.
    """

    pipeline: str
    guarantee: Guarantee
    sinks: tuple[SinkSpec, ...] = ()
    dead_letter: SinkSpec | None = None
    on_bad_row: OnBadRow = OnBadRow.FAIL
    checkpoint: str | None = None
    tolerance: Tolerance = field(default_factory=Tolerance)
    transform: str = ""
    direct: bytes | None = None
    drain: str | None = None
    run_id: str | None = None
    start: str = ""
    owner: Owner = Owner("")
    driver: DriverAddress = DriverAddress()
    check: StartCheck | None = None
    batch: int | None = None
    one_of_each: bool = False
    source: str = SOURCE
    until: Offsets | None = None
    rejects: bool = False
    raw: bool = False

    def open(self) -> Sinks:
        """
        Raises:
            UsageError: bad options, or two sinks with the same name.
        """
        letters = self.dead_letter
        return Sinks.of(
            [(s.name, s.open(), s.route) for s in self.sinks],
            self.on_bad_row,
            (letters.name, letters.open()) if letters is not None else None,
        )

    def scope(self, sinks: Sinks, incarnation: str | None = None) -> Scope:
        """Where the batches of an incarnation are decided.

        Args:
            sinks: from `open`.
            incarnation: None: there is none yet.
        """
        return Scope(self.pipeline, sinks.decider.name, incarnation or NO_INCARNATION)

    def to_option(self) -> str:
        """For `OPTION`."""
        return json.dumps(
            {
                "version": VERSION,
                "pipeline": self.pipeline,
                "guarantee": self.guarantee.value,
                "sinks": [s.to_json() for s in self.sinks],
                "dead_letter": self.dead_letter.to_json() if self.dead_letter is not None else None,
                "on_bad_row": self.on_bad_row.value,
                "checkpoint": self.checkpoint,
                "tolerance": asdict(self.tolerance),
                "transform": self.transform,
                "direct": base64.b64encode(self.direct).decode() if self.direct is not None else None,
                "drain": self.drain,
                "start": self.start,
                "batch": self.batch,
                "one_of_each": self.one_of_each,
                "source": self.source,
                "until": self.until,
                "rejects": self.rejects,
                "raw": self.raw,
            }
        )

    @classmethod
    def parse(
        cls,
        system: str,
        options: Mapping[str, str],
        owner: Owner | None = None,
        driver: DriverAddress = _UNKNOWN,
    ) -> PipelineSpec:
        """The spec of a write.

        Args:
            options: as Spark passes them, in any case.

        Raises:
            UsageError: no guarantee, or an invalid value.
            Refused: asynchronous progress tracking, under which a rerun batch may have different offsets.
        """
        settings = _option_json(options)
        rest = {k: v for k, v in options.items() if k.lower() != OPTION and not k.lower().startswith(_ASYNC)}
        made = "pipeline" in settings
        foreign = sorted(k for k in rest if k.lower() not in _SPARKS_OWN)
        if made and foreign:
            raise UsageError(
                "SINKS_OPTION",
                f"The format {PREFIX}{system} was started by delivered.Pipeline, which names all options itself; it "
                f"was given the options {foreign}.",
                next_step="name several sinks in delivered.Pipeline(sinks=[...]) or in a pipeline file",
            )
        spec = _from_json(settings) if made else _from_options(system, rest)
        _refuse_async(options, spec.guarantee)
        check = StartCheck(**settings["check"]) if settings.get("check") else None
        return replace(spec, owner=owner or spec.owner, driver=driver, start=settings.get("start", ""), check=check)


@dataclass(frozen=True)
class Reading:
    """How a stream's source is read.

    Attributes:
        checkpoint: of its query, as Spark spells it; None: unknown.
        drain: as in the spec.
        direct: tasks of the sink read the source themselves; Spark carries slices.
        source: its name in the query.
        until: as in the spec.
        pipeline: its name, if it is one's source.
        start: of its query.
        rejects: records that cannot be decoded do not fail the read.
        raw: as in the spec.
    """

    checkpoint: str | None = None
    drain: str | None = None
    direct: bool = False
    source: str = SOURCE
    until: Offsets | None = None
    pipeline: str | None = None
    start: str = ""
    rejects: bool = False
    raw: bool = False

    @property
    def is_drained(self) -> bool:
        return self.drain is not None and Path(self.drain).exists()

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> tuple[Reading, dict[str, str]]:
        """Parse the options of a read; returns it and the connector's remaining options."""
        settings = _option_json(options)
        checkpoint = next((v for k, v in options.items() if k.lower() == CHECKPOINT.lower()), None)
        rest = {k: v for k, v in options.items() if k.lower() not in (OPTION, CHECKPOINT.lower())}
        if "pipeline" not in settings:
            return cls(checkpoint), rest
        spec = _from_json(settings)
        reading = cls(
            spec.checkpoint,
            spec.drain,
            spec.direct is not None,
            spec.source,
            spec.until,
            spec.pipeline,
            settings.get("start", ""),
            spec.rejects,
            spec.raw,
        )
        return reading, rest


def idiom_option(*, start: str = "", check: StartCheck | None = None) -> str:
    """For `OPTION`, in addition to the user's own options."""
    return json.dumps({"version": VERSION, "start": start, "check": asdict(check) if check is not None else None})


def is_start_check(options: Mapping[str, str]) -> bool:
    """Whether these options belong to a start check and not to a read."""
    return bool(_option_json(options).get("check"))


def _option_json(options: Mapping[str, str]) -> dict[str, Any]:
    text = next((v for k, v in options.items() if k.lower() == OPTION), None)
    if text is None:
        return {}
    given: dict[str, Any] = json.loads(text)
    if given.get("version") != VERSION:
        raise UsageError(
            "SPEC_VERSION",
            f"The pipeline is described in version {given.get('version')!r}; this process reads version {VERSION}: the "
            "client and the driver have different releases of delivered.",
            next_step="install the same release of delivered at both ends",
        )
    return given


def _from_json(data: Mapping[str, Any]) -> PipelineSpec:
    letters = data["dead_letter"]
    return PipelineSpec(
        data["pipeline"],
        Guarantee(data["guarantee"]),
        tuple(SinkSpec.from_json(s) for s in data["sinks"]),
        SinkSpec.from_json(letters) if letters is not None else None,
        OnBadRow(data["on_bad_row"]),
        data["checkpoint"],
        Tolerance(**data["tolerance"]),
        data["transform"],
        base64.b64decode(data["direct"]) if data["direct"] is not None else None,
        data["drain"],
        batch=data.get("batch"),
        one_of_each=data.get("one_of_each", False),
        source=data.get("source", SOURCE),
        until=data.get("until"),
        rejects=data.get("rejects", False),
        raw=data.get("raw", False),
    )


def _from_options(system: str, options: Mapping[str, str]) -> PipelineSpec:
    known = {o.name.lower() for o in PIPELINE_OPTIONS.options}
    own = {k: v for k, v in options.items() if k.lower() in known}
    guarantee = Guarantee.parse(next((v for k, v in own.items() if k.lower() == "guarantee"), None))
    values = PIPELINE_OPTIONS.restore(own)
    sink = checked_name("sink", values["sink"]) if "sink" in values else None
    return PipelineSpec(
        pipeline=_pipeline_name(values),
        guarantee=guarantee,
        sinks=(SinkSpec(system, {k: v for k, v in options.items() if k.lower() not in known}, sink),),
        checkpoint=values.get("checkpointLocation"),
        tolerance=Tolerance(*(_accepts(values, name) for name in _ACCEPTED)),
        run_id=values.get("runId"),
    )


_ACCEPTED = ("newCheckpoint", "missingLedger", "repeatedBatch", "newTarget", "lostRecords")
"""Options, in the order of the fields of `Tolerance`."""


def _accepts(values: Mapping[str, str], name: str) -> bool:
    return choice(("refuse", "accept")).parse("delivered", name, values.get(name, "refuse")) == "accept"


def _pipeline_name(values: Mapping[str, str]) -> str:
    if "pipeline" in values:
        return checked_name("pipeline", values["pipeline"])
    if "queryName" in values:
        return fitted_name(values["queryName"], instead="-")
    if "checkpointLocation" in values:
        location = values["checkpointLocation"].rstrip("/")
        return "checkpoint-" + hashlib.blake2b(location.encode(), digest_size=6).hexdigest()
    if "runId" in values:
        return "batch"
    raise UsageError(
        "PIPELINE_UNNAMED",
        "The pipeline has no name: the ledger needs one to recognise its batches.",
        next_step='add .option("pipeline", "orders")',
    )


def _refuse_async(options: Mapping[str, str], guarantee: Guarantee) -> None:
    enabled = next((v for k, v in options.items() if k.lower() == _ASYNC_ENABLED), "false")
    if enabled.lower() == "true" and guarantee is not Guarantee.AT_LEAST_ONCE:
        raise Refused(
            "ASYNC_PROGRESS",
            f"Asynchronous progress tracking logs offsets after the batch; a batch that runs again may read other "
            f"records, and {guarantee.value} cannot hold.",
            next_step="remove asyncProgressTrackingEnabled, or use the guarantee at_least_once",
        )
