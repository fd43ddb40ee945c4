"""What the served pages show and do, without HTTP."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, urlencode

from delivered import html
from delivered.checkpoint.history import looked_at
from delivered.model.errors import DeliveredError
from delivered.operate.asking import ASK_S_MAX, look, status
from delivered.operate.dead_letters import dead_letters, drop, retry
from delivered.operate.flow import Flow, flow_of
from delivered.operate.overview import Order, Row
from delivered.operate.page import HOURS, Actions, Frame, dead_letters_page, message_page, overview, pipeline_page
from delivered.operate.problem import Problem
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


# The newest answer of each pipeline, asked again only while somebody looks, and never for longer than a page may take.
#
# All viewers share the answers. With very many pipelines a page shows those that have answered; the others follow.


log = logging.getLogger(__name__)

FRESH_S = 2.0
WAIT_S = ASK_S_MAX + 1.0
AT_ONCE = 8


class Asked:
    """Args: paths: pipeline files, and those of ledgers."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._answers: dict[Path, list[Status]] = {}
        self._at_s: dict[Path, float] = {}
        self._took_s: dict[Path, float] = {}
        self._due: deque[tuple[Path, object]] = deque()
        self._open: dict[Path, object] = {}
        self._workers = 0
        self._changed = threading.Condition()

    def all(self) -> list[list[Status] | None]:
        """Of each path the statuses in it, the newest ones that are known after `WAIT_S`; None: not answered yet."""
        with self._changed:
            for path in self._paths:
                if path not in self._open and self._is_old(path):
                    self._ask(path)
            self._wait(self._paths)
            return [self._answers.get(p) for p in self._paths]

    def one(self, path: Path) -> list[Status] | None:
        """As `all`, before the others."""
        with self._changed:
            if self._is_old(path, FRESH_S):
                self._ask(path, first=True)
            self._wait([path])
            return self._answers.get(path)

    def forget(self, path: Path) -> None:
        """What is known, and what is being asked, are older than an action."""
        with self._changed:
            self._at_s.pop(path, None)
            self._open.pop(path, None)

    def _is_old(self, path: Path, fresh_s: float | None = None) -> bool:
        """At most half of the time is spent on asking."""
        if fresh_s is None:
            fresh_s = max(FRESH_S, sum(self._took_s.values()) / AT_ONCE)
        return path not in self._at_s or time.monotonic() - self._at_s[path] > fresh_s

    def _wait(self, paths: Iterable[Path]) -> None:
        deadline = time.monotonic() + WAIT_S
        asked = [(p, self._open[p]) for p in paths if p in self._open]
        while any(self._open.get(p) is request for p, request in asked):
            if (left := deadline - time.monotonic()) <= 0:
                return
            self._changed.wait(left)

    def _ask(self, path: Path, first: bool = False) -> None:
        self._open[path] = request = object()
        (self._due.appendleft if first else self._due.append)((path, request))
        if self._workers < AT_ONCE:
            self._workers += 1
            threading.Thread(target=self._work, daemon=True, name="delivered-page").start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._due and self._open.get(self._due[0][0]) is not self._due[0][1]:
                    self._due.popleft()
                if not self._due:
                    self._workers -= 1
                    return
                path, request = self._due.popleft()
            start = time.monotonic()
            found = _look(path)
            with self._changed:
                self._took_s[path] = time.monotonic() - start
                if self._open.get(path) is request:
                    self._answers[path], self._at_s[path] = found, time.monotonic()
                    del self._open[path]
                self._changed.notify_all()


def _look(path: Path) -> list[Status]:
    try:
        return look([path])
    except Exception as error:  # one file must not hide the others
        log.debug("not answered", exc_info=True)
        problem = Problem.build("UNEXPECTED.STATUS", error_type=type(error).__name__, error=error)
        return [Status(path.stem, "", "", problems=(problem,))]
