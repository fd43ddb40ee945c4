"""docs/python.md: the Python API, from its signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import delivered

_PAGE = """# Python reference

This page lists every public name of the package `delivered`, with its arguments and what it raises; look here when you
write Python. [Which API to use](apis.md) compares the APIs; [options](options.md) lists what sources and sinks take.
"""
_COLUMNS = 80
_AREAS = {
    "Pipelines and sessions": ("Pipeline", "session", "register", "write_batch", "receive", "audit_chain"),
    "Sources and sinks": (
        "endpoint", "kafka", "postgres", "mysql", "sqlite", "delta", "iceberg", "files", "log", "Endpoint",
    ),
    "Transforms": ("transform", "arrow", "dedup", "Transform", "Dedup"),
    "Answers": ("Guarantee", "Plan", "Refusal", "AuditReport", "ChainReport"),
}  # fmt: skip
_VALUES = {*_AREAS["Answers"], "Endpoint", "Transform", "Dedup"}
"""What users get and do not make: described without a signature."""
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)


def _docs(value: Any) -> list[str]:
    """A docstring as Markdown: its sections become lists, one entry for each name."""
    text = inspect.getdoc(value) or ""
    head, *sections = _SECTION.split(text)
    lines = [*_paragraphs(head)]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        entries = re.split(r"\n(?=    \S)", body.rstrip())
        lines += [f"*{title}*", "", *(_entry(e) for e in entries if e.strip()), ""]
    return lines


def _paragraphs(text: str) -> list[str]:
    lines: list[str] = []
    for paragraph in re.split(r"\n\n+", text.strip("\n")):
        indented = all(line.startswith("    ") for line in paragraph.splitlines())
        lines += ["```python", inspect.cleandoc(paragraph), "```", ""] if indented and paragraph else [paragraph, ""]
    return lines


def _entry(text: str) -> str:
    name, colon, meaning = " ".join(text.split()).partition(": ")
    return f"- `{name}`: {meaning}" if colon else f"- {name}"


def _signature(name: str, value: Any) -> list[str]:
    """Without annotations, one line for each argument if it is long."""
    signature = inspect.signature(value)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    shown = f"{name}{signature.replace(parameters=plain, return_annotation=signature.empty)}"
    if len(shown) > _COLUMNS:
        arguments = "".join(f"    {p},\n" for p in _marked(plain))
        shown = f"{name}(\n{arguments})"
    return ["```text", shown, "```", ""]


def _marked(parameters: Sequence[inspect.Parameter]) -> Iterator[str]:
    """With the star before the first one that is passed by name only."""
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    for p in parameters:
        if named and p is named[0]:
            yield "*"
        yield str(p)


def _call(name: str, value: Any) -> list[str]:
    lines = [f"### `{name}`", "", *_signature(f"delivered.{name}", value), *_docs(value)]
    if inspect.isclass(value):
        methods = [(n, getattr(value, n)) for n in dir(value) if not n.startswith("_")]
        for method, function in methods:
            if callable(function) and inspect.getdoc(function):
                lines += [f"#### `{name}.{method}`", "", *_signature(f"{name}.{method}", function), *_docs(function)]
    return lines


def page() -> str:
    """
    Raises:
        LookupError: a public name stands in no area.
    """
    errors = [n for n in delivered.__all__ if isinstance(v := getattr(delivered, n), type) and issubclass(v, Exception)]
    listed = {n for names in _AREAS.values() for n in names} | {*errors}
    if missing := {*delivered.__all__} ^ listed:
        raise LookupError(f"docs/python_reference.py and delivered.__all__ differ in {sorted(missing)}")
    lines = [_PAGE]
    for area, names in _AREAS.items():
        lines += [f"## {area}", ""]
        for name in names:
            value = getattr(delivered, name)
            lines += [f"### `{name}`", "", *_docs(value)] if name in _VALUES else _call(name, value)
    lines += ["## Errors", "", "| class | when |", "|---|---|"]
    for name in errors:
        first, _, _ = (inspect.getdoc(getattr(delivered, name)) or "").partition("\n\n")
        lines.append(f"| `{name}` | {' '.join(first.split())} |")
    lines += ["", "Each has `code`, `condition`, `message` and `next_step`; [error codes](errors.md) lists them.", ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
