"""The commands of docs/evidence.md, as an auditor runs them: with jq, sha256sum and openssl."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.decided import checkpoint, decide, pipeline
from tests.support.pages import BLOCKS, Reader
from tests.support.seals import add_seals, chain, linked

from delivered.audit.evidence import Verdict
from delivered.engine.owner import _at
from delivered.model.identity import Scope
from delivered.model.work import Owner

pytestmark = pytest.mark.skipif(not all(map(shutil.which, ("jq", "openssl"))), reason="needs jq and openssl")

_SHELL = [b for b in BLOCKS if b.page == "docs/evidence.md" and b.language == "sh"]
_BY_HAND = [b.text for b in _SHELL if "jq" in b.text]
_YAML = """
pipeline: orders
guarantee: exactly_once
checkpoint: {folder}/checkpoint
source: {{format: log, path: {folder}/in}}
sinks: [{{format: sqlite, path: {folder}/out.db, table: orders}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the file lies; the second of its four seals is broken."""
    folder = tmp_path_factory.mktemp("evidence")
    made = pipeline(folder)
    decide(made, 3, _at(Owner("owner"), psutil.Process()))
    checkpoint(made, 3)
    (folder / "orders.yaml").write_text(_YAML.format(folder=folder))
    seals = chain(4, Scope(made.name, made.sink_names[0], "incarnation-1"))
    seals[1] = replace(
        seals[1], verdict=Verdict.BROKEN, breaches=("2 records are lost",), notes=("back\\slash $HOME 'é'",)
    )
    add_seals(made, linked(seals))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        # The seals are made by hand: tests/spark/test_evidence.py compares real ones with source and sink.
        swap = {"evidence.json orders.yaml": "evidence.json orders.yaml --recompute none"}
        reader = Reader(folder, lambda name: None, monkeypatch, swap=swap)
        for block in (b for b in _SHELL if b.text not in _BY_HAND):
            reader.read(block)
        assert "the signature is of that key" in reader.said[-2]
        assert "the ledger has the same seals 0 to 3" in reader.said[-1]
    return folder


def by_hand(folder: Path) -> list[str]:
    """What each block by hand prints, errors among it."""
    return [
        subprocess.run(["bash", "-c", text], cwd=folder, stdout=-1, stderr=subprocess.STDOUT, text=True).stdout
        for text in _BY_HAND
    ]


def findings(said: list[str]) -> list[str]:
    """What is wrong, by what the blocks say."""
    says, file, hashes, links, batches, signature = said
    found = [] if "broken" in says else ["no broken seal"]
    found += [] if len(set(file.split())) == 1 else ["file"]
    found += [] if hashes == "same hashes\n" else ["hashes"]
    found += [] if links.startswith("same chain\n") else ["chain"]
    found += [] if links.endswith("true\n") else ["numbers"]
    found += [] if batches == "true\n" else ["batches"]
    return found + ([] if "Verified Successfully" in signature else ["signature"])


def test_by_hand_a_file_is_intact(folder: Path) -> None:
    says = by_hand(folder)
    assert findings(says) == []
    assert says[0].splitlines() == [
        "orders: seals 0 to 3, newest in the ledger 3",
        *("10", "19", "broken", "true", "2 records are lost"),
    ]


def drop(data: dict[str, Any], at: int) -> None:
    for name in ("seals", "sha256"):
        del data["sinks"][0][name][at]


def swap(data: dict[str, Any]) -> None:
    for name in ("seals", "sha256"):
        values = data["sinks"][0][name]
        values[1], values[2] = values[2], values[1]


def rewrite(data: dict[str, Any]) -> None:
    seals = data["sinks"][0]["seals"]
    seals[1] = seals[1].replace("2 records", "0 records")


def plan(data: dict[str, Any]) -> None:
    data["plan"]["mechanism"] = "none"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (rewrite, ["file", "hashes", "chain", "signature"]),
        (lambda data: drop(data, 2), ["file", "chain", "numbers", "batches", "signature"]),
        (lambda data: drop(data, 3), ["file", "numbers", "signature"]),
        (swap, ["file", "chain", "numbers", "batches", "signature"]),
        (plan, ["file", "signature"]),
    ],
    ids=["changed", "missing", "cut off", "reordered", "plan"],
)
def test_by_hand_a_change_is_found(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], found: list[str]
) -> None:
    data = json.loads((folder / "evidence.json").read_text())
    change(data)
    (tmp_path / "evidence.json").write_text(json.dumps(data, indent=2))
    shutil.copy(folder / "key.pub", tmp_path)
    assert findings(by_hand(tmp_path)) == found


def test_the_page_names_every_verdict() -> None:
    page = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()
    assert set(re.findall(r"^\| `?(held|broken|unknown|never audited)", page, re.MULTILINE)) == {
        *(v.value for v in Verdict),
        "never audited",
    }
