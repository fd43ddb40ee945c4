"""`make totals`, in small."""

from __future__ import annotations

from pathlib import Path

from examples.totals import events, run


def test_totals_equal_a_recomputation_to_the_cent(tmp_path: Path) -> None:
    table = events(6_000)
    result = run("update", table, ("commit.decide:after@batch=3", "log:before@batch=7"), tmp_path, print)
    assert (result.kills, result.missing, result.extra, result.different) == (2, 0, 0, 0)
    assert result.recomputed_equal
    assert result.rows > 100
