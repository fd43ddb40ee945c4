"""The plot of docs/benchmark.md: records per second of the last stored run. `make docs` draws it."""

from __future__ import annotations

import json
from pathlib import Path

import altair as alt

STORED = Path(__file__).parent / "benchmark.json"
PICTURE = STORED.with_suffix(".svg")
_OURS, _OTHERS = "#009E73", "#8A8A8A"


def draw() -> None:
    """A bar for each case but those of memory: the median, and a line from the slowest to the fastest repetition.

    Words stand above the bars, as in docs/demo.py.
    """
    cases = [c for c in json.loads(STORED.read_text(encoding="utf-8"))["cases"] if not c["name"].startswith("memory")]
    rows = [
        {
            "case": c["name"],
            "median": c["median"],
            "low": min(c["records_per_second"]),
            "high": max(c["records_per_second"]),
            "text": f"{c['name']}: {c['median'] / 1_000:,.0f}",
            "colour": _OTHERS if c["name"].startswith(("Spark's own", "flink")) else _OURS,
        }
        for c in cases
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(y=alt.Y("case:N", sort=[r["case"] for r in rows], axis=None))
    most = max(r["high"] for r in rows)
    scale = alt.Scale(domain=[0, most * 1.02], nice=False)
    bars = base.mark_bar(height=18, yOffset=10).encode(
        x=alt.X("median:Q", scale=scale, axis=None), color=alt.Color("colour:N", scale=None)
    )
    spread = base.mark_rule(strokeWidth=2, yOffset=10).encode(x=alt.X("low:Q", scale=scale), x2="high:Q")
    words = base.mark_text(align="left", dy=-10, fontSize=13).encode(x=alt.datum(0, scale=scale), text="text:N")
    title = alt.TitleParams(
        "Thousand records per second, Kafka to Kafka",
        subtitle=["median, and from the slowest to the fastest", "repetition; grey: Spark's own connector, Flink"],
        anchor="start",
        offset=12,
    )
    chart = alt.layer(bars, spread, words).properties(width=360, height=46 * len(rows), title=title)
    chart.configure(font="sans-serif", background="white", padding=12).configure_view(stroke=None).configure_title(
        fontSize=16, subtitleFontSize=13
    ).save(str(PICTURE))


if __name__ == "__main__":
    draw()
