"""Deduplication window of a log: the ids of the newest messages in each partition, by count and by time. Pure.

It depends only on the log: the last `size` offsets of each partition, and those appended less than `for_ms` before the
partition's newest append. So it is the same before and after a restart, and in every process that has read the log to
the same end; while nothing is appended, nothing is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from delivered.model.limits import DEDUP_WINDOW_MAX


@dataclass
class _Tail:
    """
    Attributes:
        appends: (end offset, time in ms) of the appends that are not known to be old, in order.
        old: ids at offsets below this one were appended too long ago.
    """

    ids: deque[str | None] = field(default_factory=deque)
    end: int = 0
    newest_ms: int = 0
    old: int = 0
    appends: deque[tuple[int, int]] = field(default_factory=deque)


class Window:
    """
    Args:
        size: number of offsets per partition whose ids are kept. A message redelivered after more than this many others
            in its partition, and later than `for_ms`, counts as new.
        for_ms: how long an id is kept, measured by the times of appends; `DEDUP_WINDOW_MAX` ids at most.
    """

    def __init__(self, size: int, for_ms: int = 0) -> None:
        self._size = size
        self._for_ms = for_ms
        self._times: dict[str, int] = {}  # occurrences; an id can be in the log twice, far apart
        self._tails: dict[int, _Tail] = {}

    @property
    def ends(self) -> dict[int, int]:
        """Partition -> next offset to read."""
        return {partition: tail.end for partition, tail in self._tails.items() if tail.end}

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._times

    def start(self, partition: int, earliest: int, end: int, young: int | None = None) -> int:
        """The first offset whose id must be read, if the log contains [earliest, end).

        Args:
            young: the first offset appended less than `for_ms` before the partition's newest append.
        """
        wanted = end - self._size
        if self._for_ms and young is not None:
            wanted = max(min(wanted, young), end - DEDUP_WINDOW_MAX)
        tail = self._tails.get(partition)
        return max(earliest, wanted, tail.end if tail is not None else 0)

    def first(self, partition: int) -> int:
        """The first offset whose id is kept."""
        tail = self._tails.get(partition)
        return 0 if tail is None else tail.end - len(tail.ids)

    def add(self, partition: int, first: int, ids: Sequence[str | None], at_ms: int = 0) -> None:
        """Add the ids persisted from offset `first` on. Only durable messages may be added (P8).

        Offsets added before are skipped; after a gap (the log was trimmed), earlier ids are dropped.

        Args:
            at_ms: Unix time of the append.
        """
        tail = self._tails.setdefault(partition, _Tail())
        if first < tail.end:
            ids, first = ids[tail.end - first :], tail.end
        elif first > tail.end:
            self._forget(tail, len(tail.ids))
        if not ids:
            return
        times = self._times
        for message_id in ids:
            if message_id is not None:
                times[message_id] = times.get(message_id, 0) + 1
        tail.ids.extend(ids)
        tail.end = first + len(ids)
        self._forget(tail, self._excess(tail, at_ms))

    def _excess(self, tail: _Tail, at_ms: int) -> int:
        """How many of the oldest ids need not be kept, after an append at this time."""
        excess = len(tail.ids) - self._size
        if not self._for_ms:
            return excess
        appends = tail.appends
        appends.append((tail.end, at_ms))
        tail.newest_ms = max(tail.newest_ms, at_ms)
        # Receivers' clocks differ, and may be set back: an append is not old before the ones in front of it are.
        while appends[0][1] < tail.newest_ms - self._for_ms:
            tail.old = appends.popleft()[0]
        return max(min(excess, tail.old - (tail.end - len(tail.ids))), len(tail.ids) - DEDUP_WINDOW_MAX)

    def fresh(self, ids: Sequence[str | None]) -> list[int]:
        """Indexes of the unknown `ids`, each id once. Messages without an id are always fresh."""
        times, seen, indexes = self._times, set[str](), []
        for at, message_id in enumerate(ids):
            if message_id is not None:
                if message_id in times or message_id in seen:
                    continue
                seen.add(message_id)
            indexes.append(at)
        return indexes

    def _forget(self, tail: _Tail, count: int) -> None:
        """Drop the oldest `count` ids of a tail."""
        times = self._times
        for _ in range(count):
            message_id = tail.ids.popleft()
            if message_id is None:
                continue
            left = times[message_id] - 1
            if left:
                times[message_id] = left
            else:
                del times[message_id]
