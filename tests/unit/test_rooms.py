"""What an executor loads, side effects of imports, and testable house rules."""

from __future__ import annotations

import ast
import importlib
import pickle
import pkgutil
from pathlib import Path

import grimp
import pytest
from tests.support.interpreter import SOURCE, fresh
from tests.support.memory import CONNECTOR
from tests.support.memory.world import ROWS

from delivered.model.capability import Guarantee
from delivered.model.errors import EXTRA_OF
from delivered.model.identity import Scope
from delivered.model.work import Action, BatchPlan

ROOT = Path(__file__).parents[2]
MODULES = sorted(SOURCE.parent.rglob("*.py"))
KNOWN_ASSERTS: set[str] = set()
PRINTS = ("delivered/cli/",)


def test_executor_loads_model_contract_its_part_of_the_engine_and_one_sink() -> None:
    """Unpickle a task's input and use it, as an executor does."""
    plan = BatchPlan(Scope("p", "s", "i"), "o", Guarantee.EXACTLY_ONCE, 0, "{}", Action.WRITE)
    sink = CONNECTOR.sink({"world": "executor"})
    code = """
import pickle, sys
sink, plan, schema = (pickle.loads(bytes.fromhex(a)) for a in sys.argv[1:])
from tests.support.memory.world import make_world
from delivered.engine.shard import write_shard
from delivered.engine import Sinks
make_world("executor")
assert write_shard(Sinks.one(sink, "s"), plan, 0, 0, iter(()), schema).prepared is not None
"""
    loaded = fresh(code, *(pickle.dumps(x) for x in (sink, plan, ROWS)))
    ours = {m.removeprefix("delivered.") for m in loaded if m.startswith("delivered.")}
    allowed = ("model", "contract", "engine", "connectors")
    assert {m for m in ours if m.split(".")[0] not in allowed} == set()
    assert {m.split(".")[1] for m in ours if m.startswith("engine.")} == {"shard"}
    assert {m for m in ours if m.startswith("connectors.")} == set(), "the sink is of the tests"
    assert loaded.isdisjoint({"pyspark", "confluent_kafka", "kafka", "deltalake", "pydantic", "typer", "rich", "yaml"})


@pytest.mark.parametrize("name", sorted(p.parent.name for p in SOURCE.glob("connectors/*/__init__.py")))
def test_importing_a_connector_loads_no_client(name: str) -> None:
    loaded = fresh(f"import delivered.connectors.{name} as c; c.CONNECTOR")
    clients = set(EXTRA_OF) - {"pandas"}
    assert loaded.isdisjoint({*clients, "sqlite3"})


def test_what_stands_outside_of_the_package_follows_its_modules() -> None:
    """Benchmarks and examples run by hand: a renamed module must be noticed earlier."""
    folders = ("benchmarks", "examples", "tools")
    found = [p.relative_to(ROOT) for folder in folders for p in (ROOT / folder).rglob("*.py")]
    names = {".".join(p.with_suffix("").parts) for p in found if "peer_apps" not in p.parts}
    fresh(f"import importlib; [importlib.import_module(n) for n in {sorted(names)}]")


def test_importing_the_package_does_nothing() -> None:
    loaded = fresh("import threading, delivered; assert threading.active_count() == 1")
    assert loaded.isdisjoint({"pyspark", "confluent_kafka", "kafka", "deltalake", "py4j"})


def test_exported_names_exist_and_are_sorted_once() -> None:
    for info in pkgutil.walk_packages([str(SOURCE)], "delivered."):
        path = SOURCE.parent / Path(*info.name.split("."))
        file = path / "__init__.py" if info.ispkg else path.with_suffix(".py")
        if "__all__" not in file.read_text(encoding="utf-8"):
            continue
        module = importlib.import_module(info.name)
        assert len(set(module.__all__)) == len(module.__all__), info.name
        assert [n for n in module.__all__ if not hasattr(module, n)] == [], info.name


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE.parent)))
def test_house(path: Path) -> None:
    name = str(path.relative_to(SOURCE.parent))
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert not text.strip() or ast.get_docstring(tree), f"{name} does not say what it is for"
    calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert name.startswith(PRINTS) or "print" not in calls, f"{name} prints"
    asserts = any(isinstance(n, ast.Assert) for n in ast.walk(tree))
    assert not asserts or name in KNOWN_ASSERTS, f"{name}: a broken invariant raises"


WITHOUT_PYSPARK = {
    "delivered.spark": "says what the room holds",
}


def test_what_lies_in_spark_imports_pyspark() -> None:
    """Directly, or its internals by the one module that touches them."""
    graph = grimp.build_graph("delivered", include_external_packages=True, exclude_type_checking_imports=True)
    room = {"delivered.spark", *graph.find_descendants("delivered.spark")}
    edge = {
        m for name in ("pyspark", "delivered.spark.internals") for m in graph.find_modules_that_directly_import(name)
    }
    assert room - edge == set(WITHOUT_PYSPARK)


def test_one_module_asks_for_the_version_of_spark() -> None:
    """`delivered.spark` does before anything of pyspark is imported, for a Spark that is too old."""
    ask = set()
    for file in [*SOURCE.rglob("spark/**/*.py"), SOURCE / "entry.py"]:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        orders = [n for n in nodes if isinstance(n, ast.Compare) and not isinstance(n.ops[0], ast.Is | ast.IsNot)]
        asked = ("parsed(", "version")
        if any(word in ast.unparse(n).lower() for n in orders for word in asked):
            ask.add(str(file.relative_to(SOURCE)))
    assert ask == {"spark/__init__.py", "spark/internals.py"}


def test_tests_import_helpers_and_no_other_tests() -> None:
    """Shared test code is in tests/support, or in a helper module of the folder without tests of its own."""
    tests = Path(__file__).parents[1]
    wrong = []
    for file in tests.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names += (node.module or "").split(".")
            wrong += [(file.name, n) for name in names for n in name.split(".") if n.startswith("test_")]
            if (
                isinstance(node, ast.FunctionDef)
                and not file.name.startswith("test_")
                and node.name.startswith("test_")
            ):
                wrong.append((file.name, node.name))
    assert wrong == []
