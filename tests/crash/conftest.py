"""Which sweeps `make test` leaves to `make verify`: they take minutes and differ little from what stays."""

from __future__ import annotations

import pytest

_SWEEPS = {
    "test_delta_crash.py": {"test_killed_once_at_each_point", "test_zombie_driver_is_fenced"},
    "test_files_crash.py": {"test_killed_once_at_each_point", "test_zombie_driver_is_fenced"},
    "test_iceberg_crash.py": {"test_killed_once_at_each_point", "test_zombie_driver_is_fenced"},
    "test_group.py": {"test_one_crash_at_every_point", "test_two_crashes"},
    "test_letters.py": {"test_one_crash_at_every_point"},
}
"""Under the weaker guarantees these are swept over memory and SQLite in `make test`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_iceberg_crash.py" and "zombie_driver" in item.name and "claim" not in item.name:
            item.add_marker("matrix")  # each starts a process that imports for seconds
        name = getattr(item, "originalname", item.name)
        if name in _SWEEPS.get(item.path.name, ()) and "exactly_once" not in item.name:
            item.add_marker("matrix")
