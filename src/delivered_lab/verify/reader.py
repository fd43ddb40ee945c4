"""The continuous reader of the sink, in a thread of its own, and the interpretation of its rows."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from delivered_lab.verify.evidence import Seen
from delivered_lab.verify.history import End, History
from delivered_lab.verify.services import VerifierError
from delivered_lab.verify.systems.base import Poll, Row, SinkClient, polling
from delivered_lab.verify.systems.group import at_sink
from delivered_lab.verify.workload import Record, Workload
from delivered_lab.verify.workloads import records

_JOIN_S = 60.0
_POLL_S = 0.1


class Reader:
    """
    Attributes:
        seen: every effect, in the order found.
        snapshots: moments at which the whole sink was seen at once, as (seconds, effects visible).
        upserted: an operator's rows replace those with their key.
    """

    def __init__(self, name: str, sink: SinkClient, workload: Workload, seed: int, history: History) -> None:
        self.seen: list[Seen] = []
        self.snapshots: list[tuple[float, frozenset[str]]] = []
        self._name = name
        self._sink = sink
        self._workload = workload
        self._history = history
        self._visible: set[str] = set()
        self._error: str | None = None
        self.upserted = workload.output_mode == "update" and sink.options().get("mode") == "upsert"
        self._newest = LatestByKey(workload, records(workload, seed)) if workload.replaces else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reader {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Let it read what is there, then stop it. May be called again."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def check(self) -> None:
        """
        Raises:
            VerifierError: it ended early.
        """
        if self._error is not None:
            raise VerifierError("READER_DIED", f"The reader of case {self._name} ended early: {self._error}")

    def as_seen(self, rows: Sequence[Row]) -> list[Seen]:
        """The effects of rows that were read at one moment."""
        if self._newest is not None:
            return self._newest.seen_in(rows, self._history.now_s)
        return [self._one(r) for r in rows]

    def _one(self, row: Row) -> Seen:
        effect = self._workload.effect_of(row.key, row.value)
        partition = at_sink(row.sink, row.partition)
        return Seen(
            at_sink(row.sink, effect.id), partition, row.position, effect.key, effect.number, self._history.now_s
        )

    def _run(self) -> None:
        def note(poll: Poll) -> None:
            found = self.as_seen(poll.rows)
            self.seen.extend(found)
            if poll.snapshot:
                self._visible |= {s.effect for s in found}
                self.snapshots.append((self._history.now_s, frozenset(self._visible)))
            self._history.add("reader", "read", End.OK, {"effects": len(found), "all": len(self.seen)})

        try:
            if self._newest is None and not self.upserted:
                self._sink.follow(note, self._stop)
            else:
                self._follow_newest()
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"

    def _follow_newest(self) -> None:
        """Read the whole sink again and again. While it cannot be read, there is nothing to see."""
        before: frozenset[str] = frozenset()
        for last in polling(self._stop, _POLL_S):
            try:
                rows = self._sink.read()
            except Exception:
                if last:
                    raise
                continue
            now_s = self._history.now_s
            found = self.as_seen(rows)
            back = self._newest.went_back(found, now_s) if self._newest is not None else []
            visible = frozenset(s.effect for s in found)
            if visible != before:
                fresh = [s for s in found if s.effect not in before]
                self.seen += [*fresh, *back]
                self.snapshots.append((now_s, visible))
                before = visible
                self._history.add("reader", "read", End.OK, {"effects": len(fresh), "all": len(self.seen)})


class LatestByKey:
    """Translates a sink that keeps the newest row per key into one that keeps all rows.

    Row n of a key implies that its records 0 to n came through: the checkers for lost, torn and rolled-back records see
    those. A key whose number decreased appears as an effect that is missing at the end.

    Args:
        sent: all possible records, numbered within each key.
    """

    def __init__(self, workload: Workload, sent: Sequence[Record]) -> None:
        self._workload = workload
        self._effects = {(r.key, r.number): workload.effect_of(r.key, r.value).id for r in sent}
        self._at: dict[str, int] = {}

    def seen_in(self, rows: Sequence[Row], at_s: float) -> list[Seen]:
        """All effects that the rows of a sink, seen at one moment, imply."""
        found: list[Seen] = []
        for row in rows:
            effect = self._workload.effect_of(row.key, row.value)
            key, number = effect.key, effect.number
            if key is None or number is None:
                found.append(Seen(effect.id, row.partition, row.position, at_s=at_s))
                continue
            ids = [self._effects.get((key, i), f"{key} {i}: nobody sent it") for i in range(number)]
            found += [Seen(e, key, i, key, i, at_s) for i, e in enumerate([*ids, effect.id])]
        return found

    def went_back(self, found: Sequence[Seen], at_s: float) -> list[Seen]:
        """Keys whose number is lower than at the previous call, or that are gone."""
        now: dict[str, int] = {}
        for s in found:
            if s.key is not None and s.number is not None:
                now[s.key] = max(s.number, now.get(s.key, -1))
        behind = [
            Seen(f"{key} went back from {before} to {now.get(key, 'nothing')}", key, before, key, before, at_s)
            for key, before in self._at.items()
            if now.get(key, -1) < before
        ]
        self._at = now
        return behind
