"""Every error code with its causes and next steps, from the code: the list that the site adds to docs/errors.md."""

from __future__ import annotations

import re

from delivered.cli.error_index import read_index
from delivered.cli.explain import to_json

_SPECIAL = {"<": "&lt;", ">": "&gt;"}


def _escaped(text: str) -> str:
    """Text for Markdown; what is in backticks stays."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(p if p.startswith("`") else re.sub(r"[\\*\[\]<>#]", _mark, p) for p in parts)


def _mark(found: re.Match[str]) -> str:
    return _SPECIAL.get(found[0], "\\" + found[0])


def listing() -> str:
    index = read_index()
    lines = []
    for code, causes in index.causes.items():
        entry = to_json(code, causes, index)
        lines += [f"## `{code}`", ""]
        lines += [_escaped(entry["meaning"]), ""] if entry["meaning"] else []
        lines += [f"- {_escaped(c['cause'])} **Next:** {_escaped(c['next'])}" for c in entry["causes"]]
        lines.append("")
    return "\n".join(lines)
