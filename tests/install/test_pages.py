"""Pages that need no server, pasted from top to bottom into an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.install.conftest import ROOT, clean

_SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _paste(page: str, folder: Path, blocks: int) -> str:
    """The output of a page's first shell blocks, in one shell; what they install is there already."""
    texts = _SHELL.findall((ROOT / "docs" / page).read_text())[:blocks]
    script = "\n".join(line for text in texts for line in text.splitlines() if not line.startswith("pip install"))
    environment = clean(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _column(output: str, name: str) -> list[int]:
    """A column of the audits' last lines, `all`."""
    names = [c.strip() for c in re.findall(r"┃ (partition .*?) ┃$", output, re.MULTILINE)[0].split("┃")]
    rows = [[c.strip() for c in row.split("│")[1:-1]] for row in re.findall(r"^│ all .*$", output, re.MULTILINE)]
    return [int(row[names.index(name)].replace(",", "")) for row in rows]


@pytest.mark.timeout(900)
@pytest.mark.matrix
def test_the_tutorial(tmp_path: Path) -> None:
    output = _paste("tutorial.md", tmp_path, blocks=5)
    assert output.count("killed\n") == 2
    assert "orders -> orders: exactly_once held" in output
    assert "again -> again: at_least_once held" in output
    assert _column(output, "delivered")[0] == 1_000
    assert _column(output, "lost") == [0, 0]
    exactly, at_least = _column(output, "duplicated")
    assert exactly == 0
    assert at_least > 0


@pytest.mark.timeout(900)
@pytest.mark.matrix
def test_replay_rebuild_and_dead_letters(tmp_path: Path) -> None:
    _paste("replay.md", tmp_path, blocks=1)
