"""What the connector of a queue implements: of a system that forgets a message once it is acknowledged.

Receivers take messages out of it, a journal keeps them, and the journal is what a pipeline reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from delivered.contract.finding import Finding
from delivered.model.outcome import Outcome


@dataclass
class MessageBatch:
    """Messages that a queue handed out and that nobody acknowledged yet. Lists of one length, a message each.

    Attributes:
        ids: what the sender named them by; None: it did not.
        headers: name and value; an empty sequence where there are none.
        times_us: Unix time that the sender set; None: it did not.
        handles: what `Receiver.acknowledge` takes; opaque.
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
        """The first `count`, and the others; one of the two may be this very batch."""
        if len(self) <= count:
            return self, MessageBatch()
        if not count:
            return MessageBatch(), self
        lists = self._lists()
        return MessageBatch(*(column[:count] for column in lists)), MessageBatch(*(column[count:] for column in lists))

    def pick(self, at: Sequence[int]) -> MessageBatch:
        """Those at these places, in this order."""
        return MessageBatch(*([column[i] for i in at] for column in self._lists()))

    def extend(self, others: MessageBatch) -> None:
        for mine, more in zip(self._lists(), others._lists(), strict=True):
            mine += more

    def _lists(self) -> tuple[list[Any], ...]:
        return self.ids, self.keys, self.values, self.headers, self.times_us, self.handles


class Receiver(Protocol):
    """One connection to a queue that forgets what is acknowledged. Used by one thread of one process."""

    def receive(self, count_max: int, wait_s: float) -> MessageBatch:
        """Messages that arrived, at most `count_max`, in the queue's order; waits up to `wait_s` for the first one.

        Also does what keeps the connection alive: call it every few seconds, with 0 to take nothing.
        Dies here: the queue hands them out again. Raises Unreachable when the connection is gone for good.
        """

    def acknowledge(self, handles: Sequence[Any]) -> Outcome[int]:
        """Let the queue forget these. Returns how many. Unknown or Failed: it will hand them out again, perhaps."""

    def give_back(self, handles: Sequence[Any]) -> None:
        """Have the queue hand these out again, to whomever. Best effort: closing does the same."""

    def close(self) -> None:
        """Give back what is not acknowledged, and the connection. May be called again."""


@runtime_checkable
class Queue(Protocol):
    """A queue as the user named it: options, checked, no connection. Picklable."""

    @property
    def name(self) -> str:
        """For people, and the default name of what is made for it."""

    def assumes(self) -> tuple[str, ...]:
        """What the guarantee takes for granted of this queue and its senders."""

    def preflight(self) -> Sequence[Finding]:
        """Ask the live system whether messages can be received. Takes none."""

    def receiver(self) -> Receiver: ...


@runtime_checkable
class NamesIds(Protocol):
    """What a queue has besides when only an option tells where its senders put ids. Opt-in."""

    @property
    def without_ids(self) -> str | None:
        """Why a message that comes again cannot be recognised, to follow "and"; None: it can."""


@dataclass(frozen=True)
class Entered:
    """What one append did.

    Attributes:
        entered: messages that are in the log now, and were not before.
        repeated: messages that were in already, or twice in the batch.
        tries: commits it took, because others wrote at the same time.
    """

    entered: int
    repeated: int
    tries: int = 1


@dataclass(frozen=True)
class JournalSize:
    """How much a journal holds."""

    bytes: int
    files: int


class Journal(Protocol):
    """The durable log behind a receiver. Any number of processes may write to one; each has an object of its own."""

    def append(self, batch: MessageBatch) -> Outcome[Entered]:
        """Append the messages whose ids the window does not hold, all or none. Ok: all of the batch is durable.

        Which messages are known is decided in the commit itself: of two processes that append one message at the
        same time, one finds it. Failed: nothing of it is in. Unknown: it may be in; do not acknowledge.
        """

    def size(self) -> JournalSize:
        """Of what readers can see now."""

    def maintain(self, exact: bool = False) -> int:
        """Put small files together; take away what every reader has behind it. Returns records taken away.

        exact: take away all of it, at the price of writing files anew; else what costs little.
        """

    def close(self) -> None: ...
