"""The sink. Its ledger is external: RocketMQ has no storage that a single driver can own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from delivered.connectors.rocketmq import TRANSACTION, RocketmqSinkOptions
from delivered.connectors.rocketmq.committer import SETTLE_S, RocketmqCommitter
from delivered.connectors.rocketmq.publish import HalfPublisher, Message, Publisher, new_name
from delivered.connectors.rocketmq.remoting import Cluster
from delivered.connectors.rocketmq.topic import RocketmqScan
from delivered.contract.finding import Finding
from delivered.contract.sink import BoundedScan, Committer, Writer
from delivered.kits.queue import (
    COLUMNS,
    OWN_ID_BYTES_MAX,
    TEXT,
    MessageSink,
    Nothing,
    SendingWriter,
    ServerLimits,
    check_names,
    check_types,
    column,
    sends,
    text,
)
from delivered.ledger import Ledgers
from delivered.model.capability import Commit, SinkCapability
from delivered.model.errors import BadRecord, Refused, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.model.outcome import Outcome, Unknown
from delivered.model.ranges import ROCKETMQ_PROPERTIES_BYTES_MAX as PROPERTIES_BYTES_MAX
from delivered.model.ranges import ROCKETMQ_WORDS_BYTES_MAX as WORDS_BYTES_MAX
from delivered.model.ranges import bytes_of, check_lengths, too_long
from delivered.model.work import Prepared, Promise

_limits = ServerLimits("rocketmq")


def refused_rows(options: RocketmqSinkOptions, batch: pa.RecordBatch) -> pa.Array | None:
    """See `delivered.contract.sink.Sink.refused_rows`. Brokers have a limit of the same name, which is not reported."""
    return _limits.refused(batch, options.endpoints, lambda size: _limit(options, size))


def _limit(options: RocketmqSinkOptions, size: int) -> int | None:
    publisher = Publisher(options)
    try:
        limit = publisher.body_max
    finally:
        publisher.close()
    return limit if 0 < limit < size else None


# Executor side: rows to messages. A replayed batch has the same ids, so that receivers can detect duplicates.

_SHORT = 2_000
"""Characters that are within every limit."""
NAMES = ("value", "message_id", "key", "tag", "message_group")


class RocketmqWriter(SendingWriter[RocketmqSinkOptions, Message]):
    def __init__(self, options: RocketmqSinkOptions, work: Work, gives_up: bool) -> None:
        super().__init__(options, work, gives_up)
        self._scope = work.scope
        self._value_max: int | None = None  # as the proxy reports it

    def _connect(self) -> Publisher | HalfPublisher:
        if self._options.kind == TRANSACTION:
            return HalfPublisher(Cluster(self._options), new_name(self._scope), holds=False)
        publisher = Publisher(self._options)
        self._value_max = publisher.body_max or None
        return publisher

    def _messages(self, rows: pa.RecordBatch) -> list[Message]:
        columns = [column(rows, name, pa.binary()) for name in NAMES]
        times = _milliseconds(rows)
        messages = []
        for value, given, key, tagged, grouped, at in zip(*columns, times, strict=True):
            own = self._next_id()
            message_id = own if given is None else text(given, "column 'message_id'")
            tag, group = text(tagged or b"", "column 'tag'"), text(grouped or b"", "column 'message_group'")
            check_lengths("rocketmq", message_group=group, value=value)
            if self._value_max is not None and bytes_of(value) > self._value_max:
                raise too_long("rocketmq", "value", bytes_of(value), self._value_max)
            _check_word("message_id", message_id, required=True)
            _check_word("tag", tag)
            _check_word("message_group", group)
            # RocketMQ joins keys with spaces, and takes no control character in them.
            keys = (message_id,) if len(message_id.split()) == 1 and not _controls(message_id) else ()
            keys = keys if key is None else (*keys, _key(key))
            self._check_together(given is not None, message_id, keys, tag, group)
            if not value:
                raise BadRecord("MESSAGE_EMPTY")
            if self._options.kind == "FIFO" and not group:
                raise BadRecord("MESSAGE_GROUP")
            if self._options.kind == "DELAY" and at is None:
                raise BadRecord("DELIVERY_TIME")
            messages.append(Message(message_id, value, keys, tag, group, at))
        return messages

    def _check_together(self, chosen: bool, message_id: str, keys: tuple[str, ...], tag: str, group: str) -> None:
        """
        Args:
            chosen: whether the message id is the row's; one of our own counts with its greatest length, so that a row
                is judged alike in every shard.

        Raises:
            BadRecord: the words of a message are longer than proxy or broker accept.
        """
        if len(message_id) + sum(map(len, keys)) + len(tag) + len(group) <= _SHORT:
            return
        own = bytes_of(message_id) if chosen else OWN_ID_BYTES_MAX
        lengths = {
            "message_id": own,
            "key": sum(map(bytes_of, keys)),
            "tag": bytes_of(tag),
            "message_group": bytes_of(group),
        }
        if message_id in keys[:1]:
            lengths["key"] -= bytes_of(message_id)
        half = self._options.kind == TRANSACTION
        named = own if message_id in keys[:1] else 0
        words = named + lengths["key"] + lengths["tag"]
        # A broker stores the id by itself too, and as the id of a transaction.
        stored = words + own * (2 if half else 1) + lengths["message_group"]
        for size, limit in ((words, None if half else WORDS_BYTES_MAX), (stored, PROPERTIES_BYTES_MAX)):
            if limit is not None and size > limit:
                longest = max(lengths, key=lambda name: lengths[name])
                raise BadRecord(
                    "VALUE_TOO_LONG.ROCKETMQ", column=longest, bytes=lengths[longest], size=size, limit=limit
                )


class HalfWriter(RocketmqWriter):
    """Writes half messages, which the driver commits once their batch is decided."""

    def __init__(self, options: RocketmqSinkOptions, work: Work) -> None:
        super().__init__(options, work, gives_up=False)
        self._half_messages: HalfPublisher | None = None

    def _connect(self) -> HalfPublisher:
        self._half_messages = HalfPublisher(Cluster(self._options), new_name(self._scope), holds=True)
        return self._half_messages

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        super().prepare(fingerprint)
        handle = None if self._half_messages is None else self._half_messages.handle
        return Promise(handle if handle is not None and handle.halves else None)


def _milliseconds(rows: pa.RecordBatch) -> list[int | None]:
    if "delivery_timestamp" not in rows.schema.names:
        return [None] * rows.num_rows
    times = rows.column("delivery_timestamp").cast(pa.timestamp("ms", "UTC"), safe=False)  # truncates
    return times.cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]


def _controls(text: str) -> bool:
    """Whether Java's isISOControl is true of a character: RocketMQ's proxy refuses them, and with them the batch."""
    return any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text)


def _check_word(name: str, text: str, required: bool = False) -> None:
    """What the proxy refuses of a single message, and with it its batch."""
    blank = not text.strip() and (required or bool(text))
    # It joins properties with \x01 and \x02: an id that has one arrives cut, and is confused with another.
    separates = any(c in "\x01\x02" for c in text) if name == "message_id" else _controls(text)
    if blank or separates or (name == "tag" and "|" in text):
        raise BadRecord("MESSAGE_WORD", text=text, name=name)


def _key(value: bytes) -> str:
    """RocketMQ joins keys with spaces, as text."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise BadRecord("MESSAGE_KEY.NOT_TEXT", value=value) from None
    if not text or any(c.isspace() for c in text) or _controls(text):
        raise BadRecord("MESSAGE_KEY.CHARACTERS", text=text)
    return text


_NEEDED = {"NORMAL": (), "FIFO": ("message_group",), "DELAY": ("delivery_timestamp",), TRANSACTION: ()}
HALF_MESSAGES_KEPT_S = 72 * 3_600.0
"""RocketMQ's default for fileReservedTime."""


@dataclass(frozen=True)
class RocketmqSink(MessageSink):
    options: RocketmqSinkOptions
    ledgers: Ledgers

    def capability(self) -> SinkCapability:
        options = self.options
        if options.kind == TRANSACTION:
            return self._two_phase()
        order = ("messages of a group are ordered only within a shard",) if options.kind == "FIFO" else ()
        return sends(
            "rocketmq",
            mechanism="receipts",
            send=f"rocketmq {options.topic}: {options.kind}, with a receipt for each message, each sent once",
            assumes=(
                f"the ledger {options.ledger} is kept as long as the checkpoint",
                "brokers do not lose confirmed messages (flushDiskType, replicas)",
            ),
            limits=(
                "a replayed batch has the same message_id, also among the keys (unless a column message_id sets it), "
                "so that receivers can detect duplicates",
                *order,
            ),
        )

    def _two_phase(self) -> SinkCapability:
        options = self.options
        return SinkCapability(
            system="rocketmq",
            commit=Commit.TWO_PHASE,
            mechanism="two-phase commit",
            stage=f"rocketmq {options.topic}: half messages, which brokers store and keep invisible",
            prepare="each confirmed by its broker; identified by its place in the broker's log",
            decide="one row in the ledger, by the one driver that owns it",
            apply="each half message is committed once, by one process at a time",
            send=f"rocketmq {options.topic}: half messages, committed when all of a shard are stored, each sent once",
            batch_atomic=False,
            validates=True,
            prepared_timeout_s=HALF_MESSAGES_KEPT_S,
            assumes=(
                f"the ledger {options.ledger} is one file for every driver of this pipeline, and kept as long as the "
                "checkpoint",
                "brokers do not lose confirmed messages (flushDiskType, replicas), and keep half messages and the "
                "topic's for fileReservedTime (72 h unless set)",
                "no other producer connects with a group that starts with delivered_: brokers would let it end this "
                "sink's half messages",
            ),
            limits=(
                "each record is in the topic once; as always, messages that a group does not acknowledge in time are "
                "redelivered to it, with the same message_id, which is also among the keys",
                "transaction checks of brokers, at most transactionCheckMax (15), get no answer: the driver ends half "
                "messages, or the next driver by the decision, also after the last check (measured with 5.5.0)",
                f"a start after a crash during apply waits {SETTLE_S:.0f} s, then looks the batch up in the topic",
                "readers may see some rows of a shard before others, in any order",
            ),
        )

    def _look(self, guarantee: Guarantee) -> Sequence[Finding]:
        del guarantee
        if self.options.kind == TRANSACTION:
            cluster = Cluster(self.options)
            try:
                for broker in dict.fromkeys(p.broker for p in cluster.places()):
                    cluster.broker(broker)
            finally:
                cluster.close()
        publisher = Publisher(self.options)
        try:
            takes = publisher.takes()
        finally:
            publisher.close()
        if self.options.kind in takes:
            return []
        return [
            Finding.build(
                "TOPIC_TYPE.START",
                refuses=True,
                topic=self.options.topic,
                accepted=", ".join(takes) or "none",
                kind=self.options.kind,
            )
        ]

    def _check_schema(self, schema: pa.Schema) -> None:
        needed = {"value", *_NEEDED[self.options.kind]}
        action = "select these columns; messageType=fifo takes message_group, delay takes delivery_timestamp"
        system = f"rocketmq with messageType={self.options.kind.lower()}"
        check_names(system, schema, needed, {*COLUMNS, "tag", *needed}, action)
        check_types(pa.schema([f for f in schema if f.name in COLUMNS]))
        for field in schema:
            if field.name in ("tag", "message_group") and not any(fits(field.type) for fits in TEXT):
                raise UsageError("COLUMNS.NOT_TEXT", column=field.name, type=field.type)
            if field.name == "delivery_timestamp" and not pa.types.is_timestamp(field.type):
                raise UsageError("COLUMNS.NOT_TIMESTAMP", column=field.name, type=field.type)

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
        if guarantee is Guarantee.EXACTLY_ONCE and self.options.kind == TRANSACTION:
            return HalfWriter(self.options, work)
        return super().writer(work, guarantee, schema)

    def committer(self, scope: Scope) -> Committer:
        return RocketmqCommitter(self.options, scope) if self.options.kind == TRANSACTION else _PlainCommitter()

    def refused_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        return refused_rows(self.options, batch)

    def _writer(self, work: Work, *, gives_up: bool) -> RocketmqWriter:
        return RocketmqWriter(self.options, work, gives_up)

    def scan(self) -> BoundedScan:
        if self.options.kind == TRANSACTION:
            return RocketmqScan(self.options)
        raise Refused("NOT_READABLE.ROCKETMQ", topic=self.options.topic)


class _PlainCommitter(Nothing):
    """Sent messages are visible; but an earlier run of the pipeline may have decided half messages."""

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        del prepared
        return Unknown(f"shard {work.shard} was decided with messageType=transaction: start once with that option")
