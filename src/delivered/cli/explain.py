"""`delivered explain`: what an error code means, what causes it, and what to run next."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from delivered.cli.error_index import Cause, Index, read_index
from delivered.cli.output import Output, OutputOption, command, say, say_json, spoken

_PASSED_ON = re.compile(r"\W*<[^>]*>\W*")


def _meaning(kind: str, index: Index) -> str:
    """One sentence: what an error of this class says. Empty: the class says nothing."""
    said = index.meanings.get(kind) or index.meanings["Refused" if kind == "Reason" else "UsageError"]
    return "" if kind == "DeliveredError" else said.partition(". ")[0].rstrip(".") + "."


def to_json(code: str, causes: Sequence[Cause], index: Index) -> dict[str, Any]:
    """For programs, and for the reference page."""
    return {
        "code": code,
        "meaning": " ".join(filter(None, dict.fromkeys(_meaning(c.kind, index) for c in causes))),
        "causes": [
            {"cause": cause, "next": step, "modules": sorted(modules)} for (cause, step), modules in _merged(causes)
        ],
    }


def _merged(causes: Sequence[Cause]) -> list[tuple[tuple[str, str], set[str]]]:
    """Causes with the same text once; those that only pass on an error, <message>, if there are no others."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for c in causes:
        found[c.message, c.next_step].add(c.module)
    telling = [(texts, where) for texts, where in found.items() if not all(_PASSED_ON.fullmatch(t) for t in texts)]
    return telling or list(found.items())


@command
def explain(
    code: Annotated[str | None, typer.Argument(help="As printed, DELIVERED_LEDGER_AHEAD. Default: list all.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Explain an error code: what it means, what causes it, and what to run next."""
    index = read_index()
    found = [index.find(code)] if code is not None else list(index.causes.items())
    entries = [to_json(known, causes, index) for known, causes in found]
    if output is Output.JSON:
        say_json(entries if code is None else entries[0])
        return
    for entry in entries:
        if code is None:
            say(entry["code"])
            continue
        say(f"{entry['code']}: {entry['meaning']}".removesuffix(": "))
        for cause in entry["causes"]:
            say(f"\n  {spoken(cause['cause'])}\n  Next: {spoken(cause['next'])}")
