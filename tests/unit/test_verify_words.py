"""The verifier's terms: a case runs on a fixture in an environment, under a network fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PET_WORDS = frozenset(
    {"bench", "beside", "cell", "cells", "deaths", "forgets", "ground", "lane", "mischief", "mine", "said"}
    | {"strangers", "told", "trouble"}
)
LAB = SRC / "delivered_lab"
FILES = [*(LAB / "verify").rglob("*.py"), LAB / "supervisor.py", SRC / "delivered" / "cli" / "lab.py"]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SRC)))
def test_no_pet_word_in_names_and_texts(file: Path) -> None:
    words = re.findall(r"[A-Z]?[a-z]+", file.read_text(encoding="utf-8"))
    assert not {w.lower() for w in words} & PET_WORDS
