"""The Kafka source: the offsets of a batch, and detection of lost records and of logs that were replaced."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self, TypeVar

import pyarrow as pa
import tenacity

from delivered.clients.kafka import NoAnswer
from delivered.clients.kafka.channel import unreachable
from delivered.clients.kafka.consumer import BatchHeader, EpochEnd, batches_before, epoch_ends
from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.record_batch import Partition
from delivered.connectors.kafka import (
    EARLIEST,
    LASTING,
    LATEST,
    METADATA,
    OWNER,
    SOURCE_SETTINGS,
    Positions,
    SourceOptions,
    Where,
    by_arrow,
    check_settings,
    path,
    refuse_latest_start,
)
from delivered.connectors.kafka.reader import (
    KafkaDriverClient,
    decode,
    find_compacted,
    find_retained,
    find_write_times,
    joined,
    raw_schema,
    read_range,
    read_rows,
    resolve,
)
from delivered.contract.source import (
    Address,
    Finding,
    HeldBack,
    Offsets,
    Resumption,
    Retained,
    Slice,
    Source,
    SourceDriver,
)
from delivered.model.capability import SourceCapability
from delivered.model.errors import DeliveredError, InvariantBroken, UsageError
from delivered.model.limits import RESTART_CONFIRM_S
from delivered.model.rows import Rows
from delivered.source import Range, admit, columns, split

# Whether a partition's log is still the one that a position was read from (P29).
#
# A log can lose its end: an unclean leader election, a broker with an older copy of its disk. Once it has grown past
# the position, offsets alone do not show it. The epoch of the leader that named the position does: see
# `delivered.clients.kafka.consumer`.

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
    """Compares positions with the logs as they are. Not thread-safe. Args: wire: opens the driver's connections."""

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
        """An epoch that a leader does not know may be one that it does not know yet: ask until that is certain."""
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


# The Kafka source: the offsets of a batch, and detection of lost records.

log = logging.getLogger("delivered.kafka")

_CONFIRM_PAUSE_S = 0.1


@dataclass(frozen=True)
class KafkaSource(Source):
    """`delivered_kafka` as a source. Holds options, no connection."""

    options: SourceOptions

    @property
    def rows_per_batch_max(self) -> int | None:
        return self.options.rows_max

    def capability(self) -> SourceCapability:
        assumes = [
            f"Kafka keeps the records of {self.options.what} until their batch is logged (retention, compaction)",
            "brokers are not restored from a copy of their disks that is less than a minute old",
        ]
        if not self.options.fail_on_data_loss:
            assumes.append(
                "failOnDataLoss is false: records that Kafka deletes before they are read are lost, with a warning"
            )
        if not self.options.committed_only:
            assumes.append("read_uncommitted: records of transactions that abort later count")
        records = path(self.options.through, self.options.client, SOURCE_SETTINGS, "Arrow, decoded in C")
        return SourceCapability(
            "kafka",
            replayable=True,
            sent_twice=True,
            records=records,
            assumes=tuple(assumes),
            decodes=True,
            offset_metadata=METADATA,
            lasting_metadata=LASTING,
        )

    def preflight(self) -> Sequence[Finding]:
        try:
            self.planned()
        except UsageError as error:
            return [Finding.refusal(error)]
        client = KafkaDriverClient(self.options)
        try:
            client.offsets(dict.fromkeys(client.partitions()[0], LATEST))
            group = self.options.group
            if group is not None and (members := client.group_members(group)):
                return [Finding.build("GROUP_IN_USE", refuses=True, group=group, members=members)]
        except DeliveredError as error:
            return [Finding.refusal(error)]
        finally:
            client.close()
        return []

    def planned(self) -> Self:
        check_settings(OWNER, self.options.client)
        by_arrow(OWNER, self.options.through, self.options.client, SOURCE_SETTINGS)
        return self

    def schema(self) -> pa.Schema:
        return columns(self.options.headers)

    def address(self) -> Address:
        options = self.options
        named = options.topics if options.partitions is None else [topic for topic, _ in options.partitions]
        servers = options.client["bootstrap.servers"].replace(" ", "").split(",")
        return Address("kafka", frozenset(servers), frozenset(named) if named is not None else None)

    def driver(self) -> KafkaDriver:
        return KafkaDriver(self.options)

    def resumption(self, stopped: Offsets | str | int) -> Resumption:
        from delivered.connectors.kafka.reader import find_resumption

        return find_resumption(self.options, stopped)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        topic, partition, start, end = piece.data
        return read_range(self.options, Range((topic, partition), start, end))

    def read_rows(self, piece: Slice) -> Iterator[Rows]:
        """Rejects record batches that are too large to be decompressed."""
        topic, partition, start, end = piece.data
        return read_rows(self.options, Range((topic, partition), start, end))

    def raw_schema(self) -> pa.Schema:
        return raw_schema(self.options.headers)

    def decoded(self, raw: pa.RecordBatch) -> Rows:
        return decode(raw)


@dataclass(frozen=True)
class _Snapshot:
    """End offsets, topic ids and leader epochs at one moment."""

    ends: Mapping[Partition, int]
    ids: Mapping[str, str]
    epochs: Mapping[Partition, int]


class KafkaDriver(SourceDriver):
    """See `delivered.contract.source.SourceDriver`."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._client = KafkaDriverClient(options)
        self._frozen: _Snapshot | None = None
        self._history = LogHistory(options, self._client.wire)
        self._checked = False
        self._acknowledged: dict[Partition, int] = {}
        self._ended_s: float | None = None

    def initial(self) -> Offsets:
        return self._settled(self._initial)

    def _initial(self) -> Offsets:
        options = self._options
        if options.ending is not None:
            raise UsageError("OPTION_CONFLICT.KAFKA_END", option=options.ending.option)
        where = options.starting or Where("startingOffsets", LATEST)
        if where.stored is not None:
            return where.stored.to_json()
        snapshot = self._frozen or self._snapshot()
        at = resolve(self._client, options, where, snapshot.ends, None if options.timestamp_strict else LATEST)
        return Positions(at, snapshot.ids, epochs=snapshot.epochs).to_json()

    def check_offsets(self, offsets: Offsets) -> None:
        Positions.from_json(offsets)

    def parts(self, at: Offsets) -> Mapping[str, int]:
        positions = Positions.from_json(at)
        return {f"{t}-{n} (topic id {positions.ids.get(t)})": o for (t, n), o in positions.at.items()}

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        return self._settled(lambda: self._latest(start, rows_max))

    def _latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        at = Positions.from_json(start)
        snapshot = self._frozen_snapshot() or self._snapshot_from(at)
        begin, first, jumps = self._begin(at, snapshot)
        if (
            not jumps
            and begin.keys() == at.at.keys()
            and self._waits(sum(snapshot.ends[p] - o for p, o in begin.items()))
        ):
            return start
        admitted = admit({p: snapshot.ends[p] - o for p, o in begin.items()}, rows_max)
        ends = {p: o + admitted[p] for p, o in begin.items()}
        if ends == at.at:
            if snapshot.ids == at.ids and not jumps:
                return start
            # A log that is another one now, and ends at the old position: Spark runs no batch between equal offsets.
            if short := next((p for p in sorted(jumps) if jumps[p] < ends[p]), None):
                ends[short] -= 1
        return Positions(ends, snapshot.ids, first, jumps, snapshot.epochs).to_json()

    def _waits(self, rows: int) -> bool:
        """Whether a batch of this many offsets waits for `minOffsetsPerTrigger`. The first batch does not."""
        options, now = self._options, time.monotonic()
        if options.rows_min is None or self._frozen is not None:
            return False
        if rows < options.rows_min and self._ended_s is not None and now - self._ended_s < options.delay_s_max:
            return True
        self._ended_s = now
        return False

    def newest(self) -> Offsets | None:
        snapshot = self._snapshot()
        return Positions(snapshot.ends, snapshot.ids).to_json()

    def waiting_since(self, start: Offsets, end: Offsets) -> dict[str, int]:
        """By the records' timestamps."""
        at, ends = Positions.from_json(start).at, Positions.from_json(end).at
        waiting = {p: (o, ends[p]) for p, o in at.items() if ends.get(p, o) > o}
        return {f"{t}/{n}": ms for (t, n), ms in find_write_times(self._options, waiting).items()} if waiting else {}

    def held_back(self) -> HeldBack | None:
        """By the partitions' ends and producers, and the coordinators' lists."""
        from delivered.connectors.kafka.committer import find_held_back

        if not self._options.committed_only:
            return None
        return find_held_back(self._client.wire(), list(self._client.partitions()[0]), self._options.servers)

    def retained(self, at: Offsets) -> Retained:
        """By log start offsets, `retention.ms` and `retention.bytes`."""
        return find_retained(self._options, self._client, Positions.from_json(at))

    def compacted(self) -> Sequence[str]:
        return find_compacted(self._client)

    def landmarks(self, at: Offsets) -> Mapping[str, str]:
        """The header of a record batch."""
        found = self._history.landmarks(Positions.from_json(at).at)
        return {f"{topic}/{number}": text for (topic, number), text in found.items()}

    def check_landmarks(self, at: Offsets, known: Mapping[str, str]) -> None:
        read = Positions.from_json(at)
        _, ids = self._client.partitions()
        # `latest` and `slices` report topics that were recreated, and logs that parted, with their offsets.
        same = [p for p in read.at if p[0] in ids and read.ids.get(p[0], ids[p[0]]) == ids[p[0]]]
        parted = self._history.compare(read, {p: e for p, e in read.epochs.items() if p in same})
        now = self._history.landmarks({p: read.at[p] for p in same if p not in parted})
        for (topic, number), text in sorted(now.items()):
            name, offset = f"{topic}/{number}", read.at[topic, number]
            if name in known and are_different(known[name], text):
                self._lost(
                    f"{topic}-{number} has other records before offset {offset} than this stream has read: it is an "
                    "older copy that grew again. Those which it has lost, and those that have their offsets now, are "
                    "not read"
                )

    def freeze(self) -> None:
        self._frozen = self._snapshot()

    def _frozen_snapshot(self) -> _Snapshot | None:
        """The snapshot that `freeze` stored, or a new one of the same topics if one was recreated since.

        A recreated topic has other records under the same offsets. The new snapshot makes that show as in a stream that
        is not frozen; with failOnDataLoss false the topic is read to its present end.
        """
        frozen = self._frozen
        if frozen is None:
            return None
        _, ids = self._client.partitions()
        if any(ids.get(topic) != id_ for topic, id_ in frozen.ids.items()):
            now = self._snapshot()
            self._frozen = frozen = _Snapshot(
                {p: o for p, o in now.ends.items() if p[0] in frozen.ids},
                {t: i for t, i in now.ids.items() if t in frozen.ids},
                now.epochs,
            )
        return frozen

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        first, last = Positions.from_json(start), Positions.from_json(end)
        partings = {} if self._checked else self._check_log(last)
        ranges = []
        begins = {p: last.begin_of(p, first) for p in last.at}
        # Spark's own connector does not log the first offset of an added partition; it too starts at the earliest.
        unknown = [p for p, begin in begins.items() if begin is None]
        earliest = self._earliest(unknown, last.at)
        for partition, stop in sorted(last.at.items()):
            known = begins[partition]
            begin = min(earliest[partition] or 0, stop) if known is None else known
            if partition in partings and (same := partings[partition].offset) is not None:
                stop = min(stop, max(begin, same))  # the next batch reads on from here
            if begin > stop:
                self._lost(f"{joined([partition])} went back from offset {begin} to {stop}")
                begin = stop
            ranges.append(Range(partition, begin, stop))
        pieces = split(ranges, self._options.pieces_min, self._options.piece_rows_max)
        return [Slice((*r.key, r.start, r.end), partition=f"{r.key[0]}-{r.key[1]}") for r in pieces]

    def _earliest(self, partitions: Sequence[Partition], stops: Mapping[Partition, int]) -> dict[Partition, int | None]:
        """The first offsets of partitions that no batch has read. With failOnDataLoss false, one that was deleted since
        its end was listed has nothing left to read."""
        try:
            return self._client.offsets(dict.fromkeys(partitions, EARLIEST))
        except UsageError as error:
            if self._options.fail_on_data_loss or error.code != "DELIVERED_TOPIC_MISSING":
                raise
            if len(partitions) == 1:
                self._lost(f"{joined(partitions)} was deleted before it was read")
                return {partitions[0]: stops[partitions[0]]}
        return {p: offset for one in partitions for p, offset in self._earliest([one], stops).items()}

    def batch(self) -> tuple[Offsets, Offsets]:
        options = self._options
        starting = options.starting or Where("startingOffsets", EARLIEST)
        refuse_latest_start(starting)
        snapshot = self._snapshot()
        missing = None if options.timestamp_strict else LATEST
        start = resolve(self._client, options, starting, snapshot.ends, missing)
        end = resolve(self._client, options, options.ending or Where("endingOffsets", LATEST), snapshot.ends, LATEST)
        for partition, offset in start.items():
            if offset > end[partition]:
                raise UsageError(
                    "OPTION_VALUE.KAFKA_RANGE",
                    partition=joined([partition]),
                    offset=offset,
                    end=end[partition],
                )
        return Positions(start, snapshot.ids).to_json(), Positions(end, snapshot.ids).to_json()

    def acknowledge(self, end: Offsets) -> None:
        group = self._options.group
        if group is None:
            return
        at = dict(Positions.from_json(end).at)
        if at == self._acknowledged:
            return
        try:
            self._client.commit(group, at)
            self._acknowledged = at
        except DeliveredError as error:
            # Progress is in the checkpoint; the group is only for monitoring. The next batch commits again.
            log.warning("offsets were not committed to the consumer group %r: %s", group, error, extra={"group": group})

    def close(self) -> None:
        self._client.close()

    def _settled(self, ask: Callable[[], T]) -> T:
        """The answer of `ask`, which lists topics and then asks about them: meanwhile one may have been deleted. With
        failOnDataLoss false, such a topic is a lost one, and the others are asked about again."""
        asking = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda e: getattr(e, "code", None) == "DELIVERED_TOPIC_MISSING"),
            wait=tenacity.wait_fixed(_CONFIRM_PAUSE_S),
            stop=tenacity.stop_after_delay(0 if self._options.fail_on_data_loss else RESTART_CONFIRM_S),
            reraise=True,
        )
        return asking(ask)

    def _snapshot(self) -> _Snapshot:
        partitions, ids = self._client.partitions()
        ends, epochs = self._client.ends(partitions)
        return _Snapshot({p: ends[p] for p in partitions}, ids, epochs)

    def _snapshot_from(self, at: Positions) -> _Snapshot:
        """A snapshot; an end before this stream's position, which a restarting broker may report, must persist, and so
        must a leader of an earlier epoch, which may not know yet that it was replaced."""

        def behind(snapshot: _Snapshot) -> bool:
            return any(
                (snapshot.ends[p] < o or snapshot.epochs.get(p, 0) < at.epochs.get(p, 0))
                and at.ids.get(p[0], snapshot.ids.get(p[0])) == snapshot.ids.get(p[0])
                for p, o in at.at.items()
                if p in snapshot.ends
            )

        confirming = tenacity.Retrying(
            retry=tenacity.retry_if_result(behind),
            wait=tenacity.wait_fixed(_CONFIRM_PAUSE_S),
            stop=tenacity.stop_after_delay(RESTART_CONFIRM_S),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )
        snapshot: _Snapshot = confirming(self._snapshot)
        return snapshot

    def _begin(
        self, at: Positions, snapshot: _Snapshot
    ) -> tuple[dict[Partition, int], dict[Partition, int], dict[Partition, int]]:
        """First offsets of the batch: of all partitions, of added ones, and of those that lost records before it."""
        self._checked = True
        remade = {t for t, i in snapshot.ids.items() if at.ids.get(t, i) != i}
        missing = [p for p in at.at if p not in snapshot.ends]
        again = [p for p in at.at if p in snapshot.ends and p[0] in remade]
        back = [p for p, o in at.at.items() if p in snapshot.ends and p[0] not in remade and snapshot.ends[p] < o]
        if missing:
            self._lost(f"{joined(missing)} no longer exists, or is no longer subscribed to")
        if again:
            self._lost(f"the topic of {joined(again)} was deleted and recreated")
        partings = self._history.partings(at, {p: e for p, e in snapshot.epochs.items() if p[0] not in remade})
        self._report(partings)
        if others := [p for p in back if p not in partings]:
            self._lost(f"{joined(others)} ends before offset {at.at[others[0]]}, the position of this stream")
        fresh = [p for p in snapshot.ends if p not in at.at or p in again]
        low = self._client.offsets(dict.fromkeys(fresh, EARLIEST)) if fresh else {}
        began = {p: min(low[p] or 0, snapshot.ends[p]) for p in fresh}
        # Continuing at the new end repeats nothing: what remains below it was read before.
        jumps = {p: snapshot.ends[p] for p in back} | {p: began[p] for p in again}
        jumps |= {p: parting.offset for p, parting in partings.items() if parting.offset is not None}
        first = {p: o for p, o in at.first.items() if p in snapshot.ends} | {
            p: o for p, o in began.items() if p not in again
        }
        kept = {p: o for p, o in at.at.items() if p in snapshot.ends}
        return {**kept, **began, **jumps}, first, jumps

    def _check_log(self, last: Positions) -> dict[Partition, Parting]:
        """Check that the logs are still those of which an earlier process planned this batch."""
        self._checked = True
        snapshot = self._snapshot_from(last)
        remade = [t for t, i in last.ids.items() if t in snapshot.ids and snapshot.ids[t] != i]
        if remade:
            self._lost(f"the topic {remade[0]} was deleted and recreated")
        partings = self._history.partings(last, {p: e for p, e in snapshot.epochs.items() if p[0] not in remade})
        self._report(partings)
        return partings

    def _report(self, partings: Mapping[Partition, Parting]) -> None:
        for partition, parting in sorted(partings.items()):
            self._lost(parting.describe(partition))

    def _lost(self, what: str) -> None:
        if self._options.fail_on_data_loss:
            raise InvariantBroken("DATA_LOST.KAFKA_TOPIC", what=what)
        log.warning("%s; records may be lost, and failOnDataLoss is false", what)
