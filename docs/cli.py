"""docs/cli.md: every command, argument and option, from the command line itself."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import typer

from delivered.cli.main import app

_HEAD = """# Command line

This page lists every command of `delivered`, with its arguments and options; look here for a flag or an exit code.
`delivered COMMAND --help` shows the same.

| exit code | meaning |
|---|---|
| 0 | done; the guarantee held; nothing needs attention |
| 1 | failed; the guarantee is broken; a pipeline needs attention |
| 2 | the request is wrong: an option, a file, a refused pipeline |
| 3 | unknown: a server did not answer, or not everything could be judged |
"""


def _commands(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    for name, found in sorted(getattr(command, "commands", {}).items()):
        if found.hidden:
            continue
        if getattr(found, "commands", None):
            yield from _commands(found, f"{words} {name}")
        else:
            yield words if name == getattr(command, "unnamed", None) else f"{words} {name}", found


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    shown = None if callable(value) or "Sentinel" in type(value).__name__ else value
    return "" if shown in (None, False, "", (), []) else f"`{shown}`"


def _row(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    is_argument = parameter.param_type_name == "argument"
    shown = parameter.name.upper() if is_argument else ", ".join(f"`{n}`" for n in names)
    repeated = " Repeatable." if parameter.multiple or parameter.nargs == -1 else ""
    text = " ".join((getattr(parameter, "help", None) or "").split())
    repeated = "" if "epeatable" in text else repeated
    return f"| {shown} | {_default(parameter)} | {text}{repeated} |".replace("\\|", "|").replace("  ", " ")


def page() -> str:
    lines = [_HEAD]
    for words, command in _commands(typer.main.get_command(app), "delivered"):
        lines += [f"## {words}", "", " ".join((command.help or "").split()), ""]
        shown = [p for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
        if shown:
            lines += ["| argument or option | default | meaning |", "|---|---|---|", *map(_row, shown), ""]
    return "\n".join(lines)
