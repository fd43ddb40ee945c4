"""README and "Start with Kafka", pasted from top to bottom into an empty folder, show what they say they show."""

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


@pytest.mark.matrix
def test_sixty_seconds_print_what_readme_shows(installed: Callable[[str], Installed], tmp_path: Path) -> None:
    env = installed("spark")
    readme = (ROOT / "README.md").read_text()
    (commands,) = (text for kind, text in _BLOCK.findall(readme) if text.startswith("pip install") and kind == "sh")
    said = [env.run(*line.partition("#")[0].split(), cwd=tmp_path) for line in commands.splitlines()[1:]]
    file = tmp_path / "delivered-example" / "orders.yaml"
    sink = '  - {format: rabbitmq, url: "amqp://localhost", exchange: orders, ledger: ledger.db}\n'
    text = file.read_text()
    other = text[: text.index("  - format: sqlite")] + sink + text[text.index("audit:") :]
    file.with_name("other.yaml").write_text(other)
    refused = env.run("delivered", "plan", "delivered-example/other.yaml", cwd=tmp_path, code=2)
    shown = re.findall(r"```text\n(.*?)```", readme, re.DOTALL)
    assert len(shown) == 3
    for text, output in zip(shown, (said[1], said[3], refused), strict=True):
        printed = {" ".join(re.split(r"[\s┃│]+", line)) for line in output.splitlines()}
        missing = [line for line in text.splitlines() if " ".join(re.split(r"[\s┃│]+", line)) not in printed]
        assert missing == [], output


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
    path = (ROOT / "docs" / "start-kafka.md").read_text().replace("9092", str(port))
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
