"""The commands of docs/evidence.md, as an auditor runs them: with jq, sha256sum and openssl."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.orders import DELETE, Orders
from tests.support.pages import BLOCKS, Reader
from typer.testing import CliRunner

import delivered
from delivered.audit.evidence import Verdict
from delivered.audit.evidence_file import sign
from delivered.cli.main import app

pytestmark = pytest.mark.skipif(not all(map(shutil.which, ("jq", "openssl"))), reason="needs jq and openssl")

_SHELL = [b for b in BLOCKS if b.page == "docs/evidence.md" and b.language == "sh"]
_BY_HAND = [b.text for b in _SHELL if "jq" in b.text]
_YAML = """
pipeline: orders
guarantee: exactly_once
checkpoint: {folder}/checkpoint
source: {{format: log, path: {folder}/log, startingOffsets: earliest}}
sinks: [{{format: sqlite, path: {folder}/orders.db, table: orders, ifNotExists: true}}]
"""


def test_the_example_is_intact_and_signed() -> None:
    docs = Path(__file__).parents[2] / "docs"
    file, key = docs / "evidence-example.json", docs / "evidence-example.pub"
    done = CliRunner().invoke(app, ["evidence", "check", str(file), "--key", str(key)])
    assert done.exit_code == 0 and "intact" in done.output, done.output
    assert "not checked" not in done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the file lies; the second of its four seals is broken."""
    orders = Orders(tmp_path_factory.mktemp("evidence"))
    folder = orders.folder
    (folder / "orders.yaml").write_text(_YAML.format(folder=folder))
    for batch in range(4):
        orders.run()
        if batch == 1:
            orders.sql(DELETE.format(25))
        delivered.Pipeline.from_file(folder / "orders.yaml").audit()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        reader = Reader(folder, lambda name: None, monkeypatch)
        for block in (b for b in _SHELL if b.text not in _BY_HAND):
            reader.read(block)
        assert "the signature is of that key" in reader.said[-2]
        assert "the ledger has the same seals 0 to 3" in reader.said[-1]
        assert "batches 0 to 3: verified again" in reader.said[-1]
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
        *("1", "1", "broken", "true", "1 records are lost; exactly_once promises none"),
    ]


def test_by_hand_a_file_with_batches_that_were_sealed_again_is_intact(folder: Path, tmp_path: Path) -> None:
    made = delivered.Pipeline.from_file(folder / "orders.yaml")
    made.audit(full=True)
    evidence = sign(made.evidence(), (folder / "key.pem").read_bytes(), "key.pem")
    assert [len(chain.seals) for chain in evidence.chains] == [5]
    (tmp_path / "evidence.json").write_text(evidence.text)
    shutil.copy(folder / "key.pub", tmp_path)
    assert findings(by_hand(tmp_path)) == []


def drop(data: dict[str, Any], at: int) -> None:
    for name in ("seals", "sha256"):
        del data["sinks"][0][name][at]


def swap(data: dict[str, Any]) -> None:
    for name in ("seals", "sha256"):
        values = data["sinks"][0][name]
        values[1], values[2] = values[2], values[1]


def rewrite(data: dict[str, Any]) -> None:
    seals = data["sinks"][0]["seals"]
    seals[1] = seals[1].replace("1 records are lost", "0 records are lost")


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
