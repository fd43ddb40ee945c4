"""The shop of examples/shop in small: everything is killed, and the books balance; without the inbox they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.shop.run import run


@pytest.mark.matrix
def test_the_books_balance_though_everything_is_killed(tmp_path: Path) -> None:
    result = run(tmp_path, 25, "", 7, print)
    assert result.clean, result
    verdict = result.verdict
    assert (verdict.lost, verdict.doubled, verdict.stuck, verdict.balance) == (0, 0, 0, 0)
    assert verdict.orders == 145
    assert verdict.mails == verdict.paid > 50
    assert verdict.compensated == verdict.orders - verdict.paid > 0
    assert {"postgres", "kafka"} <= set(result.kills)
    assert sum(result.kills.values()) > 6


@pytest.mark.matrix
@pytest.mark.parametrize("without", ["inbox", "keys"])
def test_the_judge_sees_what_is_missing(without: str, tmp_path: Path) -> None:
    verdict = run(tmp_path, 25, without, 7, print).verdict
    assert verdict.doubled > 0
    assert not verdict.clean
    assert bool(verdict.balance) is (without == "keys")
