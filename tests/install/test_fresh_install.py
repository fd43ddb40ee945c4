"""`pip install "delivered[...]"` without the lock, with the newest or the lowest dependencies."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.install.conftest import ROOT, Installed, clean, uv

from delivered.model.errors import EXTRA_OF

EXTRAS = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
_IN_CI = ("",)
_PIPELINE = re.compile(r"```python\n(pipeline = delivered\.Pipeline\(.*?)print\(pipeline\.plan", re.DOTALL)
_FILE = re.compile(r"<<'END'\n(pipeline: orders\n.*?)END\n", re.DOTALL)
_IMPORTS = """
import importlib, pkgutil, sys
import delivered, delivered_lab
from delivered.model.errors import MissingExtra
packages = (delivered, delivered_lab)
for found in (m for p in packages for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}.")):
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        print(error.name.partition(".")[0])
    except MissingExtra:
        pass  # it names the extra itself
"""


@pytest.mark.parametrize(
    "extra", [pytest.param(e, marks=() if e in _IN_CI else pytest.mark.matrix, id=e or "none") for e in ("", *EXTRAS)]
)
def test_each_extra_alone(extra: str, installed: Callable[[str], Installed], tmp_path: Path) -> None:
    here = tmp_path / "work"
    here.mkdir()
    env = installed(extra)
    assert "Usage" in env.run("delivered", "--help", cwd=here)
    assert re.fullmatch(r"delivered \d.*\n", env.run("delivered", "--version", cwd=here))
    with_spark = extra in ("spark", "connect")
    said = env.run("delivered", "doctor", cwd=here, code=0 if with_spark else 1)
    assert ('pip install "delivered[spark]"' in said) is not with_spark, "brackets are no markup"
    assert ('pip install "delivered[kafka]"' in said) is (extra != "kafka")
    # Every missing module that is imported anywhere belongs to an extra.
    assert set(env.run("python", "-c", _IMPORTS, cwd=here).split()) <= set(EXTRA_OF)

    can_run = extra == "spark"
    said = env.run("delivered", "init", cwd=here, code=0 if can_run else 2)
    if can_run:
        said = env.run("delivered", "plan", "delivered-example/orders.yaml", cwd=here)
        assert "orders: exactly_once by ledger row" in said
    else:
        assert 'pip install "delivered[spark]"' in said
        assert list(here.iterdir()) == [], "nothing is left of an example that cannot run"
    page = (ROOT / "docs" / "start-kafka.md").read_text()
    pipeline, file = _PIPELINE.search(page), _FILE.search(page)
    assert pipeline is not None
    assert file is not None
    (here / "orders.yaml").write_text(file.group(1))
    (here / "snippet.py").write_text(f"import delivered\n{pipeline.group(1)}print(pipeline.plan(offline=True))")
    for command in (("delivered", "plan", "--offline", "orders.yaml"), ("python", "snippet.py")):
        assert "orders: exactly_once by two-phase commit" in env.run(*command, cwd=here)
    if extra != "kafka":
        assert 'pip install "delivered[kafka]"' in env.run("delivered", "plan", "orders.yaml", cwd=here, code=2)


@pytest.mark.matrix
def test_the_example_of_a_fresh_install_runs(installed: Callable[[str], Installed], tmp_path: Path) -> None:
    env = installed("spark")
    env.run("delivered", "init", cwd=tmp_path)
    said = env.run("delivered", "run", "delivered-example/orders.yaml", cwd=tmp_path)
    assert "4 batches, 1,000 records" in said


@pytest.mark.matrix
@pytest.mark.timeout(3_600)
def test_the_lowest_versions_that_are_allowed(wheel: Path, tmp_path: Path) -> None:
    """The fast tests with the lowest version of each direct dependency; transitive ones are new."""
    env, locked = ROOT / "build" / "lowest", tmp_path / "lowest.txt"  # accessible to tests that run as other users
    extras = [x for extra in EXTRAS for x in ("--extra", extra)]
    lowest = ("--resolution", "lowest-direct", "--python-version", "3.11", "--output-file", locked)
    uv("pip", "compile", "--quiet", *lowest, *extras, "pyproject.toml")
    assert re.search(r"^pyspark==4\.2\.0", locked.read_text(), re.MULTILINE)
    uv("venv", "--quiet", "--clear", "--python", "3.11", env)
    tools = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "uv")
    uv("pip", "install", "--quiet", "--python", env, "-r", locked, *tools)
    uv("pip", "install", "--quiet", "--python", env, "--no-deps", wheel)  # its entry points
    fast = ("tests/unit", "tests/property", "tests/crash/test_crash_points.py")
    without = "not object_store and not object_in"  # moto is a development dependency
    others = [f"--ignore=tests/unit/test_{n}.py" for n in ("rooms", "tools")]  # of the repository, by grimp
    done = subprocess.run(
        [env / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", *fast, *others, "-k", without],
        cwd=ROOT,
        env=clean(PYTHONPATH=str(ROOT / "src")),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr[-2_000:]
