"""What a source's connector implements: offsets, slices of a batch, and the read of a slice; and a queue's. Findings of
preflight checks, of sources and sinks."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import pyarrow as pa

from delivered.model.capability import Guarantee, SourceCapability
from delivered.model.errors import DeliveredError, InvariantBroken, texts
from delivered.model.rows import Rows
from delivered.model.work import Outcome, Owner


@dataclass(frozen=True)
class Finding:
    """What a preflight check found at the live system.

    Attributes:
        code: as in an error, without the prefix.
        refuses: the pipeline must not start.
        only: the guarantee it rules out; None: all of them.
        transient: a server is unreachable and may come back.
    """

    code: str
    message: str
    refuses: bool
    next_step: str | None = None
    only: Guarantee | None = None
    transient: bool = False

    @classmethod
    def build(
        cls, code: str, *, refuses: bool, only: Guarantee | None = None, transient: bool = False, **values: object
    ) -> Finding:
        """With the texts of the catalogue; `code` with its condition."""
        message, next_step = texts(code, values)
        return cls(code.partition(".")[0], message, refuses, next_step, only, transient)

    @classmethod
    def refusal(cls, why: DeliveredError) -> Finding:
        return cls(why.code.removeprefix("DELIVERED_"), why.message, True, why.next_step, None, why.may_come_back)

    def __str__(self) -> str:
        """As a warning: with the code that `delivered explain` takes."""
        return f"{'; '.join(filter(None, (self.message.rstrip('.'), self.next_step)))} [DELIVERED_{self.code}]"


Offsets = dict[str, Any]
"""A position in a source, as the JSON in Spark's offset log. The connector chooses the shape."""


@dataclass(frozen=True)
class Slice:
    """The part of a batch that one task reads.

    Attributes:
        data: picklable; the connector chooses the shape.
        partition: name of the source partition, for reports; slices of one partition are ordered.
    """

    data: Any
    partition: str = ""


@dataclass(frozen=True)
class Address:
    """Where a sink writes, or a source reads.

    Attributes:
        system: "kafka".
        servers: as the options spell them.
        names: of topics or tables; None: each row, or a pattern, says which.
    """

    system: str
    servers: frozenset[str]
    names: frozenset[str] | None

    def meets(self, other: Address) -> bool:
        """Whether one reads what the other writes."""
        if self.system != other.system or not self.servers & other.servers:
            return False
        return self.names is None or other.names is None or bool(self.names & other.names)

    def __str__(self) -> str:
        names = "topics or tables by row" if self.names is None else ", ".join(sorted(self.names))
        return f"{self.system} {names} at {', '.join(sorted(self.servers))}"


@dataclass(frozen=True)
class ReceiverReport:
    """What a receiver last said of itself, next to the log that it fills. For operators; proves nothing.

    Attributes:
        owner: its process.
        at_ms: when, since 1970.
        counts: messages since its start: received, entered, repeated, quarantined, acknowledged; and how often it
            paused and reconnected.
    """

    owner: Owner
    at_ms: int
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Unique among the receivers of a log; part of a file's name."""
        return f"{self.owner.host}-{self.owner.process}-{self.owner.started_ms}"

    def to_json(self) -> str:
        return self.owner.to_json(at_ms=self.at_ms, counts=dict(self.counts))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises ValueError, KeyError or TypeError for other text, and Refused for a newer format."""
        owner, rest = Owner.from_json(text)
        return cls(owner, rest["at_ms"], rest["counts"])


@dataclass(frozen=True)
class DedupWindow:
    """How long a log recognises a message, at the rate of its last appends, in seconds.

    Attributes:
        kept_s: how long it keeps an id.
        needed_s: how long after a message was received the queue may redeliver it.
        records_per_s: of the log's busiest partition.
    """

    kept_s: float
    needed_s: float
    records_per_s: float

    @property
    def short(self) -> bool:
        return self.kept_s < self.needed_s


@dataclass(frozen=True)
class Retained:
    """What a source still has of the records from a position on, and how long it keeps them.

    Attributes:
        missing: partition -> offsets from the position on whose records it has dropped; of records, at most so many.
            0: it has dropped some, and does not say how many.
        until_ms: partition -> when it may drop the first record that it has, at the earliest, in milliseconds since
            1970. A partition without one is absent: it has no such record, or drops none by age or size.
        unknown: why nothing is known of some partitions; empty: all are known.
    """

    missing: Mapping[str, int] = field(default_factory=dict)
    until_ms: Mapping[str, int] = field(default_factory=dict)
    unknown: str = ""


@dataclass(frozen=True)
class Blocking:
    """An open transaction that hides its own records, and those behind them, from readers of committed records.

    Attributes:
        id: transactional id; empty: no coordinator knows it, or this user may not see its name.
        producer: its number at the system.
        since_ms: of its start, or without a name of its newest record, in milliseconds since 1970; None: unknown.
        timeout_s: age at which its system aborts it; None: never, or unknown.
        at: partition, as the source's lag names it -> its first hidden offset.
        end: command of the system's own tool that ends it, for an operator.
    """

    id: str
    producer: int
    since_ms: int | None
    timeout_s: float | None
    at: Mapping[str, int]
    end: str

    def age_s(self) -> float | None:
        return None if self.since_ms is None else max(0.0, time.time() - self.since_ms / 1000)


@dataclass(frozen=True)
class HeldBack:
    """Records that readers of committed records do not see yet.

    Attributes:
        offsets: partition -> offsets from its last stable one to its high watermark; those without any are absent.
        by: the transactions that hide them, those of this pipeline excepted; oldest first.
    """

    offsets: Mapping[str, int] = field(default_factory=dict)
    by: tuple[Blocking, ...] = ()

    @property
    def total(self) -> int:
        return sum(self.offsets.values())


class SourceDriver(ABC):
    """Plans the batches of a source. Runs on the driver, in one long-lived process; used by one thread.

    A driver derives from this class and implements the abstract methods. It inherits the rest, which then says that its
    system has nothing of the kind.
    """

    @abstractmethod
    def initial(self) -> Offsets:
        """Where a new checkpoint starts, by `startingOffsets`. Not called if the checkpoint has offsets.

        `startingOffsets` accepts the result as JSON: the checkpoint sidecar keeps it, so that "latest" stays the same
        when batch 0 is rerun.
        """

    def check_initial(self) -> None:
        """Raise what `initial` would raise, for a plan. Changes nothing at the server."""
        self.initial()

    def check_offsets(self, offsets: Offsets) -> None:  # noqa: ARG002
        """Raise InvariantBroken if a checkpoint's offsets are those of another kind of source. Contacts no server."""
        return

    @abstractmethod
    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        """Where the next batch may end: at most about `rows_max` records after `start`; None: no limit."""

    def parts(self, at: Offsets) -> Mapping[str, Any]:  # noqa: ARG002
        """What can be removed from the source and come back (a topic's partition, a stream), with its identity if the
        system has one -> its position in `at`. Contacts no server."""
        return {}

    @abstractmethod
    def newest(self) -> Offsets | None:
        """The current end of the source, for the lag in progress reports."""

    @abstractmethod
    def freeze(self) -> None:
        """Trigger.AvailableNow: offer no record newer than this call."""

    @abstractmethod
    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        """Split a batch. The same start and end give the same slices in the same order, in any process."""

    @abstractmethod
    def batch(self) -> tuple[Offsets, Offsets]:
        """Start and end of a batch read: `startingOffsets` to `endingOffsets`."""

    def acknowledge(self, end: Offsets) -> None:  # noqa: ARG002
        """Report progress: the end of a batch that Spark logged. May be called repeatedly for a batch, or never."""
        return

    def close(self) -> None:
        """Release connections. May be called again."""
        return

    def waiting_since(self, start: Offsets, end: Offsets) -> Mapping[str, int] | None:  # noqa: ARG002
        """When the records were written that wait; None: this source does not know.

        Partition, named as by `source.lag_by_partition`, -> when its first record of [start, end) was written, in
        milliseconds since 1970; a partition without one is absent. Read-only. Raises Unreachable.
        """
        return None

    def held_back(self) -> HeldBack | None:
        """What open transactions hide from this source; None: none can, or it does not know. Read-only. Raises
        Unreachable."""
        return None

    def retained(self, at: Offsets) -> Retained | None:  # noqa: ARG002
        """What this source still has from a position on; None: it does not know. Read-only. Raises Unreachable."""
        return None

    def compacted(self) -> Sequence[str]:
        """Why records that were read may be missing from any place, by the system's settings. Each a sentence.

        Read-only. Raises Unreachable.
        """
        return ()

    def landmarks(self, at: Offsets) -> Mapping[str, str]:  # noqa: ARG002
        """Partition -> description of its last record before `at`, which another history would not have.

        Where a source was restored from an older copy, or deleted and recreated, other records may have the positions
        that were read. A landmark shows it where positions do not. The same for as long as the record exists; a
        partition without one is absent. Read-only. Raises Unreachable, UsageError.
        """
        return {}

    def check_landmarks(self, at: Offsets, known: Mapping[str, str]) -> None:  # noqa: ARG002
        """Compare what `landmarks(at)` returned at an earlier start with what the source has now.

        Raises InvariantBroken if another record is there, and the options say to stop; else logs a warning. A record
        that is missing proves nothing here: retention or compaction may have removed it.

        The identity in `at` (a topic's or a table's id, a server's), if the source has one, is compared first, and then
        epochs: what was recreated has other records too, and the user reads the cause. A difference that `latest` and
        `slices` report is left to them.
        """
        return


def foreign_offsets(kind: str, offsets: Offsets) -> InvariantBroken:
    """The error of `check_offsets`. Args: kind: "a Kafka"."""
    return InvariantBroken("CHECKPOINT_OFFSETS", kind=kind, offsets=json.dumps(offsets)[:200])


@dataclass(frozen=True)
class Resumption:
    """Where another reader stopped.

    Attributes:
        offsets: as `SourceDriver.initial` gives them.
        partitions: source partition -> (offset of the next record, its current lag in records).
        notes: what was assumed.
    """

    offsets: Offsets
    partitions: Mapping[str, tuple[int, int]]
    notes: tuple[str, ...] = ()


class Source(ABC):
    """A source as the user declared it: validated options, no connection. Picklable.

    A source derives from this class and implements the abstract methods. It inherits the rest, which then says that its
    system has nothing of the kind.
    """

    @abstractmethod
    def capability(self) -> SourceCapability:
        """Static: contacts no server."""

    @abstractmethod
    def schema(self) -> pa.Schema:
        """Columns that `read` returns. Static if possible."""

    @abstractmethod
    def driver(self) -> SourceDriver: ...

    @abstractmethod
    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        """Runs on an executor. Bounded memory; the same slice gives the same records, in the same order."""

    @property
    def rows_per_batch_max(self) -> int | None:
        """The user's admission limit (`maxOffsetsPerTrigger`), if any."""
        return None

    def preflight(self) -> Sequence[Finding]:
        """Check on the live system that this source can be read. Runs on the driver before the first batch."""
        return ()

    def recheck(self) -> None:
        """Check what the server may lose after `preflight`. Read-only. Raises DeliveredError: a start would be refused
        now."""
        return

    def planned(self) -> Self:
        """A copy with the current columns fixed; itself if they are fixed already.

        Runs on the driver, once per query, before `schema`. Queries the system; raises UsageError if it has no columns.
        """
        return self

    def address(self) -> Address | None:
        """Where this reads, to see whether one pipeline reads what another one wrote; contacts no server.

        None: not known.
        """
        return None

    def row_key(self) -> tuple[str, ...]:
        """Columns of the key that names the row of an update or delete; none: it has none, or no changes.

        Of a planned source it contacts no server.
        """
        return ()

    def earlier(self, end: Offsets, until: Offsets) -> Offsets:
        """Per partition, the earlier of two positions; only partitions that `until` names. Pure.

        Here, positions are numbers, nested by partition.
        """
        at: Offsets = {name: end.get(name, bound) for name, bound in until.items()}
        return {n: self.earlier(at[n], to) if isinstance(to, dict) else min(at[n], to) for n, to in until.items()}

    def resumption(self, stopped: Offsets | str | int) -> Resumption | None:  # noqa: ARG002
        """Where another reader stopped. Runs on the driver; read-only. None: this source does not know.

        Args:
            stopped: the offsets in a checkpoint of Spark's own source; the name of a consumer group, refused while it
                has members; or a time in milliseconds since 1970, for each partition's first record at or after it.

        Raises Refused if records would be skipped or may have been read, and Unreachable.
        """
        return None

    def rate(self) -> float | None:
        """Records per second of a log's busiest partition, over its last appends. None: too few to know.

        Raises DeliveredError if the log cannot be read.
        """
        return None

    def receivers(self) -> Sequence[ReceiverReport] | None:
        """The receivers that did not leave: they run, or died; None: none fill this source.

        Read-only. Raises DeliveredError if the log cannot be read.
        """
        return None

    def dedup_window(self) -> DedupWindow | None:
        """How long messages are recognised; None: too few appends to know, or messages without ids.

        Read-only. Raises DeliveredError.
        """
        return None

    def wal_held_back(self) -> int | None:
        """Bytes of WAL that this source keeps its server from removing; None: nothing. Read-only. Raises
        Unreachable."""
        return None

    def read_rows(self, piece: Slice) -> Iterator[Rows]:
        """As `read`, which fails at a record of which it can make no row (`SourceCapability.decodes`): here it is
        rejected."""
        return map(Rows, self.read(piece))

    def read_good(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        """The good rows of `read_rows` alone."""
        return (rows.good for rows in self.read_rows(piece))

    def raw_schema(self) -> pa.Schema:
        """Columns of records that are not decoded."""
        return self.schema()

    def decoded(self, raw: pa.RecordBatch) -> Rows:
        """Such records, as `read_rows` returns them."""
        return Rows(raw)

    def newest_versions(self) -> Mapping[str, int]:
        """By column, the newest version of its registered schema; without those whose schema the options name."""
        return {}

    def by_versions(self, versions: Mapping[str, int]) -> Mapping[str, str]:  # noqa: ARG002
        """Options that name these versions."""
        return {}


COORDINATES = ("topic", "partition", "offset")
"""Columns that say where a record is, in sources that have them."""


# What a queue's connector implements. A queue deletes acknowledged messages.
#
# Receivers move its messages into a journal, and pipelines read the journal.


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
    def id_scope(self) -> str:
        """Within what a message id names one message, whatever the broker's address."""
        return self.name

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
