"""The newest answer of each pipeline, asked again only while somebody looks, and never for longer than a page may take.

All viewers share the answers. With very many pipelines a page shows those that have answered; the others follow.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from delivered.operate.asking import ASK_S_MAX, look
from delivered.operate.problem import Problem
from delivered.operate.status import Status

log = logging.getLogger(__name__)

FRESH_S = 2.0
WAIT_S = ASK_S_MAX + 1.0
AT_ONCE = 8


class Asked:
    """
    Args:
        paths: pipeline files, and those of ledgers.
    """

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
