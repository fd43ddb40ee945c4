"""Code blocks of README and the site: commands, pipelines, Python and options exist as they are written."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml
from docs.site import ROOT
from tests.support.pages import BLOCKS, ONLY_CHECKED, Block, commands, inner, parsed
from typer.testing import CliRunner

import delivered
from delivered.cli.main import app
from delivered.model.errors import UsageError
from delivered.model.options import OptionTable
from delivered.pipeline.registry import connector
from delivered.pipeline.spec import PIPELINE_OPTIONS
from delivered.planner import Refusal

_FIRST = {
    "docs/outbox.md": "1 order\n1 message\n",
    "docs/inbox.md": "1 mail\n",
    "docs/events.md": "now at version 2\n7\n",
    "docs/saga.md": "reserved order-7\npaid order-7\nreserved order-8\nreleased order-8\n1 complete, 1 compensated\n",
}
"""Pages for applications, and what their first block prints."""
_NO_PIPELINE = {"docs/declarative.md"}
"""Pages whose YAML is Spark's."""


def _of(*languages: str) -> list[Block]:
    """Blocks of these languages, and what shell blocks hand to Python or write into a file."""
    found = [b for b in BLOCKS if b.language in languages]
    return found + [b for block in BLOCKS for b in inner(block) if b.language in languages]


@cache
def _cli() -> Any:
    return typer.main.get_command(app)


def _parse(command: Any, words: list[str], parent: Any = None, name: str = "delivered") -> None:
    """As the command line would, without running it. Raises click's UsageError."""
    context = command.make_context(name, list(words), parent=parent)
    if hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        found, sub, rest = command.resolve_command(context, rest)
        _parse(sub, rest, context, found)


@pytest.mark.parametrize("block", _of("sh"), ids=str)
def test_commands_exist(block: Block) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for words in commands(block):
        match words:
            case ["make", *names]:
                assert set(names) <= targets
            case ["delivered", *rest]:
                try:
                    _parse(_cli(), rest)
                except Exception as error:  # the reader has the file that it names, this folder has not
                    if not str(error).endswith("does not exist."):
                        raise
            case ["pip", "install", *packages]:
                named = re.findall(r"delivered\[([\w,]+)\]", " ".join(packages))
                assert set(",".join(named).split(",")) <= extras | {""}
            case ["pytest", *rest]:
                assert all((ROOT / w).exists() for w in rest if w.startswith("tests/"))
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module)


_WHOLE = {
    "pipeline": "example",
    "guarantee": "exactly_once",
    "checkpoint": "checkpoint",
    "source": {"format": "log", "path": "orders"},
    "sinks": [{"format": "sqlite", "path": "out.db", "table": "orders"}],
}

_KAFKA = {"format": "kafka", "kafka.bootstrap.servers": "localhost:9092", "topic": "out"}


@pytest.mark.parametrize("block", [b for b in _of("yaml", "yml") if b.page not in _NO_PIPELINE], ids=str)
def test_pipelines_can_be_planned(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, or a part of one put into a small one: keys and options are known, and the plan is no refusal."""
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"env:(\w+)", block.text):
        monkeypatch.setenv(name, "secret")
    data = yaml.safe_load(block.text)
    whole = data if "pipeline" in data else _WHOLE | data
    if "dead_letter" in data:  # two sinks: one of them must prepare
        whole |= {"sinks": [_KAFKA]}
    if (
        "pipeline" not in data
        and "ledger" in whole["sinks"][0]
        and whole["sinks"][0].get("messageType") != "transaction"
    ):
        whole |= {"guarantee": "at_least_once"}  # a queue
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(whole))
    answer = delivered.Pipeline.from_file(str(file)).plan(offline=True)
    assert not isinstance(answer, Refusal), str(answer)


def _chain(node: ast.expr) -> list[str]:
    match node:
        case ast.Attribute(value=value, attr=name):
            return [*_chain(value), name] if _chain(value) else []
        case ast.Name(id=name):
            return [name]
    return []


def _imported(tree: ast.Module) -> dict[str, Any]:
    """What the block's imports of this package give; `delivered` itself is taken for granted."""
    found: dict[str, Any] = {"delivered": delivered}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("delivered"):
            module = importlib.import_module(node.module or "")
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                value = getattr(module, name.name, None)
                found[name.asname or name.name] = importlib.import_module(whole) if value is None else value
    return found


@pytest.mark.parametrize("block", _of("python"), ids=str)
def test_python_names_and_arguments_exist(block: Block) -> None:
    tree = parsed(block.text)
    known = _imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (names := _chain(node)) and names[0] in known:
            value = known[names[0]]
            for name in names[1:]:
                if not isinstance(value, ModuleType | type):
                    break
                assert hasattr(value, name), f"{'.'.join(names)} does not exist"
                value = getattr(value, name)
        if isinstance(node, ast.Call) and (names := _chain(node.func)) and names[0] in known:
            _check_call(node, names, known[names[0]])


def _check_call(node: ast.Call, names: list[str], value: Any) -> None:
    for name in names[1:]:
        value = getattr(value, name, None)
    if not callable(value):
        return
    signature = inspect.signature(value)
    keywords = {k.arg: k.value for k in node.keywords if k.arg}
    left_out = any(isinstance(a, ast.Constant) and a.value is ... for a in node.args)  # f(...): the rest is not shown
    signature.bind_partial(*(() if left_out else node.args), **keywords)


def _options(tree: ast.Module) -> Iterator[tuple[str, str, set[str]]]:
    """(format, source or sink, names of options) of every chain of calls."""
    for node in ast.walk(tree):
        parts: list[tuple[str, list[Any]]] = []
        inner: ast.expr = node if isinstance(node, ast.Call) else ast.Constant(None)
        while True:
            match inner:
                case ast.Call(func=ast.Attribute(value=rest, attr=name), args=args, keywords=keywords):
                    texts = [a.value for a in args if isinstance(a, ast.Constant)]
                    parts.append((name, texts[:1] + [k.arg for k in keywords if k.arg and name == "options"]))
                    inner = rest
                case ast.Attribute(value=rest, attr=name):
                    parts.append((name, []))
                    inner = rest
                case _:
                    break
        role, system, names = "", "", set[str]()
        for name, values in reversed(parts):
            if name in ("readStream", "read", "writeStream", "write"):
                role, system, names = "source" if name.startswith("read") else "sink", "", set()
            elif name == "format" and values and str(values[0]).startswith("delivered_"):
                system = str(values[0]).removeprefix("delivered_")
            elif name in ("option", "options") and system:
                names |= {str(v) for v in values}
            elif name in ("load", "start", "save") and system and role:
                yield system, role, names
                system = ""


@pytest.mark.parametrize("block", _of("python"), ids=str)
def test_options_are_known(block: Block) -> None:
    for system, role, names in _options(parsed(block.text)):
        found = connector(system)
        table = found.source_options if role == "source" else found.sink_options
        assert isinstance(table, OptionTable)
        known = {o.name for o in table.options} | {"checkpointLocation"}
        known |= {o.name for o in PIPELINE_OPTIONS.options} if role == "sink" else set()
        unknown = {n for n in names - known if not any(n.startswith(p) for p in table.passthrough)}
        assert not unknown, f"{system} as a {role}"


@pytest.mark.parametrize("block", _of("toml"), ids=str)
def test_toml_is_toml(block: Block) -> None:
    assert tomllib.loads(block.text)


_AS_IN_CODE = {"ARCHITECTURE.md", "README.md", "docs/new-connector.md"}
"""Pages with code as the repository has it, or that GitHub shows wider."""


def test_code_is_not_cut_at_the_width_of_a_page() -> None:
    wide = [
        f"{b}: {line}" for b in BLOCKS if b.page not in _AS_IN_CODE for line in b.text.splitlines() if len(line) > 80
    ]
    assert not wide, "at most 80 columns: a reader has to scroll, and misses the end"


def test_blocks_name_their_language() -> None:
    """A command in a block without a language is not highlighted, and would not be checked as shell."""
    plain = [b for b in BLOCKS if b.language == "" and re.match(r"(delivered|make|pip|python|spark-submit) ", b.text)]
    assert [str(b) for b in plain] == [], "write ```sh"
    assert {b.language for b in BLOCKS} <= {"", "sh", "python", "yaml", "sql", "toml", "text", "diff"}


def test_what_is_only_checked_is_on_a_page_and_names_tests_that_exist() -> None:
    for (page, text), why in ONLY_CHECKED.items():
        assert [b for b in BLOCKS if b.page == page and text in b.text], (page, text)
        assert all((ROOT / name).exists() for name in re.findall(r"tests/[\w/]+\.py", why))


@pytest.mark.parametrize("page", _FIRST)
def test_a_page_for_applications_begins_with_code_that_needs_neither_spark_nor_arrow(page: str, tmp_path: Path) -> None:
    first = next(b for b in BLOCKS if b.page == page)
    assert len(first.text.splitlines()) <= 33
    heavy = "{'pyspark', 'pyarrow', 'numpy', 'pydantic', 'httpx'}"
    probe = f"{first.text}\nimport sys\nassert not {heavy} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, _FIRST[page]), done.stderr


def test_error_codes_are_explained() -> None:
    """The commands of docs/errors.md."""
    (block,) = [b for b in BLOCKS if b.page == "docs/errors.md"]
    for words in commands(block):
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, done.output
        assert "LEDGER_AHEAD" in done.output


@pytest.mark.parametrize(
    "words",
    [w for b in BLOCKS if b.page == "docs/verify.md" for w in commands(b) if "orders.yaml" not in w],
    ids=" ".join,
)
def test_selections_of_the_verifier_find_cases(words: list[str]) -> None:
    done = CliRunner().invoke(app, [*words[1:], "--list"])
    assert done.exit_code == 0, done.output
    assert done.output.strip(), words


def test_what_is_not_known_is_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        test_commands_exist(Block("x", "sh", "delivered run a.yaml --now\n"))
    with pytest.raises(AssertionError):
        test_commands_exist(Block("x", "sh", "make everything\n"))
    with pytest.raises(AssertionError, match="does not exist"):
        test_python_names_and_arguments_exist(Block("x", "python", "delivered.pipelines.run()\n"))
    with pytest.raises(TypeError):
        test_python_names_and_arguments_exist(Block("x", "python", "delivered.dedup('key', inside='1 hour')\n"))
    with pytest.raises(AssertionError):
        test_options_are_known(
            Block("x", "python", "(a.writeStream.format('delivered_kafka').option('topics', 'a').start())\n")
        )


def test_a_pipeline_with_an_unknown_option_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block("x", "yaml", "source: {format: log, paths: orders}\n")
    with pytest.raises((UsageError, AssertionError)):
        test_pipelines_can_be_planned(block, tmp_path, monkeypatch)
