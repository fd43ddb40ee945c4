"""A whole pipeline as a pydantic model: what a YAML file may hold, and nothing else."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Scalar = str | int | float | bool

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)
_ENDPOINT = ConfigDict(strict=True, extra="allow", frozen=True)

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
"""It becomes part of transactional ids and topic names."""


class SourceSpec(BaseModel):
    """Where records come from; every other key is an option of the format."""

    model_config = _ENDPOINT
    __pydantic_extra__: dict[str, Scalar | dict[str, Any]]

    format: str = Field(description='Name of the connector ("kafka", "log"), or "spark:kafka" for a source of Spark.')


class AuditSpec(BaseModel):
    """How the audit tells records apart."""

    model_config = _STRICT

    id: str | None = Field(None, description="SQL over the sink's columns that names a record. Default: all of it.")
    key: str | None = Field(
        None,
        description="SQL over the sink's columns; records of one key have an order. Default: key, if there is one.",
    )
    own: str | None = Field(
        None,
        description="SQL over the sink's columns, true for this pipeline's records, where others write to the sink "
        "too; 'true': nobody else does.",
    )


class SinkSpec(BaseModel):
    """Where records go; every other key is an option of the format."""

    model_config = _ENDPOINT
    __pydantic_extra__: dict[str, Scalar | dict[str, Any]]

    format: str = Field(description='Name of the connector: "kafka", "sqlite".')
    name: Name | None = Field(None, description="Name of this sink in its pipeline. Default: made from its target.")
    select: list[str] | None = Field(
        None, description='Columns that this sink gets: names, or SQL with a name: "amount * 2 AS double".'
    )
    where: str | None = Field(None, description="SQL; this sink gets the rows for which it is true.")
    audit: AuditSpec | None = Field(None, description="How the audit tells records of this sink apart.")


class DedupSpec(BaseModel):
    """Which repeats in the source are dropped, before the transform, under every guarantee."""

    model_config = _STRICT

    by: list[str] = Field(
        min_length=1, description="SQL over the source's columns that names a record; none is a repeat if one is null."
    )
    within: str = Field(
        description='"1 hour": a repeat whose time is at most so long after the first one\'s is dropped.'
    )
    time: str = Field("timestamp", description="SQL over the source's columns, a timestamp.")
    late: Literal["refuse", "drop"] = Field(
        "refuse",
        description="drop: it is known that a record older than the newest one by more than `within` is dropped, even "
        "if it is the first of its key. refuse: the pipeline is refused then, with the reason.",
    )
    memory: Literal["state", "table"] = Field(
        "state",
        description="What remembers keys. state: Spark's, in the checkpoint. table: a table in the database of the "
        "sink (postgres, mysql, sqlite), in the transaction of the decision; no record is dropped as late.",
    )


class TransformSpec(BaseModel):
    """What happens between source and sink. One of sql, python, arrow, select."""

    model_config = _STRICT

    sql: str | None = Field(None, description="A query over the view `source`.")
    python: str | None = Field(None, description='A function DataFrame -> DataFrame, as "module:function".')
    arrow: str | None = Field(
        None, description='A function from Arrow record batch to Arrow record batch, row-wise, as "module:function".'
    )
    select: list[str] | None = Field(None, description="Columns to keep; alone, or before `arrow`.")
    stateful: bool = Field(False, description="It keeps state between batches.")
    deterministic: bool | None = Field(None, description="The same rows in, the same rows out, in any run.")

    @model_validator(mode="after")
    def _one(self) -> TransformSpec:
        ways = [n for n in ("sql", "python", "arrow") if getattr(self, n) is not None]
        if len(ways) > 1 or (ways and ways != ["arrow"] and self.select) or not (ways or self.select):
            raise ValueError("a transform is one of: sql, python, arrow (with or without select), select")
        return self


class PipelineSpec(BaseModel):
    """A delivered pipeline."""

    model_config = ConfigDict(**_STRICT, title="delivered pipeline")

    pipeline: Name = Field(description="Name; two pipelines that share a sink need two names.")
    guarantee: Literal["at_most_once", "at_least_once", "exactly_once"] = Field(
        description="What is promised to a reader of the sink. There is no default."
    )
    checkpoint: str = Field(
        min_length=1, description="Folder or URL where Spark keeps the query's progress; one per pipeline."
    )
    source: SourceSpec
    dedup: DedupSpec | None = None
    transform: TransformSpec | None = None
    sinks: list[SinkSpec] = Field(min_length=1)
    on_bad_row: Literal["fail", "dead_letter", "drop"] = Field(
        "fail",
        description="What becomes of a row that a sink refuses for itself. drop: at_most_once only; it is counted.",
    )
    dead_letter: SinkSpec | None = Field(
        None, description="Where such rows go, in the same batch, with the reason; select and where have no place here."
    )
    trigger: str | dict[Literal["processing_time", "continuous", "real_time"], str] = Field(
        "0 seconds",
        description='available_now: end when all is delivered that was there at the start; "10 seconds": a batch '
        "every so often, until stopped.",
    )
    batch_s_max: float | None = Field(
        None, gt=0, description="Seconds a batch may take; checked against the transaction time-out."
    )
    new_checkpoint: Literal["refuse", "accept"] = Field(
        "refuse", description="accept: start over although an earlier checkpoint wrote to this sink."
    )
    missing_ledger: Literal["refuse", "accept"] = Field(
        "refuse", description="accept: go on although the ledger lacks batches of this checkpoint."
    )
    new_target: Literal["refuse", "accept"] = Field(
        "refuse", description="accept: go on although a sink's topic or table was dropped and made anew."
    )
    master: str | None = Field(None, description="Spark master. Default: what spark-submit set, else local[*].")
    spark: dict[str, Scalar] = Field(default_factory=dict, description="Spark configuration.")
    audit: AuditSpec | None = None
