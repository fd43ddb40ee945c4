"""docs/new-connector.md and its sink."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from docs import new_connector
from examples.toy_sink import CONNECTOR, ToyCommitter, ToySink
from typing_extensions import get_protocol_members

import delivered
from delivered.contract.connector import Factory
from delivered.contract.sink import Committer, Sink
from delivered.engine import Sinks
from delivered.engine.context import open_committers
from delivered.model.capability import Commit, Guarantee
from delivered.model.errors import UsageError
from delivered.model.identity import Scope
from delivered.pipeline.registry import connector, connectors, find_sink
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


def test_a_new_sink_has_at_most_ten_methods_and_the_page_names_them() -> None:
    rows = [row.split("|")[2:4] for row in PAGE.read_text().partition("## 8.")[2].splitlines() if row.startswith("| ")]
    families = [cells for cells in rows if "`" in cells[0]]
    assert len(families) == 3
    for bases, methods in families:
        needed: list[str] = []
        for module, names in re.findall(r"`(delivered[\w.]+)`: ((?:`\w+`(?:, )?)+)", bases):
            for name in re.findall(r"`(\w+)`", names):
                base = getattr(importlib.import_module(module), name)
                needed += base.__abstractmethods__ or get_protocol_members(base)
        listed = re.findall(r"`(\w+)`", methods)
        assert sorted(needed) == sorted(listed)
        assert len(listed) <= 10


class OldCommitter:
    """Written by the protocols of an earlier release: it derives from nothing, and has what they asked."""

    commit, was_committed = ToyCommitter.commit, ToyCommitter.was_committed
    abort, abort_orphans, close = ToyCommitter.abort, ToyCommitter.abort_orphans, Committer.close


class OldSink:
    def __init__(self, *_: Any) -> None:
        """Takes options and ledgers."""


class LacksRecords(Sink):
    capability, writer, committer = ToySink.capability, ToySink.writer, ToySink.committer

    def __init__(self, *_: Any) -> None:
        """Takes options and ledgers."""


class HasOldCommitter(ToySink):
    def committer(self, scope: Scope) -> Any:
        del scope
        return OldCommitter()


def found(name: str) -> Callable[[Path], Sink]:
    assert CONNECTOR.sinks is not None
    factory = Factory(CONNECTOR.sinks.options, f"{__name__}:{name}")
    return lambda path: replace(CONNECTOR, external_ledger=False, sinks=factory).sink(
        {"path": str(path), "ledger": "l"}
    )


@pytest.mark.parametrize(
    ("name", "why"), [("OldSink", "OldSink does not derive from .*Sink"), ("LacksRecords", "LacksRecords.*records")]
)
def test_a_sink_of_an_earlier_contract_is_refused(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"(?s)CONNECTOR_OUTDATED.*{why}.*Next: install a version"):
        found(name)(tmp_path)


def test_a_committer_of_an_earlier_contract_is_refused() -> None:
    sink = HasOldCommitter(ToySink.__new__(ToySink), None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"OldCommitter does not derive from delivered\.contract\.sink\.Committer"):
        open_committers(Sinks.one(sink, "s"), Scope("p", "s", "i"), Guarantee.EXACTLY_ONCE)


@pytest.mark.usefixtures("installed")
def test_a_connector_that_imports_what_is_missing_stops_only_who_uses_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.metadata.EntryPoint.load", load_old())
    with pytest.raises(UsageError, match=r"CONNECTOR_OUTDATED.*No module named 'delivered\.contract\.powers'"):
        connector("toy")
    assert "toy" not in connectors() and "kafka" in connectors()
    assert "left aside" in caplog.text


def load_old() -> Callable[[Any], Any]:
    from importlib.metadata import EntryPoint

    load = EntryPoint.load

    def loaded(self: EntryPoint) -> Any:
        return importlib.import_module("delivered.contract.powers") if self.name == "toy" else load(self)

    return loaded
