"""What objects show in a notebook: the words of their text, no secret, nothing fetched, text that stays text."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

import delivered
from delivered import html
from delivered.audit.report import unknown_report
from delivered.entry import CellView
from delivered.model.errors import DeliveredError
from delivered.operate.status import Driver, Problem, SinkStatus, Status
from delivered.planner import Plan, Refusal

SECRET = "hunter2"
LOGIN = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.password": SECRET}
EVIL = "<script>alert(1)</script>"


def pipeline(guarantee: str = "exactly_once", source: str = "log") -> delivered.Pipeline:
    return delivered.Pipeline(
        name="orders", guarantee=guarantee, checkpoint="/nowhere/checkpoint",
        source=delivered.endpoint(source, **({"path": "/nowhere/in"} if source == "log" else {})),
        transform=f"SELECT key, value FROM source WHERE value > '{EVIL}'",
        sinks=[delivered.kafka("localhost:9092", topic="clean", **LOGIN)],
        dedup=delivered.dedup("key", within="1 hour", late="drop"),
    )  # fmt: skip


def words(found: str) -> str:
    """As a reader sees them."""
    bare = re.sub(r"<style>.*?</style>", "", found, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", bare)).split())


def shown() -> dict[str, object]:
    made = pipeline()
    refusal = pipeline(source="spark:socket").plan(offline=True)
    sink = SinkStatus("out", "log", 7, 0)
    problem = Problem("DELIVERED_STALLED", EVIL, "delivered doctor")
    return {
        "pipeline": made,
        "plan": made.plan(offline=True),
        "refusal": refusal,
        "status": Status(EVIL, "exactly_once", "/c", Driver.STOPPED, sinks=(sink,), problems=(problem,)),
        "audit": unknown_report(EVIL, "clean", delivered.Guarantee.EXACTLY_ONCE, EVIL),
        "failed query": CellView(EVIL, "failed", notes=[EVIL], failure=DeliveredError("QUERY_FAILED", EVIL)),
    }  # fmt: skip


@pytest.mark.parametrize("name", shown())
def test_nothing_is_run_or_fetched_and_no_secret_is_on_it(name: str) -> None:
    found = shown()[name]._repr_html_()  # type: ignore[attr-defined]
    assert SECRET not in found
    assert not re.search(r"<script|<link|<img|<iframe|url\(|@import|https?:", found)
    assert found.count("<div") == found.count("</div>")
    for theme in ("prefers-color-scheme: dark", 'data-jp-theme-light="false"', ".vscode-dark"):
        assert theme in found


def test_a_plan_shows_every_word_of_its_text() -> None:
    plan = pipeline().plan(offline=True)
    assert isinstance(plan, Plan)
    seen = words(plan._repr_html_())
    for text in (plan.mechanism, *plan.assumptions, *plan.limits, *plan.warnings, *plan.dedup, *plan.records):
        assert " ".join(text.split()) in seen
    for step in (*plan.steps, *plan.recovery):
        assert step.id.value in seen and step.does in seen
    assert "from here on the batch counts" in seen
    assert all(step.on_crash in seen for step in plan.steps)


def test_a_refusal_shows_code_reason_and_way_out() -> None:
    refusal = pipeline(source="spark:socket").plan(offline=True)
    assert isinstance(refusal, Refusal)
    seen = words(refusal._repr_html_())
    for text in (refusal.error.code, refusal.reason, refusal.way_out, "at_most_once"):
        assert text in seen


def test_a_pipeline_shows_the_way_of_its_data() -> None:
    found = pipeline()._repr_html_()
    way = "log in offsets, replayable orders exactly_once by two-phase commit kafka clean two-phase commit"
    assert way in words(found)
    assert EVIL in words(found) and EVIL not in found
    assert "/nowhere/checkpoint" in found


def test_a_pipeline_that_is_refused_shows_itself_too() -> None:
    assert "spark:socket" not in words(pipeline(source="spark:socket")._repr_html_())
    assert "socket Spark's own source orders exactly_once kafka clean" in words(
        pipeline(source="spark:socket")._repr_html_()
    )


def test_a_cell_of_a_plain_process_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from delivered.entry import is_notebook

    assert not is_notebook()
    assert str(CellView("orders", "refused", notes=["a note"])) == "orders: refused\n  a note"


def test_cells_are_escaped_once() -> None:
    assert html.table(("a",), [("<b>",), (html.element("b", "<i>"),)]).count("&lt;") == 2
    assert html.text(html.Html("<b>")) == "<b>"
