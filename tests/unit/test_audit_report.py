"""The report as text and JSON, the fingerprint comparison, and the ledger's chain."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html import unescape

import pytest

from delivered.audit.evidence import Counts, Damage, Fingerprints, PartitionLine, Sample, check_history
from delivered.audit.report import AuditReport, as_text
from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
from delivered.model.work import Account, Decision, Prepared

A, B = Fingerprint(2, 5, 7), Fingerprint(1, 3, 4)


@pytest.mark.parametrize(
    ("sent", "ledger", "given_up", "delivered", "says"),
    [
        (A, A, Fingerprint(), A, "source, ledger and sink agree"),
        (A, A, Fingerprint(), A + B, "source and ledger agree, the sink differs"),
        (A + B, A, B, A, "source, ledger and sink agree"),
        (A + B, A, B, A + B, "source and ledger agree, the sink differs"),
        (B, A, Fingerprint(), A, "ledger and sink agree, the source differs"),
        (A, B, Fingerprint(), A, "source and sink agree, the ledger differs"),
        (A, B, Fingerprint(), A + A, "source, ledger and sink all differ"),
        (A, None, Fingerprint(), A, "source and sink agree"),
        (A, None, Fingerprint(), B, "source and sink differ"),
    ],
)
def test_fingerprints_say_who_differs(
    sent: Fingerprint, ledger: Fingerprint | None, given_up: Fingerprint, delivered: Fingerprint, says: str
) -> None:
    assert Fingerprints(sent, ledger, given_up, delivered).says.startswith(says)


def report() -> AuditReport:
    counts = Counts(sent=3, delivered=2, lost=1)
    return AuditReport(
        pipeline="orders",
        sink="clean",
        guarantee=Guarantee.EXACTLY_ONCE,
        range_from='{"orders": {"0": 0}}',
        range_to='{"orders": {"0": 3}}',
        counts=counts,
        partitions=(PartitionLine("orders-0", counts, A, B),),
        samples=(Sample(Damage.LOST, "id-7", "k", "orders-0 @ 2", None, 1, 0),),
        fingerprints=Fingerprints(A, A, Fingerprint(), B),
        notes=("a note",),
    )


def test_the_text_names_verdict_breach_and_record() -> None:
    text = as_text(report())
    assert "orders -> clean: exactly_once broken" in text
    assert "1 records are lost; exactly_once promises none" in text
    assert "orders-0 @ 2" in text
    assert "id-7" in text
    assert "source and ledger agree, the sink differs" in text


def test_the_json_holds_the_same() -> None:
    data = json.loads(report().to_json())
    assert data["verdict"] == "broken"
    assert data["range"] == {"from": {"orders": {"0": 0}}, "to": {"orders": {"0": 3}}}
    assert data["counts"]["lost"] == 1
    assert data["counts"]["given_up"] == 0
    assert data["samples"]["lost"] == [
        {"id": "id-7", "key": "k", "source": "orders-0 @ 2", "sink": None, "sent": 1, "delivered": 0}
    ]
    assert data["partitions"][0]["partition"] == "orders-0"


def chain(*counts: int, guarantee: Guarantee = Guarantee.EXACTLY_ONCE) -> list[Decision]:
    decisions = []
    total = Fingerprint()
    for batch, count in enumerate(counts):
        own = Fingerprint(count, count * 17, count * 31)
        total = total + own
        decisions.append(
            Decision(
                Scope("p", "s", "i"),
                "owner",
                guarantee,
                batch,
                "{}",
                (Prepared(0, 0, own, sink="s"),),
                {"s": Account(total)},
                0,
            )
        )
    return decisions


def test_a_good_chain_has_no_fault() -> None:
    history = check_history(chain(3, 0, 5))
    assert (history.batches, history.faults) == (3, ())
    assert history.last is not None
    assert history.last.batch == 2
    assert history.before is not None
    assert history.before.batch == 1
    assert [line.records for line in history.lines] == [3, 0, 5]


def test_a_missing_link_a_changed_link_and_a_repeated_link_are_faults() -> None:
    good = chain(3, 4, 5, 6)
    assert check_history([good[0], good[2]]).faults == ("batches 1 to 1 are missing",)
    assert "batch 0 follows batch 1" in check_history([good[1], good[0]]).faults
    changed = chain(3, 9, 5)[1]
    assert any("batch 2" in fault for fault in check_history([good[0], changed, good[2]]).faults)


def test_a_chain_that_begins_late_is_whole() -> None:
    assert check_history(chain(1, 2, 3, 4)[2:]).faults == ()


def test_a_long_history_is_bounded() -> None:
    history = check_history(chain(*([1] * 500)))
    assert (history.batches, len(history.lines)) == (500, 20)
    assert history.lines[-1].batch == 499


def test_print_and_notebook_show_the_table_of_the_command_line() -> None:
    made = replace(report(), samples=(Sample(Damage.LOST, "<b>7</b>", "k", None, None, 1, 0),))
    assert str(made) == as_text(made).rstrip("\n")
    assert "orders -> clean: exactly_once broken" in str(made)
    html = made._repr_html_()
    assert "&lt;b&gt;7&lt;/b&gt;" in html and "<b>7" not in html
    assert '<b class="broken">broken</b>' in html
    bare = re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    seen = unescape(re.sub(r"<[^>]+>", " ", bare)).split()
    printed = re.sub("[━┏┳┓┃┡╇┩│└┴┘─╈├┼┤]", " ", as_text(made)).split()
    assert Counter(seen) == Counter(printed)
