"""Audits of several pipelines as one HTML file: a table and a chart, nothing fetched from a network.

Colours are from the Okabe-Ito palette, safe for the colour-blind, on a light and on a dark page; every number is in the
table as well, and every bar is labelled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from delivered import html
from delivered.model.errors import MissingExtra

MEASURES = ("lost", "duplicated", "given_up")
_COLOURS = {"lost": "#D55E00", "duplicated": "#0072B2", "given_up": "#E69F00"}
_COLOURS_DARK = {"lost": "#F0804A", "duplicated": "#56B4E9", "given_up": "#F0C04A"}


@dataclass(frozen=True)
class Row:
    """One guarantee's outcome; numbers of records.

    Attributes:
        kills: how often the pipeline was killed, and where, in words.
    """

    guarantee: str
    sent: int
    delivered: int
    lost: int
    duplicated: int
    given_up: int
    verdict: str
    kills: tuple[str, ...] = ()


def page(title: str, intro: str, rows: Sequence[Row], details: Sequence[tuple[str, str]] = ()) -> str:
    """The whole file.

    Args:
        intro: one paragraph, plain text.
        details: heading and plain text of collapsible blocks, for example whole audit reports.

    Raises:
        MissingExtra: the chart needs the extra `report`.
    """
    try:
        import vl_convert
    except ImportError:
        raise MissingExtra("report") from None
    return html.page(
        title,
        _TEMPLATE,
        more_style=_STYLE,
        intro=intro,
        rows=rows,
        details=details,
        # Both go into script elements, so they must not contain an end tag.
        spec=json.dumps({"light": _chart(rows, dark=False), "dark": _chart(rows, dark=True)}).replace("<", "\\u003c"),
        script=_script_safe(vl_convert.javascript_bundle(_DRAW)),
    )


def _script_safe(text: str) -> str:
    return re.sub(r"<(?=/script|!--)", r"\\x3c", text, flags=re.IGNORECASE)


def _chart(rows: Sequence[Row], dark: bool) -> dict[str, Any]:
    try:
        import altair as alt
    except ImportError:
        raise MissingExtra("report") from None
    colours = _COLOURS_DARK if dark else _COLOURS
    ink, faint = ("#e8e8ea", "#5a5f68") if dark else ("#1c1e21", "#c8ccd2")
    guarantees = [r.guarantee for r in rows]
    values: list[dict[str, Any]] = [
        {"guarantee": r.guarantee, "what": m.replace("_", " "), "records": int(getattr(r, m)), "sent": r.sent}
        for r in rows
        for m in MEASURES
    ]
    most = max((int(v["records"]) for v in values), default=0)
    base = alt.Chart(alt.InlineData(values)).encode(
        y=alt.Y("guarantee:N", sort=guarantees, title=None, axis=alt.Axis(labelFontSize=13, ticks=False, domain=False)),
        x=alt.X(
            "records:Q",
            title="records",
            scale=alt.Scale(domain=[0, max(1, most) * 1.4]),
            axis=alt.Axis(format="~s", tickCount=4, grid=False, labelFontSize=12, titleFontSize=12),
        ),
    )
    bars = base.mark_bar(height=18, cornerRadiusEnd=2).encode(
        color=alt.Color(
            "what:N",
            scale=alt.Scale(domain=[m.replace("_", " ") for m in MEASURES], range=[colours[m] for m in MEASURES]),
            legend=None,
        ),
        tooltip=[
            alt.Tooltip("guarantee:N"),
            alt.Tooltip("what:N"),
            alt.Tooltip("records:Q", format=","),
            alt.Tooltip("sent:Q", format=","),
        ],
    )
    labels = base.mark_text(align="left", dx=5, fontSize=13, color=ink).encode(text=alt.Text("records:Q", format=","))
    chart = (
        alt.layer(bars, labels)
        .properties(width=230, height=120)
        .facet(
            column=alt.Column(
                "what:N",
                sort=[m.replace("_", " ") for m in MEASURES],
                title=None,
                header=alt.Header(labelFontSize=14, labelFontWeight="bold", labelColor=ink),
            )
        )
        .configure(background="transparent")
        .configure_axis(labelColor=ink, titleColor=ink, gridColor=faint, domainColor=faint, tickColor=faint)
        .configure_view(stroke=None)
    )
    found: dict[str, Any] = chart.to_dict()
    return found


_DRAW = """
const specs = JSON.parse(document.getElementById("chart-data").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function draw() {
  vegaEmbed("#chart", dark.matches ? specs.dark : specs.light, {actions: false, renderer: "svg"})
    .then(() => document.getElementById("chart").setAttribute("data-drawn", "true"));
}
dark.addEventListener("change", draw);
draw();
"""

_STYLE = """
  p, figcaption { color: var(--soft); max-width: 46rem; }
  table { margin: 1.5rem 0; width: 100%; } th, td { text-align: right; } td { font-variant-numeric: tabular-nums; }
  th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
  .verdict { font-weight: 600; } .kills { color: var(--soft); font-size: .85rem; white-space: nowrap; }
  figure { margin: 2rem 0; overflow-x: auto; } pre { overflow-x: auto; font-size: .8rem; line-height: 1.25; }
"""

_TEMPLATE = """<p>{{ intro }}</p>
<table>
<thead><tr><th>guarantee</th><th>sent</th><th>delivered</th><th>lost</th><th>duplicated</th><th>given up</th>
<th>verdict</th><th>killed at</th></tr></thead>
<tbody>
{% for r in rows -%}
<tr><td>{{ r.guarantee }}</td><td>{{ "{:,}".format(r.sent) }}</td><td>{{ "{:,}".format(r.delivered) }}</td>
<td>{{ "{:,}".format(r.lost) }}</td><td>{{ "{:,}".format(r.duplicated) }}</td><td>{{ "{:,}".format(r.given_up) }}</td>
<td class="verdict {{ r.verdict }}">{{ signs[r.verdict] }} {{ r.verdict }}</td>
<td class="kills">{% for k in r.kills %}{{ k }}{% if not loop.last %}<br>{% endif %}{% endfor %}</td></tr>
{% endfor -%}
</tbody>
</table>
<figure>
<div id="chart" role="img" aria-label="Bars of records lost, duplicated and given up, by guarantee; the same numbers
 are in the table above"></div>
<figcaption>Lost and duplicated records are counted by reading the sink back; given-up ones come from the ledger and are
the upper bound of what at_most_once may lose.</figcaption>
</figure>
{% for heading, text in details -%}
<details><summary>{{ heading }}</summary><pre>{{ text }}</pre></details>
{% endfor -%}
<script type="application/json" id="chart-data">{{ spec|safe }}</script>
<script type="module">{{ script|safe }}</script>
"""
