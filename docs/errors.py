"""Every error code with its causes and next steps, from the catalogue: pages by area, which the site adds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from delivered.cli.doctor import to_json
from delivered.model.errors import entries

DOCS = Path(__file__).parent
_SRC = DOCS.parent / "src"
_SPECIAL = {"<": "&lt;", ">": "&gt;"}
_QUOTED = re.compile(r"""["']([A-Z][A-Z0-9_]+)(?:\.[A-Z0-9_.]+)?["']""")


class Area(NamedTuple):
    """
    Attributes:
        folders: below src/; an error of these folders alone belongs here.
    """

    name: str
    title: str
    folders: Set[str]


def _below(folder: str, names: str) -> frozenset[str]:
    return frozenset(f"{folder}/{name}" for name in names.split())


_BASE = _below("delivered", "cli model contract") | {"delivered_lab"}
"""Folders that name errors of others: they count for a code that nothing else names."""
AREAS = (
    Area("kafka", "Kafka", _below("delivered/connectors", "kafka") | {"delivered/clients/kafka"}),
    Area(
        "databases",
        "PostgreSQL, MySQL and SQLite",
        _below("delivered/connectors", "postgres mysql sqlite") | _below("delivered/kits", "sql mysql"),
    ),
    Area(
        "tables",
        "Delta Lake, Iceberg and files",
        _below("delivered/connectors", "delta iceberg files") | {"delivered/kits/table"},
    ),
    Area(
        "queues",
        "Pulsar, queues and receivers",
        _below("delivered/connectors", "pulsar rabbitmq activemq rocketmq log")
        | _below("delivered", "clients kits/queue.py receiver"),
    ),
    Area(
        "applications",
        "Outbox, inbox, sagas and events",
        _below("delivered", "patterns connectors/outbox connectors/saga"),
    ),
    Area("schemas", "Schemas and options of several systems", _below("delivered", "kits connectors")),
    Area("pipelines", "Pipelines and plans", _below("delivered", "pipeline planner entry.py")),
    Area(
        "batches",
        "Batches, checkpoints and ledgers",
        _below("delivered", "engine ledger.py checkpoint spark planner pipeline"),
    ),
    Area("audit", "Audits and evidence", _below("delivered", "audit")),
    Area("operating", "Operating", _below("delivered", "operate cli audit")),
    Area("lab", "Verifier and development servers", _below("delivered", "testing.py crash.py") | {"delivered_lab"}),
    Area("general", "In several places", frozenset()),
)


def escaped(text: str) -> str:
    """Text for Markdown; what is in backticks stays."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(p if p.startswith("`") else re.sub(r"[\\*\[\]<>#]", _mark, p) for p in parts)


def _mark(found: re.Match[str]) -> str:
    return _SPECIAL.get(found[0], "\\" + found[0])


def _sites() -> dict[str, set[str]]:
    """Code -> files below src/ that name it."""
    found = defaultdict(set)
    for path in _SRC.rglob("*.py"):
        for code in _QUOTED.findall(path.read_text(encoding="utf-8")):
            found[code.removeprefix("DELIVERED_")].add(str(path.relative_to(_SRC)))
    return found


def _lies_in(file: str, folders: Set[str]) -> bool:
    return any(file == folder or file.startswith(f"{folder}/") for folder in folders)


def area_of(files: set[str]) -> Area:
    own = {f for f in files if not _lies_in(f, _BASE)} or files
    return next((a for a in AREAS if own and all(_lies_in(f, a.folders) for f in own)), AREAS[-1])


def by_area() -> dict[Area, dict[str, Any]]:
    """Area -> code -> entry of the catalogue, in the order of `AREAS`."""
    sites, found = _sites(), {area: dict[str, Any]() for area in AREAS}
    for code, entry in entries().items():
        found[area_of(sites[code])][code] = entry
    return found


@cache
def _title(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def _described(code: str, entry: dict[str, Any]) -> Iterator[str]:
    shown = to_json(code, entry)
    yield from (f"## `{shown['code']}`", "")
    if shown["meaning"]:
        yield from (escaped(shown["meaning"]), "")
    for cause in shown["causes"]:
        name = f"`{cause['condition']}`: " if cause["condition"] else ""
        yield f"- {name}{escaped(cause['cause'])} **Next:** {escaped(cause['next'])}"
    yield ""
    if "docs" in shown:
        yield from (f"More: [{_title(shown['docs'].partition('#')[0])}](../{shown['docs']})", "")


def pages() -> Iterator[tuple[str, str]]:
    """(path in the site, text) of each area's page."""
    for area, found in by_area().items():
        lines = [
            f"# Errors: {area.title}",
            "",
            "This page explains each of these error codes: what it means, what causes it, and what to do next.",
            "",
        ]
        lines += [line for code, entry in found.items() for line in _described(code, entry)]
        yield f"errors/{area.name}.md", "\n".join(lines)


def index() -> str:
    """The table of areas at the end of errors.md."""
    lines = ["", "## Codes by area", "", "| area | codes |", "|---|---:|"]
    lines += [f"| [{area.title}](errors/{area.name}.md) | {len(found)} |" for area, found in by_area().items()]
    return "\n".join(lines) + "\n"
