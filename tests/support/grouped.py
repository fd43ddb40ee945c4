"""What tests of one group share in a process of `pytest -n`, ended with the group's last test there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

GROUP = "xdist_group"
_shared: list[Callable[[], None]] = []


def end_with_group(request: Any) -> None:
    """Called by a fixture of the whole session: a broker or a Spark session takes 2 to 7 % of a processor when idle.

    A test of another group that asks for it later gets a new one.
    """
    _shared.append(partial(request._fixturedef.finish, request))


def end_after(item: pytest.Item, following: pytest.Item | None) -> None:
    """Once a test and its fixtures are done: end what its group shared, unless the following one is of that group."""
    group, other = (None if one is None else one.get_closest_marker(GROUP) for one in (item, following))
    if group is not None and other is not None and group != other:
        while _shared:
            _shared.pop()()
