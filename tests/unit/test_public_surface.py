"""What `import delivered` exports, and its lack of side effects."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import delivered

HEAVY = ["pyspark", "pydantic", "pyarrow", "numpy", "confluent_kafka", "kafka", "deltalake", "psycopg", "rich", "typer"]


def loaded_by(code: str) -> set[str]:
    """Top-level modules of a fresh interpreter after `code`."""
    probe = f"import sys, json\n{code}\nprint(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    told = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(json.loads(told.stdout.splitlines()[-1]))


def test_import_loads_nothing_heavy() -> None:
    assert loaded_by("import delivered").isdisjoint(HEAVY)


def test_making_and_planning_a_pipeline_loads_neither_spark_nor_clients() -> None:
    code = (
        "import delivered\n"
        "p = delivered.Pipeline(name='orders', guarantee='exactly_once', checkpoint='/nowhere',"
        " source=delivered.log('/nowhere/log'), sinks=[delivered.sqlite('/nowhere/x.db', 'orders')])\n"
        "assert 'exactly_once by' in str(p.plan(offline=True))"
    )
    assert loaded_by(code).isdisjoint({"pyspark", "confluent_kafka", "kafka", "deltalake"})


def test_all_is_exact() -> None:
    assert delivered.__all__ == sorted(delivered.__all__)
    assert set(delivered.__all__) == set(delivered._WHERE)


@pytest.mark.parametrize("name", delivered.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(delivered, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = delivered.nothing_like_it
