"""A task's side: what is staged is visible. Ids are the same when a batch runs again, so receivers can tell repeats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa

from delivered.model.errors import OutcomeUnknown, Unreachable
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Work

_ROWS = 1_000

M = TypeVar("M", contravariant=True)


class Publisher(Protocol[M]):
    """One connection that sends, many messages in flight."""

    @property
    def unconfirmed(self) -> int:
        """Messages sent whose fate nobody told."""

    def send(self, messages: Sequence[M]) -> None:
        """Waits while too many are in flight. Raises when one was refused."""

    def flush(self) -> None:
        """Wait until every message was confirmed. Raises when one was refused; OutcomeUnknown or Unreachable when
        nobody can tell."""

    def close(self) -> None:
        """May be called again."""


class SendingWriter(ABC, Generic[M]):
    """
    Args:
        gives_up: at_most_once: a message whose confirmation is lost is counted and not sent again.
    """

    def __init__(self, work: Work, gives_up: bool) -> None:
        self._gives_up = gives_up
        scope = work.scope
        self._id = f"{scope.pipeline}.{scope.sink}.{scope.incarnation}.{work.batch}.{work.shard}"
        self._rows = 0
        self._publisher: Publisher[M] | None = None

    def stage(self, batch: pa.RecordBatch) -> None:
        if self._publisher is None:
            self._publisher = self._connect()
        for at in range(0, batch.num_rows, _ROWS):
            self._publisher.send(self._messages(batch.slice(at, _ROWS)))

    def prepare(self, fingerprint: Fingerprint) -> dict[str, Any]:
        del fingerprint
        publisher = self._publisher
        if publisher is None:
            return {}
        try:
            publisher.flush()
        except (OutcomeUnknown, Unreachable):
            if not self._gives_up:
                raise
            return {"given_up": publisher.unconfirmed}
        finally:
            publisher.close()
        return {}

    def abort(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    def _next_id(self) -> str:
        """Of the next row of this shard."""
        found = f"{self._id}.{self._rows}"
        self._rows += 1
        return found

    @abstractmethod
    def _connect(self) -> Publisher[M]: ...

    @abstractmethod
    def _messages(self, rows: pa.RecordBatch) -> list[M]:
        """One for each row, in their order."""
