"""The page shows every number, fetches nothing, and escapes all text of records."""

from __future__ import annotations

import json
import re

import pytest
from examples.demo.page import MEASURES, Row, page

ROWS = [
    Row("exactly_once", 336_776, 336_776, 0, 0, 0, "held", ("commit.decide:after, batch 2",)),
    Row("at_least_once", 336_776, 426_120, 0, 89_344, 0, "held"),
    Row("at_most_once", 336_776, 232_336, 104_440, 0, 180_000, "broken"),
]
EVIL = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def text() -> str:
    return page("Flights", "A <b>paragraph</b>.", ROWS, [("audit", f"key {EVIL}")])


def test_every_number_stands_in_the_table(text: str) -> None:
    for row in ROWS:
        for number in (row.sent, row.delivered, row.lost, row.duplicated, row.given_up):
            assert f">{number:,}<" in text
    assert "commit.decide:after, batch 2" in text
    assert 'class="verdict broken"' in text


def test_nothing_is_fetched(text: str) -> None:
    # The chart library's own code mentions such elements; only the page counts.
    bare = re.sub(r"(<script[^>]*>).*?(</script>)", r"\1\2", text, flags=re.DOTALL)
    assert not re.findall(r"<(?:script|img|link|iframe)[^>]*(?:src|href)\s*=", bare)
    assert "@import" not in text
    assert "url(" not in re.findall(r"<style>.*?</style>", text, re.DOTALL)[0]


def test_text_stays_text(text: str) -> None:
    assert EVIL not in text
    assert "<b>paragraph" not in text
    assert text.count("<script") == text.count("</script>") == 2


def test_the_chart_holds_the_same_numbers_in_both_colours(text: str) -> None:
    found = re.search(r'<script type="application/json" id="chart-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    specs = json.loads(found[1])
    assert set(specs) == {"light", "dark"}
    wanted = {(r.guarantee, m.replace("_", " "), getattr(r, m)) for r in ROWS for m in MEASURES}
    for spec in specs.values():
        (values,) = [d for d in _values(spec) if len(d) == len(wanted)]
        assert {(v["guarantee"], v["what"], v["records"]) for v in values} == wanted


def _values(spec: object) -> list[list[dict[str, object]]]:
    """Every inline data set of a chart, at any depth."""
    if isinstance(spec, dict):
        own = [spec["values"]] if isinstance(spec.get("values"), list) else []
        nested = [v for d in spec.get("datasets", {}).values() for v in [d]] if "datasets" in spec else []
        return own + nested + [v for k, x in spec.items() if k not in ("values", "datasets") for v in _values(x)]
    return [v for x in spec for v in _values(x)] if isinstance(spec, list) else []
