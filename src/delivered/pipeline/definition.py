"""A pipeline as the user names it, in Python or in a file: all of the chain, so that all of it can be checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Self

from delivered.checkpoint import configure
from delivered.contract.connector import Connector
from delivered.contract.source import Offsets
from delivered.model.capability import Dedup, Guarantee
from delivered.model.errors import Refused, UsageError, shown
from delivered.model.identity import SOURCE, SOURCE_NAME, checked_name
from delivered.model.limits import NAME_LENGTH_MAX
from delivered.model.options import (
    Unfit,
    argument,
    check_argument,
    choice,
    duration,
    is_reference,
    not_as_meant,
    read_ms,
)
from delivered.model.rows import OnBadRow
from delivered.model.work import Tolerance
from delivered.pipeline.endpoint import Endpoint, as_text, is_folder_of, refuse_passwords
from delivered.pipeline.file import (
    AuditEntry,
    DedupEntry,
    PipelineAuditEntry,
    PipelineFile,
    TransformEntry,
    endpoint_of,
    load_file,
    resolve_file,
    resolve_location,
)
from delivered.pipeline.registry import connector, connectors
from delivered.pipeline.spec import PipelineSpec, SinkSpec
from delivered.pipeline.transform import (
    NO_TRANSFORM,
    Transform,
    arrow,
    as_transform,
    build_version,
    load_function,
    reads_all,
)
from delivered.pipeline.transform import dedup as make_dedup
from delivered.pipeline.transform import transform as declare
from delivered.planner import Trigger

# What a query's output mode does to its sinks: upserts by the grouping keys, or replacement of all rows.

_GROUP_BY = re.compile(
    r"\bgroup\s+by\s+(.+?)(?:\bhaving\b.*|\border\s+by\b.*|\blimit\b.*|;|$)", re.IGNORECASE | re.DOTALL
)
_COLUMN = re.compile(r"(?:[A-Za-z_]\w*\.)?([A-Za-z_]\w*)|(?:[A-Za-z_]\w*\.)?`([^`]+)`")


def for_output_mode(sink: Endpoint, mode: str, transform: Transform) -> Endpoint:
    """The sink as this output mode writes to it.

    Raises:
        UsageError: an upsert without keys, or a contradicting mode of the sink.
        Refused: the sink cannot replace all its rows.
    """
    if mode == "append" or sink.is_spark_own:
        return sink
    values = {k.lower(): v for k, v in sink.options.items()}
    given = values.get("mode", "").strip().lower()
    is_table = _has_table(connector(sink.system))
    required = "complete" if mode == "complete" else "upsert"
    if mode == "complete" and not is_table:
        raise Refused(
            "OUTPUT_MODE_COMPLETE",
            system=sink.system,
            known=", ".join(c.name for c in connectors().values() if _has_table(c)),
        )
    if not is_table or (mode == "update" and given == "append"):
        return sink
    if "mode" in values and given != required:
        raise UsageError("OUTPUT_MODE.SINK", mode=mode, label=sink.label, sink_mode=values["mode"], required=required)
    added = {} if "mode" in values else {"mode": required}
    if mode == "update" and not values.get("keycolumns", "").strip():
        added["keyColumns"] = ",".join(_keys(sink, transform))
    return sink.with_options(**added)


def _has_table(of: Connector) -> bool:
    """Whether its sinks write rows that have a key."""
    return of.sink_options is not None and any(o.name == "keyColumns" for o in of.sink_options.options)


def grouping_columns(sql: str) -> list[str]:
    """The columns of the SQL's one GROUP BY, if they are plain columns; else none."""
    parts = _GROUP_BY.findall(sql)
    nested = re.search(r"\bgroup\s+by\b.*\bgroup\s+by\b", sql, re.I | re.S)
    columns = [_COLUMN.fullmatch(part.strip()) for part in parts[0].split(",")] if len(parts) == 1 else []
    return [m.group(1) or m.group(2) for m in columns if m is not None] if None not in columns and not nested else []


def _keys(sink: Endpoint, transform: Transform) -> list[str]:
    columns = grouping_columns(transform.sql)
    if not columns:
        groupings = [re.sub(r"\s+", " ", text).strip() for text in _GROUP_BY.findall(transform.sql)]
        why = f"its SQL groups by {groupings[0]!r}" if len(groupings) == 1 else "the transform does not show them"
        raise UsageError("OUTPUT_MODE_KEYS", label=sink.label, reason=why)
    return columns


_PART = r"(\d+\s+(week|day|hour|minute|millisecond|microsecond)|\d+(\.\d+)?\s+second)s?"
_INTERVAL = re.compile(rf"(interval\s+)?{_PART}(\s+{_PART})*", re.IGNORECASE)
"""What Spark accepts as a trigger's interval."""
_SPARK_NAMES = {
    Trigger.AVAILABLE_NOW: "availableNow",
    Trigger.PROCESSING_TIME: "processingTime",
    Trigger.CONTINUOUS: "continuous",
    Trigger.REAL_TIME: "realTime",
}


@dataclass(frozen=True)
class When:
    """
    Attributes:
        interval: as Spark spells it, "10 seconds"; None with available_now.
    """

    kind: Trigger
    interval: str | None = None

    def for_spark(self) -> dict[str, Any]:
        """Arguments of DataStreamWriter.trigger."""
        return {_SPARK_NAMES[self.kind]: True if self.kind is Trigger.AVAILABLE_NOW else self.interval}


_CALL = "delivered.Pipeline"
NOTIFY_FORMATS = ("json", "slack", "teams", "pagerduty")
AS_FAST_AS_POSSIBLE = When(Trigger.PROCESSING_TIME, "0 seconds")
AVAILABLE_NOW = When(Trigger.AVAILABLE_NOW)


def parse_trigger(value: str | Mapping[str, Any] | When | None) -> When:
    """Read a trigger: "available_now", "10 seconds", {"processing_time": "10 seconds"}, {"real_time": "1 minute"}.

    Raises:
        UsageError: anything else.
    """
    match value:
        case None:
            return AS_FAST_AS_POSSIBLE
        case When():
            return value
        case str() if value.strip().lower().replace("-", "_") in ("available_now", "availablenow"):
            return AVAILABLE_NOW
        case str() if _INTERVAL.fullmatch(value.strip()):
            return When(Trigger.PROCESSING_TIME, value.strip())
        case Mapping() if len(value) == 1:
            ((key, interval),) = value.items()
            kinds = {k.value: k for k in Trigger if k is not Trigger.AVAILABLE_NOW}
            if key in kinds and isinstance(interval, str) and _INTERVAL.fullmatch(interval.strip()):
                return When(kinds[key], interval.strip())
    raise UsageError("TRIGGER_VALUE", value=shown(value, "trigger"), interval=_interval_near(value))


def _interval_near(value: object) -> str:
    """For a next step: what 10s, 10 secs or 10 was to say, in Spark's words."""
    found = re.fullmatch(r"(\d+)\s*([a-zA-Z]*)", str(value).strip())
    word = "" if found is None else {"ms": "milli", "us": "micro"}.get(found[2].lower(), found[2].lower()[:2])
    units = ("seconds", "minutes", "hours", "days", "weeks", "milliseconds", "microseconds")
    unit = next((u for u in units if u.startswith(word)), None)
    return "10 seconds" if found is None or unit is None else f"{found[1]} {unit}"


@dataclass(frozen=True)
class Webhook:
    """Where problems are reported. `url`, `key`: references to secrets."""

    url: str
    format: str = "json"
    key: str | None = None

    @property
    def references(self) -> list[tuple[str, str]]:
        return [("webhook", self.url)] + ([] if self.key is None else [("key", self.key)])

    @classmethod
    def of(cls, entry: Mapping[str, str]) -> Self:
        """Raises UsageError: a secret in the place of its reference, an unknown format, or a key that is missing."""
        made = cls(entry.get("webhook", ""), entry.get("format", "json"), entry.get("key"))
        for name, value in made.references:
            if not is_reference(value):
                raise UsageError("NOTIFY_VALUE.REFERENCE", name=name)
        if made.format not in NOTIFY_FORMATS:
            raise UsageError("NOTIFY_VALUE.FORMAT", value=shown(made.format), known=", ".join(NOTIFY_FORMATS))
        if (made.format == "pagerduty") != (made.key is not None):
            raise UsageError("NOTIFY_VALUE.KEY", value="missing" if made.key is None else shown(made.key))
        return made


class Definition:
    """Sources, a transform, sinks, and the guarantee between them. Creating one contacts no server.

    Args:
        name: 1 to 64 letters, digits, '.', '_' or '-'; two pipelines that share a sink need two names.
        guarantee: "at_most_once", "at_least_once" or "exactly_once". There is no default.
        checkpoint: folder or URL where Spark keeps the query's progress.
        source, sinks: from `delivered.kafka`, `delivered.log`, `delivered.sqlite`, `delivered.endpoint`.
        sources: instead of `source`, by name: {"orders": delivered.kafka(...), "payments": ...}.
        dedup: from `delivered.dedup`: which duplicates in the source are dropped, before the transform.
        transform: SQL over the view `source`; or a function DataFrame -> DataFrame; or `delivered.arrow(...)`, the
            fastest; or `delivered.transform(...)`, to declare its properties; None: records are not changed. With
            `sources`, SQL over their names, or a function with a parameter for each: `def paid(orders, payments)`.
        output_mode: what a batch of a query that keeps state delivers. "append": rows that are final; "update": rows
            that changed: upserts into tables, by `keyColumns` or else the columns of the SQL's GROUP BY, and records to
            Kafka and queues; "complete": all rows, in place of the table's.
        trigger: "available_now", "10 seconds", or {"processing_time": "10 seconds"}; None: batch after batch.
        batch_s_max: how long a batch may take, in seconds; checked against the transaction time-out.
        audit: how the audit identifies records: {"id": SQL, "key": SQL} over the sink's columns; {"own": SQL} is true
            for this pipeline's records, where others write to the sink too.
        conf, master: of the Spark session, if the pipeline makes one.
        new_checkpoint: start over although an earlier checkpoint wrote to this sink.
        missing_ledger: continue although the ledger lacks batches of this checkpoint.
        repeated_batch: exactly_once may repeat a batch that a weaker guarantee began.
        new_target: continue although a sink's topic or table was dropped and recreated.
        lost_records: give up records of a decided batch that neither the sink nor the source still has.
        on_bad_row: for a row that a sink rejects, or for which the function of `delivered.arrow` raises, and for a
            record that cannot be decoded: "fail"; "dead_letter": it goes to that sink, in the same batch; "drop": it
            is dropped and counted as given up, at_most_once only.
        dead_letter: the sink for dead letters.
        lineage: send OpenLineage events, to where OPENLINEAGE_URL or openlineage.yml says.
        notify: where `delivered run` and `delivered watch` report problems: {"webhook": "env:URL", "format": "slack"};
            formats json, slack, teams and pagerduty, which takes a "key".

    Raises:
        UsageError: a name, guarantee, trigger or transform that is not allowed.
    """

    until: Mapping[str, Offsets] = MappingProxyType({})
    """Where each source ends, if the pipeline is a replay."""

    def __init__(
        self,
        *,
        name: str,
        guarantee: str | Guarantee,
        checkpoint: str | Path,
        source: Endpoint | None = None,
        sources: Mapping[str, Endpoint] | None = None,
        sinks: Sequence[Endpoint],
        dedup: Dedup | None = None,
        transform: str | Callable[[Any], Any] | Transform | None = None,
        output_mode: str = "append",
        trigger: str | Mapping[Any, str] | When | None = None,
        batch_s_max: float | None = None,
        audit: Mapping[str, Any] | None = None,
        conf: Mapping[str, Any] | None = None,
        master: str | None = None,
        new_checkpoint: bool = False,
        missing_ledger: bool = False,
        repeated_batch: bool = False,
        new_target: bool = False,
        lost_records: bool = False,
        on_bad_row: str = "fail",
        dead_letter: Endpoint | None = None,
        lineage: bool = False,
        notify: Mapping[str, str] | None = None,
    ) -> None:
        self.name = checked_name("pipeline", name)
        mappings: dict[str, object] = {"audit": audit, "conf": conf, "notify": notify}
        texts: dict[str, object] = {"output_mode": output_mode, "on_bad_row": on_bad_row}
        flags: dict[str, object] = {
            "new_checkpoint": new_checkpoint,
            "missing_ledger": missing_ledger,
            "repeated_batch": repeated_batch,
            "new_target": new_target,
            "lost_records": lost_records,
            "lineage": lineage,
        }
        for key, value in mappings.items():
            check_argument(_CALL, key, value, (Mapping, NoneType), "a mapping", f"{key}={{...}}")
        for key, value in texts.items():
            check_argument(_CALL, key, value, str, "text", f'{key}="..."')
        for key, value in flags.items():
            check_argument(_CALL, key, value, bool, "True or False", f"{key}=True")
        check_argument(_CALL, "master", master, (str, NoneType), "text", 'master="local[2]"')
        check_argument(_CALL, "batch_s_max", batch_s_max, (int, float, NoneType), "in seconds", "batch_s_max=60")
        self.guarantee = Guarantee.parse(guarantee)
        refuse_passwords(name, {"checkpoint": str(checkpoint), "master": master or ""})
        if not isinstance(checkpoint, str | Path) or not str(checkpoint).strip():
            raise UsageError("CHECKPOINT_MISSING.PIPELINE", checkpoint=repr(checkpoint))
        if isinstance(sinks, str | bytes | Mapping) or not isinstance(sinks, Iterable):
            raise UsageError("ENDPOINT_VALUE.SINKS", sinks=sinks, sinks_type=type(sinks).__name__)
        if step := not_as_meant(str(checkpoint)):
            raise UsageError("OPTION_VALUE.LITERAL", owner="Pipeline", name="checkpoint", value=checkpoint, action=step)
        if master is not None and "://" not in master and not _MASTER.fullmatch(master):
            raise UsageError("OPTION_VALUE.MASTER", master=master)
        self.checkpoint = _absolute(str(checkpoint))
        self.sources = _sources(source, sources)
        self.transform = as_transform(transform)
        reads_all(self.transform, tuple(self.sources))
        self.output_mode = choice(("append", "update", "complete")).parse(
            "delivered.Pipeline", "output_mode", output_mode, call=argument
        )
        self.sinks = tuple(for_output_mode(_endpoint("sinks", s), self.output_mode, self.transform) for s in sinks)
        self.dedup = _dedup(dedup, self.sources)
        self.trigger = parse_trigger(trigger)
        self.batch_s_max = batch_s_max
        self.audit_by = {k: v for k, v in (audit or {}).items() if k in AuditEntry.model_fields}
        self.audit_every = Cadence.of(audit or {})
        self.conf = {k: as_text(k, v) for k, v in (conf or {}).items()}
        configure(self.checkpoint, self.conf)
        self.master, self.new_checkpoint = master, new_checkpoint
        self.missing_ledger, self.repeated_batch = missing_ledger, repeated_batch
        self.new_target, self.lost_records = new_target, lost_records
        self.on_bad_row = _on_bad_row(on_bad_row, dead_letter)
        self.dead_letter, self.lineage = dead_letter, lineage
        data = (e for e in (*self.sources.values(), *self.all_sinks) if is_folder_of(self.checkpoint, e))
        if (endpoint := next(data, None)) is not None:
            raise UsageError("CHECKPOINT_IS_DATA", location=self.checkpoint, label=endpoint.label)
        self.notify = None if notify is None else Webhook.of(notify)
        of_sinks = ((s.audit, AuditEntry.model_fields) for s in self.sinks)
        for entry, known in ((audit or {}, PipelineAuditEntry.model_fields), *of_sinks):
            if unknown := set(entry) - set(known):
                raise UsageError("AUDIT_KEY", unknown=sorted(unknown), known=", ".join(known))

    @classmethod
    def from_file(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Self:
        """Read a YAML file. Keys of `overrides` ("source.maxOffsetsPerTrigger") win over environment and file.

        Raises:
            UsageError: every fault of the file, with its line and key.
        """
        return cls.from_parsed(load_file(path, overrides), Path(path).parent)

    @classmethod
    def from_parsed(cls, file: PipelineFile, folder: Path) -> Self:
        """A pipeline as a file in `folder` describes it: relative paths and the transform's modules are looked for
        there."""
        return cls(
            name=file.pipeline,
            guarantee=file.guarantee,
            checkpoint=resolve_location(folder, file.checkpoint),
            sources={n: endpoint_of(s, folder) for n, s in file.endpoints.items()},
            sinks=[endpoint_of(s, folder) for s in file.sinks],
            dedup=_dedup_of(file.dedup),
            transform=_transform(file.transform, folder.resolve()),
            output_mode=file.output_mode,
            trigger=file.trigger,
            batch_s_max=file.batch_s_max,
            audit=file.audit.model_dump(exclude_none=True) if file.audit else None,
            conf=file.spark,
            master=file.master,
            new_checkpoint=file.new_checkpoint == "accept",
            missing_ledger=file.missing_ledger == "accept",
            repeated_batch=file.repeated_batch == "accept",
            new_target=file.new_target == "accept",
            lost_records=file.lost_records == "accept",
            on_bad_row=file.on_bad_row,
            dead_letter=endpoint_of(file.dead_letter, folder) if file.dead_letter else None,
            lineage=file.lineage,
            notify={k: resolve_file(folder, v) if v.startswith("file:") else v for k, v in file.notify if v is not None}
            if file.notify
            else None,
        )

    @property
    def transform_version(self) -> str:
        """A fingerprint of the transform with what the sinks select of it; kept with every batch that is decided."""
        projections = zip(self.sink_names, (s.projection for s in self.sinks), strict=True)
        return build_version(self.transform, projections, self.on_bad_row, tuple(self.sources))

    @property
    def spec(self) -> PipelineSpec:
        """What travels to Spark. Each sink gets all rows and columns here; `start` adds the routes."""
        letters = self.dead_letter
        return PipelineSpec(
            pipeline=self.name,
            guarantee=self.guarantee,
            sinks=tuple(_sink_spec(e) for e in self.sinks),
            dead_letter=_sink_spec(letters) if letters is not None else None,
            on_bad_row=self.on_bad_row,
            checkpoint=self.checkpoint,
            tolerance=Tolerance(
                self.new_checkpoint, self.missing_ledger, self.repeated_batch, self.new_target, self.lost_records
            ),
            transform=self.transform_version,
        )

    @property
    def spark_projects(self) -> bool:
        """Whether Spark applies select and where: one sink gets every row. Otherwise each task routes its rows."""
        return len(self.sinks) == 1 and self.on_bad_row is OnBadRow.FAIL

    @property
    def is_direct(self) -> bool:
        """Whether no Spark operation lies between source and sinks, so that tasks can read the source themselves."""
        if len(self.sources) > 1 or any(e.is_spark_own for e in self.sources.values()) or self.dedup is not None:
            return False
        plain = all(s.projection.is_all if self.spark_projects else s.projection.is_plain for s in self.sinks)
        return self.transform.kind in ("none", "arrow") and plain and self.output_mode == "append"

    @property
    def all_sinks(self) -> tuple[Endpoint, ...]:
        """The sinks, and the one of dead letters."""
        return self.sinks if self.dead_letter is None else (*self.sinks, self.dead_letter)

    @property
    def sink_names(self) -> tuple[str, ...]:
        """Of every sink, in order: as named, or as its connector names it."""
        return tuple(e.sink_name for e in self.sinks)

    def __repr__(self) -> str:
        return (
            f"Pipeline(name={self.name!r}, guarantee={self.guarantee.value!r}, checkpoint={self.checkpoint!r}, "
            f"sources={self.sources!r}, sinks={list(self.sinks)!r})"
        )


def _sources(source: object, sources: object) -> dict[str, Endpoint]:
    """The sources by name, in the user's order."""
    if (source is None) == (sources is None):
        raise UsageError("SOURCES.ONE_OR_SEVERAL", which="neither source nor" if source is None else "both source and")
    if sources is None:
        sources = {SOURCE: source}
    if not isinstance(sources, Mapping) or not sources:
        raise UsageError("SOURCES.TYPE", sources=sources, sources_type=type(sources).__name__)
    found = {_source_name(n): _endpoint(f"source {n!r}", e) for n, e in sources.items()}
    for name, other in combinations(found, 2):
        if name.lower() == other.lower():
            raise UsageError("SOURCE_NAME.TWICE", name=name, other=other)
    for name, endpoint in found.items():
        if not endpoint.projection.is_all:
            raise UsageError("SOURCE_SELECT", source="The source" if name == SOURCE else f"The source {name!r}")
    return found


def _source_name(name: object) -> str:
    if isinstance(name, str) and SOURCE_NAME.fullmatch(name) and len(name) <= NAME_LENGTH_MAX:
        return name
    raise UsageError("SOURCE_NAME.INVALID", name=name, name_length_max=NAME_LENGTH_MAX)


def _sink_spec(endpoint: Endpoint) -> SinkSpec:
    return SinkSpec(endpoint.system, endpoint.connector_options, endpoint.name)


_MASTER = re.compile(r"local(\[(\*|\d+)(, *\d+)?\])?|local-cluster\[.*\]|yarn")


def _absolute(location: str) -> str:
    """Make a local path absolute: Spark's driver and our workers may have other working directories."""
    if not location:
        raise UsageError("CHECKPOINT_MISSING.PIPELINE", checkpoint="empty")
    return location if ":" in location.split("/", 1)[0] else str(Path(location).expanduser().absolute())


def _endpoint(what: str, endpoint: object) -> Endpoint:
    if not isinstance(endpoint, Endpoint):
        raise UsageError("ENDPOINT_VALUE.PIPELINE", what=what, endpoint=endpoint, endpoint_type=type(endpoint).__name__)
    return endpoint


def _dedup(dedup: object, sources: Mapping[str, Endpoint]) -> Dedup | None:
    if dedup is not None and len(sources) > 1:
        raise UsageError("DEDUP_SOURCES", sources=", ".join(sources))
    if dedup is None or isinstance(dedup, Dedup):
        return dedup
    raise UsageError("DEDUP_VALUE", dedup=dedup, dedup_type=type(dedup).__name__)


def _on_bad_row(on_bad_row: str, dead_letter: Endpoint | None) -> OnBadRow:
    policy = choice(OnBadRow).parse("delivered.Pipeline", "on_bad_row", str(on_bad_row), call=argument)
    if (policy is OnBadRow.DEAD_LETTER) != (dead_letter is not None):
        raise UsageError("DEAD_LETTER.SINK", policy=policy.value, article="a" if dead_letter else "no")
    if dead_letter is not None and not _endpoint("dead_letter", dead_letter).projection.is_all:
        raise UsageError("DEAD_LETTER.PROJECTION")
    return policy


def _dedup_of(entry: DedupEntry | None) -> Dedup | None:
    return (
        make_dedup(*entry.by, within=entry.within, time=entry.time, late=entry.late, memory=entry.memory)
        if entry is not None
        else None
    )


def _transform(entry: TransformEntry | None, folder: Path) -> Transform:
    if entry is None:
        return NO_TRANSFORM
    if entry.sql is None and entry.python is None:
        return arrow(load_function(entry.arrow, folder) if entry.arrow else None, select=entry.select or ())
    definition = entry.sql if entry.sql is not None else load_function(str(entry.python), folder)
    return declare(definition, stateful=entry.stateful, deterministic=entry.deterministic)


# What differs between two definitions of a pipeline, and what their checkpoint makes of it (docs/checkpoint.md).


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


# How often a pipeline is audited, and how much of the time audits may take.

SHARE = "10 %"
SEALS_LATE = 3
"""A seal older than so many intervals is a problem."""
_PERCENT = re.compile(r"(\d{1,3}(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class Cadence:
    """
    Attributes:
        every_s: seconds from the start of an audit to the start of the next one, at least.
        share: of the time that audits may take; above 0, at most 1.
    """

    every_s: float
    share: float = 0.1

    @classmethod
    def parse(cls, every: str, share: str | float | None = None) -> Self:
        """From "15 min" and "10 %" or 0.1.

        Raises:
            UsageError: neither a duration nor a share.
        """
        try:
            every_ms = read_ms(every)
        except Unfit as error:
            raise error.of("audit.every", 'write every: "15 min"') from None
        try:
            return cls(every_ms / 1000, _read_share(SHARE if share is None else share))
        except Unfit as error:
            raise error.of("audit.share", 'write share: "10 %"') from None

    @classmethod
    def of(cls, entry: Mapping[str, str]) -> Self | None:
        """Of a pipeline's `audit`; None: it does not audit by itself.

        Raises:
            UsageError: as `parse`; or a share, and no interval.
        """
        if "every" in entry:
            return cls.parse(entry["every"], entry.get("share"))
        if "share" in entry:
            raise UsageError("AUDIT_SHARE")
        return None

    @property
    def every(self) -> str:
        """For display."""
        return duration(int(self.every_s * 1000))

    @property
    def late_s(self) -> float:
        """Age from which a seal is too old."""
        return SEALS_LATE * self.every_s

    def after(self, started_s: float, ended_s: float) -> float:
        """When the next audit is due, after one that took so long."""
        pause_s = (ended_s - started_s) * (1 / self.share - 1)
        return max(started_s + self.every_s, ended_s + pause_s)


def _read_share(value: str | float) -> float:
    percent = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        share = float(percent[1]) / 100 if percent is not None else float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise Unfit.build("OPTION_VALUE.SHARE", text=value)
    return share
