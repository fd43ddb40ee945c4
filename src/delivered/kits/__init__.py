"""Shared code of connectors of a kind: `sql` databases, `table` formats and files, message `queue` systems. For all of
them, connected clients that a reused Python worker keeps between shards, each lent to one user at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class WarmClients(Generic[T]):
    """Idle clients by their settings, at most `limit`. A forked process never uses its parent's."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: list[tuple[Hashable, T]] = []

    def take(self, key: Hashable) -> T | None:
        """An idle client, for exclusive use until `give`; None: there is none."""
        own = (os.getpid(), key)
        with self._lock:
            at = next((i for i, (known, _) in enumerate(self._idle) if known == own), None)
            return None if at is None else self._idle.pop(at)[1]

    def give(self, key: Hashable, client: T) -> None:
        """Keep a client with nothing in flight for the next shard. Beyond the limit, the oldest is closed."""
        with self._lock:
            self._idle.append(((os.getpid(), key), client))
            oldest, self._idle = self._idle[: -self._limit], self._idle[-self._limit :]
        for _, one in oldest:
            retire(one)

    @contextmanager
    def lent(self, key: Hashable, make: Callable[[], T]) -> Iterator[T]:
        """An idle client or a new one. After an error it is closed: its state is unknown."""
        client = self.take(key) or make()
        try:
            yield client
        except BaseException:
            _close(client)
            raise
        self.give(key, client)

    def clear(self) -> None:
        """Close all idle clients."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, client in idle:
            _close(client)


def retire(client: Any) -> None:
    """Close a client in the background."""
    threading.Thread(target=_close, args=[client], daemon=True, name="delivered-retire").start()


def _close(client: Any) -> None:
    with suppress(Exception):
        client.close()
