"""Which record batches of a log are those that a producer sent."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from delivered.clients.kafka import transactions
from delivered.clients.kafka.consumer import BatchHeader, headers
from delivered.clients.kafka.record_batch import HEADER_BYTES, SEQUENCES

HALF = SEQUENCES // 2
MARKER = 0x30
"""Flags of a control batch in a transaction."""


def batch(offset: int, sequence: int, count: int = 10, flags: int = 0x10, producer: int = 7) -> bytes:
    fixed = (offset, HEADER_BYTES - 12, 0, 2, 0, flags, count - 1, 0, 0, producer, 0, sequence, count)
    return struct.pack(">qiibIhiqqqhii", *fixed)


def is_in(log: bytes, sequence: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a batch of ten records is found in a log that is returned once."""
    answers = [log]
    monkeypatch.setattr(transactions, "find_leader", lambda *_: SimpleNamespace(node=1, epoch=0))
    monkeypatch.setattr(transactions, "Response", lambda body: SimpleNamespace(error=0, records=body))

    def post(*_: object) -> Any:
        return SimpleNamespace(body=lambda _: answers.pop() if answers else b"")

    sent: BatchHeader = next(headers(batch(0, sequence)))
    return transactions._is_in_log(SimpleNamespace(post=post), ("t", 0), sent, 0, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("sequence", [0, HALF - 5, HALF + 5, SEQUENCES - 5])
def test_a_marker_of_the_producer_is_not_what_it_sent(sequence: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence of a marker is -1, which lies before as well as behind others in a circle."""
    marker = batch(0, -1, 1, MARKER)
    assert not is_in(marker, sequence, monkeypatch)
    assert is_in(marker + batch(1, sequence), sequence, monkeypatch)


def test_a_batch_is_found_behind_others_and_inside_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    others = batch(0, 0) + batch(10, 20, producer=8)
    assert is_in(others + batch(20, 10, 20), 20, monkeypatch)
    assert not is_in(others + batch(20, 30), 20, monkeypatch), "a later one is stored, and this one is missing"
    assert not is_in(others + batch(20, 20)[:-1], 20, monkeypatch), "cut off"
