"""Rows of docs/connectors/kafka-parity.md that need no session, and the format of all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.parity import scenarios
from tests.parity.behaviours import AREAS, Differs, rows
from tests.parity.world import OURS, World


def test_options_of_our_stream() -> None:
    world: Any = World(None, None, Path(), OURS)
    said = {row.what: row.ours for row in rows() if row.scenario == "options_stream"}
    assert scenarios.options_stream(world) == said


def test_every_difference_is_one_and_has_a_reason() -> None:
    for scenario, area in AREAS.items():
        assert callable(getattr(scenarios, scenario))
        for what, fact in area.facts.items():
            if isinstance(fact, Differs):
                assert fact.spark != fact.ours, (scenario, what)
                assert fact.why.endswith((".", ")")), (scenario, what, fact.why)


def test_rows_have_names_of_their_own() -> None:
    named = [(row.scenario, row.what) for row in rows()]
    assert len(set(named)) == len(named)
