"""Marks for sweeps that take minutes and differ little from what stays in `make test`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sweep(every: Iterable[Any], keep: Callable[..., bool]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`; `make verify` alone runs those that `keep` does not want.

    Args:
        every: values, or tuples of them.
        keep: whether `make test` runs it, too; takes what a test takes.
    """
    given = [v if isinstance(v, tuple) else (v,) for v in every]
    return [pytest.param(*v, marks=() if keep(*v) else pytest.mark.matrix) for v in given]


def occurrences(nth_max: int) -> Any:
    """Mark: how often a crash point is passed before the crash, up to `nth_max` times; `make test` takes the first."""
    return pytest.mark.parametrize("nth_max", sweep([1, nth_max], lambda n: n == 1), ids=["first", "all"])


def once_each(names: Iterable[str]) -> list[Any]:
    """Databases by way to commit; `make test` takes each database and each way once.

    For what both ways share in a database: conformance/test_sinks.py drives all four sinks.
    """
    return sweep(names, lambda name: name not in ("postgres-two-phase", "mysql-one-transaction"))


KAFKA_CLIENTS = sweep(["librdkafka", "arrow"], lambda client: client == "arrow")
"""Of Kafka's connector. `make test` runs the fall-back through conformance and what its transactions rest on."""
