"""What a queue's connector implements. A queue deletes acknowledged messages.

Receivers move its messages into a journal, and pipelines read the journal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from delivered.contract.source import Finding
from delivered.model.work import Outcome


@dataclass
class MessageBatch:
    """Messages that were received and not yet acknowledged: parallel lists, one entry per message.

    Attributes:
        ids: set by the sender, or None; bytes that are not UTF-8 as lone surrogates (`source.id_text`).
        headers: pairs of name (`source.header_name`) and value; may be empty.
        times_us: Unix time set by the sender, or None.
        handles: opaque, for `Receiver.acknowledge`.
    """

    ids: list[str | None] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    headers: list[Sequence[tuple[str, bytes | None]]] = field(default_factory=list)
    times_us: list[int | None] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.handles)

    def split(self, count: int) -> tuple[MessageBatch, MessageBatch]:
        """The first `count` messages, and the rest; one of them may be `self`."""
        if len(self) <= count:
            return self, MessageBatch()
        if not count:
            return MessageBatch(), self
        lists = self._lists()
        return MessageBatch(*(column[:count] for column in lists)), MessageBatch(*(column[count:] for column in lists))

    def pick(self, at: Sequence[int]) -> MessageBatch:
        """The messages at these indices, in this order."""
        return MessageBatch(*([column[i] for i in at] for column in self._lists()))

    def extend(self, others: MessageBatch) -> None:
        for own, more in zip(self._lists(), others._lists(), strict=True):
            own += more

    def _lists(self) -> tuple[list[Any], ...]:
        return self.ids, self.keys, self.values, self.headers, self.times_us, self.handles


class Receiver(ABC):
    """One connection to a queue. Used by one thread of one process."""

    @abstractmethod
    def receive(self, count_max: int, wait_s: float) -> MessageBatch:
        """At most `count_max` messages, in the queue's order; waits up to `wait_s` for the first one.

        Also keeps the connection alive: call it every few seconds, with a count of 0 to receive nothing.
        Dies here: the messages are redelivered. Raises Unreachable if the connection is lost permanently.
        """

    @abstractmethod
    def acknowledge(self, handles: Sequence[Any]) -> Outcome[int]:
        """Let the queue delete these messages. Returns how many. Unknown or Failed: they may be redelivered."""

    @abstractmethod
    def give_back(self, handles: Sequence[Any]) -> None:
        """Return these messages to the queue, for any consumer. Best effort: closing does the same."""

    @abstractmethod
    def close(self) -> None:
        """Return unacknowledged messages to the queue, and disconnect. May be called again."""


class Queue(ABC):
    """A queue as the user declared it: validated options, no connection. Picklable."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For users; also the default name of its journal."""

    @property
    @abstractmethod
    def redelivers_after_s(self) -> float:
        """How long after a message was received the queue may redeliver it, if its receiver died or hangs."""

    @abstractmethod
    def receiver(self) -> Receiver: ...

    def assumes(self) -> tuple[str, ...]:
        """Assumptions about this queue and its senders."""
        return ()

    def preflight(self) -> Sequence[Finding]:
        """Check on the live system that messages can be received, without receiving any."""
        return ()

    @property
    def without_ids(self) -> str | None:
        """Why redelivered messages cannot be recognized, as a clause after "and"; None: they can."""
        return None


@dataclass(frozen=True)
class Entered:
    """Result of one append.

    Attributes:
        entered: messages that were new to the log.
        repeated: duplicates of messages in the log or in the batch.
        tries: commit attempts, more than one if there were concurrent writers.
    """

    entered: int
    repeated: int
    tries: int = 1


@dataclass(frozen=True)
class JournalSize:
    bytes: int
    files: int


class Journal(ABC):
    """The durable log that receivers write to. Any number of processes may write, each with its own object."""

    @abstractmethod
    def append(self, batch: MessageBatch) -> Outcome[Entered]:
        """Atomically append the messages whose ids are not in the window. Ok: all of the batch is durable.

        The commit decides which messages are new: if two processes append the same message concurrently, only one adds
        it. Failed: nothing was added. Unknown: something may have been added; do not acknowledge.
        """

    @abstractmethod
    def size(self) -> JournalSize:
        """What readers can see now."""

    @abstractmethod
    def maintain(self, exact: bool = False) -> int:
        """Compact small files, and delete records that every reader has passed. Returns the number of deleted records.

        exact: delete all of them, even if files must be rewritten; otherwise only where that is cheap.
        """

    @abstractmethod
    def close(self) -> None: ...
