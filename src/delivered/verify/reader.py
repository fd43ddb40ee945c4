"""Who reads the sink all along, in a thread of its own, and what a row found there says."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from delivered.verify.evidence import Seen
from delivered.verify.history import End, History
from delivered.verify.newest import Newest
from delivered.verify.services import VerifierError
from delivered.verify.setting import Setting
from delivered.verify.systems.base import Poll, Row
from delivered.verify.systems.group import at_sink
from delivered.verify.workloads import records

_JOIN_S = 60.0
_POLL_S = 0.1


class Reader:
    """
    Attributes:
        seen: every effect, in the order in which it was found.
        snapshots: moments at which the whole sink was seen at once, as (seconds, effects visible).
    """

    def __init__(self, setting: Setting, history: History) -> None:
        self.seen: list[Seen] = []
        self.snapshots: list[tuple[float, frozenset[str]]] = []
        self._setting = setting
        self._history = history
        self._visible: set[str] = set()
        self._error: str | None = None
        workload = setting.workload
        self._newest = Newest(workload, records(workload, setting.seed)) if workload.replaces else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reader {setting.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Let it see what is there, and end. May be called again."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def check(self) -> None:
        """
        Raises:
            VerifierError: it ended early.
        """
        if self._error is not None:
            raise VerifierError("READER_DIED", f"The reader of case {self._setting.name} ended early: {self._error}")

    def as_seen(self, rows: Sequence[Row]) -> list[Seen]:
        """What rows say that were read at one moment."""
        if self._newest is not None:
            return self._newest.told(rows, self._history.now_s)
        return [self._one(r) for r in rows]

    def _one(self, row: Row) -> Seen:
        effect = self._setting.workload.effect_of(row.key, row.value)
        partition = at_sink(row.sink, row.partition)
        return Seen(
            at_sink(row.sink, effect.id), partition, row.position, effect.key, effect.number, self._history.now_s
        )

    def _run(self) -> None:
        def told(poll: Poll) -> None:
            found = self.as_seen(poll.rows)
            self.seen.extend(found)
            if poll.snapshot:
                self._visible |= {s.effect for s in found}
                self.snapshots.append((self._history.now_s, frozenset(self._visible)))
            self._history.add("reader", "read", End.OK, {"effects": len(found), "all": len(self.seen)})

        try:
            if self._newest is None:
                self._setting.sink.follow(told, self._stop)
            else:
                self._follow_newest(self._newest)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"

    def _follow_newest(self, newest: Newest) -> None:
        """All of the sink again and again. While it cannot be read, there is nothing to see."""
        before: frozenset[str] = frozenset()
        while True:
            last = self._stop.is_set()
            try:
                rows = self._setting.sink.read()
            except Exception:
                if last:
                    raise
                self._stop.wait(_POLL_S)
                continue
            now_s = self._history.now_s
            found = newest.told(rows, now_s)
            back = newest.went_back(found, now_s)
            visible = frozenset(s.effect for s in found)
            if visible != before:
                fresh = [s for s in found if s.effect not in before]
                self.seen += [*fresh, *back]
                self.snapshots.append((now_s, visible))
                before = visible
                self._history.add("reader", "read", End.OK, {"effects": len(fresh), "all": len(self.seen)})
            if last:
                return
            self._stop.wait(_POLL_S)
