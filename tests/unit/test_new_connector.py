"""docs/new-connector.md and its sink."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs import new_connector

import delivered
from delivered.model.capability import Commit
from delivered.model.guarantee import Guarantee
from delivered.pipeline.registry import find_sink
from delivered.planner.answer import Plan

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "new-connector.md"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's entry point, as if its package were installed."""
    entry = re.search(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert entry is not None
    group, line = entry[1].split("\n", 1)
    folder = tmp_path / "delivered_toy-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: delivered-toy\nVersion: 0.1\n")
    name = group.removeprefix("[project.entry-points.").strip('"]')
    (folder / "entry_points.txt").write_text(f"[{name}]\n{line.replace(chr(34), '')}")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_it_has_fewer_than_150_lines() -> None:
    assert len([line for line in new_connector.CODE.read_text().splitlines() if line.strip()]) < 150


def test_the_page_quotes_all_of_it_once_and_in_order() -> None:
    assert new_connector.quoted(PAGE.read_text()) == list(new_connector.definitions())


def test_the_files_that_it_names_are_there() -> None:
    table = PAGE.read_text().partition("## 7.")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(named) > 10
    assert [n for n in named if not (ROOT / n.replace("<system>", "rocketmq")).exists()] == []


@pytest.mark.usefixtures("installed")
def test_an_entry_point_is_all_that_it_needs(tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "orders"), "ledger": str(tmp_path / "ledger.db")}
    assert find_sink("delivered_toy", options).capability().commit is Commit.TWO_PHASE
    for guarantee in Guarantee:
        plan = delivered.Pipeline(
            name="orders",
            guarantee=guarantee.value,
            checkpoint=str(tmp_path / "checkpoint"),
            source=delivered.endpoint("log", path=str(tmp_path / "log")),
            sinks=[delivered.endpoint("toy", **options)],
        ).plan(offline=True)
        assert isinstance(plan, Plan), plan
        assert plan.guarantee is guarantee
