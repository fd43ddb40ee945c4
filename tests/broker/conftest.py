"""Fixtures of tests against servers, beside those of tests/conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.broker.sink_help import Rig

from delivered.ledger import Ledger


@pytest.fixture
def opened(rig: Rig) -> Iterator[Callable[[], Ledger]]:
    """Creates ledgers of the module's `rig` as in other processes, which share only the broker."""
    made: list[Ledger] = []

    def make() -> Ledger:
        made.append(rig.ledger())
        return made[-1]

    yield make
    for one in made:
        one.close()
