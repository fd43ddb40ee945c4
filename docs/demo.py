"""The picture of docs/index.md: the demo's last stored run. `python -m docs.demo build/demo.json` stores one.

`make docs` draws it. It is no page that a test compares: another version of the chart library writes other bytes.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import altair as alt

STORED = Path(__file__).parent / "demo.json"
PICTURE = STORED.with_suffix(".svg")
_COLOURS = {"delivered once": "#009E73", "lost": "#D55E00", "duplicated": "#0072B2"}
"""Of the Okabe-Ito palette, told apart by the colour-blind."""


def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
    return found


def draw(run: dict[str, Any]) -> None:
    """One bar for each guarantee: what arrived once, what was lost, and beyond the line what arrived again.

    Words stand above the bars: a telephone shows them at a size that can be read.
    """
    origin, results = run["origin"], run["results"]
    sent = max(int(r["sent"]) for r in results)
    kills = sum(int(r["kills"]) for r in results)
    bars, labels = [], []
    for r in results:
        parts = {"delivered once": r["sent"] - r["lost"], "lost": r["lost"], "duplicated": r["duplicated"]}
        at = 0
        for part, count in parts.items():
            bars.append({"guarantee": r["guarantee"], "part": part, "from": at, "to": at + count})
            at += count
        found = f"{r['guarantee']}: {r['lost']:,} lost, {r['duplicated']:,} duplicated"
        labels.append({"guarantee": r["guarantee"], "at": 0, "text": found})
    most = max(bar["to"] for bar in bars)
    y = alt.Y("guarantee:N", sort=[r["guarantee"] for r in results], axis=None)
    scale = alt.Scale(domain=[0, most * 1.02], nice=False)
    marks = alt.Chart(alt.Data(values=bars)).mark_bar(height=22, yOffset=12)
    marks = marks.encode(
        y=y,
        x=alt.X("from:Q", scale=scale, axis=None),
        x2="to:Q",
        color=alt.Color(
            "part:N",
            scale=alt.Scale(domain=list(_COLOURS), range=list(_COLOURS.values())),
            legend=alt.Legend(title=None, orient="bottom", labelFontSize=13, columnPadding=20),
        ),
    )
    line = alt.Chart(alt.Data(values=[{"guarantee": r["guarantee"], "at": sent} for r in results]))
    line = line.mark_tick(color="black", thickness=2, size=30, yOffset=12).encode(y=y, x=alt.X("at:Q", scale=scale))
    words = alt.Chart(alt.Data(values=labels)).mark_text(align="left", dy=-12, fontSize=14)
    words = words.encode(y=y, x=alt.X("at:Q", scale=scale), text="text:N")
    title = alt.TitleParams(
        f"{sent:,} flights, {kills} kills",
        subtitle=[
            "read back from the sink; the line is what was sent",
            f"{origin['command']}, {origin['date']}, commit {origin['commit']}",
        ],
        anchor="start",
        offset=12,
    )
    chart = alt.layer(marks, line, words).properties(width=360, height=170, title=title)
    chart.configure(font="sans-serif", background="white", padding=12).configure_view(stroke=None).configure_title(
        fontSize=17, subtitleFontSize=13
    ).save(str(PICTURE))


if __name__ == "__main__":
    if sys.argv[1:]:
        shutil.copyfile(sys.argv[1], STORED)
    draw(stored())
