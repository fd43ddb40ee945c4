"""What a pipeline file may contain: exactly this, as a pydantic model and as a JSON Schema."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from delivered.model.identity import SOURCE
from delivered.model.options import Option, OptionTable
from delivered.pipeline.endpoint import SPARK_OWN
from delivered.pipeline.registry import connectors

# What a pipeline file may contain: exactly this, as a pydantic model.

Scalar = str | int | float | bool

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)
_ENDPOINT = ConfigDict(strict=True, extra="allow", frozen=True)

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
"""It becomes part of transactional ids and topic names."""


class SourceEntry(BaseModel):
    """Where records come from; every other key is an option of the format."""

    model_config = _ENDPOINT
    __pydantic_extra__: dict[str, Scalar | dict[str, Any]]

    format: str = Field(
        description='Name of the connector ("kafka", "log"), or "spark:kafka" for a built-in Spark source.'
    )


class AuditEntry(BaseModel):
    """How the audit identifies records."""

    model_config = _STRICT

    id: str | None = Field(
        None, description="SQL over the sink's columns that identifies a record. Default: the whole record."
    )
    key: str | None = Field(
        None,
        description="SQL over the sink's columns; records of one key are ordered. Default: key, if present.",
    )
    own: str | None = Field(
        None,
        description="SQL over the sink's columns, true for this pipeline's records, if others write to the sink too; "
        "'true': nobody else does.",
    )


class SinkEntry(BaseModel):
    """Where records go; every other key is an option of the format."""

    model_config = _ENDPOINT
    __pydantic_extra__: dict[str, Scalar | dict[str, Any]]

    format: str = Field(description='Name of the connector: "kafka", "sqlite".')
    name: Name | None = Field(None, description="Name of this sink in its pipeline. Default: derived from its target.")
    select: list[str] | None = Field(
        None, description='Columns that this sink gets: names, or named SQL: "amount * 2 AS double".'
    )
    where: str | None = Field(None, description="SQL; this sink gets the rows that match.")
    audit: AuditEntry | None = Field(None, description="How the audit identifies records of this sink.")


class DedupEntry(BaseModel):
    """Which duplicates in the source are dropped, before the transform, under every guarantee."""

    model_config = _STRICT

    by: list[str] = Field(
        min_length=1,
        description="SQL over the source's columns that identifies a record; with a null, it duplicates nothing.",
    )
    within: str = Field(
        description='"1 hour": a record whose time is at most this long after its key\'s first one is dropped.'
    )
    time: str = Field("timestamp", description="SQL over the source's columns, a timestamp.")
    late: Literal["refuse", "drop"] = Field(
        "refuse",
        description="drop: accept that a record older than the newest one by more than `within` is dropped, even if it "
        "is the first of its key. refuse: such a pipeline is refused, with the reason.",
    )
    memory: Literal["state", "table"] = Field(
        "state",
        description="Where keys are kept. state: in Spark's state, in the checkpoint. table: in a table in the sink's "
        "database (postgres, mysql, sqlite), updated in the deciding transaction; no record is dropped as late.",
    )


class TransformEntry(BaseModel):
    """What happens between source and sink. One of sql, python, arrow, select."""

    model_config = _STRICT

    sql: str | None = Field(None, description="A query over the view `source`, or over the names of `sources`.")
    python: str | None = Field(
        None,
        description='A function DataFrame -> DataFrame, as "module:function"; with several sources, a parameter for '
        "each, by name.",
    )
    arrow: str | None = Field(
        None, description='A function from Arrow record batch to Arrow record batch, row-wise, as "module:function".'
    )
    select: list[str] | None = Field(None, description="Columns to keep; alone, or before `arrow`.")
    stateful: bool = Field(False, description="It keeps state between batches.")
    deterministic: bool | None = Field(None, description="The same input rows give the same output rows in every run.")

    @model_validator(mode="after")
    def _one(self) -> TransformEntry:
        ways = [n for n in ("sql", "python", "arrow") if getattr(self, n) is not None]
        if len(ways) > 1 or (ways and ways != ["arrow"] and self.select) or not (ways or self.select):
            raise ValueError("a transform is one of: sql, python, arrow (with or without select), select")
        return self


class PipelineFile(BaseModel):
    """A delivered pipeline."""

    model_config = ConfigDict(
        **_STRICT,
        title="delivered pipeline",
        json_schema_extra={"oneOf": [{"required": ["source"]}, {"required": ["sources"]}]},
    )

    pipeline: Name = Field(description="Name; pipelines that share a sink need different names.")
    guarantee: Literal["at_most_once", "at_least_once", "exactly_once"] = Field(
        description="What readers of the sink can rely on. There is no default."
    )
    checkpoint: str = Field(
        min_length=1, description="Folder or URL where Spark keeps the query's progress; one per pipeline."
    )
    source: SourceEntry | None = Field(None, description="Where records come from, if from one place; or sources.")
    sources: dict[str, SourceEntry] | None = Field(
        None,
        min_length=1,
        description="Where records come from, by name: orders: {format: ...}. SQL reads each by its name.",
    )
    dedup: DedupEntry | None = None
    transform: TransformEntry | None = None
    sinks: list[SinkEntry] = Field(min_length=1)
    on_bad_row: Literal["fail", "dead_letter", "drop"] = Field(
        "fail",
        description="What happens to a row that is invalid for a sink, or for which the transform's Arrow function "
        "raises, and to a record that cannot be decoded. drop: at_most_once only; it is counted.",
    )
    dead_letter: SinkEntry | None = Field(
        None, description="Where such rows go, in the same batch, with the reason; select and where are not allowed."
    )
    output_mode: Literal["append", "update", "complete"] = Field(
        "append",
        description="What a batch of a query that keeps state delivers: append: rows that are final; update: rows that "
        "changed, as upserts into tables; complete: all rows, in place of the table's.",
    )
    trigger: str | dict[Literal["processing_time", "continuous", "real_time"], str] = Field(
        "0 seconds",
        description='available_now: deliver what is there at the start, then end; "10 seconds": a batch at this '
        "interval, until stopped.",
    )
    batch_s_max: float | None = Field(
        None, gt=0, description="Seconds a batch may take; checked against the transaction time-out."
    )
    new_checkpoint: Literal["refuse", "accept"] = Field(
        "refuse", description="accept: start over although an earlier checkpoint wrote to this sink."
    )
    missing_ledger: Literal["refuse", "accept"] = Field(
        "refuse", description="accept: continue although the ledger lacks batches of this checkpoint."
    )
    new_target: Literal["refuse", "accept"] = Field(
        "refuse", description="accept: continue although a sink's topic or table was dropped and recreated."
    )
    lost_records: Literal["refuse", "accept"] = Field(
        "refuse", description="accept: give up what a decided batch held, and sink and source have no more."
    )
    lineage: bool = Field(
        False, description="Send OpenLineage events, to where OPENLINEAGE_URL or openlineage.yml says."
    )
    master: str | None = Field(None, description="Spark master. Default: what spark-submit set, else local[*].")
    spark: dict[str, Scalar] = Field(default_factory=dict, description="Spark configuration.")
    audit: AuditEntry | None = None

    @model_validator(mode="after")
    def _one(self) -> PipelineFile:
        if (self.source is None) == (self.sources is None):
            raise ValueError("a pipeline has one of: source, sources")
        return self

    @property
    def endpoints(self) -> dict[str, SourceEntry]:
        """The sources by name."""
        return {SOURCE: self.source} if self.source is not None else dict(self.sources or {})


# The JSON Schema of a pipeline file, from the model and the connectors' option tables.
#
# `python -m delivered.pipeline.entries docs/pipeline.schema.json` writes it; a test keeps the file up to date.

_OPTION = {"type": ["string", "number", "boolean", "object"]}


def schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12."""
    document = PipelineFile.model_json_schema()
    installed = connectors()
    sources = {n: c.source_options for n, c in installed.items() if c.source_options is not None}
    sinks = {n: c.sink_options for n, c in installed.items() if c.sink_options is not None}
    definitions = document["$defs"]
    definitions["SourceEntry"] = _endpoint(definitions["SourceEntry"], sources, own=True)
    definitions["SinkEntry"] = _endpoint(definitions["SinkEntry"], sinks, own=False)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}


def _endpoint(model: dict[str, Any], tables: dict[str, OptionTable], *, own: bool) -> dict[str, Any]:
    """One shape per connector: exactly its options."""
    common = {k: v for k, v in model["properties"].items() if k != "format"}
    shapes: list[dict[str, Any]] = [
        {
            "type": "object",
            "title": name,
            "properties": {
                "format": {"enum": [name, f"delivered_{name}"]},
                **common,
                **{spelling: _option(o) for o in table.options for spelling in (o.name, *o.aliases)},
            },
            "patternProperties": {f"^{re.escape(p)}": _OPTION for p in table.passthrough},
            "required": ["format", *(o.name for o in table.options if o.required)],
            "additionalProperties": False,
        }
        for name, table in tables.items()
    ]
    if own:
        pattern = {"format": {"type": "string", "pattern": f"^{SPARK_OWN}"}}
        shapes.append(
            {
                "type": "object",
                "title": "one of Spark's own sources",
                "properties": {**pattern, **common},
                "required": ["format"],
                "additionalProperties": _OPTION,
            }
        )
    return {"description": model["description"], "oneOf": shapes}


def _option(option: Option) -> dict[str, Any]:
    """Values may be text in any case, so allowed ones are listed as examples; bounds only apply to numbers."""
    examples = {} if option.example is None else {"examples": [option.example]}
    return {**_OPTION, "description": option.doc, **examples, **option.type.schema}


def as_text() -> str:
    return json.dumps(schema(), indent=2, sort_keys=True) + "\n"


def main() -> None:
    """Write the schema to the file given on the command line, or to standard output."""
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(as_text(), encoding="utf-8")
    else:
        sys.stdout.write(as_text())


if __name__ == "__main__":
    main()
