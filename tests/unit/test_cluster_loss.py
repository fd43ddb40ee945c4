"""When a standalone cluster's application counts as forgotten."""

from __future__ import annotations

import pytest

from delivered.spark.cluster import LOST_S, Loss


@pytest.mark.parametrize(
    ("counts", "final"),
    [
        pytest.param([(0, 0), (0, 10 * LOST_S)], False, id="waits for its first executors"),
        pytest.param([(2, 0), (0, 5), (0, 5 + LOST_S - 1)], False, id="not long enough"),
        pytest.param([(2, 0), (0, 5), (0, 5 + LOST_S)], True, id="lost"),
        pytest.param([(2, 0), (0, 5), (1, 9), (0, 10), (0, 5 + LOST_S)], False, id="one came back meanwhile"),
        pytest.param([(2, 0), (0, 5), (1, 9), (0, 10), (0, 10 + LOST_S)], True, id="lost again"),
    ],
)
def test_executors_that_were_there_and_stay_away(counts: list[tuple[int, float]], final: bool) -> None:
    loss = Loss()
    *before, last = [loss.is_final(count, now) for count, now in counts]
    assert (any(before), last) == (False, final)
