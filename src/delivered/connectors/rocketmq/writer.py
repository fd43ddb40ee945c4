"""Executor side: rows to messages. A replayed batch has the same ids, so that receivers can detect duplicates."""

from __future__ import annotations

import pyarrow as pa

from delivered.connectors.rocketmq.half_messages import HalfPublisher, new_name
from delivered.connectors.rocketmq.options import TRANSACTION, RocketmqSinkOptions
from delivered.connectors.rocketmq.publish import Message, Publisher
from delivered.connectors.rocketmq.remoting import Cluster
from delivered.kits.queue.columns import column, text
from delivered.kits.queue.writer import OWN_ID_BYTES_MAX, SendingWriter
from delivered.model.errors import BadRecord
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Work
from delivered.model.message_limits import ROCKETMQ_PROPERTIES_BYTES_MAX as PROPERTIES_BYTES_MAX
from delivered.model.message_limits import ROCKETMQ_WORDS_BYTES_MAX as WORDS_BYTES_MAX
from delivered.model.message_limits import bytes_of, check_lengths, too_long
from delivered.model.prepared import Promise

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
                raise BadRecord(
                    "MESSAGE_EMPTY",
                    "A row has no value in column 'value'; RocketMQ rejects messages without a body.",
                    next_step="fill the column value, or filter such rows",
                )
            if self._options.kind == "FIFO" and not group:
                raise BadRecord(
                    "MESSAGE_GROUP",
                    "A row has no value in column 'message_group', which a FIFO topic needs.",
                    next_step="fill the column message_group, or write to a NORMAL topic",
                )
            if self._options.kind == "DELAY" and at is None:
                raise BadRecord(
                    "DELIVERY_TIME",
                    "A row has no value in column 'delivery_timestamp', which a DELAY topic needs.",
                    next_step="fill the column, or write to a NORMAL topic",
                )
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
                    "VALUE_TOO_LONG",
                    f"A row's column {longest!r} has {lengths[longest]} bytes; with its other words, the message has "
                    f"{size}, and rocketmq accepts at most {limit} of them.",
                    next_step="shorten message_id, key or tag, or filter such rows; on_bad_row: dead_letter keeps them",
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
    # It joins properties with \x01 and \x02: an id that has one arrives cut, and is taken for another.
    separates = any(c in "\x01\x02" for c in text) if name == "message_id" else _controls(text)
    if blank or separates or (name == "tag" and "|" in text):
        raise BadRecord(
            "MESSAGE_WORD",
            f"A row has {text!r:.80} in column {name!r}, which is blank or has a character that RocketMQ takes in no "
            "such word: a control character, | in a tag.",
            next_step="correct the column, or filter such rows",
        )


def _key(value: bytes) -> str:
    """RocketMQ joins keys with spaces, as text."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise BadRecord(
            "MESSAGE_KEY",
            f"A row has {value!r:.80} in column 'key', which is not UTF-8; RocketMQ's keys are text.",
            next_step="encode it, for example with base64 or hex",
        ) from None
    if not text or any(c.isspace() for c in text) or _controls(text):
        raise BadRecord(
            "MESSAGE_KEY",
            f"A row has {text!r:.80} in column 'key', which is blank, or contains white space or a control character; "
            "RocketMQ's keys must not.",
            next_step="replace such characters in the column, or filter such rows",
        )
    return text
