"""An earlier version of the code, from the Git history, run in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
from io import BytesIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORMAT_0 = "9fb14d38fa0aa993e51a3e8aa11a75673517b4c2"
"""The last commit whose durable records carried no format version."""


def checkout(commit: str, folder: Path) -> Path:
    """Put a commit's sources into `folder`, with its connectors installed; return the start of PYTHONPATH.

    Skips the test without a history: in a source archive or a shallow clone.
    """
    known = subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True)
    if known.returncode:
        pytest.skip(f"commit {commit[:8]} is not in this checkout: fetch the whole history")
    archive = subprocess.run(
        ["git", "archive", commit, "src", "pyproject.toml"], cwd=ROOT, capture_output=True, check=True
    )
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    # That version's connectors, not the installed ones: the first distribution of a name counts.
    installed = folder / "src" / f"delivered-{project['version']}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: delivered\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (installed / "entry_points.txt").write_text("\n".join(groups))
    return folder / "src"


def cli(source: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command line of the code in `source`: the command and its environment."""
    command = [sys.executable, "-c", "from delivered.cli.main import app; app()", *arguments]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("DELIVERED_")}
    path = os.pathsep.join(filter(None, [str(source), inherited.get("PYTHONPATH", "")]))
    return command, {**inherited, "PYTHONPATH": path}
