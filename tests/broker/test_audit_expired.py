"""A first audit of a topic whose retention has removed records."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.orders import ROWS, clean, states
from tests.support.topic_orders import DAY_MS, TopicOrders

from delivered.audit.evidence import Counts, Verdict
from delivered.connectors.kafka import reader

LOST = b"%d" % (3 * ROWS + 7)


@pytest.fixture
def a_day_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the audit: the topics' retention may have removed what was just written."""
    monkeypatch.setattr(reader, "_now_ms", lambda: time.time_ns() // 1_000_000 + DAY_MS)


@pytest.mark.usefixtures("a_day_later")
def test_batches_that_retention_reached_are_unknown_and_the_others_are_judged(kafka: Any, tmp_path: Path) -> None:
    orders = TopicOrders(tmp_path, kafka=kafka)
    orders.run(5)
    orders.expire(1)
    report = orders.audit()
    assert (report.verdict, report.breaches) == (Verdict.UNKNOWN, []), report
    assert report.counts.lost == 0
    assert report.counts.sent == 3 * ROWS
    assert report.counts.earlier == report.counts.delivered - 3 * ROWS > 0
    (why,) = report.unknowns
    assert f"{orders.topic}-1: offsets 0 to" in why and "batches 0 to 1, 40 records" in why
    assert states(orders) == [(0, 1, Verdict.UNKNOWN, False), (2, 4, Verdict.HELD, True)]
    orders.run()
    later = orders.audit()
    assert (later.verdict, later.counts) == (Verdict.HELD, clean(ROWS))
    again = orders.audit(full=True)
    assert again.verdict is Verdict.UNKNOWN and again.counts.lost == 0


@pytest.mark.usefixtures("a_day_later")
def test_retention_hides_no_loss_behind_it(kafka: Any, tmp_path: Path) -> None:
    orders = TopicOrders(tmp_path, kafka=kafka, named={"name": "orders"})
    orders.run(4)
    orders.lose(LOST)
    orders.expire(1)
    report = orders.pipeline().audit()
    assert (report.verdict, report.counts.lost) == (Verdict.BROKEN, 1), report
    assert report.continuation is not None
    added = [(s.first, s.last, s.verdict, s.audited) for s in report.continuation.seals]
    assert added == [(0, 1, Verdict.UNKNOWN, False), (2, 3, Verdict.BROKEN, True)]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"retention_ms": -1}, marks=pytest.mark.matrix),
        {"retention_ms": DAY_MS, "retention_bytes": 1 << 30},
    ],
)
def test_what_no_retention_removed_is_lost(kafka: Any, tmp_path: Path, settings: dict[str, int]) -> None:
    """Without retention; younger than it, and of a shorter log."""
    orders = TopicOrders(tmp_path, kafka=kafka, settings=settings)
    orders.run(3)
    orders.expire(1)
    report = orders.audit()
    assert report.verdict is Verdict.BROKEN and report.counts.lost > 0
    assert report.counts == Counts(3 * ROWS, 3 * ROWS - report.counts.lost, lost=report.counts.lost)
