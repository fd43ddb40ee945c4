"""The code on docs/new-connector.md: definitions of examples/toy_sink.py, quoted where the page names them."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

CODE = Path(__file__).parent.parent / "examples" / "toy_sink.py"
_QUOTE = re.compile(r"<!-- toy_sink: ([\w ]+) -->\n.*?<!-- /toy_sink -->", re.DOTALL)


def definitions() -> dict[str, str]:
    """Name -> source of every class, function and constant at the top of the file, in its order."""
    text = CODE.read_text(encoding="utf-8")
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        first = node.lineno
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            name, first = node.name, min([first, *(d.lineno for d in node.decorator_list)])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        else:
            continue
        found[name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def quoted(text: str) -> list[str]:
    """The names that the page quotes, in its order."""
    return [name for names in _QUOTE.findall(text) for name in names.split()]


def into(text: str) -> str:
    """`text` with the code below each of its marks regenerated. Raises KeyError for a name that is gone."""
    known = definitions()

    def quote(found: re.Match[str]) -> str:
        parts = [known[name] for name in found[1].split()]
        sources = parts[0]
        for before, part in itertools.pairwise(parts):
            sources += ("\n\n\n" if "\n" in before or "\n" in part else "\n") + part
        return f"<!-- toy_sink: {found[1]} -->\n```python\n{sources}\n```\n<!-- /toy_sink -->"

    return _QUOTE.sub(quote, text)
