"""A queue as a source: receivers fill a durable log, and the pipeline reads the log.

A queue forgets what it delivered, so a message is written ahead before it is acknowledged:

    receive.take          receive messages; the queue keeps them until they are acknowledged
    receive.persist       one atomic append to the log; ids that are already in the log are skipped
    receive.quarantine    a bad message goes to the quarantine log, durably, before its batch is acknowledged
    receive.ack           the queue may delete them

After a crash before the end of receive.ack, the queue redelivers the messages; if it was after receive.persist, the log
recognises their ids. Appends run one at a time, in parallel with receiving: meanwhile the next batch accumulates, so
batches grow with the load.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pyarrow as pa

from delivered.contract.source import (
    DedupWindow,
    Entered,
    Finding,
    Journal,
    MessageBatch,
    Queue,
    Receiver,
    ReceiverReport,
    Slice,
    Source,
    SourceDriver,
)
from delivered.model import limits
from delivered.model.capability import SourceCapability
from delivered.model.errors import BadRecord, DeliveredError, OutcomeUnknown, Unreachable
from delivered.model.limits import DEDUP_WINDOW_MAX, REFUSED_IN_A_ROW_MAX, REFUSED_TIMES, SOURCE_PATIENCE_S
from delivered.model.options import (
    DURATION_MS,
    Option,
    Options,
    OptionType,
    check_storage,
    choice,
    duration,
    integer,
    option,
    prefixed,
    several,
)
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Failed, Ok, Outcome, Unknown

_LOG = logging.getLogger(__name__)
_POLL_S = 0.02
_WAIT_S = 0.2
"""How soon a request to stop is noticed."""
_PAUSE_S = 1.0
_WARN_S = 60.0
_RECONNECT_S = 0.5
_LATENCIES_KEPT = 10_000


@dataclass(frozen=True)
class ReceiveLimits:
    """
    Attributes:
        messages_max, bytes_max: of one append.
        linger_s: how long a batch may wait for more messages.
        message_bytes_max: a larger message is bad.
        log_bytes_max: of the log; receiving pauses above it. None: no limit.
        ids_required: a message without an id is bad.
        refused_times: a message that the log rejects on its own this often is bad.
        maintain_s: interval of log maintenance; None: another process does it.
    """

    messages_max: int
    bytes_max: int
    linger_s: float
    message_bytes_max: int
    log_bytes_max: int | None = None
    ids_required: bool = True
    refused_times: int = REFUSED_TIMES
    maintain_s: float | None = None


@dataclass
class Counts:
    """A receiver's counters since its start.

    Attributes:
        received: messages, including redelivered ones.
        entered: messages appended to the log; repeated: already in the log; quarantined: bad ones.
        acknowledged: messages acknowledged to the queue.
        unacknowledged: persisted messages whose acknowledgement has an unknown outcome.
        paused: times it stopped receiving because the log was full; reconnected: times the connection was lost.
        latencies_s: from arrival to acknowledgement, of the oldest message of each recent batch.
    """

    received: int = 0
    entered: int = 0
    repeated: int = 0
    quarantined: int = 0
    acknowledged: int = 0
    unacknowledged: int = 0
    appends: int = 0
    tries: int = 0
    retired: int = 0
    paused: int = 0
    reconnected: int = 0
    latencies_s: list[float] = field(default_factory=list)


@dataclass
class _Gathering:
    """
    Attributes:
        receiver: the connection that delivered the messages; no other can acknowledge them.
    """

    receiver: Receiver | None = None
    batch: MessageBatch = field(default_factory=MessageBatch)
    bytes: int = 0
    since: float = 0.0

    def take(self, arrived: MessageBatch, receiver: Receiver) -> None:
        self.receiver = receiver
        if not len(self.batch):
            self.batch, self.since = arrived, time.monotonic()
        else:
            self.batch.extend(arrived)
        self.bytes += sum(map(len, arrived.values))


class ReceiveLoop:
    """One receiver process. Only the calling thread uses the queue.

    Args:
        quarantine: where bad messages go, with the reason as a header; None: the first one stops the receiver.
    """

    def __init__(
        self,
        connect: Callable[[], Receiver],
        journal: Journal,
        limits: ReceiveLimits,
        quarantine: Journal | None = None,
    ) -> None:
        self._connect = connect
        self._receiver: Receiver | None = None
        self._journal = journal
        self._quarantine = quarantine
        self._limits = limits
        self._refused_in_a_row = 0
        self._stopping = False
        self.counts = Counts()

    def run(self, stop: Callable[[], bool], report: Callable[[Counts], None] | None = None) -> Counts:
        """Receive until `stop()` is true; messages received by then are persisted and acknowledged.

        Raises:
            BadRecord: a message is bad, and there is no quarantine.
            DeliveredError: the log failed, or the queue failed for too long. Only messages in the log are acknowledged.
        """
        pool = ThreadPoolExecutor(1, "delivered-append")
        try:
            self._receiver = self._connect()
            self._run(stop, report, pool)
        finally:
            pool.shutdown(wait=True)
            if self._receiver is not None:
                self._receiver.close()
        return self.counts

    def _run(self, stop: Callable[[], bool], report: Callable[[Counts], None] | None, pool: ThreadPoolExecutor) -> None:
        gathering, writing = _Gathering(), _Gathering()
        running: Future[Outcome[Entered]] | None = None
        upkeep: Future[int] | None = None
        upkeep_at = time.monotonic() + (self._limits.maintain_s or 0.0)
        while True:
            stopping = self._stopping = stop()
            busy = running is not None or upkeep is not None
            gathering = self._gather(gathering, stopping, busy, stop)
            if running is not None and running.done():
                self._entered(running.result(), writing)
                running = None
                if report is not None:
                    report(self.counts)
            if upkeep is not None and upkeep.done():
                self.counts.retired += upkeep.result()
                upkeep = None
                upkeep_at = time.monotonic() + (self._limits.maintain_s or 0.0)
                if self._is_full():
                    gathering = self._wait_for_room(stop)
            if running is not None or upkeep is not None:
                continue
            if self._limits.maintain_s is not None and time.monotonic() >= upkeep_at and not stopping:
                upkeep = pool.submit(self._journal.maintain)
            elif self._due(gathering, stopping):
                writing, gathering = gathering, _Gathering()
                running = pool.submit(self._persist, writing.batch)
            elif stopping:
                return

    def _gather(self, gathering: _Gathering, stopping: bool, busy: bool, stop: Callable[[], bool]) -> _Gathering:
        """Take new messages. If the connection is lost, drop those not persisted: they are redelivered."""
        receiver = self._receiver
        free = max(0, self._limits.messages_max - len(gathering.batch))
        if stopping or gathering.bytes >= self._limits.bytes_max or receiver is None:
            free = 0
        try:
            if receiver is None:
                return _Gathering()
            arrived = receiver.receive(free, self._wait_s(busy, gathering))
        except Unreachable as error:
            self._again(error, stop)
            return _Gathering()
        if len(arrived):
            self._took(arrived)
            gathering.take(arrived, receiver)
        return gathering

    def _again(self, error: Unreachable, stop: Callable[[], bool]) -> None:
        """Reconnect; wait as long as a queue may take to restart."""
        self.counts.reconnected += 1
        deadline = time.monotonic() + SOURCE_PATIENCE_S
        _LOG.warning("lost the connection to the queue; reconnecting: %s", error.message)
        while not stop():
            if self._receiver is not None:
                self._receiver.close()
                self._receiver = None
            try:
                self._receiver = self._connect()
                return
            except Unreachable as again:
                if time.monotonic() > deadline:
                    raise again from error
                time.sleep(_RECONNECT_S)

    def _took(self, arrived: MessageBatch) -> None:
        self.counts.received += len(arrived)
        reach(StepId.RECEIVE_TAKE, Moment.AFTER, messages=len(arrived), received=self.counts.received)

    def _wait_s(self, writing: bool, gathering: _Gathering) -> float:
        if writing:
            return _POLL_S
        if not len(gathering.batch):
            return _WAIT_S
        return max(0.0, min(_WAIT_S, gathering.since + self._limits.linger_s - time.monotonic()))

    def _due(self, gathering: _Gathering, stopping: bool) -> bool:
        limits = self._limits
        if not len(gathering.batch):
            return False
        full = len(gathering.batch) >= limits.messages_max or gathering.bytes >= limits.bytes_max
        return full or stopping or time.monotonic() - gathering.since >= limits.linger_s

    def _persist(self, batch: MessageBatch) -> Outcome[Entered]:
        """Runs in the append thread. While the log rejects everything (a full disk), wait: each return to the queue
        counts as a delivery, after some of which queues drop messages.
        """
        deadline = time.monotonic() + SOURCE_PATIENCE_S
        warned = False
        while True:
            outcome = self._append(batch)
            if not isinstance(outcome, Failed) or isinstance(outcome, Raised):
                return outcome
            if self._stopping or time.monotonic() >= deadline:
                return outcome
            if not warned:
                warned = True
                _LOG.warning("%d messages were not appended to the log; retrying: %s", len(batch), outcome.reason)
            time.sleep(_PAUSE_S)

    def _append(self, batch: MessageBatch) -> Outcome[Entered]:
        reach(StepId.RECEIVE_PERSIST, Moment.BEFORE, messages=len(batch))
        good, bad, reasons = self._sorted(batch)
        if bad:
            outcome = self._put_in_quarantine(batch.pick(bad), reasons)
            if not isinstance(outcome, Ok):
                return outcome
        rest = batch if not bad else batch.pick(good)
        done = guard(self._journal, rest)
        if isinstance(done, Failed) and self._quarantine is not None:
            done = self._isolate(rest)
        elif isinstance(done, Ok) and done.value.entered:
            self._refused_in_a_row = 0
        reach(StepId.RECEIVE_PERSIST, Moment.AFTER, messages=len(batch))
        return done

    def _isolate(self, batch: MessageBatch) -> Outcome[Entered]:
        """Append or quarantine every message. Ok: all are durable."""
        isolated = isolate(self._journal, batch, self._limits.refused_times, self._refused_in_a_row)
        self._refused_in_a_row = isolated.in_a_row
        if isinstance(isolated.outcome, Ok) and isolated.refused:
            kept = self._put_in_quarantine(batch.pick(isolated.refused), isolated.reasons)
            if not isinstance(kept, Ok):
                return kept
        return isolated.outcome

    def _sorted(self, batch: MessageBatch) -> tuple[list[int], list[int], list[str]]:
        limits = self._limits
        if max(map(len, batch.values)) <= limits.message_bytes_max and not (limits.ids_required and None in batch.ids):
            return [], [], []
        good, bad, reasons = list[int](), list[int](), list[str]()
        for at, (value, message_id) in enumerate(zip(batch.values, batch.ids, strict=True)):
            if len(value) > limits.message_bytes_max:
                reason = f"it has {len(value)} bytes; the limit (messageBytesMax) is {limits.message_bytes_max}"
            elif limits.ids_required and message_id is None:
                reason = "its producer set no message id, or none of text, so it could not be recognised if redelivered"
            else:
                good.append(at)
                continue
            bad.append(at)
            reasons.append(reason)
        return good, bad, reasons

    def _put_in_quarantine(self, bad: MessageBatch, reasons: Sequence[str]) -> Outcome[Entered]:
        if self._quarantine is None:
            raise BadRecord("MESSAGE_BAD", reasons=reasons[0])
        reach(StepId.RECEIVE_QUARANTINE, Moment.BEFORE, messages=len(bad))
        outcome = guard(self._quarantine, _add_reasons(bad, reasons))
        if isinstance(outcome, Failed):  # it may reject what the log rejected, too
            outcome = guard(self._quarantine, _add_reasons(as_readable(bad), reasons))
        reach(StepId.RECEIVE_QUARANTINE, Moment.AFTER, messages=len(bad))
        if isinstance(outcome, Ok):
            self.counts.quarantined += outcome.value.entered
            _LOG.warning("%d messages quarantined, the first because %s", len(bad), reasons[0])
        return outcome

    def _entered(self, outcome: Outcome[Entered], written: _Gathering) -> None:
        handles = written.batch.handles
        match outcome:
            case Failed(reason):
                if written.receiver is not None:
                    written.receiver.give_back(handles)
                raise DeliveredError("RECEIVE_NOT_PERSISTED", message_count=len(handles), reason=reason)
            case Unknown(reason):
                raise OutcomeUnknown("RECEIVE_UNKNOWN", message_count=len(handles), reason=reason)
            case Ok(entered):
                self.counts.entered += entered.entered
                self.counts.repeated += entered.repeated
                self.counts.appends += 1
                self.counts.tries += entered.tries
        self._acknowledge(written)

    def _acknowledge(self, written: _Gathering) -> None:
        handles = written.batch.handles
        reach(StepId.RECEIVE_ACK, Moment.BEFORE, messages=len(handles))
        receiver = written.receiver
        answer = Failed("no connection") if receiver is None else receiver.acknowledge(handles)
        reach(StepId.RECEIVE_ACK, Moment.AFTER, messages=len(handles))
        if isinstance(answer, Ok):
            self.counts.acknowledged += answer.value
        else:
            # They will be redelivered and recognised.
            self.counts.unacknowledged += len(handles)
            _LOG.warning("%d persisted messages were not acknowledged: %s", len(handles), answer.reason)
        latencies = self.counts.latencies_s
        latencies.append(time.monotonic() - written.since)
        del latencies[:-_LATENCIES_KEPT]

    def _is_full(self) -> bool:
        limit = self._limits.log_bytes_max
        return limit is not None and self._journal.size().bytes > limit

    def _wait_for_room(self, stop: Callable[[], bool]) -> _Gathering:
        """While the log exceeds its limit, hold no messages: they stay in the queue, for any receiver with room."""
        self.counts.paused += 1
        _LOG.warning(
            "the log is larger than %s bytes; receiving pauses until there is room", self._limits.log_bytes_max
        )
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        warned_at = -math.inf
        while self._is_full() and not stop():
            retired = self._journal.maintain(exact=True)
            self.counts.retired += retired
            if not retired:
                if time.monotonic() - warned_at >= _WARN_S:
                    warned_at = time.monotonic()
                    _LOG.warning(
                        "nothing can be removed from the log: its readers (logReaders) have not read further, or the "
                        "ids that it keeps (dedupWindow, dedupFor) fill it; run the readers, or raise logBytesMax"
                    )
                time.sleep(_PAUSE_S)
        if not stop():
            self._receiver = self._connect()
            _LOG.warning("there is room in the log again; receiving resumes")
        return _Gathering()


def _add_reasons(bad: MessageBatch, reasons: Sequence[str]) -> MessageBatch:
    headers: list[Sequence[tuple[str, bytes | None]]] = [
        [*h, ("delivered.reason", r.encode())] for h, r in zip(bad.headers, reasons, strict=True)
    ]
    return replace(bad, headers=headers)


# The poison message that makes the log reject a batch, found by appending ever smaller parts of it.

_RETRY_S = 0.1


@dataclass(frozen=True)
class Raised(Failed):
    """This code failed, not the store."""


def guard(journal: Journal, batch: MessageBatch) -> Outcome[Entered]:
    """An append that turns every error into an outcome: a message can cause any error."""
    try:
        return journal.append(batch)
    except Exception as error:
        return Raised(f"{type(error).__name__}: {error}"[:500])


@dataclass
class Isolated:
    """
    Attributes:
        outcome: of all appends; or the one that ended it, in which case nothing may be acknowledged.
        refused: indexes of the messages that the log rejected on their own every time; reasons: a sentence for each.
        in_a_row: how many of them since the last appended message.
    """

    outcome: Outcome[Entered] = field(default_factory=lambda: Ok(Entered(0, 0, 0)))
    refused: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    in_a_row: int = 0


def isolate(journal: Journal, batch: MessageBatch, times: int, in_a_row: int = 0) -> Isolated:
    """Append what can be appended, by bisecting down to single messages.

    Args:
        times: how often a message must be rejected on its own before it counts as the cause.
        in_a_row: messages rejected since the last appended one. Above `REFUSED_IN_A_ROW_MAX` the log is broken: stop.
    """
    isolated = Isolated(in_a_row=in_a_row)
    entered = repeated = tries = 0
    by_store = ""
    parts = [range(len(batch))]
    while parts:
        part = parts.pop()
        done = _try_append(journal, batch.pick(part), times if len(part) == 1 else 1)
        match done:
            case Ok(more):
                entered, repeated, tries = entered + more.entered, repeated + more.repeated, tries + more.tries
                isolated.in_a_row = 0 if more.entered else isolated.in_a_row
            case Failed(reason) if len(part) > 1:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]  # first half first, to keep the order
            case Failed(reason):
                isolated.in_a_row += 1
                if isolated.in_a_row > REFUSED_IN_A_ROW_MAX:
                    isolated.outcome = Failed(
                        f"{isolated.in_a_row} messages in a row, each on its own; the last: {reason}"
                    )
                    return isolated
                by_store = by_store if isinstance(done, Raised) else reason
                isolated.refused.append(part[0])
                isolated.reasons.append(f"the log rejected it on its own, {times} times: {reason}")
            case _:
                isolated.outcome = done
                return isolated
    isolated.outcome = Failed(by_store) if by_store and not entered else Ok(Entered(entered, repeated, tries))
    return isolated


def _try_append(journal: Journal, batch: MessageBatch, times: int) -> Outcome[Entered]:
    done = guard(journal, batch)
    for _ in range(times - 1):
        if not isinstance(done, Failed):
            break
        time.sleep(_RETRY_S)
        done = guard(journal, batch)
    return done


def as_readable(batch: MessageBatch) -> MessageBatch:
    """A copy for logs that reject the original messages: everything but id and body as text."""
    headers = [
        [("delivered.key", _text(key)), ("delivered.time_us", _text(at)), ("delivered.headers", _text(list(pairs)))]
        for key, at, pairs in zip(batch.keys, batch.times_us, batch.headers, strict=True)
    ]
    ids = [None if i is None else i if isinstance(i, str) and i.isprintable() else ascii(i) for i in batch.ids]
    values = [v if isinstance(v, bytes) else _text(v) for v in batch.values]
    count = len(batch)
    return MessageBatch(ids, [None] * count, values, list(headers), [None] * count, list(batch.handles))


def _text(value: object) -> bytes:
    return ascii(value).encode()


QUARANTINE_SUFFIX = ".bad"

_LOG_OPTIONS = (
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "maxOffsetsPerTrigger",
    "includeHeaders",
    "reader",
)


def _read_milliseconds(text: str) -> float:
    return integer(0, 60_000).read(text) / 1000


def _log_options(_owner: str, values: Mapping[str, str]) -> dict[str, str]:
    return {k: values[k] for k in _LOG_OPTIONS if k in values}


class ReceiveOptions(Options):
    """Options of every source with a receiver.

    Attributes:
        log: path or URL, as given.
        log_options: for the log's source.
        storage: for the object store's client; may be references to secrets.
    """

    log: str = option("log", "Folder or URL of the durable log that receivers fill and the pipeline reads.")
    ids_required: bool = option(
        "messageId",
        "required: producers set an id, by which a message is recognised; none: they do not.",
        choice({"required": True, "none": False}),
        default=True,
    )
    window: int = option(
        "dedupWindow",
        "Number of newest messages per log partition among which a redelivered one is recognised.",
        integer(1, limits.DEDUP_WINDOW_MAX),
        default=limits.DEDUP_WINDOW,
    )
    dedup_for_ms: int = option(
        "dedupFor",
        "How long a redelivered message is recognised, however many others came since; none: by dedupWindow alone.",
        DURATION_MS,
        default=0,
        shown="",
    )
    partitions: int = option(
        "logPartitions",
        "Partitions of the log, by a hash of the key; 1 keeps the queue's order.",
        integer(1, 1_000),
        default=1,
    )
    messages_max: int = option(
        "receiveMessagesMax",
        "Maximum number of messages per append to the log.",
        integer(1, 1_000_000),
        default=limits.RECEIVE_MESSAGES_MAX,
    )
    linger_s: float = option(
        "receiveLingerMs",
        "How long a message waits for others before it is appended: more latency, fewer commits.",
        OptionType(_read_milliseconds, lambda s: f"{s * 1000:.0f}", {"minimum": 0, "maximum": 60_000}),
        default=limits.RECEIVE_LINGER_S,
    )
    message_bytes_max: int = option(
        "messageBytesMax",
        "Larger messages are bad (see badMessages).",
        integer(1, limits.RECEIVE_BYTES_MAX),
        default=limits.MESSAGE_BYTES_MAX,
    )
    quarantine: bool = option(
        "badMessages",
        "stop: a bad message stops the receiver; quarantine: it goes to the log <log>.bad.",
        choice({"stop": False, "quarantine": True}, former={"set_aside": "quarantine"}),
        default=False,
    )
    refused_times: int = option(
        "refusedTimes",
        "With badMessages=quarantine: a message that the log rejects on its own this many times is bad.",
        integer(1, 100),
        default=limits.REFUSED_TIMES,
    )
    log_bytes_max: int | None = option(
        "logBytesMax", "Receiving pauses while the log is larger; none: no limit.", integer(1), default=None
    )
    readers: tuple[str, ...] = option(
        "logReaders",
        "Comma-separated names of pipelines: what all of them have read is removed; none: nothing is.",
        OptionType(lambda text: tuple(r.strip() for r in text.split(",") if r.strip())),
        default=(),
        shown="",
    )
    keep_s: float = option("logKeepSeconds", "Records younger than this are not removed.", integer(0), default=3600)
    log_options: Mapping[str, str] = several(
        _log_options,
        Option("reader", "Name under which this pipeline's progress is stored next to the log, for logReaders."),
        Option(
            "startingOffsets", 'Where a new checkpoint starts in the log: earliest, latest or {"0": 12}.', "earliest"
        ),
        Option("startingTimestamp", "Milliseconds since 1970: where a new checkpoint starts in the log."),
        Option("endingOffsets", 'Where a batch read of the log ends: latest or {"0": 12}.', "latest"),
        Option("maxOffsetsPerTrigger", "Approximate maximum number of records per batch; none: no limit."),
        Option(
            "includeHeaders", "Whether to add the column headers; delivered.id in it is the producer's id.", "false"
        ),
    )
    storage: Mapping[str, str] = prefixed("storage.")

    def check(self, owner: str) -> None:
        check_storage(owner, self.log, self.storage)

    def limits(self) -> ReceiveLimits:
        return ReceiveLimits(
            messages_max=self.messages_max,
            bytes_max=limits.RECEIVE_BYTES_MAX,
            linger_s=self.linger_s,
            message_bytes_max=self.message_bytes_max,
            log_bytes_max=self.log_bytes_max,
            ids_required=self.ids_required,
            refused_times=self.refused_times,
            maintain_s=limits.RECEIVE_UPKEEP_S,
        )


@dataclass(frozen=True)
class ReceivedSource(Source):
    """The log behind a queue, as the queue's source.

    Attributes:
        system: of the queue: "rabbitmq".
        log: the log as a source.
    """

    system: str
    queue: Queue
    options: ReceiveOptions
    log: Source

    @property
    def rows_per_batch_max(self) -> int | None:
        return self.log.rows_per_batch_max

    def capability(self) -> SourceCapability:
        inner, options = self.log.capability(), self.options
        lacks = self.queue.without_ids or (
            "" if options.ids_required else "with messageId=none it cannot be recognised"
        )
        repeats = ""
        if lacks:
            repeats = (
                f"the queue {self.queue.name} redelivers a message if its receiver dies before acknowledging it, and "
                f"{lacks}"
            )
        known = f"a message redelivered after more than {options.window:,} others"
        memory = f"up to {_memory(options.window * options.partitions)}"
        if options.dedup_for_ms:
            known += f" and {duration(options.dedup_for_ms)}"
            memory += ", or more for the time"
        known += f" counts as a new one; each receiver keeps their ids in memory, {memory}"
        return SourceCapability(
            system=self.system,
            replayable=True,
            repeats=repeats,
            local=inner.local,
            received=True,
            offset_metadata=inner.offset_metadata,
            lasting_metadata=inner.lasting_metadata,
            assumes=(
                f"`delivered receive` is running: it writes {self.queue.name} to the log and only then acknowledges",
                *(() if repeats else (known,)),
                *self.queue.assumes(),
                *inner.assumes,
            ),
        )

    def preflight(self) -> Sequence[Finding]:
        findings = list(self.log.preflight())
        if findings:
            return [_start_receiver(f) if f.code == "LOG_MISSING" else f for f in findings]
        return list(self._short_window())

    def dedup_window(self) -> DedupWindow | None:
        options = self.options
        rate = self.log.rate()
        if not rate or self.capability().repeats:
            return None
        for_s = min(options.dedup_for_ms / 1000, limits.DEDUP_WINDOW_MAX / rate)
        return DedupWindow(max(options.window / rate, for_s), self.queue.redelivers_after_s, rate)

    def receivers(self) -> Sequence[ReceiverReport] | None:
        return self.log.receivers()

    def _short_window(self) -> Iterator[Finding]:
        """A warning if ids are forgotten before the queue may redeliver their messages."""
        window, kept = self.dedup_window(), self.options.window
        if window is not None and window.short:
            yield Finding.build(
                "DEDUP_WINDOW_SHORT.START",
                refuses=False,
                records_per_s=window.records_per_s,
                kept=kept,
                kept_s=kept / window.records_per_s,
                queue=self.queue.name,
                needed_s=window.needed_s,
                needed=duration(int(window.needed_s) * 1000),
            )

    def schema(self) -> pa.Schema:
        return self.log.schema()

    def driver(self) -> SourceDriver:
        return self.log.driver()

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        return self.log.read(piece)


def _start_receiver(finding: Finding) -> Finding:
    next_step = "start `delivered receive` with this pipeline file: it creates the log and fills it"
    return replace(finding, next_step=next_step)


def _memory(ids: int) -> str:
    return f"{max(1, round(ids * limits.DEDUP_BYTES_PER_ID / 1e6)):,} MB"


# Which ids a log knows. A window depends only on the log: the last `size` offsets of each partition, and those appended
# less than `for_ms` before the partition's newest append. So it is the same before and after a restart, and in every
# process that has read the log to the same end; while nothing is appended, nothing is forgotten.


@dataclass
class _Tail:
    """
    Attributes:
        appends: (end offset, time in ms) of the appends that are not known to be old, in order.
        old: ids at offsets below this one were appended too long ago.
    """

    ids: deque[str | None] = field(default_factory=deque)
    end: int = 0
    newest_ms: int = 0
    old: int = 0
    appends: deque[tuple[int, int]] = field(default_factory=deque)


class Window:
    """Deduplication window of a log: the ids of the newest messages in each partition, by count and by time. Pure.

    Args:
        size: number of offsets per partition whose ids are kept. A message redelivered after more than this many others
            in its partition, and later than `for_ms`, counts as new.
        for_ms: how long an id is kept, measured by the times of appends; `DEDUP_WINDOW_MAX` ids at most.
    """

    def __init__(self, size: int, for_ms: int = 0) -> None:
        self._size = size
        self._for_ms = for_ms
        self._times: dict[str, int] = {}  # occurrences; an id can be in the log twice, far apart
        self._tails: dict[int, _Tail] = {}

    @property
    def ends(self) -> dict[int, int]:
        """Partition -> next offset to read."""
        return {partition: tail.end for partition, tail in self._tails.items() if tail.end}

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._times

    def start(self, partition: int, earliest: int, end: int, young: int | None = None) -> int:
        """The first offset whose id must be read, if the log contains [earliest, end).

        Args:
            young: the first offset appended less than `for_ms` before the partition's newest append.
        """
        wanted = end - self._size
        if self._for_ms and young is not None:
            wanted = max(min(wanted, young), end - DEDUP_WINDOW_MAX)
        tail = self._tails.get(partition)
        return max(earliest, wanted, tail.end if tail is not None else 0)

    def first(self, partition: int) -> int:
        """The first offset whose id is kept."""
        tail = self._tails.get(partition)
        return 0 if tail is None else tail.end - len(tail.ids)

    def add(self, partition: int, first: int, ids: Sequence[str | None], at_ms: int = 0) -> None:
        """Add the ids persisted from offset `first` on. Only durable messages may be added (P8).

        Offsets added before are skipped; after a gap (the log was trimmed), earlier ids are dropped.

        Args:
            at_ms: Unix time of the append.
        """
        tail = self._tails.setdefault(partition, _Tail())
        if first < tail.end:
            ids, first = ids[tail.end - first :], tail.end
        elif first > tail.end:
            self._forget(tail, len(tail.ids))
        if not ids:
            return
        times = self._times
        for message_id in ids:
            if message_id is not None:
                times[message_id] = times.get(message_id, 0) + 1
        tail.ids.extend(ids)
        tail.end = first + len(ids)
        self._forget(tail, self._excess(tail, at_ms))

    def _excess(self, tail: _Tail, at_ms: int) -> int:
        """How many of the oldest ids need not be kept, after an append at this time."""
        excess = len(tail.ids) - self._size
        if not self._for_ms:
            return excess
        appends = tail.appends
        appends.append((tail.end, at_ms))
        tail.newest_ms = max(tail.newest_ms, at_ms)
        # Receivers' clocks differ, and may be set back: an append is not old before the ones in front of it are.
        while appends[0][1] < tail.newest_ms - self._for_ms:
            tail.old = appends.popleft()[0]
        return max(min(excess, tail.old - (tail.end - len(tail.ids))), len(tail.ids) - DEDUP_WINDOW_MAX)

    def fresh(self, ids: Sequence[str | None]) -> list[int]:
        """Indexes of the unknown `ids`, each id once. Messages without an id are always fresh."""
        times, seen, indexes = self._times, set[str](), []
        for at, message_id in enumerate(ids):
            if message_id is not None:
                if message_id in times or message_id in seen:
                    continue
                seen.add(message_id)
            indexes.append(at)
        return indexes

    def _forget(self, tail: _Tail, count: int) -> None:
        """Drop the oldest `count` ids of a tail."""
        times = self._times
        for _ in range(count):
            message_id = tail.ids.popleft()
            if message_id is None:
                continue
            left = times[message_id] - 1
            if left:
                times[message_id] = left
            else:
                del times[message_id]
