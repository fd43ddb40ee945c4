"""A status as HTML: on the page, and in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delivered import html
from delivered.model.offsets import SOURCE
from delivered.pipeline.presence import is_gone

if TYPE_CHECKING:
    from delivered.observe.status import Status


def in_notebook(s: Status) -> str:
    head = html.joined((html.element("b", s.pipeline), f" {s.guarantee}"))
    return html.fragment(html.element("p", head), summary(s))


def summary(s: Status) -> html.Html:
    """Problems with what mends them, and the newest figures."""
    figures: list[tuple[str, object]] = [("driver", s.driver.value)]
    if s.batch is not None and s.decided_at_ms is not None:
        figures += [("newest batch", s.batch), ("decided", html.utc(s.decided_at_ms))]
    if s.lag_total is not None:
        figures.append(("lag, offsets", f"{s.lag_total:,}"))
    if s.lag_s_max is not None:
        figures.append(("lag, seconds", f"{s.lag_s_max:,.0f}"))
    for name, reports in s.receivers.items():
        gone = sum(map(is_gone, reports))
        live = f"{len(reports) - gone}{f', {gone} gone' * bool(gone)}"
        figures.append((f"receivers{f' of {name}' * (name != SOURCE)}", live))
    for w in s.windows.values():
        figures.append(("ids kept, may be redelivered after", f"{w.kept_s:,.0f} s, {w.needed_s:,.0f} s"))
    for sink in s.sinks:
        lost = f", {sink.given_up:,} given up" if sink.given_up else ""
        figures.append((f"records in {sink.name}", f"{sink.records:,}{lost}"))
    figures += [("WAL held back", f"{held / 1048576:,.1f} MiB") for held in s.wal_held_back.values()]
    return html.joined((*(html.problem(p.code, p.text, p.next_step) for p in s.problems), html.figures(figures)))
