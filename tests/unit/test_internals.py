"""Spark's internals are touched in one file, and pyspark is imported at the edge alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from tests.support.interpreter import SOURCE

OWN = SOURCE / "spark" / "internals.py"
ROOMS = ("spark", "audit/spark", "cli", "entry.py", "operate", "pipeline")
"""Where objects of PySpark are at hand."""
PUBLIC = re.compile(
    r"pyspark(\.errors|\.sql(\.(types|functions|window|datasource|streaming(\.(datasource|listener|query|readwriter))?))?)?"
)
"""Modules of PySpark's public API."""
NOT_PRIVATE = {"_exit", "_replace", "_asdict", "_repr_html_"}
JAVA = re.compile(r"_j[a-z]\w*|_gateway|_sc|_write_proto|_write_stream")


def in_rooms(path: Path) -> bool:
    name = str(path.relative_to(SOURCE))
    return any(name == room or name.startswith(f"{room}/") for room in ROOMS)


def private(tree: ast.AST, *, of_spark: bool) -> Iterator[str]:
    """Private attributes of others, by name or by a text given to getattr and its like.

    Args:
        of_spark: each may be one of PySpark's; otherwise only names that nobody else has.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name("self" | "cls"), _) | ast.Attribute(ast.Call(ast.Name("super")), _):
                continue
            case ast.Attribute(_, name):
                pass
            case ast.Call(ast.Name("getattr" | "hasattr" | "setattr"), [_, ast.Constant(str(name)), *_]):
                pass
            case _:
                continue
        hidden = name.startswith("_") and not name.startswith("__") and name not in NOT_PRIVATE
        if hidden and (of_spark or JAVA.fullmatch(name)):
            yield f"line {getattr(node, 'lineno', 0)}: {name}"


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules of PySpark, imported by statement or by name."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)):
                yield module
            case ast.Import(names):
                yield from (n.name for n in names)
            case ast.Call(ast.Name("import_module"), [ast.Constant(str(module)), *_]):
                yield module
            case ast.Call(ast.Name("import_module"), [ast.JoinedStr([ast.Constant(str(start)), *_]), *_]):
                yield start


def test_internals_of_spark_are_touched_in_one_file() -> None:
    """What is found belongs into spark/internals.py."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path == OWN or not (in_rooms(path) or "spark" in text or JAVA.search(text)):
            continue
        tree = ast.parse(text)
        modules = [m for m in imported(tree) if m.split(".")[0] in ("pyspark", "py4j") and not PUBLIC.fullmatch(m)]
        found += [f"{path}: {use}" for use in (*private(tree, of_spark=in_rooms(path)), *modules)]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "frame._jdf.schema()",
        "getattr(spark, '_jvm', None)",
        "hasattr(writer, '_write_proto')",
        "x = query._jsq",
        "writer._spark.conf",
    ],
)
def test_the_search_finds_private_access(code: str) -> None:
    assert list(private(ast.parse(code), of_spark=True))


@pytest.mark.parametrize(
    "code",
    [
        "from pyspark.sql.pandas.types import to_arrow_schema",
        "import pyspark.daemon",
        "import_module('pyspark.cloudpickle')",
        "import_module(f'pyspark.sql.{kind}.dataframe')",
        "from py4j.java_gateway import JavaObject",
    ],
)
def test_the_search_finds_modules_that_are_not_public(code: str) -> None:
    (module,) = imported(ast.parse(code))
    assert not PUBLIC.fullmatch(module)


def test_pyspark_is_imported_at_the_edge_alone() -> None:
    graph = grimp.build_graph("delivered", include_external_packages=True, exclude_type_checking_imports=True)
    edge = ("delivered.spark", "delivered.audit.spark")
    found = {m for m in graph.find_modules_that_directly_import("pyspark") if not m.startswith(edge)}
    assert found == set()
