"""What becomes of each type and value in each system: measured by tests/conformance/test_catalogue.py, kept as data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from delivered.connectors.delta.target import TYPES as DELTA
from delivered.connectors.iceberg.target import TYPES as ICEBERG
from delivered.connectors.iceberg.target import to_iceberg
from delivered.connectors.mysql import TYPES as MYSQL
from delivered.connectors.postgres import TYPES as POSTGRES
from delivered.connectors.sqlite import TYPES as SQLITE
from delivered.kits.sql.table import Types
from delivered.model.errors import UsageError

FILE = Path(__file__).parent / "types.json"
EXACT, BAD_ROW, AT_START = "exact", "refused as bad row", "refused at start"
NO_VALUE = "no such value"
_SHOWN = {EXACT: "exact", BAD_ROW: "bad row", AT_START: "no", NO_VALUE: "not in the system"}

Cells = Mapping[str, Mapping[str, str]]
"""Type or name -> label of a value -> its outcome."""


def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def packed(cells: Cells) -> dict[str, Any]:
    """Cells as they are stored: the outcome, if all values of a type have it, else the labels of each."""
    made: dict[str, Any] = {}
    for kind, outcomes in cells.items():
        by = {o: [label for label, found in outcomes.items() if found == o] for o in outcomes.values()}
        made[kind] = next(iter(by)) if len(by) == 1 else by
    return made


def page() -> str:
    data = stored()
    lines = ["# What each type and value becomes", "", *_INTRODUCTION, ""]
    lines += ["## Types", "", *_declared(data["types"]), ""]
    lines += ["## Values", "", *_counts(data["values"]), ""]
    for kind, spark in data["types"].items():
        lines += _kind(kind, spark["spark"], data["values"])
    lines += ["## Sources", "", *_SOURCES, "", *_source_counts(data), ""]
    for path, kinds in data["sources"].items():
        lines += _source(path, kinds)
    lines += ["## Names", "", *_names(data["names"], data["spelled"]), ""]
    return "\n".join(lines)


_INTRODUCTION = [
    "This page shows how each sink stores each of Spark's types, and which values it cannot hold; look here if a row",
    "or column is refused. Each value was written by the real sink to the real system, read back by that system's own",
    "client, compared with what was sent, and audited (`tests/conformance/test_catalogue.py`). `make test` compares",
    "this page with what one path to each encoder does now, `make verify` with all of them. The outcomes are:",
    "",
    "- **exact**: the value arrived as it was sent, and the audit's verdict is `held`;",
    "- **bad row**: the row is refused with the column's name, and goes where `on_bad_row` says;",
    "- **no**: the query does not start; cast the column.",
    "",
    "`upsert key`: the value is the key, and a second batch with the same rows changes nothing; `partition`: it says",
    "where the row is stored. The other paths write it into a column, or a part of a message.",
    "",
    "Zero has no sign here: -0.0 equals 0.0 to Spark and to SQL, and MySQL and SQLite store 0.0. SQLite stores NaN as",
    "the text `NaN`; decimals, dates and timestamps as text; times and intervals as numbers of microseconds. A queue's",
    "message has no null: its body is then empty, as is RabbitMQ's routing key; without a message id it gets one.",
]

_SOURCES = [
    "Each value is written by the system's own client, read by the source, and compared with what that client reads",
    "(`tests/conformance/test_catalogue_sources.py`): *exact*; *bad row*: the record is refused by name, and a",
    "receiver with `badMessages: quarantine` keeps its bytes; *not in the system*: its own client cannot write the",
    "value, or reads another one.",
]


def _source_counts(data: Mapping[str, Any]) -> list[str]:
    lines = ["| path | exact | bad row | no | not in the system |", "|---|---:|---:|---:|---:|"]
    for path, kinds in data["sources"].items():
        count: Counter[str] = Counter()
        for kind, found in kinds.items():
            if isinstance(found, str):
                count[found] += data["source labels"][path][kind]
            else:
                count.update({o: len(labels) for o, labels in found.items()})
        lines.append(f"| {path} | " + " | ".join(str(count[o]) for o in _SHOWN) + " |")
    return lines


def _source(path: str, kinds: Mapping[str, Any]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for kind, found in kinds.items():
        groups.setdefault(_outcome(found), []).append(kind)
    return [f"### {path}", "", *(f"- {text}: {', '.join(of)}" for text, of in groups.items()), ""]


def _declared(types: Mapping[str, Any]) -> list[str]:
    lines = ["| Spark | PostgreSQL | MySQL, MariaDB | SQLite | Delta, Parquet | Iceberg |", "|---|---|---|---|---|---|"]
    for each in types.values():
        kind = _arrow(each["arrow"])
        cells = [_shortened(_declared_by(system, kind)) for system in (POSTGRES, MYSQL, SQLITE, DELTA, ICEBERG)]
        lines.append(f"| `` {each['spark']} `` | " + " | ".join(f"`{c}`" if c else "-" for c in cells) + " |")
    return [*lines, "", "`-`: refused at the start."]


def _declared_by(system: Types, kind: pa.DataType) -> str | None:
    schema = pa.schema([("v", kind)])
    try:
        system.check(schema)
    except UsageError:
        return None
    if system is ICEBERG:
        return str(to_iceberg(system.canonical_schema(schema)).fields[0].field_type)
    return system.declared(system.plain(kind))


def _shortened(text: str | None) -> str | None:
    return text if text is None or len(text) < 46 else f"{text[:40]}..."


def _arrow(text: str) -> pa.DataType:
    kind: pa.DataType = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(text))).field(0).type
    return kind


def _counts(values: Mapping[str, Any]) -> list[str]:
    lines = ["| path | exact | bad row | no |", "|---|---:|---:|---:|"]
    total: Counter[str] = Counter()
    sizes = _sizes(values)
    for path, kinds in values.items():
        count: Counter[str] = Counter()
        for kind, found in kinds.items():
            if isinstance(found, str):
                count[found] += sizes[kind]
            else:
                count.update({o: len(labels) for o, labels in found.items()})
        total += count
        lines.append(f"| {path} | {count[EXACT]} | {count[BAD_ROW]} | {count[AT_START]} |")
    return [*lines, f"| **all** | {total[EXACT]} | {total[BAD_ROW]} | {total[AT_START]} |"]


def _sizes(values: Mapping[str, Any]) -> dict[str, int]:
    """Type -> number of its values."""
    return {kind: len(labels) for kind, labels in stored()["labels"].items() if values}


def _kind(kind: str, spark: str, values: Mapping[str, Any]) -> list[str]:
    found = {path: kinds[kind] for path, kinds in values.items() if kind in kinds}
    lines = [f"### {kind}", "", f"`` {spark} ``", ""]
    groups: dict[str, list[str]] = {}
    for path, outcome in found.items():
        groups.setdefault(_outcome(outcome), []).append(path)
    for text, paths in groups.items():
        lines.append(f"- {text}: {', '.join(_systems(paths, list(found)))}")
    return [*lines, ""]


def _systems(paths: list[str], every: list[str]) -> list[str]:
    """A system's name stands for all of its paths."""
    made = []
    for system in dict.fromkeys(p.split()[0] for p in paths):
        its = [p for p in every if p.split()[0] == system]
        made += [system] if all(p in paths for p in its) else [p for p in its if p in paths]
    return made


def _outcome(found: str | Mapping[str, list[str]]) -> str:
    if isinstance(found, str):
        return _SHOWN[found]
    parts = [f"{_SHOWN[o]}: {', '.join(f'`{n}`' for n in labels)}" for o, labels in found.items() if o != EXACT]
    return f"exact but for {'; '.join(parts)}" if EXACT in found else "; ".join(parts)


def _names(names: Mapping[str, Any], spelled: Mapping[str, str]) -> list[str]:
    lines = ["Of columns, and of tables or folders.", "", "| path | refused at the start |", "|---|---|"]
    for path, found in names.items():
        bad = []
        for label, outcome in found.items():
            each = outcome if isinstance(outcome, str) else {o: n for o, n in outcome.items() if o != EXACT}
            if each == EXACT:
                continue
            bad.append(
                label if isinstance(each, str) else f"{label} ({', '.join(n for w in each.values() for n in w)})"
            )
        lines.append(f"| {path} | {', '.join(bad) or '-'} |")
    shown = ", ".join(f"{label}: `{json.dumps(name)}`" for label, name in spelled.items() if "`" not in name)
    return [*lines, "", f"The names: {shown}."]
