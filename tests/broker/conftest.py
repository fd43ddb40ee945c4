"""Which sweeps `make test` leaves to `make verify`: they take minutes and differ little from what stays."""

from __future__ import annotations

import pytest

_SWEEPS = {
    "test_upsert_deaths.py": (
        "test_a_death_at_every_point_leaves_a_state_that_was_decided",
        (
            "sqlite-arrival-delete",
            "postgres-arrival-delete",
            "mysql-arrival-delete",
            "mysql-two-phase",
            "sqlite-version-delete",
            "postgres-two-phase",
        ),
    ),
    "test_mysql_deaths.py": ("test_a_death_at_every_point_loses_and_repeats_nothing", ("one_transaction",)),
}
"""What stays: each mechanism of each database once, by appending or by key."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        test, which = _SWEEPS.get(item.path.name, ("", ()))
        if any(item.name == f"{test}[{one}]" for one in which):
            item.add_marker("matrix")
