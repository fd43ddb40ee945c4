"""The Kafka source: which offsets a batch takes, and what happened to those that it wanted."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import tenacity

from delivered.connectors.kafka.admin import KafkaDriverClient, joined
from delivered.connectors.kafka.librdkafka import check_settings
from delivered.connectors.kafka.offsets import (
    EARLIEST,
    LASTING,
    LATEST,
    METADATA,
    Partition,
    Place,
    Positions,
    Timestamp,
    Where,
)
from delivered.connectors.kafka.options import OWNER, SourceOptions, refuse_latest_start
from delivered.contract.finding import Finding
from delivered.contract.source import Offsets, Slice
from delivered.model.capability import SourceCapability
from delivered.model.errors import DeliveredError, InvariantBroken, UsageError
from delivered.model.limits import RESTART_CONFIRM_S
from delivered.source.columns import columns
from delivered.source.ranges import Range, admit, split

log = logging.getLogger("delivered.kafka")

_CONFIRM_PAUSE_S = 0.1


@dataclass(frozen=True)
class KafkaSource:
    """`delivered_kafka` as a source. Holds options, no connection."""

    options: SourceOptions

    @property
    def rows_per_batch_max(self) -> int | None:
        return self.options.rows_max

    @property
    def offset_metadata(self) -> frozenset[str]:
        return METADATA

    @property
    def lasting_metadata(self) -> frozenset[str]:
        return LASTING

    def capability(self) -> SourceCapability:
        assumes = [
            f"Kafka keeps the records of {self.options.what} until their batch is logged (retention, compaction)"
        ]
        if not self.options.fail_on_data_loss:
            assumes.append(
                "failOnDataLoss is false: records that Kafka deletes before they are read are lost, with a warning"
            )
        if not self.options.committed_only:
            assumes.append("read_uncommitted: records of transactions that abort later count")
        return SourceCapability(system="kafka", replayable=True, sent_twice=True, assumes=tuple(assumes))

    def preflight(self) -> Sequence[Finding]:
        client = KafkaDriverClient(self.options)
        try:
            client.offsets(dict.fromkeys(client.partitions()[0], LATEST))
            group = self.options.group
            if group is not None and (members := client.group_members(group)):
                return [
                    Finding(
                        "GROUP_IN_USE",
                        f"The consumer group {group!r} of commitOffsetsToGroup has {members} members: Kafka takes its "
                        "progress from them alone.",
                        True,
                        "name a group that no consumer uses",
                    )
                ]
        except DeliveredError as error:
            return [Finding.refusal(error)]
        finally:
            client.close()
        return []

    def planned(self) -> KafkaSource:
        check_settings(OWNER, self.options.client)
        return self

    def schema(self) -> pa.Schema:
        return columns(self.options.headers)

    def driver(self) -> KafkaDriver:
        return KafkaDriver(self.options)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        from delivered.connectors.kafka.reader import read_range

        topic, partition, start, end = piece.data
        return read_range(self.options, Range((topic, partition), start, end))


@dataclass(frozen=True)
class _Look:
    """What Kafka had at one moment."""

    ends: Mapping[Partition, int]
    ids: Mapping[str, str]


class KafkaDriver:
    """See `delivered.contract.source.SourceDriver`."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._client = KafkaDriverClient(options)
        self._frozen: _Look | None = None
        self._looked = False
        self._acknowledged: dict[Partition, int] = {}
        self._ended_s: float | None = None

    def initial(self) -> Offsets:
        options = self._options
        if options.ending is not None:
            raise UsageError(
                "OPTION_CONFLICT",
                f"{OWNER}: option {options.ending.option!r} is for a batch read; a stream has no end.",
                next_step="take it out, or use spark.read",
            )
        where = options.starting or Where("startingOffsets", LATEST)
        if where.stored is not None:
            return where.stored.to_json()
        look = self._frozen or self._look()
        at = self._resolve(where, look, missing=None if options.timestamp_strict else LATEST)
        return Positions(at, look.ids).to_json()

    def latest(self, start: Offsets, rows_max: int | None) -> Offsets:
        at = Positions.from_json(start)
        look = self._frozen_look() or self._look_from(at)
        begin, first, jumps = self._begin(at, look)
        if not jumps and begin.keys() == at.at.keys() and self._waits(sum(look.ends[p] - o for p, o in begin.items())):
            return start
        taken = admit({p: look.ends[p] - o for p, o in begin.items()}, rows_max)
        ends = {p: o + taken[p] for p, o in begin.items()}
        if ends == at.at:
            if look.ids == at.ids:
                return start
            # A topic made again that ends where the former one stood: Spark runs no batch between equal offsets.
            if short := next((p for p in sorted(jumps) if jumps[p] < ends[p]), None):
                ends[short] -= 1
        return Positions(ends, look.ids, first, jumps).to_json()

    def _waits(self, rows: int) -> bool:
        """Whether a batch of so many offsets is to wait for `minOffsetsPerTrigger`. The first one does not."""
        options, now = self._options, time.monotonic()
        if options.rows_min is None or self._frozen is not None:
            return False
        if rows < options.rows_min and self._ended_s is not None and now - self._ended_s < options.delay_s_max:
            return True
        self._ended_s = now
        return False

    def newest(self) -> Offsets | None:
        look = self._look()
        return Positions(look.ends, look.ids).to_json()

    def freeze(self) -> None:
        self._frozen = self._look()

    def _frozen_look(self) -> _Look | None:
        """What was there when the stream was frozen, as long as these are still the same topics.

        A topic that was deleted and recreated meanwhile has other records under the same offsets. It is looked at
        anew, so that it is found out as in a stream that is not frozen; with failOnDataLoss false it is read to its
        present end.
        """
        frozen = self._frozen
        if frozen is None:
            return None
        _, ids = self._client.partitions()
        if any(ids.get(topic) != id_ for topic, id_ in frozen.ids.items()):
            now = self._look()
            self._frozen = frozen = _Look(
                {p: o for p, o in now.ends.items() if p[0] in frozen.ids},
                {t: i for t, i in now.ids.items() if t in frozen.ids},
            )
        return frozen

    def slices(self, start: Offsets, end: Offsets) -> Sequence[Slice]:
        first, last = Positions.from_json(start), Positions.from_json(end)
        if not self._looked:
            self._check_ids(last)
        ranges = []
        begins = {p: last.begin_of(p, first) for p in last.at}
        # Spark's own connector does not log where a partition began that came later; it takes the earliest, too.
        unknown = [p for p, begin in begins.items() if begin is None]
        earliest = self._client.offsets(dict.fromkeys(unknown, EARLIEST)) if unknown else {}
        for partition, stop in sorted(last.at.items()):
            known = begins[partition]
            begin = min(earliest[partition] or 0, stop) if known is None else known
            if begin > stop:
                self._lost(f"{joined([partition])} went back from offset {begin} to {stop}")
                begin = stop
            ranges.append(Range(partition, begin, stop))
        pieces = split(ranges, self._options.pieces_min, self._options.piece_rows_max)
        return [Slice((*r.key, r.start, r.end), partition=f"{r.key[0]}-{r.key[1]}") for r in pieces]

    def batch(self) -> tuple[Offsets, Offsets]:
        options = self._options
        starting = options.starting or Where("startingOffsets", EARLIEST)
        refuse_latest_start(starting)
        look = self._look()
        start = self._resolve(starting, look, missing=None if options.timestamp_strict else LATEST)
        end = self._resolve(options.ending or Where("endingOffsets", LATEST), look, missing=LATEST)
        for partition, offset in start.items():
            if offset > end[partition]:
                raise UsageError(
                    "OPTION_VALUE",
                    f"{OWNER}: {joined([partition])} would be read from offset {offset} to {end[partition]}, which is "
                    "before its start.",
                    next_step="correct the starting and ending offsets",
                )
        return Positions(start, look.ids).to_json(), Positions(end, look.ids).to_json()

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
            # The checkpoint is what counts; the group is for people who look. The next batch tells it again.
            log.warning("the consumer group %r was not told: %s", group, error, extra={"group": group})

    def close(self) -> None:
        self._client.close()

    def _look(self) -> _Look:
        partitions, ids = self._client.partitions()
        ends = self._client.offsets(dict.fromkeys(partitions, LATEST))
        self._looked = True
        return _Look({p: o or 0 for p, o in ends.items()}, ids)

    def _look_from(self, at: Positions) -> _Look:
        """A look that knows what this stream has read. For a moment after its restart a broker may tell an earlier end
        than the one it had: what it says is taken for true when it stays with it."""

        def behind(look: _Look) -> bool:
            return any(
                look.ends[p] < o and at.ids.get(p[0], look.ids.get(p[0])) == look.ids.get(p[0])
                for p, o in at.at.items()
                if p in look.ends
            )

        looking = tenacity.Retrying(
            retry=tenacity.retry_if_result(behind),
            wait=tenacity.wait_fixed(_CONFIRM_PAUSE_S),
            stop=tenacity.stop_after_delay(RESTART_CONFIRM_S),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )
        look: _Look = looking(self._look)
        return look

    def _resolve(self, where: Where, look: _Look, missing: int | None) -> dict[Partition, int]:
        """Offsets of a place in each partition.

        Args:
            missing: what stands for a time after the last record; None: that is an error.
        """
        places: dict[Partition, Place] = {}
        silent = [p for p in look.ends if where.place(p) is None]
        foreign = [p for p in where.each if p not in look.ends]
        if silent or foreign:
            problem = f"says nothing of {joined(silent)}" if silent else f"names {joined(foreign)}, not read here"
            raise UsageError(
                "OPTION_VALUE",
                f"{OWNER}: option {where.option!r} {problem}; it must name every partition that is read, no other.",
                next_step="name them all; -2 stands for the earliest offset, -1 for the latest",
            )
        for partition, end in look.ends.items():
            place = where.place(partition)
            # The end is that of one look, so that start and end of a batch, and a frozen stream, agree.
            places[partition] = end if place == LATEST or place is None else place
        found = self._client.offsets(places)
        late = [p for p, offset in found.items() if offset is None]
        if late and missing is None:
            ms = where.place(late[0])
            raise UsageError(
                "OPTION_VALUE",
                f"{OWNER}: option {where.option!r}: {joined(late)} has no record at or after "
                f"{ms.ms if isinstance(ms, Timestamp) else ms} ms.",
                next_step='take an earlier time, or .option("startingOffsetsByTimestampStrategy", "latest")',
            )
        # Never beyond the end of the look: a record may have come since.
        at = {p: look.ends[p] if o is None else o for p, o in found.items()}
        self._check_range(where, at, look)
        return {p: min(o, look.ends[p]) for p, o in at.items()}

    def _check_range(self, where: Where, at: Mapping[Partition, int], look: _Look) -> None:
        """Offsets that the user named must exist."""
        named = {p: o for p, o in at.items() if where.place(p) == o}
        if not named or not self._options.fail_on_data_loss:
            return
        low = self._client.offsets(dict.fromkeys(named, EARLIEST))
        for partition, offset in named.items():
            first, last = low[partition] or 0, look.ends[partition]
            if not first <= offset <= last:
                raise UsageError(
                    "OFFSET_OUT_OF_RANGE",
                    f"{OWNER}: option {where.option!r} names offset {offset} of {joined([partition])}, which has "
                    f"offsets {first} to {last}.",
                    next_step='name an offset that exists, or .option("failOnDataLoss", "false")',
                )

    def _begin(
        self, at: Positions, look: _Look
    ) -> tuple[dict[Partition, int], dict[Partition, int], dict[Partition, int]]:
        """Where each partition's batch begins; where new ones did; and where the batch before ended elsewhere."""
        remade = {t for t, i in look.ids.items() if at.ids.get(t, i) != i}
        gone = [p for p in at.at if p not in look.ends]
        again = [p for p in at.at if p in look.ends and p[0] in remade]
        back = [p for p, o in at.at.items() if p in look.ends and p[0] not in remade and look.ends[p] < o]
        if gone:
            self._lost(f"{joined(gone)} no longer exists, or is no longer subscribed to")
        if again:
            self._lost(f"the topic of {joined(again)} was deleted and recreated")
        if back:
            self._lost(f"{joined(back)} ends before offset {at.at[back[0]]}, where this stream stands already")
        fresh = [p for p in look.ends if p not in at.at or p in again]
        low = self._client.offsets(dict.fromkeys(fresh, EARLIEST)) if fresh else {}
        began = {p: min(low[p] or 0, look.ends[p]) for p in fresh}
        # Going on at the new end repeats nothing: what is left below it was read before.
        jumps = {p: look.ends[p] for p in back} | {p: began[p] for p in again}
        first = {p: o for p, o in at.first.items() if p in look.ends} | {
            p: o for p, o in began.items() if p not in again
        }
        kept = {p: o for p, o in at.at.items() if p in look.ends}
        return {**kept, **began, **jumps}, first, jumps

    def _check_ids(self, last: Positions) -> None:
        """A batch planned by an earlier process: are these still the same topics?"""
        _, ids = self._client.partitions()
        self._looked = True
        remade = [t for t, i in last.ids.items() if t in ids and ids[t] != i]
        if remade:
            self._lost(f"the topic {remade[0]} was deleted and recreated")

    def _lost(self, what: str) -> None:
        if self._options.fail_on_data_loss:
            raise InvariantBroken(
                "DATA_LOST",
                f"{OWNER}: {what}; records may be lost.",
                next_step='find out why; to go on all the same, restart with .option("failOnDataLoss", "false")',
            )
        log.warning("%s; records may be lost, and failOnDataLoss is false", what)
