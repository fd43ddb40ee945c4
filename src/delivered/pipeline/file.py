"""A pipeline file: what it may contain, as a pydantic model and a JSON Schema, and how it is read.

Call > command line > environment > file > default.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import quote, unquote

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from delivered.model.errors import UsageError, did_you_mean, shown
from delivered.model.identity import SOURCE
from delivered.model.options import Option, OptionTable
from delivered.pipeline.endpoint import SPARK_OWN, Endpoint, Projection, parse_projection
from delivered.pipeline.endpoint import as_text as option_text
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
        None, min_length=1, description="SQL over the sink's columns that identifies a record. Default: all columns."
    )
    key: str | None = Field(
        None,
        min_length=1,
        description="SQL over the sink's columns; records of one key are ordered. Default: key, if present.",
    )
    own: str | None = Field(
        None,
        min_length=1,
        description="SQL over the sink's columns, true for this pipeline's records, if others write to the sink too; "
        "'true': nobody else does.",
    )


class PipelineAuditEntry(AuditEntry):
    """How the audit identifies records, and how often a running pipeline is audited."""

    every: str | None = Field(
        None,
        description='"15 min": `delivered run` and `delivered audit --follow` audit what was delivered since the last '
        "seal, at this interval. Default: never by themselves.",
        examples=["15 min"],
    )
    share: str | float | None = Field(
        None, description='Share of the time that these audits may take. Default: "10 %".', examples=["10 %"]
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

    @property
    def projection(self) -> Projection:
        return parse_projection(self.select or (), self.where)


class DedupEntry(BaseModel):
    """Which duplicates in the source are dropped, before the transform, under every guarantee."""

    model_config = _STRICT

    by: list[str] = Field(
        min_length=1,
        description="SQL over the source's columns that identifies a record; with a null, it duplicates nothing.",
    )
    within: str = Field(
        description='"1 hour": a record whose time is at most this long after its key\'s first one is dropped.',
        examples=["1 hour"],
    )
    time: str = Field("timestamp", min_length=1, description="SQL over the source's columns, a timestamp.")
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
            raise ValueError(
                "a transform is one of: sql, python, arrow (with or without select), select",
                f"keep one of {', '.join(ways)}" if len(ways) > 1 else "write transform: {sql: ...}",
            )
        return self


class NotifyEntry(BaseModel):
    """Where problems are reported, once when one appears and once when it has ended."""

    model_config = _STRICT

    webhook: str = Field(description="Reference to its address: env:NAME or file:PATH.")
    format: str = Field("json", description="json, slack, teams or pagerduty.", examples=["slack"])
    key: str | None = Field(None, description="Reference to PagerDuty's routing key.")


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
    sinks: list[SinkEntry] = Field(min_length=1, description="Where records go: a list.")
    on_bad_row: Literal["fail", "dead_letter", "drop"] = Field(
        "fail",
        description="What happens to a row that is invalid for a sink, or for which the transform's Arrow function "
        "raises, and to a record that cannot be decoded. drop: at_most_once only; it is counted.",
    )
    dead_letter: SinkEntry | None = Field(
        None,
        description="Sink of rejected rows, in the same batch, with the reason; select and where are not allowed.",
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
        examples=["10 seconds"],
    )
    batch_s_max: float | None = Field(
        None, gt=0, description="Seconds a batch may take; checked against the transaction time-out.", examples=[60]
    )
    new_checkpoint: Literal["refuse", "accept"] = Field(
        "refuse", description="accept: start over although an earlier checkpoint wrote to this sink."
    )
    missing_ledger: Literal["refuse", "accept"] = Field(
        "refuse", description="accept: continue although the ledger lacks batches of this checkpoint."
    )
    repeated_batch: Literal["refuse", "accept"] = Field(
        "refuse", description="accept: exactly_once may repeat a batch that a weaker guarantee began."
    )
    new_target: Literal["refuse", "accept"] = Field(
        "refuse", description="accept: continue although a sink's topic or table was dropped and recreated."
    )
    lost_records: Literal["refuse", "accept"] = Field(
        "refuse", description="accept: give up rows of a decided batch that neither sink nor source has any more."
    )
    lineage: bool = Field(
        False, description="Send OpenLineage events, to where OPENLINEAGE_URL or openlineage.yml says."
    )
    master: str | None = Field(None, description="Spark master. Default: what spark-submit set, else local[*].")
    spark: dict[str, Scalar] = Field(default_factory=dict, description="Spark configuration.")
    audit: PipelineAuditEntry | None = None
    notify: NotifyEntry | None = None

    @model_validator(mode="after")
    def _one(self) -> PipelineFile:
        if (self.source is None) == (self.sources is None):
            raise ValueError(
                "a pipeline has one of: source, sources",
                "add source: {format: ...}" if self.source is None else "keep one of source, sources",
            )
        return self

    @property
    def endpoints(self) -> dict[str, SourceEntry]:
        """The sources by name."""
        return {SOURCE: self.source} if self.source is not None else dict(self.sources or {})


def resolve_location(folder: Path, location: str) -> str:
    """A relative path in a file is relative to the file."""
    plain = ":" not in location.split("/", 1)[0] and not location.startswith(("~", "$")) and location.strip()
    return str((folder / location).absolute()) if plain else location


def resolve_file(folder: Path, value: str) -> str:
    """As `resolve_location`, of a file that must exist: a certificate, or the `file:PATH` of a secret. One that is only
    in the process's folder stays as it is: `spark-submit --files` puts it there, on every executor."""
    start = "file:" if value.startswith("file:") else ""
    beside = folder / value.removeprefix(start)
    with contextlib.suppress(OSError):
        if beside.is_file() and not folder.samefile(Path()):
            return f"{start}{beside.absolute()}"
    return value


_URL_FILE = re.compile(r"(?<=[?&])(sslrootcert|sslcert|sslkey|sslcrl|ssl_ca|ssl_cert|ssl_key)=([^&#]+)")


def _resolve_in_url(folder: Path, url: str) -> str:
    """As `resolve_file`, of certificates that the URL of a database names."""

    def resolve(found: re.Match[str]) -> str:
        name, path = found[1], unquote(found[2])
        resolved = path if path == "system" else resolve_file(folder, path)  # libpq's word for the system's authorities
        return found[0] if resolved == path else f"{name}={quote(resolved)}"

    return _URL_FILE.sub(resolve, url) if "://" in url else url


_PATHS = ("path", "ledger", "log", "warehouse")
"""Options that hold a path, or a URL."""
_FILES = ("location", "certsfile", "certificatefile", "keyfile")
"""How options end that hold the path of a file."""


def endpoint_of(entry: SourceEntry | SinkEntry, folder: Path) -> Endpoint:
    """What a file in `folder` declares."""
    options = {k: option_text(k, v) for k, v in (entry.__pydantic_extra__ or {}).items()}
    for key in [k for k in options if k.lower() in _PATHS]:
        options[key] = resolve_location(folder, options[key])
    written = {k: v for k, v in options.items() if k.lower().endswith(_FILES) or v.startswith("file:")}
    options |= {k: resolve_file(folder, v) for k, v in written.items()}
    in_urls = {k: resolved for k, v in options.items() if (resolved := _resolve_in_url(folder, v)) != v}
    written |= {k: options[k] for k in in_urls}
    options |= in_urls
    if isinstance(entry, SourceEntry):
        return Endpoint(entry.format, options)
    audit = entry.audit.model_dump(exclude_none=True) if entry.audit else {}
    return Endpoint(entry.format, options, entry.name, entry.projection, audit, written)


# The JSON Schema of a pipeline file, from the model and the connectors' option tables.
#
# `python -m delivered.pipeline.file docs/pipeline.schema.json` writes it; a test keeps the file up to date.

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


# YAML of users: values as they are written, and bounded in size, depth and aliases.

TEXT_BYTES_MAX = 1 << 20
NODES_MAX = 20_000
DEPTH_MAX = 50


class _Loader(yaml.SafeLoader):
    """Reads a number or a flag only where its text is what it would be written as again.

    YAML 1.1 reads 0123 as 83, 1_000 as 1000, 22:22 as 1342, 1.10 as 1.1, yes and on as true, and 2026-01-01 as a date:
    for the name of a topic or a password, another one. All these stay text.
    """


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"0|-?[1-9][0-9]{0,17}", "-0123456789"),
    ("float", r"-?(?:0|[1-9][0-9]{0,9})\.(?:0|[0-9]{0,3}[1-9])", "-0123456789"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def load_yaml(text: str) -> Any:
    """
    Raises:
        yaml.YAMLError: it is not YAML, or an explicit tag does not fit its value.
        UsageError: it is larger, deeper or more repeated than a pipeline can be.
    """
    _check(text)
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except (ValueError, TypeError, AttributeError, OverflowError, KeyError) as error:  # !!int "x", !!timestamp "x"
        raise yaml.YAMLError(f"a value does not fit its tag: {str(error)[:200]}") from None


def _check(text: str) -> None:
    """Count nodes with their aliases expanded, event by event, before anything is built."""
    if len(text) > TEXT_BYTES_MAX:
        raise _too_large(f"has {len(text):,} characters", f"{TEXT_BYTES_MAX:,}")
    sizes: dict[str, int] = {}
    open_: list[tuple[str | None, int]] = []
    count = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in open_):
                raise _too_large(f"refers to {event.anchor!r} within itself", "no cycle")
            count += sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            count += 1
            open_.append((event.anchor, count))
            if len(open_) > DEPTH_MAX:
                raise _too_large(f"is nested more than {DEPTH_MAX} deep", str(DEPTH_MAX))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor is not None:
                sizes[anchor] = count - before + 1
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        if count > NODES_MAX:
            raise _too_large(f"has more than {NODES_MAX:,} values, with its aliases expanded", f"{NODES_MAX:,}")


def _too_large(what: str, limit: str) -> UsageError:
    return UsageError("FILE_TOO_LARGE", what=what, limit=limit)


ENVIRONMENT = {
    f"DELIVERED_{name.upper()}": name
    for name in (
        "guarantee",
        "checkpoint",
        "trigger",
        "batch_s_max",
        "master",
        "new_checkpoint",
        "missing_ledger",
        "repeated_batch",
        "new_target",
        "lost_records",
        "lineage",
    )
}
"""Environment variables that override the file."""

_REFERENCE = re.compile(r"\$\{(env:[A-Za-z_][A-Za-z0-9_]*|file:[^}]+)\}")
_VARIABLE = re.compile(r"\$[A-Z_][A-Z0-9_]*")
"""As a shell writes it."""
_QUOTES = tuple("\u201c\u201d\u201e\u2018\u2019\u201a\u00ab\u00bb")
"""Typographic ones: YAML knows only ' and "."""
_MODELS: dict[str, type[BaseModel]] = {
    "": PipelineFile,
    "source": SourceEntry,
    "sources": SourceEntry,
    "sinks": SinkEntry,
    "dedup": DedupEntry,
    "transform": TransformEntry,
    "audit": PipelineAuditEntry,
    "notify": NotifyEntry,
}
_ERRORS_SHOWN = 5

Path_ = tuple[str | int, ...]


def load_file(path: str | Path, overrides: Mapping[str, Any] | None = None) -> PipelineFile:
    """Read a pipeline file.

    Args:
        overrides: dotted key -> value, overriding environment and file: {"source.maxOffsetsPerTrigger": "1000"}.

    Raises:
        UsageError: no such file, not YAML, or not a pipeline: every fault with its line and key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        hint = _files_near(path) if isinstance(error, OSError) else "save it as UTF-8; "
        raise UsageError("FILE_UNREADABLE", path=str(path), reason=reason, hint=hint) from None
    return load_text(text, str(path), overrides)


def _files_near(path: Path) -> str:
    """For a next step: the pipeline file that was meant, or those in its folder; empty: there are none."""
    folder, name = (path, "") if path.is_dir() else (path.parent, path.name)
    try:
        there = {p.name: folder / p.name for p in sorted(folder.iterdir()) if p.suffix in (".yaml", ".yml")}
    except OSError:
        return ""
    if near := difflib.get_close_matches(name, there, n=1):
        return f"did you mean {there[near[0]]}? "
    return f"there is {', '.join(map(str, list(there.values())[:_ERRORS_SHOWN]))}; " if there else ""


def load_text(text: str, name: str = "pipeline", overrides: Mapping[str, Any] | None = None) -> PipelineFile:
    """As `load_file`, from text; errors show `name`."""
    data, lines = _parse(text, name)
    data = _resolve_references(data, name, lines, ())
    origins: dict[str, str] = {}
    _check_environment()
    for variable, key in ENVIRONMENT.items():
        if variable in os.environ:
            _put(data, key, _parse_scalar(os.environ[variable]), variable)
            origins[key] = variable
    for dotted, value in (overrides or {}).items():
        _put(data, dotted, value, f"--set {dotted}")
        origins[dotted] = "the command line"
    return _validate(data, name, lines, origins)


def _check_environment() -> None:
    """Raise UsageError: a variable is misspelt, which would leave the value that it should override."""
    for name in os.environ.keys() - ENVIRONMENT.keys():
        prefix, _, key = name.upper().partition("_")
        near = difflib.get_close_matches(key.lower(), ENVIRONMENT.values(), n=1, cutoff=0.8)
        if prefix == "DELIVERED" and near:
            raise UsageError("ENVIRONMENT_UNKNOWN", name=name, known=f"DELIVERED_{near[0].upper()}")


def parse_override(text: str) -> tuple[str, Any]:
    """Read "source.maxOffsetsPerTrigger=1000".

    Raises:
        UsageError: there is no "=".
    """
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UsageError("OVERRIDE_VALUE.SYNTAX", text=text)
    return key, _parse_scalar(value)


def _parse_scalar(text: str) -> Any:
    """Shell text, read as YAML: 1 is a number, true is true."""
    try:
        value = load_yaml(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | int | float | dict | list) else text


def _parse(text: str, name: str) -> tuple[dict[str, Any], dict[Path_, int]]:
    try:
        data = load_yaml(text)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _not_yaml(text, name, error) from None
    if not isinstance(data, dict):
        raise UsageError(
            "FILE_INVALID.NO_MAPPING",
            name=name,
            known=", ".join(PipelineFile.model_fields),
            kind="empty" if data is None else shown(data),
        )
    lines: dict[Path_, int] = {}
    _lines(node, (), lines, name)
    return data, lines


def _not_yaml(text: str, name: str, error: yaml.YAMLError) -> UsageError:
    mark, opened = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    line = mark.line + 1 if mark else 0
    action = f"correct line {line}" if line else "correct the file"
    texts = [*text.splitlines(), "", ""]
    at = texts[mark.line] if mark else ""
    before = at[: mark.column + 1] if mark else ""
    context = str(getattr(error, "context", ""))
    if "\t" in before and before.isspace():
        problem, action = "a tab indents it, where YAML takes blanks only", f"replace the tab in line {line} by blanks"
    elif opened and ("flow mapping" in context or "flow sequence" in context):
        bracket = texts[opened.line][opened.column]
        problem = f"{problem}; the {bracket} of line {opened.line + 1} is open"
        action = f"close the {bracket} of line {opened.line + 1}, or quote what stands in it"
    elif opened and "simple key" in context:
        line = opened.line + 1
        problem = "no ': ' follows the key"
        action = (
            f"write a colon and a blank after the key of line {line}; what continues a value is deeper than its key"
        )
    elif opened and "quoted scalar" in context and "escape" in problem:
        action = f"write the value in line {line} in single quotes, where a backslash is one"
    elif opened and "quoted scalar" in context:
        line = opened.line + 1
        problem, action = "it opens a quote that nothing closes", f"close the quote of line {line}"
    elif problem == "but found another document":
        problem, action = "it starts a second document", f"remove the '---' of line {line}; a file has one pipeline"
    elif "cannot start any token" in problem or "undefined alias" in problem:
        action = f"quote the value in line {line}"
    elif problem.startswith("expected <block end>"):
        problem, action = (
            "it is indented unlike the lines above",
            f"indent line {line} like the keys or dashes beside it",
        )
    elif problem.startswith("mapping values are not allowed") and len(re.findall(r":\s", f"{at} ")) < 2:
        problem, action = "it is deeper than the line before, which has a value", f"indent line {line} like that one"
        if re.match(r"\s*-\S", texts[line - 2]):
            problem, action = "no blank follows the dash of the line before", f"write '- ' in line {line - 1}"
    elif problem.startswith("mapping values are not allowed"):
        problem, action = "a second ': ' in one line", f"quote the value in line {line}, or start a line for its keys"
    return UsageError(
        "FILE_NOT_YAML", name=name, where=f", line {line}" if line else "", problem=problem, action=action
    )


def _lines(node: Any, path: Path_, lines: dict[Path_, int], name: str) -> None:
    """The line of each key; refuses duplicate keys, of which YAML would silently use the last."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            at = (*path, key.value)
            if at in lines:
                raise UsageError(
                    "FILE_INVALID.KEY_TWICE",
                    name=name,
                    line=key.start_mark.line + 1,
                    key=_dotted(at),
                    first_line=lines[at],
                )
            lines[at] = key.start_mark.line + 1
            _lines(value, at, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            lines[(*path, i)] = value.start_mark.line + 1
            _lines(value, (*path, i), lines, name)


def _resolve_references(value: Any, name: str, lines: Mapping[Path_, int], path: Path_) -> Any:
    """`${env:NAME}` becomes the reference `env:NAME`: the secret itself is read where it is used, never here."""
    match value:
        case dict():
            return {k: _resolve_references(v, name, lines, (*path, k)) for k, v in value.items()}
        case list():
            return [_resolve_references(v, name, lines, (*path, i)) for i, v in enumerate(value)]
        case str() if "${" in value or _VARIABLE.fullmatch(value):
            reference = _REFERENCE.fullmatch(value.strip())
            if reference is None:
                raise UsageError("REFERENCE_INVALID", name=name, lines=_line(lines, path), path=_dotted(path))
            return reference.group(1)
        case str() if value[:1] in _QUOTES:
            line = _line(lines, path)
            raise UsageError("FILE_INVALID.QUOTES", name=name, lines=line, path=_dotted(path), mark=value[0])
    return value


def _put(data: dict[str, Any], dotted: str, value: Any, origin: str) -> None:
    head, _, rest = dotted.partition(".")
    if head == "sinks" and rest:
        number, _, rest = rest.partition(".")
        sinks = data.get("sinks")
        if not (number.isdigit() and isinstance(sinks, list) and int(number) < len(sinks) and rest):
            raise UsageError("OVERRIDE_VALUE.SINKS", origin=origin)
        _replace(sinks[int(number)], rest, value)
    elif rest and head == "sources":
        name, _, rest = rest.partition(".")
        sources = data.get("sources")
        if not (isinstance(sources, dict) and isinstance(sources.get(name), dict) and rest):
            raise UsageError("OVERRIDE_VALUE.SOURCES", origin=origin)
        _replace(sources[name], rest, value)
    elif rest and head in ("source", "dedup", "transform", "audit", "notify", "spark"):
        inner = data.setdefault(head, {})
        if not isinstance(inner, dict):
            raise UsageError("OVERRIDE_VALUE.NO_MAPPING", origin=origin, head=head)
        _replace(inner, rest, value)
    else:
        data[dotted] = value


def _replace(options: dict[str, Any], key: str, value: Any) -> None:
    """Set an option, which the file may have in another case."""
    for other in [k for k in options if k.lower() == key.lower()]:
        del options[other]
    options[key] = value


_SEE_KEYS = "correct the value; `delivered init` writes an example"


def _validate(data: dict[str, Any], name: str, lines: Mapping[Path_, int], origins: Mapping[str, str]) -> PipelineFile:
    """Args: origins: of values that are not the file's."""
    try:
        return PipelineFile.model_validate(data)
    except pydantic.ValidationError as error:
        faults = list(_describe_faults(error, name, lines, origins))
    texts, steps = [t for t, _ in faults[:_ERRORS_SHOWN]], [s for _, s in faults if s]
    meant = {s[7:-1] for s in steps if s.startswith("write '")}  # what is missing is there, misspelt
    steps = [s for s in steps if not (s.startswith("add ") and re.split(r"[ :]", s)[1].split(".")[-1] in meant)]
    more = f" (and {len(faults) - _ERRORS_SHOWN} more)" if len(faults) > _ERRORS_SHOWN else ""
    raise UsageError(
        "FILE_INVALID.VALUES", problems="; ".join(texts) + more, action="; ".join(steps[:_ERRORS_SHOWN]) or _SEE_KEYS
    )


def _describe_faults(
    error: pydantic.ValidationError, name: str, lines: Mapping[Path_, int], origins: Mapping[str, str]
) -> Iterable[tuple[str, str | None]]:
    reported = set[Path_]()
    step: str | None
    for fault in error.errors(include_url=False):
        path = _known_part(fault["loc"], lines)
        where = origins.get(_dotted(path)) or f"{name}{_line(lines, path)}"
        key = _dotted(path) or "the pipeline"
        if path in reported:
            continue  # one line per key, not one per member of a union
        reported.add(path)
        match fault["type"]:
            case "extra_forbidden":
                yield _unknown(where, path)
            case "missing":
                missing = _dotted(fault["loc"])
                yield f"{where}: {missing!r} is missing", f"add {missing}{_suggest(fault['loc']) or ': ...'}"
            case "value_error":
                why, step = fault["ctx"]["error"].args
                yield f"{where}: {key}: {why}", step
            case _:
                given = shown(fault["input"], str(path[-1]) if path else "")
                allowed = re.findall(r"'([^']*)'", str(fault.get("ctx", {}).get("expected", "")))
                step = did_you_mean(str(fault["input"]), allowed).strip()
                if not step and (meant := f": {' or '.join(allowed)}" if allowed else _suggest(path, fault["input"])):
                    step = f"write {key}{meant}"
                if fault["type"] == "list_type":
                    one = f"[{given}]" if isinstance(fault["input"], str) else "[...]"
                    step = f"write a list: {key}: {one}, or a dash before each"
                if fault["type"] == "model_type" and path[:1] == ("sources",):
                    step = "write 'source'; or name each source: sources: {orders: {format: ...}}"
                if path == ("source",) and isinstance(fault["input"], list):
                    step = "write it without the dash; or name several: sources: {orders: {format: ...}}"
                must = _MUST.get(fault["type"], f"; {_lower(fault['msg'])}")
                yield f"{where}: {key} is {given}{must.format(**fault.get('ctx', {}))}", step


_MUST: Mapping[str, str] = {
    **dict.fromkeys(("bool_parsing", "bool_type"), "; it must be true or false"),
    **dict.fromkeys(("float_parsing", "float_type", "int_parsing", "int_type"), "; it must be a number"),
    **dict.fromkeys(("model_type", "dict_type", "model_attributes_type"), "; it must have keys of its own"),
    **dict.fromkeys(("too_short", "string_too_short"), "; it must not be empty"),
    "greater_than": "; it must be greater than {gt}",
    "list_type": "; it must be a list",
    "literal_error": "; it must be one of {expected}",
    "string_pattern_mismatch": "; it must be 1 to 64 letters, digits, '.', '_' or '-'",
    "string_type": "; it must be text",
}
"""By pydantic's types of errors: what a value must be."""


def _known_part(loc: tuple[int | str, ...], lines: Mapping[Path_, int]) -> Path_:
    """Pydantic adds the names of a union's members to a path: keep what is in the file, or its first part."""
    path: Path_ = ()
    for part in loc:
        if (*path, part) not in lines:
            return path or loc[:1]
        path = (*path, part)
    return path


def _unknown(where: str, path: Path_) -> tuple[str, str | None]:
    at = str(path[0]) if len(path) > 1 else ""
    of_a_sink = path[-2:-1] == ("audit",) and len(path) > 2
    model, key = AuditEntry if of_a_sink else _MODELS.get(at, PipelineFile), str(path[-1])
    near = difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.6)
    known = ", ".join(model.model_fields)
    step = f"write {near[0]!r}" if near else "write one of these keys, or remove it"
    if at and " " in key:
        step = "quote the value before it, which ends at the comma"
    if not near and (places := [name for name, m in _MODELS.items() if key in m.model_fields]):
        under = f"under {places[0]!r}: {places[0]}: {{{key}: ...}}" if places[0] else "at the top level"
        step = f"write it {under}"
    if not at and key == "name":
        step = "write 'pipeline'"
    return f"{where}: unknown key {_dotted(path)!r}; known: {known}", step


def _suggest(path: tuple[str | int, ...], given: object = None) -> str | None:
    """For a next step, what follows a key: the words or keys that it may have, an example, or its description.

    Args:
        given: in its place; a number is suggested as text.
    """
    model = _MODELS.get(str(path[0]) if len(path) > 1 else "", PipelineFile)
    name = str(path[-1]) if path else ""
    if len(path) == 1 and name in _MODELS:
        first = next(iter(_MODELS[name].model_fields))
        shape = {"sources": "{{NAME: {{{}: ...}}}}", "sinks": "[{{{}: ...}}]"}.get(name, "{{{}: ...}}")
        return f": {shape.format(first)}"
    if path[:1] == ("spark",):
        inner = next(iter(given), "") if isinstance(given, dict) else ""
        return f".{inner}: ..., each setting on a line" if inner else ": {KEY: VALUE}"
    field = model.model_fields.get(name)
    if field is None:
        return None
    words = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    if field.annotation is bool:
        words = ("true", "false")
    if words:
        return f": {' or '.join(words)}"
    if field.examples:
        return f": {json.dumps(field.examples[0])}"
    if field.annotation is str and isinstance(given, int | float) and name != "format":
        return f": {json.dumps(str(given).lower() if isinstance(given, bool) else str(given))}"
    return f" ({_lower(field.description.removesuffix('.'))})" if field.description else None


def _line(lines: Mapping[Path_, int], path: Path_) -> str:
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return f", line {lines[path[:end]]}"
    return ""


def _dotted(path: Iterable[str | int]) -> str:
    return ".".join(str(p) for p in path)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
