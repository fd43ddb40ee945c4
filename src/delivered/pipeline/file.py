"""A pipeline file, read: call > command line > environment > file > default."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pydantic
import yaml
from pydantic import BaseModel

from delivered.model.errors import UsageError
from delivered.model.secrets import shown
from delivered.pipeline.entries import AuditEntry, DedupEntry, PipelineFile, SinkEntry, SourceEntry, TransformEntry
from delivered.pipeline.yaml_text import compose_yaml, load_yaml

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
        "new_target",
        "lost_records",
        "lineage",
    )
}
"""Environment variables that override the file."""

_REFERENCE = re.compile(r"\$\{(env:[A-Za-z_][A-Za-z0-9_]*|file:[^}]+)\}")
_MODELS: dict[str, type[BaseModel]] = {
    "": PipelineFile,
    "source": SourceEntry,
    "sources": SourceEntry,
    "sinks": SinkEntry,
    "dedup": DedupEntry,
    "transform": TransformEntry,
    "audit": AuditEntry,
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
        raise UsageError(
            "FILE_UNREADABLE",
            f"The pipeline file {str(path)!r} cannot be read: {reason}.",
            next_step="`delivered init` writes an example to start from",
        ) from None
    return load_text(text, str(path), overrides)


def load_text(text: str, name: str = "pipeline", overrides: Mapping[str, Any] | None = None) -> PipelineFile:
    """As `load_file`, from text; errors show `name`."""
    data, lines = _parse(text, name)
    data = _references(data, name, lines, ())
    for variable, key in ENVIRONMENT.items():
        if variable in os.environ:
            _put(data, key, _typed(os.environ[variable]), variable)
    for dotted, value in (overrides or {}).items():
        _put(data, dotted, value, f"--set {dotted}")
    return _validated(data, name, lines)


def parse_override(text: str) -> tuple[str, Any]:
    """Read "source.maxOffsetsPerTrigger=1000".

    Raises:
        UsageError: there is no "=".
    """
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UsageError(
            "OVERRIDE_VALUE",
            f"--set is {text!r}; it must be key=value, as in --set trigger=available_now.",
            next_step="delivered plan FILE --set trigger=available_now",
        )
    return key, _typed(value)


def _typed(text: str) -> Any:
    """Shell text, read as YAML: 1 is a number, true is true."""
    try:
        value = load_yaml(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | int | float | dict | list) else text


def _parse(text: str, name: str) -> tuple[dict[str, Any], dict[Path_, int]]:
    try:
        data = load_yaml(text)
        node = compose_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UsageError(
            "FILE_NOT_YAML",
            f"{name}{where}: this is not YAML: {problem}.",
            next_step="correct the file; `delivered init` writes an example",
        ) from None
    if not isinstance(data, dict):
        raise UsageError(
            "FILE_INVALID",
            f"{name}: a pipeline is a mapping with the keys {', '.join(PipelineFile.model_fields)}; this is "
            f"{'empty' if data is None else type(data).__name__}.",
            next_step="`delivered init` writes an example to start from",
        )
    lines: dict[Path_, int] = {}
    _lines(node, (), lines, name)
    return data, lines


def _lines(node: Any, path: Path_, lines: dict[Path_, int], name: str) -> None:
    """The line of each key; refuses duplicate keys, of which YAML would silently use the last."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            at = (*path, key.value)
            if at in lines:
                raise UsageError(
                    "FILE_INVALID",
                    f"{name}, line {key.start_mark.line + 1}: the key {_dotted(at)!r} is here and in line {lines[at]}.",
                    next_step="remove one of the two",
                )
            lines[at] = key.start_mark.line + 1
            _lines(value, at, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            lines[(*path, i)] = value.start_mark.line + 1
            _lines(value, (*path, i), lines, name)


def _references(value: Any, name: str, lines: Mapping[Path_, int], path: Path_) -> Any:
    """`${env:NAME}` becomes the reference `env:NAME`: the secret itself is read where it is used, never here."""
    match value:
        case dict():
            return {k: _references(v, name, lines, (*path, k)) for k, v in value.items()}
        case list():
            return [_references(v, name, lines, (*path, i)) for i, v in enumerate(value)]
        case str() if "${" in value:
            reference = _REFERENCE.fullmatch(value.strip())
            if reference is None:
                raise UsageError(
                    "REFERENCE_INVALID",
                    f"{name}{_line(lines, path)}: {_dotted(path)} contains '${{' but is not a reference as a whole.",
                    next_step="write ${env:NAME} or ${file:/path}, with nothing around it",
                )
            return reference.group(1)
    return value


def _put(data: dict[str, Any], dotted: str, value: Any, origin: str) -> None:
    head, _, rest = dotted.partition(".")
    if head == "sinks" and rest:
        number, _, rest = rest.partition(".")
        sinks = data.get("sinks")
        if not (number.isdigit() and isinstance(sinks, list) and int(number) < len(sinks) and rest):
            raise UsageError(
                "OVERRIDE_VALUE",
                f"{origin}: sinks are numbered from 0, as in sinks.0.topic.",
                next_step="--set sinks.0.topic=NAME",
            )
        sinks[int(number)][rest] = value
    elif rest and head == "sources":
        name, _, rest = rest.partition(".")
        sources = data.get("sources")
        if not (isinstance(sources, dict) and isinstance(sources.get(name), dict) and rest):
            raise UsageError(
                "OVERRIDE_VALUE",
                f"{origin}: sources have names, as in sources.orders.subscribe.",
                next_step="--set sources.NAME.subscribe=TOPIC",
            )
        sources[name][rest] = value
    elif rest and head in ("source", "dedup", "transform", "audit", "spark"):
        inner = data.setdefault(head, {})
        if not isinstance(inner, dict):
            raise UsageError(
                "OVERRIDE_VALUE", f"{origin}: {head} is not a mapping in the file.", next_step="name a key of the file"
            )
        inner[rest] = value
    else:
        data[dotted] = value


def _validated(data: dict[str, Any], name: str, lines: Mapping[Path_, int]) -> PipelineFile:
    try:
        return PipelineFile.model_validate(data)
    except pydantic.ValidationError as error:
        faults = list(_faults(error, name, lines))
    texts, steps = [t for t, _ in faults[:_ERRORS_SHOWN]], [s for _, s in faults if s]
    more = f" (and {len(faults) - _ERRORS_SHOWN} more)" if len(faults) > _ERRORS_SHOWN else ""
    raise UsageError("FILE_INVALID", "; ".join(texts) + more + ".", next_step="; ".join(steps[:_ERRORS_SHOWN]) or None)


def _faults(error: pydantic.ValidationError, name: str, lines: Mapping[Path_, int]) -> Iterable[tuple[str, str | None]]:
    reported = set[Path_]()
    for fault in error.errors(include_url=False):
        path = _known_part(fault["loc"], lines)
        where = f"{name}{_line(lines, path)}"
        key = _dotted(path) or "the pipeline"
        if path in reported:
            continue  # one line per key, not one per member of a union
        reported.add(path)
        match fault["type"]:
            case "extra_forbidden":
                yield _unknown(where, path)
            case "missing":
                missing = _dotted(fault["loc"])
                yield f"{where}: {missing!r} is missing", f"add {missing}: ..."
            case "value_error":
                yield f"{where}: {key}: {fault['ctx']['error']}", None
            case _:
                given = shown(fault["input"], str(path[-1]) if path else "")
                yield f"{where}: {key} is {given}; {_lower(fault['msg'])}", None


def _known_part(loc: tuple[int | str, ...], lines: Mapping[Path_, int]) -> Path_:
    """Pydantic adds the names of a union's members to a path: keep what is in the file, or its first part."""
    path: Path_ = ()
    for part in loc:
        if (*path, part) not in lines:
            return path or loc[:1]
        path = (*path, part)
    return path


def _unknown(where: str, path: Path_) -> tuple[str, str | None]:
    model = _MODELS.get(str(path[0]) if len(path) > 1 else "", PipelineFile)
    key = str(path[-1])
    near = difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.6)
    known = ", ".join(model.model_fields)
    return f"{where}: unknown key {_dotted(path)!r}; known: {known}", f"write {near[0]!r}" if near else "remove it"


def _line(lines: Mapping[Path_, int], path: Path_) -> str:
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return f", line {lines[path[:end]]}"
    return ""


def _dotted(path: Iterable[str | int]) -> str:
    return ".".join(str(p) for p in path)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
