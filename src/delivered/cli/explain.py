"""`delivered explain`: what an error code means, what causes it, and what to run next, from the catalogue."""

from __future__ import annotations

from difflib import get_close_matches
from string import Formatter
from typing import Annotated, Any

import typer

from delivered.cli.command import Output, OutputOption, say, say_json, spoken
from delivered.model import errors
from delivered.model.errors import PREFIX, Condition, UsageError, conditions_of, entries

_MEANINGS = {
    "Finding": "Found by the checks before a start, which refuse it or warn",
    "Problem": "Reported by `delivered status`",
    "Reason": "The request is valid but cannot be fulfilled",
    "Unfit": "The request itself is wrong",
}
"""Of what becomes an error later; an error's class says its meaning."""
_ALLOWED = "write what the message says is allowed"


def _meaning(kind: str) -> str:
    """One sentence: what an error of this class says. Empty: the class says nothing."""
    said = _MEANINGS.get(kind) or (getattr(errors, kind).__doc__ or "").partition("\n\n")[0]
    return "" if kind == "DeliveredError" else said.replace("\n   ", "").partition(". ")[0].rstrip(".") + "."


def _shown(template: str) -> str:
    """<name> for each value."""
    return "".join(text + (f"<{name}>" if name else "") for text, name, _, _ in Formatter().parse(template))


def _cause(condition: Condition) -> dict[str, str]:
    message, step = condition.message, condition.next_step
    if condition.kind == "Unfit":  # becomes the error of an option, whose type has an example
        message, step = f"{{owner}}: option {{name}} {message}.", step or _ALLOWED
    step = step or getattr(getattr(errors, condition.kind, None), "usual_step", None) or ""
    meaning = _meaning(condition.kind)
    name = condition.code.partition(".")[2]
    return {"condition": name, "meaning": meaning, "cause": _shown(message), "next": _shown(step)}


def to_json(code: str, entry: dict[str, Any]) -> dict[str, Any]:
    """For programs, and for the reference page. Args: entry: as the catalogue has it."""
    conditions = list(conditions_of(code, entry))
    found = {
        "code": PREFIX + code,
        "meaning": " ".join(filter(None, dict.fromkeys(_meaning(c.kind) for c in conditions))),
        "causes": [_cause(c) for c in conditions],
    }
    return found | ({"docs": entry["docs"]} if "docs" in entry else {})


def find(code: str) -> tuple[str, dict[str, Any]]:
    """A code, without the prefix, and its entry in the catalogue; only the condition, if one is named.

    Args:
        code: with or without its prefix, in any case, also in brackets.

    Raises:
        UsageError: there is no such code.
    """
    known = entries()
    wanted, _, name = code.strip().strip("[]").upper().removeprefix(PREFIX).partition(".")
    entry = known.get(wanted)
    if entry is not None and name in entry.get("conditions", {}):
        return wanted, {**entry, "conditions": {name: entry["conditions"][name]}}
    if entry is not None and not name:
        return wanted, entry
    names = [f"{wanted}.{n}" for n in entry["conditions"]] if entry and "conditions" in entry else list(known)
    near = get_close_matches(f"{wanted}.{name}" if entry else wanted, names, n=1)
    if near:
        raise UsageError("CODE_UNKNOWN.NEAR", name=code, near=PREFIX + near[0])
    raise UsageError("CODE_UNKNOWN.OTHER", name=code)


def explain(
    code: Annotated[str | None, typer.Argument(help="As printed, DELIVERED_LEDGER_AHEAD. Default: list all.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Explain an error code: what it means, what causes it, and what to run next."""
    found = [find(code)] if code is not None else list(entries().items())
    shown = [to_json(*each) for each in found]
    if output is Output.JSON:
        say_json(shown if code is None else shown[0])
        return
    for entry in shown:
        if code is None:
            say(entry["code"])
            continue
        first = entry["causes"][0]["meaning"]
        say(f"{entry['code']}: {first}".removesuffix(": "))
        for cause in entry["causes"]:
            other = f"{cause['meaning']} " if cause["meaning"] != first else ""
            say(f"\n  {other}{spoken(cause['cause'])}")
            if cause["next"]:
                say(f"  Next: {spoken(cause['next'])}")
        if "docs" in entry:
            say(f"\n  See docs/{entry['docs']}")
