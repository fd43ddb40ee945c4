"""docs/threat-model.md: each promise names a test, and each named test exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_named_test_exists(file: str, test: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_promise_names_a_test() -> None:
    rows = [
        line for line in PAGE.splitlines() if line.startswith("| ") and not re.match(r"\| (tries|happens) \|", line)
    ]
    assert len(rows) >= 20
    assert [row for row in rows if "::test_" not in row] == []


def test_the_security_policy_links_it() -> None:
    assert "(docs/threat-model.md)" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
