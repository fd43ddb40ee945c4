"""Shares of the keys: how they are named, which one comes next, and how likely a wrong key is found."""

from __future__ import annotations

import math

import pytest

from delivered.audit.evidence import Counts
from delivered.audit.request import KeyCheck, KeyShare
from delivered.model.errors import UsageError


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("1/1000", KeyShare(0, 1000)),
        (" 7/1,000 ", KeyShare(7, 1000)),
        ("#1/1_000", KeyShare(1, 1000)),
        ("1000/1000", KeyShare(1000, 1000)),
        ("#1/1", KeyShare(1, 1)),
    ],
)
def test_a_share_is_named_as_a_fraction(text: str, share: KeyShare) -> None:
    assert KeyShare.parse(text) == share
    assert KeyShare.parse(share.text) == share


@pytest.mark.parametrize("text", ["", "7", "0/5", "6/5", "1/0", "1/1000001", "-1/5", "1/,", "a/b", "1/5/5", "0.1"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="AUDIT_KEYS"):
        KeyShare.parse(text)


def test_every_share_comes_once_before_the_first_one_comes_again() -> None:
    audits = [{"sink": "rows", "verdict": "held"}, {"sink": "other", "keys": {"share": 2, "of": 7}}]
    numbers = []
    for _ in range(15):
        share = KeyShare.parse("1/7").after(audits, "rows", seed="inc/12")
        numbers.append(share.number)
        audits += [{"sink": "rows", "keys": {"share": share.number, "of": 7}}]
        audits += [{"sink": "rows", "keys": {"share": 3, "of": 5}}]  # of other shares
    assert sorted(numbers[:7]) == sorted(numbers[7:14]) == [1, 2, 3, 4, 5, 6, 7]
    assert numbers[7] == numbers[0]
    assert KeyShare.parse("3/7").after(audits, "rows", "") == KeyShare(3, 7)


def test_without_a_history_the_newest_batch_chooses_the_share() -> None:
    numbers = {KeyShare(0, 1000).after([], "rows", f"inc/{batch}").number for batch in range(100)}
    assert len(numbers) > 80
    assert KeyShare(0, 1000).after([], "rows", "inc/5") == KeyShare(0, 1000).after([], "rows", "inc/5")


def test_the_probability_that_wrong_keys_are_found() -> None:
    share = KeyShare(7, 1000)
    assert math.isclose(share.found(1), 0.001)
    assert math.isclose(share.found(1000), 1 - 0.999**1000)
    assert KeyShare(1, 1).found(1) == 1
    check = KeyCheck.of_counts(share, Counts(sent=50, delivered=51, lost=1, unexpected=2), "from here")
    assert check.compared == 52
    assert check.to_json()["probability_found"] == {
        "1": 0.001,
        "10": 0.00995512,
        "100": 0.095207853,
        "1000": 0.632304575,
    }
    assert "1: 0.1 %, 10: 0.996 %, 100: 9.52 %, 1,000: 63.2 %" in "\n".join(check.lines())
    assert "100: > 99.9 %" in KeyCheck(KeyShare(1, 10)).lines()[1]
    assert "1: 100 %" in KeyCheck(KeyShare(1, 1)).lines()[1]
