"""When a standalone cluster's application counts as forgotten."""

from __future__ import annotations

import pytest

from delivered.model.patience import LOST_S, Loss


@pytest.mark.parametrize(
    ("looks", "final"),
    [
        pytest.param([(0, 0), (0, 10 * LOST_S)], False, id="waits for its first executors"),
        pytest.param([(2, 0), (0, 5), (0, 5 + LOST_S - 1)], False, id="not long enough"),
        pytest.param([(2, 0), (0, 5), (0, 5 + LOST_S)], True, id="lost"),
        pytest.param([(2, 0), (0, 5), (1, 9), (0, 10), (0, 5 + LOST_S)], False, id="one came back meanwhile"),
        pytest.param([(2, 0), (0, 5, 0), (0, 5 + LOST_S, 0)], False, id="no job needs them"),
        pytest.param([(2, 0), (0, 5, 0), (0, 5 + LOST_S), (0, 5 + 2 * LOST_S)], True, id="the next job waits"),
        pytest.param([(2, 0), (0, 5), (1, 9), (0, 10), (0, 10 + LOST_S)], True, id="lost again"),
    ],
)
def test_executors_that_were_there_and_stay_away(looks: list[tuple[float, ...]], final: bool) -> None:
    """Looks: executors, time, and jobs (default: one)."""
    loss = Loss()
    *before, last = [loss.is_final(int(count), int(*jobs or [1]), now) for count, now, *jobs in looks]
    assert (any(before), last) == (False, final)
