"""What travels from the user's process to Spark's: one envelope, in one option of the Spark format (decision 118).

`Pipeline` makes the spec of a write from its definition. In the Spark idiom,
`df.writeStream.format("delivered_kafka").option(...)`, the same value is made from the user's options. Both happen in
`PipelineSpec.parse`, and nowhere else. Options of SQL tables travel in the metadata of a column.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pyarrow as pa

from delivered.checkpoint import Store, remember
from delivered.contract.sink import Sink
from delivered.contract.source import Offsets
from delivered.engine import Columns, Sinks
from delivered.model.capability import Guarantee
from delivered.model.errors import Refused, UsageError, redacted
from delivered.model.identity import SOURCE, Scope, checked_name, fitted_name
from delivered.model.options import Option, OptionTable, choice, find_option
from delivered.model.rows import OnBadRow
from delivered.model.work import DriverAddress, Owner, Tolerance
from delivered.pipeline.registry import find_sink

OPTION = "delivered.spec.secret"
"""Holds the envelope. The name makes Spark redact its value, which contains the sinks' options."""

VERSION = 4
"""Version of the envelope. Client and server of Spark Connect may run different releases."""

PIPELINE_OPTIONS = OptionTable(
    "delivered",
    (
        Option("guarantee", "at_most_once, at_least_once or exactly_once.", required=True),
        Option("pipeline", "Name of the pipeline; two pipelines that share a sink need two names.", "the query's name"),
        Option("sink", "Name of this sink in its pipeline.", "made from its target"),
        Option("newCheckpoint", "accept: start over although an earlier checkpoint wrote to this sink.", "refuse"),
        Option("missingLedger", "accept: continue although the ledger lacks batches of this checkpoint.", "refuse"),
        Option("repeatedBatch", "accept: exactly_once may repeat a batch that a weaker guarantee began.", "refuse"),
        Option("newTarget", "accept: continue although the sink's topic or table was dropped and recreated.", "refuse"),
        Option(
            "lostRecords",
            "accept: give up rows of a decided batch that neither sink nor source has any more.",
            "refuse",
        ),
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


@dataclass(frozen=True)
class Sender:
    """The driver that an envelope comes from. Spark pickles it with the class that `register` creates.

    Attributes:
        address: where executors reach it.
    """

    owner: Owner
    address: DriverAddress


_APART = {"apart": True}
"""Of a field that is not in the envelope."""


@dataclass(frozen=True)
class StartCheck:
    """A request to check whether a query with this write could start.

    Attributes:
        columns: of its rows, as Spark's JSON of a StructType.
    """

    columns: Mapping[str, Any]
    output_mode: str
    store: Store = field(default_factory=dict)


@dataclass(frozen=True)
class OrderCheck:
    """A request to check whether each source of a query would get its own offsets.

    Attributes:
        sources: from `start.identities`.
    """

    checkpoint: str
    sources: list[list[str]]


@dataclass(frozen=True)
class PipelineSpec:
    """
    Attributes:
        sinks: in the user's order; empty for a read.
        dead_letter: the sink of rows that fail the validation of another one.
        checkpoint: as Spark spells it; None for a write that is not a stream.
        transform: fingerprint of the pipeline's transform; empty: unknown.
        direct: tasks read the source themselves: an `engine.transform.Direct`, pickled by value.
        run_id: identifies the rows of a write that is not a stream.
        start: differs at each start of a query, whose processes outlive it; None: unknown.
        sender: the driver. Not in the envelope: the registered class carries it.
        batch: this write is that batch of a query with `foreachBatch`; None: it is a stream, or a run.
        one_of_each: a key of an upsert without version occurs once in a batch.
        rejects: tasks may store records that cannot be decoded in the checkpoint.
        store: how Python opens the checkpoint.
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
    run_id: str | None = None
    start: str | None = None
    sender: Sender | None = field(default=None, metadata=_APART)
    batch: int | None = None
    one_of_each: bool = False
    rejects: bool = False
    store: Store = field(default_factory=dict)

    def open(self) -> Sinks:
        """Raises UsageError: bad options, or two sinks with the same name."""
        letters = self.dead_letter
        return Sinks.of(
            [(s.name, s.open(), s.route) for s in self.sinks],
            self.on_bad_row,
            (letters.name, letters.open()) if letters is not None else None,
        )

    def checked(self, rows: pa.Schema) -> Sinks:
        """The sinks, which can be written with this guarantee and these rows.

        Raises:
            UsageError, Refused: one cannot.
        """
        sinks = self.open()
        for member in sinks.members:
            member.sink.check_guarantee(self.guarantee)
        sinks.check_schema(rows)
        return sinks

    @property
    def run(self) -> str:
        """The identity of a run; generated if the guarantee allows duplicates.

        Raises:
            Refused: exactly_once or at_most_once without a run id: a restarted job could not be recognized.
        """
        if self.run_id is not None:
            return self.run_id
        if self.guarantee is Guarantee.AT_LEAST_ONCE:
            return uuid.uuid4().hex
        raise Refused("RUN_UNNAMED", guarantee=self.guarantee.value)

    def scope(self, sinks: Sinks, incarnation: str | None = None) -> Scope:
        """Where the batches of an incarnation are decided.

        Args:
            sinks: from `open`.
            incarnation: None: there is none yet.
        """
        return Scope(self.pipeline, sinks.decider.name, incarnation or NO_INCARNATION)

    def reading(self, source: str, *, drain: Drain, until: Offsets | None, raw: bool, ends: bool) -> Reading:
        """How a source of this write's pipeline is read. See `Reading`; raw: if records may be rejected."""
        return Reading(
            checkpoint=self.checkpoint,
            drain=drain,
            direct=self.direct is not None,
            source=source,
            until=until,
            pipeline=self.pipeline,
            start=self.start,
            rejects=self.rejects,
            raw=self.rejects and raw,
            ends=ends,
            store=self.store,
        )

    @cached_property
    def key(self) -> str:
        """The same for every batch and every start of this write."""
        return replace(self, start=None, batch=None).to_option()

    def to_option(self) -> str:
        """For `OPTION`."""
        return Envelope(self).encode()

    @classmethod
    def parse(cls, system: str, options: Mapping[str, str], sender: Sender | None = None) -> PipelineSpec:
        """The spec of a write.

        Args:
            options: as Spark passes them, in any case.

        Raises:
            UsageError: no guarantee, or an invalid value.
            Refused: asynchronous progress tracking, under which a rerun batch may have different offsets.
        """
        content = Envelope.decode(options)
        rest = {k: v for k, v in options.items() if k.lower() != OPTION and not k.lower().startswith(_ASYNC)}
        if isinstance(content, PipelineSpec):
            spec = content
            if foreign := sorted(k for k in rest if k.lower() not in _SPARKS_OWN):
                raise UsageError("SINKS_OPTION", system=system, foreign=foreign)
        else:
            spec = _from_options(system, rest)
            if isinstance(content, IdiomStart):
                spec = replace(spec, start=content.id, store=content.store)
            elif isinstance(content, StartCheck):
                spec = replace(spec, store=content.store)
        _refuse_async(options, spec.guarantee)
        remember(spec.checkpoint, spec.store)
        return replace(spec, sender=sender)


@dataclass(frozen=True)
class Drain:
    """How the user's process stops a query between two batches: a file on the driver's machine, where the source plans
    its batches. Spark cannot pass anything to a source while its query runs."""

    path: str

    @classmethod
    def new(cls) -> Drain:
        return cls(str(Path(tempfile.gettempdir()) / f"delivered-drain-{uuid.uuid4().hex}"))

    def request(self) -> None:
        """From now on the source offers no new records."""
        Path(self.path).touch()

    def clear(self) -> None:
        Path(self.path).unlink(missing_ok=True)


@dataclass(frozen=True)
class Reading:
    """How a stream's source is read.

    Attributes:
        checkpoint: of its query, as Spark spells it; None: unknown.
        drain: None: the query is not stopped between two batches.
        direct: tasks of the sink read the source themselves; Spark carries slices.
        source: its name in the query.
        until: offsets at which the read ends, if it is bounded: a replay. It acknowledges nothing.
        pipeline: its name, if it is one's source.
        start: of its query; None: unknown.
        rejects: records that cannot be decoded do not fail the read.
        raw: a source that decodes records passes on their bytes too.
        ends: nothing is read beyond what is there at the first request.
        store: how Python opens the checkpoint.
    """

    checkpoint: str | None = None
    drain: Drain | None = None
    direct: bool = False
    source: str = SOURCE
    until: Offsets | None = None
    pipeline: str | None = None
    start: str | None = None
    rejects: bool = False
    raw: bool = False
    ends: bool = False
    store: Store = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> tuple[Reading, dict[str, str]]:
        """Parse the options of a read; returns it and the connector's remaining options."""
        content = Envelope.decode(options)
        rest = {k: v for k, v in options.items() if k.lower() not in (OPTION, CHECKPOINT.lower())}
        if isinstance(content, Reading):
            remember(content.checkpoint, content.store)
            return content, rest
        return cls(find_option(options, CHECKPOINT)), rest


@dataclass(frozen=True)
class IdiomStart:
    """A start in the Spark idiom, whose options hold everything else. See `PipelineSpec.start`."""

    id: str
    store: Store = field(default_factory=dict)


_CONTENTS: dict[str, type] = {
    "write": PipelineSpec,
    "read": Reading,
    "idiom": IdiomStart,
    "check": StartCheck,
    "order": OrderCheck,
}


@dataclass(frozen=True)
class Envelope:
    """Encoded once, where a query starts; decoded once, in each of Spark's processes."""

    content: PipelineSpec | Reading | IdiomStart | StartCheck | OrderCheck

    def encode(self) -> str:
        """For `OPTION`."""
        (kind,) = (k for k, of in _CONTENTS.items() if type(self.content) is of)
        return json.dumps({"version": VERSION, "kind": kind, "content": _encode(self.content)})

    @staticmethod
    def decode(options: Mapping[str, str]) -> PipelineSpec | Reading | IdiomStart | StartCheck | OrderCheck | None:
        """The content; None: there is no envelope.

        Args:
            options: as Spark passes them, in any case.

        Raises:
            UsageError: another release wrote it, or it is damaged.
        """
        text = find_option(options, OPTION)
        return None if text is None else _decode_text(text)


@lru_cache(maxsize=32)
def _decode_text(text: str) -> Any:
    """Decoded once per process: a planning process gets the same options for every batch."""
    try:
        data = json.loads(text)
        version = data["version"]
        if version == VERSION:
            return _decode(_CONTENTS[data["kind"]], data["content"])
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError("SPEC_UNREADABLE", error_type=type(error).__name__, error=error) from None
    raise UsageError("SPEC_VERSION", version=version, version_max=VERSION)


def _encode(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in fields(value) if not f.metadata}
    match value:
        case Enum():
            return value.value
        case bytes():
            return base64.b64encode(value).decode()
        case Mapping():
            return {k: _encode(v) for k, v in value.items()}
        case tuple() | list():
            return [_encode(v) for v in value]
        case _:
            return value


def _decode(kind: Any, value: Any) -> Any:
    """A value of JSON, as a field of this type.

    Raises:
        ValueError, TypeError: it is of another type, or lacks a field.
    """
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else _decode(of[0], value)
    if origin is tuple:
        kinds = [of[0]] * len(value) if of[-1] is Ellipsis else of
        return tuple(_decode(k, v) for k, v in zip(kinds, value, strict=True))
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        names = {f.name for f in fields(kind) if not f.metadata}
        if not isinstance(value, dict) or value.keys() != names:
            raise ValueError(f"it must have the fields {sorted(names)}")
        return kind(**{name: _decode(hints[name], value[name]) for name in names})  # type: ignore[operator]
    if kind is bytes:
        return base64.b64decode(value, validate=True)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    expected = (origin or kind) if kind is not Any else object
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise TypeError(f"a value is {type(value).__name__}, not {expected.__name__}")  # it may hold a password
    return value


def _from_options(system: str, options: Mapping[str, str]) -> PipelineSpec:
    known = {o.name.lower() for o in PIPELINE_OPTIONS.options}
    own = {k: v for k, v in options.items() if k.lower() in known}
    guarantee = Guarantee.parse(find_option(own, "guarantee"))
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
    raise UsageError("PIPELINE_UNNAMED")


def _refuse_async(options: Mapping[str, str], guarantee: Guarantee) -> None:
    enabled = find_option(options, _ASYNC_ENABLED) or ""
    if enabled.lower() == "true" and guarantee is not Guarantee.AT_LEAST_ONCE:
        raise Refused("ASYNC_PROGRESS.QUERY", guarantee=guarantee.value)


# Options of SQL tables, `CREATE TABLE t USING delivered_kafka OPTIONS (...)`.
#
# Spark passes them to a Python source only once, when it asks for the columns, and never to later statements on the
# table (measured with PySpark 4.3). But it keeps the schema. So they are stored in the metadata of the first column,
# which every SELECT, INSERT INTO and readStream.table gets.

_TABLE = "delivered.table"
_CATALOG = "provider"
_PREFIX = "option."
_PER_STATEMENT = frozenset({"runid", "pipeline"})
"""Options that a statement may add: INSERT INTO t WITH ('runId' = '...')."""


def create_table_options(options: Mapping[str, str]) -> dict[str, str] | None:
    """The options of the calling `CREATE TABLE`; None: another statement calls.

    Raises:
        UsageError: one holds a secret: the schema goes wherever the rows go, even into files of other formats.
    """
    lowered = {k.lower(): v for k, v in options.items()}
    if _CATALOG not in lowered:
        return None
    found = {k.removeprefix(_PREFIX): v for k, v in lowered.items() if k.startswith(_PREFIX)}
    if "path" in lowered:  # Spark removes it from OPTIONS, as the table's location
        found.setdefault("path", re.sub(r"^file:/+", "/", lowered["path"]))  # Hadoop's spelling of a local one
    hidden = redacted(found)
    secret = next((k for k in found if hidden[k] != found[k]), None)
    if secret is not None:
        raise UsageError("TABLE_SECRET", secret=secret)
    return found


def table_metadata(options: Mapping[str, str]) -> dict[str, str]:
    """The options, for the metadata of the table's first column."""
    return {_TABLE: json.dumps(dict(options))}


def is_sink_table(options: Mapping[str, str]) -> bool:
    """A table with a guarantee is a sink; any other is a source."""
    return "guarantee" in options


def read_options(metadata: Mapping[str, Any], options: Mapping[str, str], system: str) -> dict[str, str]:
    """The options of a read: the statement's own override the table's.

    Args:
        metadata: of the first column.

    Raises:
        Refused: the table is a sink.
        UsageError: a table whose options Spark did not pass.
    """
    table = table_options(metadata)
    if is_sink_table(table):
        raise Refused("TABLE_WRITE_ONLY")
    if not table and not options:
        raise _not_passed(system, "SELECT ... FROM t WITH (...)")
    return {**table, **options}


def write_options(metadata: Mapping[str, Any], options: Mapping[str, str], system: str) -> dict[str, str]:
    """The options of a write: the table's, if the statement writes to a table.

    A frame that was read from a table has that table's options in its schema. They count only for a statement without
    options of its own, such as INSERT INTO.

    Raises:
        UsageError: a table whose options Spark did not pass.
    """
    if any(k.lower() not in _PER_STATEMENT for k in options):
        return dict(options)
    table = table_options(metadata)
    if not is_sink_table(table):  # none, or those of the table that the rows were read from
        raise _not_passed(system, "INSERT INTO t WITH (...)", "with the option guarantee, ")
    return {**table, **options}


def _not_passed(system: str, statement: str, as_sink: str = "") -> UsageError:
    return UsageError(
        "TABLE_OPTIONS", system=system, side="sink" if as_sink else "source", as_sink=as_sink, statement=statement
    )


def table_options(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The options of the table that a first column belongs to; empty: it belongs to none.

    Args:
        metadata: of the column.
    """
    stored: dict[str, str] = json.loads(metadata.get(_TABLE, "{}"))
    return stored
