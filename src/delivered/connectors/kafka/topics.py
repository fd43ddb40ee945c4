"""The pipeline's internal topic: layout, creation, keys, transactional ids, how its committed records are read.
And checks of topics and brokers before the first batch.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from delivered.clients.kafka import NoAnswer, protocol
from delivered.clients.kafka.channel import only
from delivered.clients.kafka.consumer import BROKER_CONFIG, TOPIC_CONFIG, describe_configs
from delivered.clients.kafka.protocol import Wire, name_of
from delivered.clients.kafka.record_batch import library
from delivered.clients.kafka.transactions import (
    OPEN_STATES,
    Transaction,
    TransactionState,
    describe,
    initialise,
    listed,
)
from delivered.connectors.kafka import LEDGER_TOPICS, SinkOptions, is_internal
from delivered.contract.source import Finding
from delivered.model.capability import Guarantee
from delivered.model.errors import DeliveredError, InvariantBroken, Refused, Unreachable, did_you_mean
from delivered.model.identity import Scope, Work
from delivered.model.limits import CLAIMS_APART, OUTAGE_PATIENCE_S, REQUEST_TIMEOUT_S, TRANSACTION_SLOTS
from delivered.model.work import Failed, Ok, Outcome, Owner, Unknown

# The pipeline's internal topic: layout and creation.

STATE_PARTITION = 0
"""Owners, newest decisions and started batches: small, read at every start."""
HISTORY_PARTITION = 1
"""Decisions kept for the audit, and its seals."""
MARKERS_FROM = 2
MARKER_PARTITIONS = 6
"""Shared by a pipeline's sinks; several, so that an open transaction of one sink rarely hides another's markers."""
PARTITIONS = MARKERS_FROM + MARKER_PARTITIONS

_CONFIG = {
    "cleanup.policy": "compact",
    # A read costs what compaction has not removed yet: one or two segments per partition.
    "segment.bytes": str(1 << 20),
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.1",
    "max.compaction.lag.ms": "600000",
    "delete.retention.ms": "600000",
    "max.message.bytes": str(2 << 20),
    "unclean.leader.election.enable": "false",
}
_MIN_ISR = "min.insync.replicas"
COPIES = 3
"""Replicas of the internal topic, where the sink's topics give no measure. Two of so many must be in sync."""
_DEFAULT_COPIES = -1
"""The broker's default."""


def ledger_topic(scope: Scope, named: str | None) -> str:
    """Name of the pipeline's internal topic."""
    return named or f"{LEDGER_TOPICS}{scope.pipeline}"


def ensure_topic(wire: Wire, topic: str, options: SinkOptions) -> None:
    """Create the topic if it does not exist, and wait until its partitions have leaders.

    Unless its replication factor is an option, it gets that of the sink's topic; a sink of several topics, 3.

    Raises:
        Refused: no permission, or the name is not allowed. Unreachable: no answer.
    """
    wire.forget()  # it may have been deleted since this process last saw it
    deadline = time.monotonic() + OUTAGE_PATIENCE_S
    if not _ready(wire, topic):
        _create(wire, topic, options)
    while not _ready(wire, topic):
        if time.monotonic() > deadline:
            raise Unreachable("LEDGER_UNAVAILABLE.LEADER", topic=topic, outage_patience_s=OUTAGE_PATIENCE_S)
        time.sleep(0.02)


def _ready(wire: Wire, topic: str) -> bool:
    try:
        for partition in range(PARTITIONS):
            wire.leader(topic, partition)
    except NoAnswer:
        return False
    return True


def _create(wire: Wire, topic: str, options: SinkOptions) -> None:
    from kafka.protocol.admin.topics import CreateTopicsRequest

    Topic = CreateTopicsRequest.CreatableTopic  # noqa: N806
    Config = Topic.CreatableTopicConfig  # noqa: N806

    def ask() -> Any:
        copies = options.ledger_replication or find_replication_factor(wire, options.topic)
        settings = _CONFIG | ({_MIN_ISR: "2"} if copies >= COPIES else {})
        request = CreateTopicsRequest(
            topics=[
                Topic(
                    name=topic,
                    num_partitions=PARTITIONS,
                    replication_factor=copies,
                    assignments=[],
                    configs=[Config(name=k, value=v) for k, v in settings.items()],
                )
            ],
            timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
            validate_only=False,
            max_version=5,
        )
        found = only(wire.ask(request).topics, "topics")
        if found.error_code == protocol.INVALID_REPLICATION_FACTOR and options.ledger_replication is None:
            raise NoAnswer(f"fewer than {copies} brokers are up now")
        return found

    try:
        found = wire.patiently(ask)  # idempotent
    except NoAnswer as error:
        raise Unreachable("LEDGER_UNAVAILABLE.CREATE", topic=topic, error=error) from None
    if found.error_code in (protocol.NONE, protocol.TOPIC_ALREADY_EXISTS):
        return
    raise Refused(
        "LEDGER_TOPIC",
        topic=topic,
        error=name_of(found.error_code),
        detail=found.error_message or "",
        partitions=PARTITIONS,
    )


def find_replication_factor(wire: Wire, beside: str | None) -> int:
    """Replication factor for the ledger of a sink that writes to this topic; None: to several."""
    if beside is not None:
        found: Any = wire.patiently(lambda: wire.topic(beside))
        if copies := min((len(p.replica_nodes) for p in found.partitions), default=0):
            return copies
    return COPIES if len(wire.nodes()) >= COPIES else _DEFAULT_COPIES


def topic_id(wire: Wire, topic: str) -> str | None:
    """A topic's id; None: the topic does not exist, or the brokers are too old for topic ids.

    Raises:
        NoAnswer: still no answer after 120 s.
    """

    def ask() -> Any:
        found = wire.topic(topic)
        if found.error_code not in (protocol.NONE, protocol.LEADER_NOT_AVAILABLE, protocol.UNKNOWN_TOPIC_OR_PARTITION):
            raise NoAnswer(f"topic {topic!r}: {name_of(found.error_code)}")
        return found

    found = wire.patiently(ask)
    if found.error_code == protocol.UNKNOWN_TOPIC_OR_PARTITION:
        return None
    known: Any = found.topic_id
    return str(known) if known is not None and known.int else None


# Transactional ids, and which transactions of a cluster are a sink's.
#
# A transactional id is `delivered.<pipeline>.<sink>.<check>.<shard>.<slot>`. Names may contain dots, so the check, a
# hash of pipeline and sink, distinguishes pairs that join to the same name.
#
# Initialising an id fences its previous holder. So slots alternate
#
# - between batches: a batch does not wait until the previous one's transaction has ended at the brokers;
# - between attempts of a task: overlapping attempts never share an id;
# - between claims of the ledger: tasks of a driver that was superseded fence none of its successor.

_PARALLEL_MAX = 8


def id_prefix(scope: Scope) -> str:
    """Prefix of this sink's transactional ids in this pipeline, of all incarnations, and of no other ids."""
    check = hashlib.blake2b(f"{scope.pipeline}\0{scope.sink}".encode(), digest_size=4).hexdigest()
    return f"{scope.prefix}{check}."


def slot_of(batch: int, attempt: int, claim: int = 0) -> int:
    """Which of a shard's ids an attempt uses. Without a claim, those of release 0.1."""
    per_batch = TRANSACTION_SLOTS // 2
    turn = 0 if claim == 0 else 1 + (claim - 1) % CLAIMS_APART
    return turn * TRANSACTION_SLOTS + (batch % 2) * per_batch + attempt % per_batch


def transactional_id(work: Work) -> str:
    return f"{id_prefix(work.scope)}{work.shard}.{slot_of(work.batch, work.attempt, work.claim)}"


def is_ours(scope: Scope, candidate: str) -> bool:
    """Whether a transactional id belongs to a shard of this sink in this pipeline."""
    prefix = id_prefix(scope)
    return candidate.startswith(prefix) and re.fullmatch(r"\d+\.\d{1,2}", candidate[len(prefix) :]) is not None


def open_transactions(wire: Wire, scope: Scope) -> list[TransactionState]:
    """This sink's unfinished transactions in this pipeline, oldest first. Raises NoAnswer."""
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    found = [describe(wire, name) for name in listed(wire, partial(is_ours, scope), OPEN_STATES, deadline)]
    return sorted((t for t in found if t is not None and t.state in OPEN_STATES), key=lambda t: t.started_ms)


def abort_orphans(
    wire: Wire, scope: Scope, keep: Iterable[Transaction], timeout_ms: int, wait_s: float
) -> Outcome[int]:
    """Fence every id of this sink whose open or future transaction is not in `keep`.

    Fences instead of just aborting, so that a paused task cannot continue writing.

    Returns:
        Number of aborted transactions.
    """
    deadline = time.monotonic() + wait_s
    kept = {h.transactional_id: h for h in keep}

    def one(item: tuple[str, str]) -> Outcome[int]:
        name, state = item
        if name in kept:
            try:
                now = describe(wire, name)
            except NoAnswer as error:
                return Unknown(str(error))
            if now is not None and now.participant == kept[name]:
                return Ok(0)
        match initialise(wire, name, timeout_ms, deadline):
            case Ok():
                # PrepareCommit is already decided: just wait for it to complete.
                return Ok(1 if state in ("Ongoing", "PrepareAbort", "PrepareEpochFence") else 0)
            case Failed(reason) | Unknown(reason):
                return Unknown(reason)

    try:
        found = listed(wire, partial(is_ours, scope), (*OPEN_STATES, "Empty"), deadline)
    except NoAnswer as error:
        return Unknown(str(error))
    if not found:
        return Ok(0)
    total = 0
    with ThreadPoolExecutor(min(_PARALLEL_MAX, len(found))) as pool:
        for outcome in pool.map(one, sorted(found.items())):
            if not isinstance(outcome, Ok):
                return outcome
            total += outcome.value
    return Ok(total)


# Keys of a ledger's records in its topic.
#
#     partition 0   ["owner", pipeline, sink]                  the ledger's owner
#                   ["last", pipeline, sink, incarnation]      its newest decision
#                   ["begun", pipeline, sink, incarnation]     its newest started batch (at_most_once)
#                   ["archive", pipeline, sink, n]             summaries of old incarnations: 25 bytes each
#     partition 1   ["kept", pipeline, sink, incarnation, n]   decisions for the audit, n = batch % 1000
#                   ["seal", pipeline, sink, number]         seals of audits, never deleted: see `store`
#     partition 2.. ["marker", pipeline, sink, shard]          written by tasks: see `committer`
#
# Keys of an earlier release (format 1) lack the pipeline; several pipelines that share a topic may have written to
# them. They stay where they are, are read, and are never written again:
#
# - A decision counts for the pipeline that it names. An owner, a started batch and an archive name none, and count for
#   every pipeline of that sink: at worst, a start is refused that need not be.
# - A claim replaces the old owner by one that such a release refuses (`FORMAT_NEWER`): it would not see the new keys.

_PARTS = {"owner": 3, "last": 4, "begun": 4, "archive": 4, "kept": 5, "seal": 4}


@dataclass(frozen=True)
class Key:
    """
    Attributes:
        kind: "owner", ...; of a record that this release does not know, too.
        pipeline: None: an earlier release wrote it.
        rest: incarnation or number, or both.
    """

    kind: str
    pipeline: str | None
    sink: str
    rest: tuple[str | int, ...]

    @classmethod
    def parse(cls, raw: bytes) -> Key:
        try:
            kind, *parts = json.loads(raw)
            pipeline = parts.pop(0) if len(parts) + 1 == _PARTS.get(kind) else None
            return cls(kind, pipeline, parts[0], tuple(parts[1:]))
        except (ValueError, TypeError, IndexError, RecursionError):
            return cls("", None, "", ())  # anybody may write to a topic


class Keys:
    """Keys of one pipeline and sink."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def key(self, kind: str, *rest: str | int) -> bytes:
        return json.dumps([kind, self._scope.pipeline, self._scope.sink, *rest], separators=(",", ":")).encode()

    def old(self, kind: str, *rest: str | int) -> bytes:
        """As an earlier release wrote it."""
        return json.dumps([kind, self._scope.sink, *rest], separators=(",", ":")).encode()

    def one(self, kind: str, *rest: str | int) -> tuple[bytes, ...]:
        return (self.key(kind, *rest),)

    def both(self, kind: str, *rest: str | int) -> tuple[bytes, ...]:
        return self.key(kind, *rest), self.old(kind, *rest)

    def holds(self, key: Key) -> bool:
        """Whether a record may be this pipeline's and sink's."""
        return key.sink == self._scope.sink and key.pipeline in (None, self._scope.pipeline)


MOVED = {"moved": True}
"""Field of an owner under an earlier release's key that only stops such a release."""


def is_moved(owner: bytes) -> bool:
    return "moved" in Owner.from_json(owner)[1]


# Committed records of a partition of the internal topic, up to an end that no stale answer can hide.
#
# A Fetch response's high watermark is no end: a leader that has just been elected learns it from its followers, and
# until then reports an old one. ListOffsets does not answer before (KIP-207), and no answer of an earlier leader epoch
# counts.

HIDDEN_S = 2.0
"""How long an open transaction may hide what is read before it is asked whether its end was lost."""

_FETCH_BYTES = 4 << 20
NOBODY = -1
_CODECS = (0, 1)
"""None and gzip, which `ledger_write` uses."""
_UNPACKED_BYTES_MAX = 256 << 20
_RECORDS_MAX = 1 << 20
"""Of a batch."""
_UNCOMMITTED, _COMMITTED = 0, 1
_LATEST = -1


@dataclass(frozen=True)
class Record:
    """
    Attributes:
        producer: the producer id of its transaction, which the broker checked; NOBODY: it was written in none, and no
            ledger or task of ours did that.
        epoch: of that producer.
        key: empty: the batch at this offset has a right checksum, but is none that a ledger writes.
    """

    offset: int
    key: bytes
    value: bytes | None
    producer: int
    epoch: int


class Hidden(NoAnswer):
    """An open transaction hides the end of a partition."""


def _every(_: Record) -> bool:
    return True


def damaged(topic: str, partition: int, offset: int, why: str) -> InvariantBroken:
    """The error for what a ledger's own record cannot be."""
    return InvariantBroken("LEDGER_DAMAGED", topic=topic, partition=partition, offset=offset, reason=why)


class CommittedReader:
    """A read_committed reader of one partition; each read continues after the last one. Not thread-safe.

    Attributes:
        position: of the next record.
    """

    def __init__(self, wire: Wire, topic: str, partition: int) -> None:
        self._wire = wire
        self._topic = topic
        self._partition = partition
        self._end = 0
        self.position = 0

    def reach(self, end: int) -> None:
        """Read at least up to this offset: it was acknowledged by all replicas in sync."""
        self._end = max(self._end, end)

    def read(self, deadline: float, wait: bool = True, ours: Callable[[Record], bool] = _every) -> Iterator[Record]:
        """Records of committed transactions, oldest first, up to the present end.

        Args:
            deadline: of time.monotonic().
            wait: for transactions that are open before that end; else stop at the last stable offset.
            ours: whether a record matters. Open transactions without such records are not waited for;
                the next read returns committed records behind them once more.

        Raises:
            NoAnswer: no answer. Hidden: such a transaction is still open at the deadline; the next read continues here.
            NoTopic: the topic does not exist.
        """
        end = self._wire.patiently(lambda: self._list_end(wait))
        pause = 0.002
        while self.position < end:
            part = self._wire.patiently(lambda: self._fetch(self.position, _COMMITTED))
            before = self.position
            yield from self._records(part)
            if not part.records:
                # Compaction removed everything there.
                self.position = max(self.position, min(end, part.last_stable_offset))
            if self.position == before and self.position < end:
                behind = self._behind_open(end, ours)
                if behind is not None:
                    yield from behind
                    return
                if time.monotonic() > deadline:
                    raise Hidden(
                        f"a transaction that is still open hides partition {self._partition} of {self._topic!r} from "
                        f"offset {part.last_stable_offset} to {end}"
                    )
                time.sleep(pause)
                pause = min(pause * 1.5, 0.25)

    def _behind_open(self, end: int, ours: Callable[[Record], bool]) -> list[Record] | None:
        """Committed records from an open transaction's start to the end. None: records of ours are undecided.

        Between the last stable offset and the end, control records show which transactions have ended.
        """
        at, found = self.position, list[Record]()
        undecided: dict[int, list[Record]] = {}
        while at < end:
            start = at
            part = self._wire.patiently(partial(self._fetch, start, _UNCOMMITTED))
            if not part.records:
                return None  # the leader does not know the end yet
            for batch in self._batches(part):
                at = max(at, batch.base_offset + batch.last_offset_delta + 1)
                if batch.is_control_batch:
                    records = undecided.pop(batch.producer_id, [])
                    if self._is_commit(batch):
                        found += records
                    continue
                records = [r for r in _read(batch) if r.offset >= start]
                if batch.is_transactional:
                    undecided.setdefault(batch.producer_id, []).extend(records)
                else:
                    found += records
            if at == start:
                return None
        if any(ours(r) for records in undecided.values() for r in records):
            return None
        return sorted(found, key=lambda r: r.offset)

    def _is_commit(self, control: Any) -> bool:
        try:
            return bool(next(iter(control)).commit)
        except Exception as error:  # any; no record: StopIteration
            what = f"{type(error).__name__}: {str(error)[:100]}"
            raise damaged(
                self._topic, self._partition, control.base_offset, f"an end of a transaction cannot be read: {what}"
            ) from None

    def end(self) -> int:
        """Where the partition ends now. Raises NoAnswer."""
        return self._wire.patiently(lambda: self._list_end(True))

    def _list_end(self, wait: bool) -> int:
        """The high watermark, never below one seen before; unless `wait`, the last stable offset."""
        from kafka.protocol.consumer import ListOffsetsRequest

        Topic = ListOffsetsRequest.ListOffsetsTopic  # noqa: N806
        leader = self._wire.led(self._topic, self._partition)
        part = Topic.ListOffsetsPartition(
            partition_index=self._partition, current_leader_epoch=leader.epoch, timestamp=_LATEST
        )
        request = ListOffsetsRequest(
            replica_id=-1,
            isolation_level=_UNCOMMITTED if wait else _COMMITTED,
            topics=[Topic(name=self._topic, partitions=[part])],
            max_version=6,
        )
        answer: Any = only(only(self._wire.ask(request, leader.node).topics, "topics").partitions, "partitions")
        if answer.error_code != protocol.NONE:
            raise self._error(answer.error_code)
        end = int(answer.offset)
        if wait and end < self._end:
            raise NoAnswer(f"{self._topic}-{self._partition} ends at offset {end}, but ended at {self._end} before")
        if wait:
            self._end = end
        return end

    def _fetch(self, offset: int, isolation: int) -> Any:
        from kafka.protocol.consumer.fetch import FetchRequest

        Topic = FetchRequest.FetchTopic  # noqa: N806
        leader = self._wire.led(self._topic, self._partition)
        part = Topic.FetchPartition(
            partition=self._partition,
            current_leader_epoch=leader.epoch,
            fetch_offset=offset,
            last_fetched_epoch=-1,
            log_start_offset=-1,
            partition_max_bytes=_FETCH_BYTES,
        )
        request = FetchRequest(
            replica_id=-1,
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=_FETCH_BYTES,
            isolation_level=isolation,
            session_id=0,
            session_epoch=-1,
            topics=[Topic(topic=self._topic, partitions=[part])],
            forgotten_topics_data=[],
            rack_id="",
            max_version=11,
        )
        answer = self._wire.ask(request, leader.node)
        if answer.error_code != protocol.NONE:
            raise NoAnswer(name_of(answer.error_code))
        found = only(only(answer.responses, "topics").partitions, "partitions")
        if found.error_code == protocol.OFFSET_OUT_OF_RANGE and offset == 0:
            raise NoAnswer("the start of the partition moved")
        if found.error_code != protocol.NONE:
            raise self._error(found.error_code)
        return found

    def _batches(self, part: Any) -> Iterator[Any]:
        """Raises InvariantBroken: LEDGER_DAMAGED: a batch differs from what its producer sent."""
        from kafka.record import MemoryRecords

        if not part.records:
            return
        at = self.position
        try:
            batches = MemoryRecords(bytes(part.records))
            while batches.has_next():
                batch = batches.next_batch()
                at = batch.base_offset
                if not _has_checksum(batch):
                    raise damaged(self._topic, self._partition, at, "the record batch does not match its checksum")
                if batch.is_control_batch and batch.compression_type:
                    raise damaged(self._topic, self._partition, at, "a control batch is compressed")
                yield batch
        except DeliveredError:
            raise
        except Exception as error:  # kafka-python raises anything, for older formats and for bytes that are none
            what = f"{type(error).__name__}: {str(error)[:100]}"
            raise damaged(self._topic, self._partition, at, f"no record batch can be read: {what}") from None

    def _error(self, code: int) -> NoAnswer:
        return NoAnswer(f"{self._topic}-{self._partition}: {name_of(code)}")

    def _records(self, part: Any) -> Iterator[Record]:
        try:
            yield from self._visible(part)
        except (DeliveredError, NoAnswer):
            raise
        except Exception as error:  # kafka-python raises anything for bytes that are no record batch
            what = f"{type(error).__name__}: {str(error)[:100]}"
            raise NoAnswer(f"{self._topic}-{self._partition}: records that cannot be read: {what}") from None

    def _visible(self, part: Any) -> Iterator[Record]:
        aborted = sorted(((t.first_offset, t.producer_id) for t in part.aborted_transactions or ()), reverse=True)
        dead: set[int] = set()
        for batch in self._batches(part):
            last = batch.base_offset + batch.last_offset_delta
            while aborted and aborted[-1][0] <= last:
                dead.add(aborted.pop()[1])
            if batch.is_control_batch:
                dead.discard(batch.producer_id)
            elif not (batch.is_transactional and batch.producer_id in dead):
                yield from (r for r in _read(batch) if r.offset >= self.position)
            self.position = max(self.position, last + 1)


def _read(batch: Any) -> list[Record]:
    producer = int(batch.producer_id) if batch.is_transactional else NOBODY
    epoch = int(batch.producer_epoch)
    try:
        if batch.compression_type not in _CODECS or batch.records_count > _RECORDS_MAX:
            raise ValueError("no ledger writes this")
        _unpack(batch)
        return [
            Record(r.offset, bytes(r.key), None if r.value is None else bytes(r.value), producer, epoch)
            for r in batch
            if r.key is not None
        ]
    except Exception:
        # Its checksum is right, so a producer made it so. Whether that matters depends on whose it is.
        return [Record(batch.base_offset, b"", None, producer, epoch)]


def _has_checksum(batch: Any) -> bool:
    """Whether a batch has its producer's checksum; by our C code, as it takes 0.3 s a megabyte in Python."""
    loaded = library()
    if loaded is None:
        return bool(batch.validate_crc())
    body = bytes(batch._buffer[batch.ATTRIBUTES_OFFSET :])
    return int(loaded.rb_crc32c(body, len(body), 0)) == int(batch.crc)


def _unpack(batch: Any) -> None:
    """Unpack a batch here: the client has no bound. Raises ValueError, zlib.error: it is none that a ledger writes."""
    if batch.compression_type == 0:
        return
    unpacking = zlib.decompressobj(wbits=31)
    found = unpacking.decompress(batch._buffer[batch.HEADER_STRUCT.size :], _UNPACKED_BYTES_MAX)
    if not unpacking.eof or unpacking.unused_data:  # too large, cut off, or more gzip members
        raise ValueError("no ledger writes this")
    batch._buffer, batch._pos, batch._decompressed = bytearray(found), 0, True


NEWEST_OFFSETS = 4_000
"""Read first for newest records: a thousand decisions, each with the end of its transaction, twice."""


def starts_from_the_end(end: int) -> Iterator[int]:
    """Where to start reading a partition for its newest records: ever earlier, at last at offset 0."""
    offsets = NEWEST_OFFSETS
    while offsets < end:
        yield end - offsets
        offsets *= 8
    yield 0


def barrier(wire: Wire, topic: str, partition: int) -> int:
    """An offset that is beyond every record committed so far: that of a tombstone which all replicas in sync have now.

    A leader that was replaced without knowing it cannot get one acknowledged.

    Raises:
        NoAnswer: not acknowledged within 120 s, or this user may not write there.
    """
    from kafka.protocol.producer.produce import ProduceRequest
    from kafka.record.default_records import DefaultRecordBatchBuilder

    Topic = ProduceRequest.TopicProduceData  # noqa: N806

    def ask() -> Any:
        builder = DefaultRecordBatchBuilder(2, 0, False, -1, -1, -1, 1 << 20)
        builder.append(0, timestamp=time.time_ns() // 1_000_000, key=b'["barrier"]', value=None, headers=[])
        data = Topic.PartitionProduceData(index=partition, records=bytes(builder.build()))
        request = ProduceRequest(
            transactional_id=None,
            acks=-1,
            timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
            topic_data=[Topic(name=topic, partition_data=[data])],
            max_version=9,
        )
        answer: Any = wire.ask(request, wire.leader(topic, partition))
        part = only(only(answer.responses, "topics").partition_responses, "partitions")
        if part.error_code not in (protocol.NONE, protocol.TOPIC_AUTHORIZATION_FAILED):
            raise NoAnswer(f"{topic}-{partition}: {name_of(part.error_code)}")
        return part

    part = wire.patiently(ask)
    if part.error_code != protocol.NONE:
        raise NoAnswer(f"{topic}-{partition}: {name_of(part.error_code)}")
    return int(part.base_offset) + 1


# Checks before the first batch: the sink's topic, the ledger's, and the brokers, against the guarantee.

_TRANSACTION_LIMIT = "transaction.max.timeout.ms"
_UNCLEAN = "unclean.leader.election.enable"
_TRANSACTION_LOG = "__transaction_state"


def preflight(options: SinkOptions, guarantee: Guarantee) -> Sequence[Finding]:
    """Whatever breaks the guarantee, and warnings.

    Raises:
        Unreachable: no broker answered, or they rejected the credentials.
    """
    with _asking(options) as wire:
        return [
            *_topic(wire, options),
            *(_transactions(wire, options) if guarantee is Guarantee.EXACTLY_ONCE else ()),
        ]


@contextmanager
def _asking(options: SinkOptions) -> Iterator[Wire]:
    """A connection; raises Unreachable if the brokers stop answering."""
    wire = Wire(options.resolved())
    try:
        yield wire
    except NoAnswer as error:
        raise Unreachable(
            "KAFKA_NO_ANSWER.PREFLIGHT", servers=options.client["bootstrap.servers"], error=error
        ) from None
    finally:
        wire.close()


def _topic(wire: Wire, options: SinkOptions) -> list[Finding]:
    if options.topic is None:
        return []
    topic = options.topic
    found = wire.patiently(lambda: wire.topic(topic))
    if found.error_code == protocol.UNKNOWN_TOPIC_OR_PARTITION:
        near = did_you_mean(topic, (t for t in wire.patiently(wire.topics) if not is_internal(t)))
        servers = options.client["bootstrap.servers"]
        return [Finding.build("TOPIC_UNKNOWN.START", refuses=True, topic=topic, servers=servers, hint=near)]
    if found.error_code == protocol.TOPIC_AUTHORIZATION_FAILED:
        return [Finding.build("KAFKA_PERMISSION.DESCRIBE", refuses=True, topic=options.topic)]
    if found.error_code != protocol.NONE:
        return [Finding.build("TOPIC_STATE", refuses=False, topic=options.topic, error=name_of(found.error_code))]
    copies = min((len(p.replica_nodes) for p in found.partitions), default=0)
    in_sync = _config(wire, TOPIC_CONFIG, options.topic, _MIN_ISR)
    findings = []
    if copies == 1:
        findings.append(Finding.build("ONE_COPY", refuses=False, topic=options.topic))
    elif in_sync is not None and int(in_sync) < 2:
        findings.append(
            Finding.build("ONE_COPY_ACKNOWLEDGED", refuses=False, topic=options.topic, copies=copies, in_sync=in_sync)
        )
    if "compact" in (_config(wire, TOPIC_CONFIG, options.topic, "cleanup.policy") or ""):
        findings.append(Finding.build("TOPIC_COMPACTED", refuses=False, topic=options.topic))
    return findings


def check_ledger(options: SinkOptions, scope: Scope) -> Sequence[Finding]:
    """What may lose decisions or markers: settings of the internal topic, and of Kafka's log of transactions.

    Raises:
        Unreachable: no broker answered, or they rejected the credentials.
    """
    topic = ledger_topic(scope, options.ledger_topic)
    with _asking(options) as wire:
        return [*_ledger(wire, topic, options.topic), *_transaction_log(wire, options.topic)]


def _ledger(wire: Wire, topic: str, beside: str | None) -> Iterator[Finding]:
    found = wire.patiently(lambda: wire.topic(topic))
    if found.error_code != protocol.NONE:
        return  # it is created, with the settings that it needs, at the first start
    name = f"The ledger's topic {topic!r}"
    if len(found.partitions) < PARTITIONS:
        yield Finding.build(
            "LEDGER_PARTITIONS",
            refuses=True,
            name=name,
            actual=len(found.partitions),
            partitions=PARTITIONS,
            topic=topic,
        )
    policy = _config(wire, TOPIC_CONFIG, topic, "cleanup.policy")
    if policy is not None and policy != "compact":
        yield Finding.build(
            "LEDGER_CLEANUP", refuses=False, name=name, policy=policy, action=_set(topic, "cleanup.policy=compact")
        )
    if _config(wire, TOPIC_CONFIG, topic, _UNCLEAN) == "true":
        yield Finding.build("LEDGER_UNCLEAN", refuses=False, name=name, action=_set(topic, f"{_UNCLEAN}=false"))
    yield from _durability(wire, topic, found, beside, name, "decisions")


def _transaction_log(wire: Wire, beside: str | None) -> Iterator[Finding]:
    found = wire.patiently(lambda: wire.topic(_TRANSACTION_LOG))
    if found.error_code == protocol.NONE:  # else there was no transaction yet, or this user may not see it
        yield from _durability(wire, _TRANSACTION_LOG, found, beside, f"Topic {_TRANSACTION_LOG!r}", "transactions")


def _durability(wire: Wire, topic: str, found: Any, beside: str | None, name: str, what: str) -> Iterator[Finding]:
    copies = min((len(p.replica_nodes) for p in found.partitions), default=0)
    wanted = find_replication_factor(wire, beside)
    if copies < wanted:
        measure = f"topic {beside!r} has" if beside is not None else "there are brokers for"
        yield Finding.build(
            "FEW_COPIES", refuses=False, name=name, copies=copies, measure=measure, wanted=wanted, what=what
        )
    in_sync = _config(wire, TOPIC_CONFIG, topic, _MIN_ISR)
    if copies >= COPIES and in_sync is not None and int(in_sync) < 2:
        yield Finding.build(
            "FEW_COPIES_ACKNOWLEDGED",
            refuses=False,
            name=name,
            copies=copies,
            in_sync=in_sync,
            what=what,
            action=_set(topic, f"{_MIN_ISR}=2"),
        )


def _set(topic: str, setting: str) -> str:
    return f"kafka-configs.sh --alter --entity-type topics --entity-name {topic} --add-config {setting}"


def _transactions(wire: Wire, options: SinkOptions) -> list[Finding]:
    # Any broker may coordinate a shard's transactions, so the strictest one counts.
    limits = [
        int(value)
        for node in wire.nodes()
        if (value := _config(wire, BROKER_CONFIG, str(node), _TRANSACTION_LIMIT, node)) is not None
    ]
    if not limits:
        return [
            Finding.build(
                "TRANSACTION_LIMIT_HIDDEN", refuses=False, transaction_timeout_s=options.transaction_timeout_s
            )
        ]
    limit_s = min(limits) // 1000
    if options.transaction_timeout_s > limit_s:
        return [
            Finding.build(
                "TRANSACTION_TIMEOUT_TOO_LONG",
                refuses=True,
                only=Guarantee.EXACTLY_ONCE,
                transaction_timeout_s=options.transaction_timeout_s,
                limit_s=limit_s,
            )
        ]
    return []


def _config(wire: Wire, kind: int, name: str, key: str, node: int | None = None) -> str | None:
    """A topic or broker setting; None: this user may not see it, or the broker left the cluster."""
    found = describe_configs(wire, kind, name, [key], node)
    return None if found is None else found.get(key)
