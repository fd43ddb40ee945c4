"""A wheel of this tree, installed into empty environments without the lock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def uv(*arguments: object, cwd: Path = ROOT) -> str:
    """Run uv, of the development dependencies."""
    own = Path(sysconfig.get_path("scripts"), "uv")
    program = str(own) if own.exists() else shutil.which("uv")
    assert program is not None, "uv is not installed; run `make setup`"
    done = subprocess.run([program, *map(str, arguments)], cwd=cwd, env=clean(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def clean(**more: str) -> dict[str, str]:
    """Environment variables without this tree's settings."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYSPARK_PYTHON", "PYTHONHOME")
    return {k: v for k, v in os.environ.items() if k not in hidden} | more


@dataclass(frozen=True)
class Installed:
    """An environment with only the wheel and its dependencies."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *arguments: object, cwd: Path, code: int | None = 0, **environment: str) -> str:
        """Run one of its programs; check the exit code; return standard output and error."""
        done = subprocess.run(
            [str(self.folder / "bin" / str(arguments[0])), *map(str, arguments[1:])],
            cwd=cwd,
            env=clean(**environment),
            capture_output=True,
            text=True,
            timeout=300,
        )
        said = done.stdout + done.stderr
        assert code is None or done.returncode == code, f"exit code {done.returncode}: {said}"
        return said


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: the build puts the C library next to its source."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.lib"))
    uv("build", "--wheel", "--quiet", "--out-dir", out, cwd=copy)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Callable[[str], Installed]:
    """`installed("kafka")`: the wheel with these extras and the newest dependencies; "": no extras."""

    def install(extras: str) -> Installed:
        folder = tmp_path / f"env-{extras or 'none'}"
        uv("venv", "--quiet", "--python", sys.executable, folder)
        uv("pip", "install", "--quiet", "--python", folder, f"{wheel}[{extras}]" if extras else wheel)
        return Installed(folder)

    return install
