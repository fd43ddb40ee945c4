"""Every error code has a cause and a next step, and `delivered explain` finds it."""

from __future__ import annotations

import ast
import json
import re
from functools import cache

import pytest
from docs.site import ROOT, pages
from typer.testing import CliRunner

from delivered.cli import explain
from delivered.cli.error_index import PREFIX, Index, _Finder, _Reader, read_index
from delivered.cli.main import app

_NOT_CODES = frozenset({"DELIVERED_X", "DELIVERED_PURE", "DELIVERED_VERIFY_TABLE"})
"""A stand-in, and variables of the build and the verifier."""


def _variables() -> frozenset[str]:
    """Environment variables: names in modules that read the environment."""
    texts = [p.read_text() for p in (ROOT / "src").rglob("*.py")]
    return frozenset(v for t in texts if "environ" in t for v in re.findall(rf"{PREFIX}[A-Z_]+[A-Z]", t))


@cache
def _index() -> Index:
    return read_index()


def _has_words(text: str) -> bool:
    return re.search(r"[A-Za-z]{2}", re.sub(r"<[^>]*>", "", text)) is not None


def test_every_code_has_a_cause_and_a_next_step() -> None:
    assert _index().unresolved == [], "write the code as a literal where the error is made"
    missing = [
        f"{c.module}:{c.line} {code}" for code, causes in _index().causes.items() for c in causes if not c.next_step
    ]
    assert not missing, "an error says what to run or change next: next_step"
    untold = [c for c, causes in _index().causes.items() if not any(_has_words(x.next_step) for x in causes)]
    assert not untold
    assert all(cause.message for causes in _index().causes.values() for cause in causes)


def _known(code: str) -> bool:
    return any(re.fullmatch(re.sub(r"<\w+>", "[A-Z0-9_]+", known), code) for known in _index().causes)


@pytest.mark.parametrize("folder", ["src", "docs"])
def test_codes_that_are_mentioned_exist(folder: str) -> None:
    files = (ROOT / "src").rglob("*.py") if folder == "src" else [ROOT / p for p in pages()]
    named = {(code, f.name) for f in files for code in re.findall(rf"{PREFIX}[A-Z0-9_]+[A-Z0-9]\b", f.read_text())}
    excused = _NOT_CODES | _variables()
    assert sorted(n for n in named if n[0] not in excused and not _known(n[0])) == []


def test_codes_in_tables_of_errors_exist() -> None:
    named = []
    for page in pages():
        for table in re.findall(r"^\| error \|.*\n\|[-| ]+\n((?:\|.*\n)+)", (ROOT / page).read_text(), re.MULTILINE):
            for row in table.splitlines():
                named += [(page.name, code) for code in re.findall(r"`([A-Z][A-Z0-9_]+)`", row.split("|")[1])]
    assert named
    assert [n for n in named if not _known(PREFIX + n[1].removeprefix(PREFIX))] == []


def _read(text: str) -> Index:
    base = "class DeliveredError(Exception):\n    'Failed.'\nclass Refused(DeliveredError):\n    'Refused. And more.'\n"
    return _Reader([_Finder("model.errors", ast.parse(base)), _Finder("a.b", ast.parse(text))]).index


def test_texts_are_read_where_the_error_is_made() -> None:
    index = _read("""
_LIMIT = "the limit"
def stop(n, why):
    hint = f"lower {n!r}"
    text = f"There are {n:,}; {_LIMIT} is {why.limit}." + " Nothing ran."
    raise Refused("TOO_MANY" if n else "TOO_FEW", text, next_step=hint)
def damaged(file, code):
    raise Refused(code, f"{file!r} is damaged.", next_step="restore it")
damaged("offsets", "OFFSETS_DAMAGED")
TABLE = {1: (Refused, "LOCKED", "find who holds it")}
""")
    texts = {code: [(c.message, c.next_step) for c in causes] for code, causes in index.causes.items()}
    many = ("There are <n>; the limit is <limit>. Nothing ran.", "lower <n>")
    assert texts == {
        "DELIVERED_LOCKED": [("<what the server reported>", "find who holds it")],
        "DELIVERED_OFFSETS_DAMAGED": [("offsets is damaged.", "restore it")],
        "DELIVERED_TOO_FEW": [many],
        "DELIVERED_TOO_MANY": [many],
    }


def test_a_code_that_the_source_does_not_tell_is_reported() -> None:
    assert _read('raise Refused(codes[0], "It failed.", "mend it")').unresolved == ["a.b:1"]
    assert _read('raise Refused("IT_FAILED", "It failed.")').causes["DELIVERED_IT_FAILED"][0].next_step == ""


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "read_index", _index)


@pytest.mark.usefixtures("read_once")
def test_explain() -> None:
    for written in ("DELIVERED_LEDGER_AHEAD", "[DELIVERED_LEDGER_AHEAD]", "ledger_ahead"):
        done = CliRunner().invoke(app, ["explain", written])
        assert done.exit_code == 0
        assert done.output.startswith("DELIVERED_LEDGER_AHEAD: The ledger has batches that the checkpoint lacks")
        assert "Next: " in done.output
    entry = json.loads(CliRunner().invoke(app, ["explain", "KEY_NULL", "--output", "json"]).output)
    assert entry["code"] == "DELIVERED_<ROLE>_NULL"
    assert "WHERE" not in entry["causes"][0]["next"]  # as stored; text is in the words of a pipeline file


@pytest.mark.usefixtures("read_once")
def test_explain_suggests_for_an_unknown_code() -> None:
    done = CliRunner().invoke(app, ["explain", "DELIVERED_LEDGER_AHEDA"])
    assert done.exit_code == 2
    assert "Next: delivered explain DELIVERED_LEDGER_AHEAD" in done.output


@pytest.mark.usefixtures("read_once")
def test_every_code_of_the_index_is_listed() -> None:
    assert CliRunner().invoke(app, ["explain"]).output.split() == list(_index().causes)
