"""What a notebook's cell shows of a query that it started: its progress until it ends. Elsewhere, nothing."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivered import html
from delivered.checkpoint.folder import is_done, read_logged
from delivered.model.errors import DeliveredError
from delivered.model.translate import translated
from delivered.pipeline.definition import Definition, changes
from delivered.pipeline.progress import Progress, Reports, watch
from delivered.planner import Plan, Refusal

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_EVERY_S = 1.0

log = logging.getLogger(__name__)


def is_notebook() -> bool:
    """Whether this process is a notebook's kernel. Imports nothing."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


@dataclass(frozen=True)
class CellView:
    """What the cell shows at one moment."""

    head: str
    state: str
    progress: Progress | None = None
    notes: Sequence[str] = ()
    failure: DeliveredError | None = None

    def __repr__(self) -> str:
        figures = f"  {self.progress.text}" if self.progress is not None else ""
        lines = [f"{self.head}: {self.state}{figures}", *(f"  {note}" for note in self.notes)]
        return "\n".join(lines + [f"  {self.failure}"] * (self.failure is not None))

    def _repr_html_(self) -> str:
        css = "broken" if self.failure is not None else "held" if self.state == "running" else "soft"
        head = html.joined((self.head, ": ", html.element("b", self.state, css)))
        parts = [html.element("p", head), html.bullets(self.notes) if self.notes else ""]
        if (p := self.progress) is not None:
            figures = [("batch", "none yet" if p.batch is None else p.batch), ("here", p.totals)]
            figures.append(("records/s", f"{p.rate:,.0f}"))
            figures += [("lag, offsets", f"{p.lag:,}")] if p.lag is not None else []
            parts.append(html.figures(figures + [("step", p.step)] * (self.state == "running")))
        if (f := self.failure) is not None:
            parts.append(html.problem(f.code, f.message, f.next_step))
        return html.fragment(*parts)


def allowed(before: Definition, now: Definition, between: bool) -> list[str]:
    """What the former query left, and what its checkpoint makes of the changes.

    Args:
        between: it was stopped between two batches.
    """
    _, newest = read_logged(now.checkpoint)
    following = 0 if newest is None else newest + is_done(now.checkpoint, newest)
    how = "between two batches" if between else "in the middle of a batch, which is finished or repeated now"
    same = before.checkpoint == now.checkpoint
    goes_on = f"this one goes on at batch {following}" if same else "this one has another checkpoint"
    return [f"the former query was stopped {how}; {goes_on}", *changes(before, now)]


def follow(pipeline: Definition, plan: Plan, query: StreamingQuery, recent: Reports, notes: Sequence[str]) -> None:
    """Show the query in this cell until it ends, from a thread of its own. Args: recent: its reports, newest first."""
    head = f"{pipeline.name}: {pipeline.guarantee.value} by {plan.mechanism}"
    cell = _display(CellView(head, "running", notes=notes), display_id=True)
    arguments = (pipeline, query, recent, head, notes, cell)
    threading.Thread(target=_follow, name=f"delivered-{pipeline.name}", args=arguments, daemon=True).start()


def refused(refusal: Refusal, notes: Sequence[str]) -> None:
    """Show in this cell what the refusal leaves: the error that is raised says only why."""
    _display(CellView(f"{refusal.pipeline}: {refusal.guarantee.value}", "refused", None, notes, refusal.error))


def _display(view: CellView, **more: bool) -> Any:
    return sys.modules["IPython.display"].display(view, **more)


def _follow(
    pipeline: Definition, query: StreamingQuery, recent: Reports, head: str, notes: Sequence[str], cell: Any
) -> None:
    try:
        with watch(pipeline, query, recent) as progress:
            while not _ended(query):
                progress.refresh()
                cell.update(CellView(head, "running", progress, notes))
            progress.refresh()
            failure = _failure(query)
            cell.update(CellView(head, "ended" if failure is None else "failed", progress, notes, failure))
    except Exception as error:  # the query goes on without it
        log.warning("%s: its progress cannot be shown: %s", pipeline.name, error)


def _ended(query: StreamingQuery) -> bool:
    """Waits for it, a moment."""
    try:
        return bool(query.awaitTermination(_EVERY_S))  # type: ignore[arg-type]
    except Exception:
        return True


def _failure(query: StreamingQuery) -> DeliveredError | None:
    with contextlib.suppress(Exception):  # its session was stopped
        error = query.exception()
        if error is not None:
            return translated(error) or DeliveredError("QUERY_FAILED.NOTEBOOK", cause=str(error).splitlines()[0])
    return None
