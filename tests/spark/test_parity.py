"""Every row of docs/connectors/kafka-parity.md, run by our Kafka connector and by Spark's own in one session.

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


def _params(ours: bool) -> list[Any]:
    return [
        pytest.param(
            row,
            id=f"{row.scenario.split('@')[0]}: {row.what}",
            marks=[] if ours and not row.matrix else [pytest.mark.matrix],
        )
        for row in rows()
    ]


@pytest.mark.parametrize("row", _params(ours=True))
def test_behaviour(row: Row, observe: Observe) -> None:
    assert observe(OURS, row.scenario)[row.what] == row.ours, f"the page says {row.verdict}"


@pytest.mark.parametrize("row", _params(ours=False))
def test_behaviour_of_sparks_own(row: Row, observe: Observe, sparks_own_kafka: bool) -> None:
    """It changes with Spark's version, hence not in `make test`."""
    if not sparks_own_kafka:
        pytest.skip("Spark's own Kafka connector cannot be had")
    assert observe(SPARK, row.scenario)[row.what] == row.spark
