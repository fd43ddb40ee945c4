"""A contract of import-linter: each room imports what its row in ARCHITECTURE.md says, and every module has a row.

The table under "## Rooms" has three columns: rooms, each in backticks (`model/`, `kits/sql/`, `contract_*.py`); what
they are for; what of ours they may import: rooms with commas (`kits` is every room below it), `none`, or `all above`.
Of two rows that fit a module the longer one counts. The package's own `__init__.py` is in no room: it names what the
others offer, and loads it when it is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

_ROW = re.compile(r"^\|(?P<rooms>.*?`.*?)\|(?P<role>.*)\|(?P<imports>[^|]*)\|$", re.MULTILINE)
_NAME = re.compile(r"`([^`<.]+?)(?:/|\.py)?(?:<[^`]*)?`")


class BadTable(ValueError):
    """The table is not that of the tree."""


@dataclass(frozen=True)
class Table:
    """
    Attributes:
        rows: pattern of a path below the package -> the first pattern of its row, which names the row.
        imports: row -> rows that it may import, itself among them.
    """

    rows: dict[str, str]
    imports: dict[str, set[str]]

    def room(self, module: str) -> str | None:
        """The row of "package.room.module"; None: it has none."""
        path = _path(module)
        fitting = [p for p in self.rows if fnmatchcase(path, p) or fnmatchcase(path, f"{p}/*")]
        return self.rows[max(fitting, key=len)] if fitting else None

    def problems(self, modules: Iterable[str]) -> Iterator[str]:
        """Modules without a row, and rows without a module."""
        paths = [_path(module) for module in sorted(modules)]
        for path in paths:
            parent = any(pattern.startswith(f"{path}/") for pattern in self.rows)
            if path and not parent and self.room(f"x/{path}".replace("/", ".")) is None:
                yield f"{path}: no row names it"
        for pattern in self.rows:
            if not any(fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}/*") for path in paths):
                yield f"{pattern}: there is no such room"


def _path(module: str) -> str:
    """The part after the package; a second package, "delivered_lab", is the room "lab"."""
    package, *rest = module.split(".")
    return "/".join([*package.split("_")[1:], *rest])


def read_table(text: str) -> Table:
    """The table of a page.

    Raises:
        BadTable: a row imports what no row is called.
    """
    section = text.partition("\n## Rooms\n")[2].partition("\n## ")[0]
    rows: dict[str, str] = {}
    words: dict[str, set[str]] = {}
    for row in _ROW.finditer(section):
        names = [name.rstrip("/") for name in _NAME.findall(row["rooms"])]
        given = {word.strip() for word in row["imports"].split(",")} - {"none"}
        words[names[0]] = given - {"all above"} | (set(words) if "all above" in given else set())
        rows |= dict.fromkeys(names, names[0])
    imports = {}
    for name, given in words.items():
        meant = {word: {row for row in words if row == word or row.startswith(f"{word}/")} for word in given}
        if unknown := sorted(word for word, found in meant.items() if not found):
            raise BadTable(f"{name} may import {', '.join(unknown)}: no row is called so; rows: {', '.join(words)}")
        imports[name] = {name}.union(*meant.values())
    return Table(rows, imports)


def strays(graph: ImportGraph, packages: Iterable[str], table: Table) -> Iterator[tuple[str, str]]:
    """Imports that the table does not allow: (importer, imported)."""
    inside = tuple(f"{package}." for package in packages)
    for importer in sorted(graph.modules):
        here = table.room(importer) if importer.startswith(inside) else None
        for imported in sorted(graph.find_modules_directly_imported_by(importer)) if here is not None else ():
            there = table.room(imported) if imported.startswith(inside) else None
            if there is not None and there not in table.imports[here]:
                yield importer, imported


class RoomsContract(Contract):
    """
    Configuration options:

        - table: the page that holds the table of rooms, from where lint-imports is run.
    """

    type_name = "rooms"

    table = fields.StringField()

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002
        packages = self.session_options["root_packages"]
        try:
            table = read_table(Path(str(self.table)).read_text(encoding="utf-8"))
        except BadTable as error:
            return ContractCheck(kept=False, metadata={"wrong": [str(error)]})
        modules = {m for m in graph.modules if m.startswith(tuple(f"{package}." for package in packages))}
        wrong = list(table.problems(modules))
        for importer, imported in strays(graph, packages, table):
            lines = ", ".join(
                str(detail["line_number"]) for detail in graph.get_import_details(importer=importer, imported=imported)
            )
            wrong.append(
                f"{importer}, line {lines}, imports {imported}: "
                f"the row of {table.room(importer)} does not name {table.room(imported)}"
            )
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["wrong"]:
            output.print_error(f"- {self.table}: {line}", bold=False)
