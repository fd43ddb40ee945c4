"""Which pipelines form a chain, and what a chain's report says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delivered.audit.evidence import Counts, Damage, Verdict
from delivered.audit.report import AuditReport, ChainReport, Segment
from delivered.audit.spark.chain import find_links, own_through, weakest
from delivered.contract.source import Address
from delivered.model.capability import Guarantee
from delivered.model.errors import UsageError
from delivered.pipeline.registry import find_source

ORDERS = Address("kafka", frozenset({"a:1", "b:1"}), frozenset({"orders"}))
ONCE, LEAST, MOST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE


@pytest.mark.parametrize(
    ("sink", "meets"),
    [
        (ORDERS, True),
        (replace(ORDERS, servers=frozenset({"b:1", "c:1"})), True),
        (replace(ORDERS, names=None), True),  # rows name their topics
        (replace(ORDERS, names=frozenset({"orders", "mails"})), True),
        (replace(ORDERS, names=frozenset({"mails"})), False),
        (replace(ORDERS, servers=frozenset({"c:1"})), False),
        (replace(ORDERS, system="pulsar"), False),
        (None, False),
    ],
)
def test_a_sink_and_a_source_that_share_server_and_topic_are_linked(sink: Address | None, meets: bool) -> None:
    elsewhere = replace(ORDERS, names=frozenset({"elsewhere"}))
    if meets:
        assert find_links(["a", "b"], [[elsewhere, sink], [None]], [None, ORDERS]) == [1]
        return
    with pytest.raises(UsageError, match="b reads kafka orders at a:1, b:1; a writes to") as refused:
        find_links(["a", "b"], [[elsewhere, sink], [None]], [None, ORDERS])
    assert refused.value.code.endswith("CHAIN_LINK")
    assert refused.value.next_step


def test_a_chain_has_two_pipelines_and_one_link_between_them() -> None:
    with pytest.raises(UsageError, match="at least two"):
        find_links(["a"], [[ORDERS]], [None])
    with pytest.raises(UsageError, match="more than one of its sinks"):
        find_links(["a", "b"], [[ORDERS, ORDERS], [None]], [None, ORDERS])
    with pytest.raises(UsageError, match=r"b reads \?"):
        find_links(["a", "b"], [[ORDERS], [None]], [None, None])


def test_addresses_of_sources() -> None:
    kafka = find_source("kafka", {"kafka.bootstrap.servers": "a:1, b:1", "subscribe": "orders"})
    assert kafka.address() == ORDERS  # type: ignore[attr-defined]
    changes = find_source("outbox", {"url": "postgresql://app@db:5432/shop", "table": "public.orders"})
    assert changes.address() == Address(  # type: ignore[attr-defined]
        "postgres", frozenset({"db:5432/shop"}), frozenset({"orders"})
    )


@pytest.mark.parametrize(
    ("hops", "promised", "uncertain"),
    [
        ((ONCE, ONCE), ONCE, ()),
        ((ONCE, LEAST), LEAST, ()),
        ((MOST, ONCE), MOST, ()),
        ((MOST, LEAST), LEAST, (Damage.LOST,)),
    ],
)
def test_a_chain_promises_what_its_weakest_hop_does(
    hops: tuple[Guarantee, ...], promised: Guarantee, uncertain: tuple[Damage, ...]
) -> None:
    assert weakest(hops) == (promised, uncertain)


def test_rows_that_nobody_sent_are_a_breach_only_if_no_other_writer_came_in_between() -> None:
    complete = AuditReport("a", "t", ONCE, counts=Counts(9, 9), own="true")
    last = replace(complete, own="id > 0", foreign=3)
    assert own_through([complete, last]) == "id > 0"
    assert own_through([replace(complete, foreign=1), last]) == ""
    assert own_through([replace(complete, own=""), last]) == ""


def test_a_broken_hop_beats_an_unknown_one_and_both_are_shown() -> None:
    held = AuditReport("a", "t", ONCE, counts=Counts(9, 9))
    lost = AuditReport("b", "u", ONCE, counts=Counts(9, 8, lost=1))
    unread = AuditReport("a", "u", ONCE, unknowns=("nobody looked",))
    hops = (Segment("a -> t", held, 2), Segment("b -> u", lost, 0))
    report = ChainReport(("a", "b"), hops, (Segment("a -> u, from end to end", unread, None),))
    assert (report.verdict, report.exit_code) == (Verdict.BROKEN, 1)
    assert (replace(report, hops=hops[:1]).verdict, replace(report, hops=hops[:1]).exit_code) == (Verdict.UNKNOWN, 3)
    assert replace(report, hops=hops[:1], ends=()).exit_code == 0
    text = str(report)
    assert "a -> b: broken" in text
    assert "b -> u: broken: 1 records are lost" in text
    assert "from end to end: unknown: nobody looked" in text
    data = report.to_dict()
    assert [hop["under_way"] for hop in data["hops"]] == [2, 0]
    assert data["end_to_end"][0]["verdict"] == "unknown"
