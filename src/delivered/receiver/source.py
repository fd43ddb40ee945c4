"""A queue as a source: receivers fill a durable log, and the pipeline reads the log.

Contains the options of all such sources: the log, recognition of redelivered messages, buffer sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from delivered.contract.finding import Finding
from delivered.contract.queue import DedupWindow, Queue, ReceiverReport
from delivered.contract.source import Slice, Source, SourceDriver
from delivered.model import limits
from delivered.model.capability import SourceCapability
from delivered.model.dedup import DURATION_MS, duration
from delivered.model.options import Option, Options, OptionType, choice, option, prefixed, several, whole
from delivered.receiver.loop import ReceiveLimits

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
    return whole(0, 60_000).read(text) / 1000


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
        whole(1, limits.DEDUP_WINDOW_MAX),
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
        whole(1, 1_000),
        default=1,
    )
    messages_max: int = option(
        "receiveMessagesMax",
        "Maximum number of messages per append to the log.",
        whole(1, 1_000_000),
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
        whole(1, limits.RECEIVE_BYTES_MAX),
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
        whole(1, 100),
        default=limits.REFUSED_TIMES,
    )
    log_bytes_max: int | None = option(
        "logBytesMax", "Receiving pauses while the log is larger; none: no limit.", whole(1), default=None
    )
    readers: tuple[str, ...] = option(
        "logReaders",
        "Comma-separated names of pipelines: what all of them have read is removed; none: nothing is.",
        OptionType(lambda text: tuple(r.strip() for r in text.split(",") if r.strip())),
        default=(),
        shown="",
    )
    keep_s: float = option("logKeepSeconds", "Records younger than this are not removed.", whole(0), default=3600)
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
        found = list(self.log.preflight())
        if found:
            return [_start_receiver(f) if f.code == "LOG_MISSING" else f for f in found]
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
