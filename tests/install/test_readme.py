"""README, pasted from top to bottom into an empty folder, shows records arriving."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.install.conftest import ROOT, Installed, clean

from delivered_lab.brokers import cache_folder
from delivered_lab.brokers.servers import free_ports

_BLOCK = re.compile(r"```(sh|python)\n(.*?)```", re.DOTALL)


@pytest.mark.timeout(900)
@pytest.mark.matrix
def test_pasted_from_top_to_bottom(installed: Callable[[str], Installed], tmp_path: Path) -> None:
    env = installed("spark,kafka")  # the line that installs from the index installs this
    here, cache = tmp_path / "work", tmp_path / "cache"
    here.mkdir()
    cache.mkdir()
    for fetched in cache_folder().iterdir():
        if fetched.name != "data":
            (cache / fetched.name).symlink_to(fetched)
    (port,) = free_ports(1)
    readme = (ROOT / "README.md").read_text()
    path = readme[readme.index("## Try it") : readme.index("## Comparison")].replace("9092", str(port))
    blocks = [(kind, text) for kind, text in _BLOCK.findall(path)]
    assert [k for k, _ in blocks] == ["sh", "python", "python", "sh"]
    shells = [text for kind, text in blocks if kind == "sh"]
    python = "".join(text for kind, text in blocks if kind == "python")
    assert shells[0].splitlines()[0] == 'pip install "delivered[spark,kafka]"'
    environment = clean(DELIVERED_CACHE=str(cache), PATH=f"{env.folder / 'bin'}:{os.environ['PATH']}")

    def paste(program: str, text: str) -> str:
        done = subprocess.run(
            [program, "-e", "-c", text] if program == "bash" else [program, "-c", text],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        said = paste("bash", shells[0].partition("\n")[2])
        assert f"kafka is up: 127.0.0.1:{port}" in said
        assert "delivered brokers produce orders" in said, "the server says how records get in"
        said = paste("python", python)
        assert "orders: exactly_once by two-phase commit" in said
        assert "orders -> orders-clean: exactly_once held" in said
        assert re.search(r"all\W+1,000\W+1,000\W+0\W+0\W+0\W+0\W+0\W", said), said
        said = paste("bash", shells[1])
        assert "orders-clean: 2,000 committed records" in said, said
        assert "orders -> orders-clean: exactly_once held" in said
    finally:
        subprocess.run([env.folder / "bin/delivered", "brokers", "stop", "kafka"], env=environment, check=False)
