"""What `delivered plan` says of files and options that cannot run: message and exit code, as they are; and soon."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from tests.support.bad_files import FILES, option_files
from typer.testing import CliRunner

from delivered.cli.main import app

GOLDEN = Path(__file__).parent / "golden_bad_files.txt"
CASES = {**FILES, **dict(option_files())}
SECRET = "hunter2"
CPU_S_MAX = 5.0
"""Of one plan; the process's own time, as others may use the machine."""


def refusal(text: str, folder: Path) -> str:
    (folder / "p.yaml").write_text(text, encoding="utf-8")
    began = time.process_time()
    result = CliRunner().invoke(app, ["plan", "p.yaml"])
    assert time.process_time() - began < CPU_S_MAX
    assert isinstance(result.exception, SystemExit), result.exception
    text = f"exit {result.exit_code}\n{result.stdout}{result.stderr}".rstrip()
    return re.sub(r"([Kk]nown: |with the keys ).*", r"\1...", text)  # these lists grow


def said() -> dict[str, str]:
    """By case, as stored."""
    parts = GOLDEN.read_text(encoding="utf-8").split("\n## ")[1:]
    return {name: text.strip() for name, _, text in (part.partition("\n") for part in parts)}


def test_each_bad_file_is_refused_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DELIVERED_GOLDEN=write stores what is said now."""
    monkeypatch.chdir(tmp_path)
    found = {name: refusal(text, tmp_path).replace(str(tmp_path), "HERE") for name, text in CASES.items()}
    if os.environ.get("DELIVERED_GOLDEN") == "write":
        stored = "\n\n".join(f"## {name}\n{text}" for name, text in found.items())
        GOLDEN.write_text(f"What `delivered plan` says of each case of bad_files.py.\n\n{stored}\n", encoding="utf-8")
    expected = said()
    assert list(expected) == list(found)
    assert len(found) >= 100
    for name, text in found.items():
        assert text == expected[name], name


def test_each_is_a_usage_error_with_a_code_and_no_secret() -> None:
    for name, text in said().items():
        assert text.startswith("exit 2\n"), name
        assert "DELIVERED_" in text, name
        assert "Traceback" not in text, name
        assert SECRET not in text, name
