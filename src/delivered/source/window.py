"""Deduplication window of a log: the ids of the newest messages in each partition. Pure.

It depends only on the log: the last `size` offsets of each partition. So it is the same before and after a restart, and
in every process that has read the log to the same end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Window:
    """
    Args:
        size: number of offsets per partition whose ids are kept. A message redelivered after more than this many others
            in its partition counts as new.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._times: dict[str, int] = {}  # occurrences; an id can be in the log twice, far apart
        self._tails: dict[int, deque[str | None]] = {}
        self._ends: dict[int, int] = {}

    @property
    def ends(self) -> dict[int, int]:
        """Partition -> next offset to read."""
        return dict(self._ends)

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._times

    def start(self, partition: int, earliest: int, end: int) -> int:
        """The first offset whose id must be read, if the log contains [earliest, end)."""
        return max(earliest, end - self._size, self._ends.get(partition, 0))

    def add(self, partition: int, first: int, ids: Sequence[str | None]) -> None:
        """Add the ids persisted from offset `first` on. Only durable messages may be added (P8).

        Offsets added before are skipped; after a gap (the log was trimmed), earlier ids are dropped.
        """
        end = self._ends.get(partition, 0)
        tail = self._tails.setdefault(partition, deque())
        if first < end:
            ids, first = ids[end - first :], end
        elif first > end:
            self._forget(tail, len(tail))
        if not ids:
            return
        times = self._times
        for message_id in ids:
            if message_id is not None:
                times[message_id] = times.get(message_id, 0) + 1
        tail.extend(ids)
        self._ends[partition] = first + len(ids)
        self._forget(tail, len(tail) - self._size)

    def fresh(self, ids: Sequence[str | None]) -> list[int]:
        """Indexes of the unknown `ids`, each id once. Messages without an id are always fresh."""
        times, seen, found = self._times, set[str](), []
        for at, message_id in enumerate(ids):
            if message_id is not None:
                if message_id in times or message_id in seen:
                    continue
                seen.add(message_id)
            found.append(at)
        return found

    def _forget(self, tail: deque[str | None], count: int) -> None:
        """Drop the oldest `count` ids of a tail."""
        times = self._times
        for _ in range(count):
            message_id = tail.popleft()
            if message_id is None:
                continue
            left = times[message_id] - 1
            if left:
                times[message_id] = left
            else:
                del times[message_id]
