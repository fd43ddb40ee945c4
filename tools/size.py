"""How large the house is: lines and files per room, methods of a sink, import cycles, into build/size.json.

    python -m tools.size [--port SYSTEM] [--tighten]

Reads nothing but this tree, and git for `--port`. Lines are of `.py` files, as they stand. The table under "## Size"
in ARCHITECTURE.md bounds what should only shrink: a test fails above a bound, and `--tighten` lowers each bound to what
is there.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import subprocess
import sys
import typing
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "delivered"
LAB = ROOT / "src" / "delivered_lab"
OUT = ROOT / "build" / "size.json"
PAGE = ROOT / "ARCHITECTURE.md"
_BOUND = re.compile(r"^\| (?P<measure>[^|]+?) \| (?P<bound>[\d,]+) \| (?P<goal>[\d,]+) \|$", re.MULTILINE)
_PRIVATE = re.compile(
    r"(?i:(?<![a-z])(?:begun|whole|gone|told|taken|noted|left_?out)(?![a-z]))"
    r"|(?:Desk|Stretch|Doubt|Unlike|Made|Shown|Way)(?![a-z])"
)
"""Words that a reader of the field would not search for."""
_KEPT_KEYS = (
    "begun",  # model/work.py: a table of SQL ledgers, a folder of those on files, a part of the keys of those in Kafka
    "begun_at",  # kits/sql/database.py: a column of two SQL ledgers
    "noted",  # kits/sql/database.py: a table of a dedup's keys
    "left_out",  # kits/sql/database.py: a table of SQL ledgers; a key of a run's summary and of a retry's
    "gone",  # a folder of the files sink's ledger; a state of receivers, in metrics and the status
)
"""Literals that stand in durable records, and in what users read by program: they do not change."""
CONDITIONS = SOURCE / "model" / "error-conditions.json"
_PROTOCOL = re.compile(r"^class \w+\((?:.*\W)?(?:Protocol|ABC)\b.*\):$", re.MULTILINE)
"""What connectors implement: a class to derive from, or to look like."""
CONTRACT = "delivered.contract.sink"
HAPPY_PATH = ("files of the happy path", "modules loaded by driver and task")
"""Measured by `tools.happy_path`, which needs servers."""
PORT = "activemq"
NAMING = (".", *(f":!{path}" for path in (
    "CHANGELOG.md", "docs/decisions", "docs/options.md", "docs/pipeline.schema.json", "docs/support.md",
    "docs/verified.json", "docs/verified.md", "requirements.lock", "tools",
)))  # fmt: skip
"""Where a port writes: not in what is generated, nor in what tells of the past."""


def sizes(folder: Path, by: int) -> dict[str, dict[str, int]]:
    """Lines and files by the first `by` names of a path below the folder; a module counts without its suffix."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        name = "/".join(path.relative_to(folder).with_suffix("").parts[:by])
        lines[name] += len(path.read_text(encoding="utf-8").splitlines())
        files[name] += 1
    return {name: {"lines": count, "files": files[name]} for name, count in lines.most_common()}


def sink_methods() -> dict[str, list[str]]:
    """Base class -> methods that a sink must have, for `Sink` and each base that one of them returns, and so on."""
    found: dict[str, list[str]] = {}
    open_ = [importlib.import_module(CONTRACT).Sink]
    while open_:
        base = open_.pop(0)
        if base.__name__ not in found:
            found[base.__name__] = sorted(base.__abstractmethods__)
            open_ += [b for name in found[base.__name__] for b in _returned(base, name)]
    return found


def _returned(base: type, name: str) -> list[type]:
    """Base classes of ours in what a method returns, at any depth of the annotation."""
    member = inspect.getattr_static(base, name, None)
    function = member.fget if isinstance(member, property) else member
    open_: list[Any] = [typing.get_type_hints(function).get("return")] if function is not None else []
    found = []
    while open_:
        kind = open_.pop()
        open_ += typing.get_args(kind)
        if inspect.isabstract(kind) and kind.__module__.startswith("delivered."):
            found.append(kind)
    return found


def import_cycles() -> list[list[str]]:
    """Modules that import each other, directly or by way of others; imports in functions and for types count, too."""
    graph = grimp.build_graph("delivered", "delivered_lab", cache_dir=None)  # a cache goes by times of files
    cycles, seen = [], set[str]()
    for module in sorted(graph.modules):
        if module in seen:
            continue
        circle = graph.find_upstream_modules(module) & graph.find_downstream_modules(module)
        if circle - {module}:
            cycles.append(sorted(circle | {module}))
            seen |= circle
    return cycles


def port_of(system: str) -> dict[str, list[str]]:
    """Files that name a system: its own, and all others."""
    command = ["git", "grep", "--untracked", "-il", system, "--", *NAMING]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    own = [path for path in found if system in path]
    return {"own": own, "others": [path for path in found if path not in own]}


def measures() -> dict[str, int]:
    """What the table of sizes bounds, by its words."""
    texts = {p.relative_to(ROOT / "src"): p.read_text(encoding="utf-8") for p in (ROOT / "src").rglob("*.py")}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    contract = "".join(text for path, text in texts.items() if path.parts[1] == "contract")

    def count(pattern: re.Pattern[str]) -> int:
        return sum(len(pattern.findall(text)) for text in texts.values())

    return {
        "files": len(texts),
        "lines": sum(lines.values()),
        "lines without the lab": sum(n for path, n in lines.items() if path.parts[0] == "delivered"),
        "lines of `spark/`": sum(n for path, n in lines.items() if path.parts[1] == "spark"),
        "protocols of the contract": len(_PROTOCOL.findall(contract)),
        "places that ask whether sinks are one or several": count(re.compile(r"Sink \| SinkGroup|\bis_group\b")),
        "private words": sum(map(private_words, texts.values())),
    }


def private_words(text: str) -> int:
    """How many private words a text holds, apart from kept keys, each a literal of its own, and codes of errors."""
    return len(_PRIVATE.findall(_kept().sub("", text)))


@cache
def _kept() -> re.Pattern[str]:
    codes = json.loads(CONDITIONS.read_text(encoding="utf-8"))
    literals = [f'"{key}"' for key in _KEPT_KEYS]
    return re.compile(
        "|".join([*literals, *(rf"\b(?:DELIVERED_)?{code}\b" for code in codes if _PRIVATE.search(code))])
    )


def bounds(text: str) -> dict[str, int]:
    """The bounds of the page."""
    return {row["measure"]: int(row["bound"].replace(",", "")) for row in _BOUND.finditer(_section(text))}


def tightened(text: str, found: dict[str, int]) -> str:
    """The page with each bound that is higher than what was found lowered to it."""

    def lower(row: re.Match[str]) -> str:
        bound = int(row["bound"].replace(",", ""))
        bound = min(found.get(row["measure"], bound), bound)
        return f"| {row['measure']} | {bound:,} | {row['goal']} |"

    section = _section(text)
    return text.replace(section, _BOUND.sub(lower, section))


def _section(text: str) -> str:
    return text.partition("\n## Size\n")[2].partition("\n## ")[0]


def measure(port: str = PORT) -> dict[str, Any]:
    rooms = sizes(SOURCE, 1)
    lab = sizes(LAB, 1)
    connectors = {n: v for n, v in sizes(SOURCE / "connectors", 1).items() if n != "__init__"}
    methods = sink_methods()
    return {
        "lines": sum(room["lines"] for room in (*rooms.values(), *lab.values())),
        "files": sum(room["files"] for room in (*rooms.values(), *lab.values())),
        "lab_lines": sum(room["lines"] for room in lab.values()),
        "bounded": measures(),
        "rooms": rooms | {f"lab/{name}": room for name, room in lab.items()},
        "connectors": connectors,
        "largest_connector": {"name": max(connectors, key=lambda n: connectors[n]["lines"])},
        "sink_methods": {"count": sum(map(len, methods.values())), "protocols": methods},
        "connector_port": {"system": port, **port_of(port)},
        "import_cycles": import_cycles(),
    }


def store(found: dict[str, Any]) -> None:
    """Into build/size.json, beside what other tools measured."""
    stored = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({**stored, **found}, indent=1) + "\n", encoding="utf-8")


def table(found: dict[str, Any]) -> str:
    largest = found["largest_connector"]["name"]
    rows = [(name, room["lines"], room["files"]) for name, room in found["rooms"].items()]
    rows.append(("all", found["lines"], found["files"]))
    protocols = ", ".join(f"{name} {len(members)}" for name, members in found["sink_methods"]["protocols"].items())
    port = found["connector_port"]
    return "\n".join(
        [
            f"{'room':<18}{'lines':>8}{'files':>7}",
            *(f"{name:<18}{lines:>8,}{files:>7}" for name, lines, files in rows),
            f"largest connector: {largest}, {found['connectors'][largest]['lines']:,} lines",
            f"methods of a sink: {found['sink_methods']['count']} ({protocols})",
            f"files that name {port['system']}: {len(port['own'])} of its own, {len(port['others'])} others",
            *(f"  {path}" for path in (*port["own"], *port["others"])),
            *(f"{name}: {count:,}" for name, count in found["bounded"].items()),
            f"import cycles: {len(found['import_cycles'])}",
            *("  " + ", ".join(m.removeprefix("delivered.") for m in cycle) for cycle in found["import_cycles"]),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", metavar="SYSTEM", default=PORT, help="the connector whose files are listed")
    parser.add_argument("--tighten", action="store_true", help="lower the bounds of ARCHITECTURE.md to what is there")
    given = parser.parse_args()
    found = measure(given.port)
    if given.tighten:
        PAGE.write_text(tightened(PAGE.read_text(encoding="utf-8"), found["bounded"]), encoding="utf-8")
    store(found)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
