"""Every error, warning and problem has its texts in the catalogue; every call that makes one passes their values."""

from __future__ import annotations

import ast
import gc
import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Formatter

import pytest
from docs.site import ROOT, pages
from typer.testing import CliRunner

from delivered.cli.main import app
from delivered.contract.source import Finding
from delivered.model import errors
from delivered.model.errors import PREFIX, DeliveredError, InvariantBroken, Refused, conditions, entries
from delivered.model.options import Unfit

_NOT_CODES = frozenset({"DELIVERED_X", "DELIVERED_PURE", "DELIVERED_VERIFY_TABLE"})
"""A stand-in, and variables of the build and the verifier."""
_BUILT = {
    "delivered.contract.source": ("Finding", "message", {"refuses", "only", "transient"}),
    "delivered.planner.answer": ("Reason", "text", {"transient"}),
    "delivered.operate.status": ("Problem", "text", set()),
    "delivered.model.options": ("Unfit", "reason", {"nearest"}),
}
"""What becomes an error later, or is shown with its code: class, its text, arguments of `build` that are no values."""
_OWN_ARGUMENTS = {"self", "cls", "code", "message", "next_step"}.union(*(own for _, _, own in _BUILT.values()))
_PASSES_ON = frozenset(_BUILT).union(
    f"delivered.{m}" for m in ("cli.command", "model.errors", "model.translate", "patterns.saga.definition")
)
"""Modules that have functions for making an error of the text of another one, or of what becomes an error."""


@dataclass(frozen=True)
class _Module:
    name: str
    path: Path
    tree: ast.Module
    names: dict[str, tuple[str, str]]
    """Imported name -> module, name there."""
    classes: list[ast.ClassDef]
    words: set[str]
    """Its string constants."""


@dataclass(frozen=True)
class _Site:
    """A call that makes an error.

    Attributes:
        codes: that it may have; empty: the code is not written here.
        values: passed by name.
        text: its own message, or None: the catalogue's.
    """

    where: str
    module: str
    kind: str
    codes: tuple[str, ...]
    values: frozenset[str]
    text: ast.expr | None


@cache
def _modules() -> dict[str, _Module]:
    gc.disable()  # else it walks a million nodes again and again
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        module = found[name] = _Module(name, path, tree, {}, [], set())
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(module=str(source)):
                    module.names.update({a.asname or a.name: (source, a.name) for a in node.names})
                case ast.ClassDef():
                    module.classes.append(node)
                case ast.Constant(value=str(word)):
                    module.words.add(word)
    gc.freeze()
    gc.enable()
    return found


@cache
def _classes() -> dict[tuple[str, str], str]:
    """Module and name of each error class -> its class in the catalogue, the nearest one of model/errors.py."""
    known = {("delivered.model.errors", n): n for n, c in vars(errors).items() if _is_error(c)}
    known |= {(module, name): name for module, (name, _, _) in _BUILT.items()}
    classes = [(m, n) for m in _modules().values() for n in m.classes]
    for _ in range(4):  # as deep as classes derive from each other
        for m, n in classes:
            bases = [m.names.get(b.id, (m.name, b.id)) for b in n.bases if isinstance(b, ast.Name)]
            kinds = [known[b] for b in bases if b in known]
            kinds += [b[1] for b in bases if b[0] == "delivered" and hasattr(errors, b[1])]
            if kinds and (m.name, n.name) not in known:
                known[m.name, n.name] = kinds[0]
    return known


def _kind(module: _Module, name: str) -> str | None:
    defined = module.names.get(name, (module.name, name))
    if defined[0] == "delivered" and hasattr(errors, name):  # from the public surface
        defined = ("delivered.model.errors", name)
    return _classes().get(defined)


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, DeliveredError)


def _codes(node: ast.expr | None) -> tuple[str, ...]:
    match node:
        case ast.Constant(value=str(code)):
            return (code,)
        case ast.IfExp(body=body, orelse=other) if (one := _codes(body)) and (two := _codes(other)):
            return one + two
    return ()


@cache
def _sites() -> tuple[_Site, ...]:
    return tuple(site for module in _modules().values() for site in _sites_of(module, module.tree, ""))


def _sites_of(module: _Module, node: ast.AST, inside: str) -> Iterator[_Site]:
    for child in ast.iter_child_nodes(node):
        yield from _sites_of(module, child, child.name if isinstance(child, ast.ClassDef) else inside)
        if isinstance(child, ast.Call) and (site := _site(module, child, inside)) is not None:
            yield site


def _site(module: _Module, call: ast.Call, inside: str) -> _Site | None:
    match call.func:
        case ast.Name(id="cls"):
            name = inside
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name), attr="build"):
            pass
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"):
            name = inside
        case _:
            return None
    given = {k.arg: k.value for k in call.keywords if k.arg}
    of_table = name == "kind" and len(call.args) == 1 and given  # the class and the code of a row
    kind = "DeliveredError" if of_table else _kind(module, name)
    if kind is None or any(k.arg is None for k in call.keywords) or not (call.args or given):
        return None
    names = {"Unfit": ("reason", "next_step", "code"), "Finding": ("code", "message", "refuses", "next_step")}
    written = dict(zip(names.get(kind, ("code", "message", "next_step")), call.args, strict=False)) | given
    built = isinstance(call.func, ast.Attribute) and call.func.attr == "build"
    code = call.args[0] if built and call.args else written.get("code")
    text = None if built else written.get("message") or (written.get("reason") if kind == "Unfit" else None)
    where = f"{module.path.relative_to(ROOT)}:{call.lineno}"
    return _Site(where, module.name, kind, _codes(code), frozenset(given) - _OWN_ARGUMENTS, text)


def _placeholders(code: str) -> set[str]:
    condition = conditions()[code]
    texts = f"{condition.message} {condition.next_step or ''}"
    return {name for _, name, _, _ in Formatter().parse(texts) if name is not None}


def _of_the_catalogue() -> list[_Site]:
    return [s for s in _sites() if s.text is None and (s.kind != "MissingExtra" or s.values)]


def _in_tables() -> set[str]:
    """Codes that are written elsewhere than in the call: a table of a server's errors, an argument."""
    calls = {code for s in _of_the_catalogue() for code in s.codes}
    words = set().union(*(m.words for m in _modules().values()))
    return {code for code in words & conditions().keys() if "_" in code or "." in code} - calls


def test_values_fit_the_texts() -> None:
    wrong = []
    for site in _of_the_catalogue():
        unknown = [code for code in site.codes if code not in conditions()]
        needed = {name for code in site.codes if code not in unknown for name in _placeholders(code)}
        if unknown:
            wrong.append(f"{site.where}: {unknown[0]} is not in {errors.CATALOGUE}")
        elif site.codes and needed != site.values:
            wrong.append(f"{site.where}: {site.codes[0]} needs {sorted(needed)}, and gets {sorted(site.values)}")
    assert not wrong


def test_values_fit_the_texts_of_codes_in_tables() -> None:
    places = [s.values for s in _of_the_catalogue() if not s.codes and s.values]
    without = {code for code in _in_tables() if _placeholders(code)}
    assert [c for c in sorted(without) if not any(_placeholders(c) <= values for values in places)] == []


def test_codes_are_of_the_class_that_raises_them() -> None:
    assert [
        f"{s.where}: {code} is of {conditions()[code].kind}, and is raised as {s.kind}"
        for s in _of_the_catalogue()
        for code in s.codes
        if code in conditions() and conditions()[code].kind != s.kind
    ] == []


def test_texts_are_in_the_catalogue() -> None:
    """A call passes on the text of another error, or none."""
    own = [s for s in _sites() if s.text is not None and not isinstance(s.text, ast.Attribute)]
    assert [s.where for s in own if s.module not in _PASSES_ON] == [], f"write the text into {errors.CATALOGUE}"


def test_every_text_is_used() -> None:
    calls = {code for s in _of_the_catalogue() for code in s.codes}
    assert sorted(conditions().keys() - calls - _in_tables()) == []


def test_texts_have_plain_placeholders_and_a_next_step() -> None:
    for code, condition in conditions().items():
        assert all(name.isidentifier() for name in _placeholders(code)), code
        assert not _placeholders(code) & _OWN_ARGUMENTS, code
        assert "\n" not in f"{condition.message}{condition.next_step}", code
        assert condition.message == condition.message.strip(), code
        assert re.fullmatch(r"[A-Z][A-Z0-9_]*(\.[A-Z][A-Z0-9_]*)?", code)
        warns = condition.kind in ("Finding", "Unfit")
        assert condition.next_step or warns or getattr(errors, condition.kind).usual_step, f"{code} has no next step"


def test_the_file_is_in_order() -> None:
    file = Path(errors.__file__).with_name(errors.CATALOGUE)
    ordered = dict(sorted(entries().items()))
    for entry in ordered.values():
        if "conditions" in entry:
            assert len(entry["conditions"]) > 1, entry
            entry["conditions"] = dict(sorted(entry["conditions"].items()))
    assert file.read_text(encoding="utf-8") == json.dumps(ordered, indent=2, ensure_ascii=False) + "\n"


def test_a_text_takes_values_and_never_fails() -> None:
    assert errors.texts("ADOPT_RUNNING.GROUP", {"group": "g{x}", "members": 2}) == (
        "The consumer group 'g{x}' has 2 members: the old job is still reading.",
        "stop it, wait until the group is empty (kafka-consumer-groups --describe), then repeat",
    )
    assert "'group': 'g'" in errors.texts("ADOPT_RUNNING.GROUP", {"group": "g"})[0]
    assert "KeyError" in errors.texts("NO_SUCH_CODE", {})[0]


def test_an_error_keeps_its_condition_and_texts() -> None:
    error = Refused("ADOPT_RUNNING.GROUP", group="g", members=2)
    assert (error.code, error.condition) == ("DELIVERED_ADOPT_RUNNING", "GROUP")
    for copy in (pickle.loads(pickle.dumps(error)), error.placed("Here"), error.after(3)):
        assert (type(copy), copy.code, copy.condition, copy.next_step) == (
            Refused,
            error.code,
            error.condition,
            error.next_step,
        )
        assert error.message.rstrip(".") in copy.message
    assert str(error).startswith("[DELIVERED_ADOPT_RUNNING] The consumer group 'g' has 2 members")


def test_a_next_step_of_the_call_goes_before_that_of_its_class() -> None:
    assert InvariantBroken("SAGA_GONE", next_step="wait", saga="s", id="i").next_step == "wait"
    assert InvariantBroken("THEIRS", "It is odd.", "turn it").next_step == "turn it"
    for usual in (InvariantBroken("SAGA_GONE", saga="s", id="i"), InvariantBroken("THEIRS", "It is odd.")):
        assert usual.next_step == InvariantBroken.usual_step == pickle.loads(pickle.dumps(usual)).next_step


def test_another_package_raises_with_its_own_code_and_text() -> None:
    error = Refused("THEIRS", "It is {odd}.", "turn it")
    assert str(error) == "[DELIVERED_THEIRS] It is {odd}. Next: turn it"
    assert Unfit("is odd").code == "OPTION_VALUE"
    assert Finding("THEIRS", "It is odd.", True, "turn it").message == "It is odd."


def _variables() -> frozenset[str]:
    """Environment variables: names in modules that read the environment."""
    texts = [p.read_text() for p in (ROOT / "src").rglob("*.py")]
    return frozenset(v for t in texts if "environ" in t for v in re.findall(rf"{PREFIX}[A-Z_]+[A-Z]", t))


@pytest.mark.parametrize("folder", ["src", "docs"])
def test_codes_that_are_mentioned_exist(folder: str) -> None:
    files = (ROOT / "src").rglob("*.py") if folder == "src" else [ROOT / p for p in pages()]
    named = {(code, f.name) for f in files for code in re.findall(rf"{PREFIX}[A-Z0-9_]+[A-Z0-9]\b", f.read_text())}
    excused = _NOT_CODES | _variables()
    assert sorted(n for n in named if n[0] not in excused and n[0].removeprefix(PREFIX) not in entries()) == []


def test_codes_in_tables_of_errors_exist() -> None:
    named = []
    for page in pages():
        for table in re.findall(r"^\| error \|.*\n\|[-| ]+\n((?:\|.*\n)+)", (ROOT / page).read_text(), re.MULTILINE):
            for row in table.splitlines():
                named += [(page.name, code) for code in re.findall(r"`([A-Z][A-Z0-9_]+)`", row.split("|")[1])]
    assert named
    assert [n for n in named if n[1].removeprefix(PREFIX) not in entries()] == []


def _explain(*words: str) -> str:
    done = CliRunner().invoke(app, ["explain", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_explain() -> None:
    for written in ("DELIVERED_LEDGER_AHEAD", "[DELIVERED_LEDGER_AHEAD]", "ledger_ahead"):
        output = _explain(written)
        assert output.startswith("DELIVERED_LEDGER_AHEAD: The ledger has batches that the checkpoint lacks")
        assert "Next: " in output
    entry = json.loads(_explain("KEY_NULL", "--output", "json"))
    assert entry["code"] == "DELIVERED_KEY_NULL"
    assert entry["causes"][0]["next"] == 'df.filter(col("<name>").isNotNull())'  # as stored; text speaks as a file does


def test_explain_shows_braces_that_hold_no_value() -> None:
    assert "Next: write ledger: {format: postgres, url: ..., dbtable: ...}" in _explain("LEDGER_FILE")
    assert 'f"{query_id}-{batch_id}"' in _explain("RUN_ID_TAKEN", "--output", "json").replace("\\", "")


def test_explain_one_condition_a_warning_and_a_problem() -> None:
    assert "consumer group" in _explain("ADOPT_RUNNING.GROUP")
    assert "began another batch" not in _explain("ADOPT_RUNNING.GROUP")
    assert "fsync = off" in _explain("FSYNC_OFF")
    assert "No batch was decided for" in _explain("DELIVERED_STALLED")


def test_explain_finds_exactly_the_code() -> None:
    for code in ("VALUE", "VALUE_TOO_LONG", "KEY_NULL", "NO_RECEIVER"):
        assert json.loads(_explain(code, "--output", "json"))["code"] == PREFIX + code


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("DELIVERED_LEDGER_AHEDA", "DELIVERED_LEDGER_AHEAD"),
        ("ADOPT_RUNNING.GROPU", "DELIVERED_ADOPT_RUNNING.GROUP"),
    ],
)
def test_explain_suggests_for_an_unknown_code(written: str, near: str) -> None:
    done = CliRunner().invoke(app, ["explain", written])
    assert done.exit_code == 2
    assert f"Next: delivered explain {near}" in done.output


def test_every_code_of_the_catalogue_is_listed() -> None:
    assert _explain().split() == [PREFIX + code for code in entries()]
