"""Whether a partition's log is still the one that a position was read from (P29).

A log can lose its end: an unclean leader election, a broker with an older copy of its disk. Once it has grown past the
position, offsets alone do not show it. The epoch of the leader that named the position does: see
`delivered.clients.kafka.epochs`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

from delivered.clients.kafka.epochs import BatchHeader, EpochEnd, batches_before, epoch_ends
from delivered.clients.kafka.login import NoAnswer, unreachable
from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.rows import Partition
from delivered.connectors.kafka.offsets import Positions
from delivered.connectors.kafka.options import SourceOptions
from delivered.model.limits import RESTART_CONFIRM_S

_PAUSE_S = 0.2
_CLEANED = 1 << 6
"""Flag of a record batch that compaction has rewritten."""
T = TypeVar("T")


@dataclass(frozen=True)
class Parting:
    """Where a log's history leaves the one that was read.

    Attributes:
        position: the stream's; the records before it were read.
        offset: the first one whose record is another; None: unknown, because the log has no epoch as new as this one.
        epoch: in which the log reached beyond `position`.
    """

    position: int
    offset: int | None
    epoch: int

    @property
    def resume(self) -> int | None:
        """Where reading can go on without reading a record again."""
        return None if self.offset is None else min(self.offset, self.position)

    def describe(self, partition: Partition) -> str:
        name = f"{partition[0]}-{partition[1]}"
        read = f"which this stream has read up to offset {self.position}"
        if self.offset is None:
            return (
                f"{name} is an older copy of the log {read}: it has no leader epoch {self.epoch}. Records that were "
                "read are no longer in it, and others may have their offsets"
            )
        count = self.position - self.offset
        return (
            f"{name} lost its end: at offset {self.offset}, its log parts from the one {read}. The {count} offsets "
            f"{self.offset} to {self.position - 1} were read with records that Kafka has lost; records that have these "
            "offsets now were never read"
        )


class LogHistory:
    """Compares positions with the logs as they are. Not thread-safe.

    Args:
        wire: opens the driver's connections.
    """

    def __init__(self, options: SourceOptions, wire: Callable[[], Wire]) -> None:
        self._options, self._connected = options, wire
        self._checked: dict[Partition, int] = {}

    def partings(self, at: Positions, epochs: Mapping[Partition, int]) -> dict[Partition, Parting]:
        """Partitions whose log is another one below the position. Asks the brokers once for each leader epoch.

        Args:
            epochs: of the leaders now.

        Raises:
            Unreachable, UsageError: no answer.
        """
        changed = {p: e for p, e in epochs.items() if self._checked.get(p) != e}
        found = self.compare(at, {p: e for p, e in at.epochs.items() if p in changed})
        self._checked |= {p: e for p, e in changed.items() if p not in found}
        return found

    def compare(self, at: Positions, epochs: Mapping[Partition, int]) -> dict[Partition, Parting]:
        """As `partings`, for these epochs of positions."""
        asked = {p: epoch for p, epoch in epochs.items() if at.at.get(p, 0) > 0}
        if not asked:
            return {}
        found: dict[Partition, Parting] = {}
        for partition, end in self._ends(asked).items():
            position, epoch = at.at[partition], asked[partition]
            if end.epoch < 0:
                found[partition] = Parting(position, None, epoch)
            elif end.offset < position:
                found[partition] = Parting(position, end.offset, epoch)
        return found

    def _ends(self, asked: Mapping[Partition, int]) -> dict[Partition, EpochEnd]:
        """An epoch that a leader does not know may be one that it has not heard of yet: ask until that is certain."""
        deadline = time.monotonic() + RESTART_CONFIRM_S
        while True:
            ends = self._ask(lambda wire: epoch_ends(wire, asked))
            if all(e.epoch >= 0 for e in ends.values()) or time.monotonic() > deadline:
                return ends
            time.sleep(_PAUSE_S)

    def landmarks(self, at: Mapping[Partition, int]) -> dict[Partition, str]:
        """The record batch before each position, as text. Raises Unreachable, UsageError."""
        found = self._ask(lambda wire: batches_before(wire, at))
        return {p: json.dumps(asdict(header)) for p, header in found.items()}

    def _ask(self, ask: Callable[[Wire], T]) -> T:
        wire = self._connected()
        wire.forget()
        try:
            return ask(wire)
        except NoAnswer as error:
            raise unreachable(self._options.servers, error) from None


def are_different(known: str, now: str) -> bool:
    """Whether two landmarks of one position are of different record batches.

    Compaction keeps a batch's offsets, leader epoch and producer; it drops records, and marks tombstones and markers.
    """
    old, new = (BatchHeader(**json.loads(text)) for text in (known, now))
    if old.crc == new.crc:
        return False
    if (old.first, old.last, old.epoch, old.producer) != (new.first, new.last, new.epoch, new.producer):
        return True
    return old.count == new.count and not new.flags & _CLEANED
