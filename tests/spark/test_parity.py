"""Every row of docs/connectors/kafka.md, run by Spark's own Kafka connector and by ours in one session.

A row fails if either of the two does something else than the page says: also where a difference is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.parity import scenarios
from tests.parity.behaviours import Row, rows
from tests.parity.world import OURS, SPARK, Connector, Facts, World

Observe = Callable[[Connector, str], Facts]


@pytest.fixture(scope="module")
def observe(spark: Any, kafka: Any, tmp_path_factory: pytest.TempPathFactory) -> Observe:
    """What a scenario observes of a connector; it runs once, whatever number of rows it has."""
    folder = tmp_path_factory.mktemp("parity")
    worlds = {c.format: World(spark, kafka, folder, c) for c in (SPARK, OURS)}
    seen: dict[tuple[str, str], Facts | Exception] = {}

    def look(connector: Connector, asked: str) -> Facts:
        key = connector.format, asked
        if key not in seen:
            scenario, *more = asked.split("@")
            try:
                seen[key] = getattr(scenarios, scenario)(worlds[connector.format], *more)
            except Exception as error:
                seen[key] = error
        found = seen[key]
        if isinstance(found, Exception):
            raise found
        return found

    return look


def _params() -> list[Any]:
    return [
        pytest.param(
            row, id=f"{row.scenario.split('@')[0]}: {row.what}", marks=[pytest.mark.matrix] if row.matrix else []
        )
        for row in rows()
    ]


@pytest.mark.parametrize("row", _params())
def test_behaviour(row: Row, observe: Observe, sparks_own_kafka: bool) -> None:
    if sparks_own_kafka:
        assert observe(SPARK, row.scenario)[row.what] == row.spark, "Spark's own connector"
    assert observe(OURS, row.scenario)[row.what] == row.ours, f"ours; the page says {row.verdict}"
