"""Every imported library is a declared dependency, not just a transitive one, which may disappear."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from docs.support import SINKS, SOURCES

from delivered.model.errors import EXTRA_OF, MissingExtra, missing_extra
from delivered.model.translate import translated
from delivered.pipeline.registry import connectors

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normal(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=;! ]", requirement, maxsplit=1)[0]).lower()


CORE = {normal(r) for r in PROJECT["dependencies"]}
EXTRAS = {extra: {normal(r) for r in found} for extra, found in PROJECT["optional-dependencies"].items()}


distributions = cache(packages_distributions)


@cache
def imported() -> dict[str, str]:
    """Module of another distribution -> the first file that imports it."""
    found: dict[str, str] = {}
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            else:
                continue
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top not in ("delivered", "delivered_lab"):
                    found.setdefault(top, str(file.relative_to(ROOT)))
    return found


def test_every_import_is_of_a_declared_dependency() -> None:
    declared = CORE.union(*EXTRAS.values(), {"py4j"})  # py4j: part of pyspark's interface
    for module, file in imported().items():
        brought_by = {normal(d) for d in distributions().get(module, [module])}
        assert brought_by & declared, f"{file} imports {module} of {sorted(brought_by)}, which pyproject.toml lacks"


def test_the_table_of_extras_is_that_of_the_project() -> None:
    for module, (distribution, extra) in EXTRA_OF.items():
        if module not in ("py4j",):
            assert normal(distribution) in EXTRAS[extra], module
    optional = {m for m in imported() if {normal(d) for d in distributions().get(m, [])} - CORE}
    assert optional - {"delivered", "delivered_lab"} <= set(EXTRA_OF)


@pytest.mark.parametrize("module", EXTRA_OF)
def test_a_missing_library_names_its_extra(module: str) -> None:
    error = ModuleNotFoundError(f"No module named '{module}.sub'")
    found = translated(error)
    assert isinstance(found, MissingExtra)
    assert found.next_step == f'pip install "delivered[{EXTRA_OF[module][1]}]"'
    assert missing_extra("No module named 'surely_not_ours'") is None


_WITHOUT = """
import importlib.abc, json, sys
from delivered.model.errors import EXTRA_OF, DeliveredError

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRA_OF:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import delivered
from delivered.model.capability import Guarantee

def asked(side, system, options):
    try:
        endpoint = delivered.endpoint(system, **options)
        found = endpoint.sink().preflight(Guarantee.EXACTLY_ONCE) if side == "sink" else endpoint.source().preflight()
        return "; ".join(str(f.next_step) for f in found)
    except DeliveredError as error:
        return error.next_step
    except Exception as error:
        return f"{type(error).__name__}: {error}"

print(json.dumps([asked(*example) for example in json.load(sys.stdin)]))
"""


def test_a_connector_without_its_libraries_names_their_extra() -> None:
    """Whether it imports them with its module or on use."""
    examples = [(side, e.system, dict(e.options)) for side, of in (("sink", SINKS), ("source", SOURCES)) for e in of]
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT],
        input=json.dumps(examples),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    answers = {(side, system): a for (side, system, _), a in zip(examples, json.loads(run.stdout), strict=True)}
    own_client = {("sink", "sqlite"), ("sink", "files"), ("sink", "saga"), ("sink", "rocketmq")}  # or asked first
    queues = {("source", "rabbitmq"), ("source", "activemq"), ("source", "rocketmq")}  # read from the receiver's log
    expected = {
        at: f'pip install "delivered[{"log" if at in queues else connectors()[at[1]].extra}]"'
        for at in answers.keys() - own_client
    }
    assert {at: answer for at, answer in answers.items() if at not in own_client} == expected
