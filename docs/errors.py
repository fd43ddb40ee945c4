"""Every error code with its causes and next steps, from the catalogue: the list that the site adds to errors.md."""

from __future__ import annotations

import re

from delivered.cli.explain import to_json
from delivered.model.catalogue import entries

_SPECIAL = {"<": "&lt;", ">": "&gt;"}


def _escaped(text: str) -> str:
    """Text for Markdown; what is in backticks stays."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(p if p.startswith("`") else re.sub(r"[\\*\[\]<>#]", _mark, p) for p in parts)


def _mark(found: re.Match[str]) -> str:
    return _SPECIAL.get(found[0], "\\" + found[0])


def listing() -> str:
    lines = []
    for code, entry in entries().items():
        shown = to_json(code, entry)
        lines += [f"## `{shown['code']}`", ""]
        lines += [_escaped(shown["meaning"]), ""] if shown["meaning"] else []
        for cause in shown["causes"]:
            name = f"`{cause['condition']}`: " if cause["condition"] else ""
            lines.append(f"- {name}{_escaped(cause['cause'])} **Next:** {_escaped(cause['next'])}")
        lines += ["", f"More: [{shown['docs'].partition('#')[0]}]({shown['docs']})"] if "docs" in shown else []
        lines.append("")
    return "\n".join(lines)
