"""Every value through every path: exact, refused as bad row, or refused at start. The outcomes are in docs/types.json.

CATALOGUE=store writes what happened there; `make docs` then makes docs/types.md of it.
"""

from __future__ import annotations

import pytest
from docs import value_types as types
from tests.support.catalogue.paths import MESSAGES, PATHS, ROLES, TABLES
from tests.support.catalogue.run import cells, name_cells
from tests.support.catalogue.stored import NOT_STORED, compare
from tests.support.catalogue.values import COLUMNS, KINDS, NAMES
from tests.support.sweeps import sweep

QUICK = (
    "sqlite append", "postgres one_transaction append", "postgres two_phase upsert", "mysql one_transaction append",
    "mysql two_phase upsert", "delta append", "iceberg append", "files parquet", "files json", "files csv",
    "delta partition", "kafka value", "kafka name", "rabbitmq key",
)  # fmt: skip
"""One path to each encoder. The others share it with one of these."""
QUICK_NAMES = ("sqlite append",)


@pytest.mark.parametrize("path", sweep(PATHS, lambda name: name in QUICK))
def test_each_value_is_exact_or_refused(request: pytest.FixtureRequest, path: str) -> None:
    compare("values", path, cells(PATHS[path](request), KINDS))


@pytest.mark.parametrize("path", sweep(TABLES, lambda name: name in QUICK_NAMES))
def test_each_name_is_taken_or_refused(request: pytest.FixtureRequest, path: str) -> None:
    compare("names", path, name_cells(TABLES[path](request), COLUMNS, NAMES))


def test_the_catalogue_is_complete() -> None:
    stored = types.stored()
    assert set(stored["values"]) | NOT_STORED["values"] == set(PATHS) == {*TABLES, *ROLES, *MESSAGES}
    assert set(stored["names"]) | NOT_STORED["names"] == set(TABLES)
    for kinds in stored["values"].values():
        assert list(kinds) == [k.name for k in KINDS]
