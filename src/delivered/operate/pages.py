"""What the served pages show and do, without HTTP."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, urlencode

from delivered import html
from delivered.model.errors import DeliveredError
from delivered.operate.asked import Asked
from delivered.operate.asking import status
from delivered.operate.dead_letters import dead_letters, drop, retry
from delivered.operate.flow import Flow, flow_of
from delivered.operate.looks import looked_at
from delivered.operate.overview import Order, Row
from delivered.operate.page import HOURS, Actions, Frame, dead_letters_page, message_page, overview, pipeline_page
from delivered.operate.status import SinkStatus, Status
from delivered.operate.transactions import end_transaction
from delivered.pipeline.definition import Definition

REFRESH_S = 5.0
SETTLES = ("read", "retry", "drop")
"""What can be done with dead letters."""
_LETTERS_SHOWN = 200
_COUNT_LENGTH_MAX = 18


class Refusal(Exception):
    """An answer that is no page of a pipeline.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Pages:
    """
    Args:
        paths: pipeline files.
        actions: whether the forms are there, and work.
        verified: there is a page of the verifier's results.
    """

    def __init__(self, paths: Sequence[Path], actions: bool, verified: bool) -> None:
        self.paths = tuple(paths)
        self.csrf = secrets.token_urlsafe(32)
        self.has_actions = actions
        self._asked = Asked(paths)
        self._names = _names(paths)
        self._names_by_path = {path: name for name, path in self._names.items()}
        self._verified = (("verified", "/verified"),) if verified else ()
        self._acting = {path: threading.Lock() for path in paths}

    def find(self, name: str) -> Path:
        if name not in self._names:
            raise Refusal(404, f"There is no pipeline file {name[:100]!r}.")
        return self._names[name]

    def numbered(self, number: str) -> Path:
        found = {str(n): path for n, path in enumerate(self.paths)}.get(number)
        if found is None:
            raise Refusal(404, "There is no such action: POST /end/FILE/apply|abort/TRANSACTION.")
        return found

    def address_of(self, path: Path) -> str:
        return f"/pipelines/{quote(self._names_by_path[path], safe='')}"

    def overview(self, order: str | None, paused: bool) -> str:
        answers = self._asked.all()
        rows = [
            Row.of(s, self.address_of(path) if s.checkpoint or s.problems else "")
            for path, found in zip(self.paths, answers, strict=True)
            for s in found or ()
        ]

        def link(order: str, paused: bool = paused) -> str:
            return "/?" + urlencode({"sort": order, **({"paused": ""} if paused else {})})

        frame = self._frame(link(order or "", not paused), paused)
        waiting = sum(found is None for found in answers)
        return overview(rows, order=Order.parse(order), frame=frame, link=link, waiting=waiting)

    def pipeline(self, path: Path, hours: str | None, paused: bool) -> str:
        found = (self._asked.one(path) or [Status(path.stem, "", "")])[0]
        chosen = next((h for h in HOURS if str(h) == hours), HOURS[0])
        here, flow, letters = self.address_of(path), Flow(), None
        with contextlib.suppress(DeliveredError):  # it is a problem of the status
            pipeline = Definition.from_file(path)
            flow, letters = flow_of(pipeline), f"{here}/dead-letters" if _keeps_dead_letters(pipeline) else None

        def link(hours: int, paused: bool = paused) -> str:
            return f"{here}?" + urlencode({"hours": hours, **({"paused": ""} if paused else {})})

        return pipeline_page(
            found,
            flow,
            frame=self._frame(link(chosen, not paused), paused, ("all pipelines", "/")),
            actions=self._actions(path),
            dead_letters=letters,
            hours=chosen,
            link=link,
        )

    def dead_letters(self, path: Path, settled: bool) -> str:
        here = self.address_of(path)
        pipeline = Definition.from_file(path)
        sinks = status(pipeline).sinks  # first: what comes meanwhile has not been seen
        listed = dead_letters(pipeline, settled=settled, limit=_LETTERS_SHOWN + 1)
        other = (
            ("only open ones", f"{here}/dead-letters") if settled else ("also settled", f"{here}/dead-letters?settled")
        )
        return dead_letters_page(
            pipeline.name,
            listed[:_LETTERS_SHOWN],
            file=str(path),
            frame=Frame(links=(("all pipelines", "/"), (pipeline.name, here), other)),
            actions=self._actions(path),
            seen={s.name: s.records for s in sinks if s.dead_letters and s.records is not None},
            more=len(listed) > _LETTERS_SHOWN,
            settled=settled,
        )

    def end(self, path: Path, transaction: str, apply: bool) -> str:
        """The address of the page that shows what became of it."""
        try:
            with self._acting[path]:
                end_transaction(Definition.from_file(path), transaction, commit=apply)
        finally:  # its outcome may be unknown
            self._asked.forget(path)
        return self.address_of(path)

    def settle(self, path: Path, how: str, form: dict[str, list[str]]) -> str | None:
        """A page of what a retry or a drop did; None: there is nothing to say."""
        pipeline, here = Definition.from_file(path), self.address_of(path)
        ids, every = form.get("id", []), form.get("which") == ["all"]
        if how != "read" and (bool(ids) == every or (every and how == "drop")):
            raise Refusal(400, "Choose the dead letters: nothing was done.")
        try:
            with self._acting[path]:
                _look_at(pipeline, form.get("seen", []))
                done = None if how == "read" else (retry if how == "retry" else drop)(pipeline, ids or None)
        finally:
            self._asked.forget(path)
        if done is None:
            return None
        lines = done.lines("retried" if how == "retry" else "dropped", f"{here}/dead-letters")
        body = html.joined(html.element("p", line) for line in lines)
        links = (("all pipelines", "/"), (pipeline.name, here), ("dead letters", f"{here}/dead-letters"))
        return message_page(f"Dead letters of {pipeline.name}", body, Frame(links=links))

    def failed(self, error: DeliveredError, path: Path) -> str:
        links = (("all pipelines", "/"), (path.stem, self.address_of(path)))
        step = error.next_step and error.next_step.replace("PIPELINE.yaml", str(path))
        return message_page("Refused", html.problem(error.code, error.message, step), Frame(links=links))

    def _frame(self, toggled: str, paused: bool, *links: tuple[str, str]) -> Frame:
        pause = ("go on" if paused else "pause", toggled)
        return Frame(None if paused else REFRESH_S, (*links, pause, *self._verified))

    def _actions(self, path: Path) -> Actions | None:
        if not self.has_actions:
            return None
        number, here = self.paths.index(path), self.address_of(path)

        def end(transaction: str, apply: bool) -> str:
            return f"/end/{number}/{'apply' if apply else 'abort'}/{quote(transaction, safe='')}"

        return Actions(self.csrf, end, {how: f"{here}/dead-letters/{how}" for how in SETTLES})


def _names(paths: Sequence[Path]) -> dict[str, Path]:
    """By file name; those of several folders with their number."""
    names: dict[str, Path] = {}
    for path in paths:
        name = path.stem
        for number in range(2, len(paths) + 2):
            if name not in names:
                break
            name = f"{path.stem}-{number}"
        names[name] = path
    return names


def _keeps_dead_letters(pipeline: Definition) -> bool:
    return pipeline.dead_letter is not None or any(e.sink().capability().write.conditional for e in pipeline.sinks)


def _look_at(pipeline: Definition, seen: Sequence[str]) -> None:
    """Remember what a page showed: "12 sink", each; no more than there are."""
    parts = (s.partition(" ") for s in seen)
    counts = {name: int(count) for count, _, name in parts if count.isdecimal() and len(count) <= _COUNT_LENGTH_MAX}
    if counts:
        sinks = status(pipeline).sinks
        looked_at(pipeline.checkpoint, [_seen(s, counts[s.name]) for s in sinks if s.name in counts])


def _seen(sink: SinkStatus, count: int) -> SinkStatus:
    return sink if sink.records is None else replace(sink, records=min(count, sink.records))
