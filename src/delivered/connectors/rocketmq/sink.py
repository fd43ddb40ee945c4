"""The sink, and the committer of half messages, which journals which ended.

The ledger is external: RocketMQ has no storage that a single driver can own.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO
from urllib.parse import quote

import pyarrow as pa

from delivered.connectors.rocketmq import TRANSACTION, RocketmqSinkOptions
from delivered.connectors.rocketmq.publish import (
    COMMIT,
    ROLLBACK,
    Ending,
    HalfMessage,
    HalfMessages,
    HalfPublisher,
    Message,
    Publisher,
    new_name,
    producer_group,
)
from delivered.connectors.rocketmq.remoting import (
    Cluster,
    Place,
    RocketmqScan,
    added,
    ends,
    open_half_messages,
    retained,
)
from delivered.contract.sink import BoundedScan, Committer, Writer
from delivered.contract.source import Finding
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
    id_prefix,
    sends,
    text,
)
from delivered.ledger import Ledgers
from delivered.model.capability import Commit, Guarantee, SinkCapability
from delivered.model.errors import BadRecord, InvariantBroken, Refused, Unreachable, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.rows import ROCKETMQ_PROPERTIES_BYTES_MAX as PROPERTIES_BYTES_MAX
from delivered.model.rows import ROCKETMQ_WORDS_BYTES_MAX as WORDS_BYTES_MAX
from delivered.model.rows import bytes_of, check_lengths, too_long
from delivered.model.work import Failed, Ok, Outcome, Prepared, Promise, Unknown, check_format

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
            limits=order,
            repeats="a replayed batch has the same message_id, also among the keys (unless a column message_id sets "
            "it), so that receivers can detect duplicates",
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
            no_position="",
            prepared_timeout_s=HALF_MESSAGES_KEPT_S,
            assumes=(
                f"the ledger {options.ledger} is one file for every driver of this pipeline, and kept as long as the "
                "checkpoint",
                "brokers do not lose confirmed messages (flushDiskType, replicas), and keep half messages and the "
                "topic's for fileReservedTime (72 h unless set)",
                "no other producer connects with a group that starts with delivered_: brokers would let it end this "
                "sink's half messages",
            ),
            transaction_limits=(
                "each record is in the topic once; as always, messages that a group does not acknowledge in time are "
                "redelivered to it, with the same message_id, which is also among the keys",
                "transaction checks of brokers, at most transactionCheckMax (15), get no answer: the driver ends half "
                "messages, or the next driver by the decision, also after the last check (measured with 5.5.0)",
                f"a start after a crash during apply waits {SETTLE_S:.0f} s, then looks the batch up in the topic",
            ),
            limits=("readers may see some rows of a shard before others, in any order",),
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
        for value, id_, key, tagged, grouped, at in zip(*columns, times, strict=True):
            own = self._next_id()
            message_id = own if id_ is None else text(id_, "column 'message_id'")
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
            self._check_together(id_ is not None, message_id, keys, tag, group)
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


# The journal of ended half messages: tables in the ledger's file, and a lock file next to it.
#
# EndTransaction is not idempotent, so each shard is recorded before its first half message is ended, and again when all
# are. A shard recorded only once was interrupted: the topic shows which messages were committed.
#
# A process holds the lock while it ends half messages, and the system releases it when the process dies. A paused
# driver thus blocks its successor, which never overtakes it.

FORMAT = 1
"""Of these tables. Tables without one are of format 1."""
VOID_KEPT = 10_000
INCARNATIONS_KEPT = 1_000
"""Checkpoints whose two newest batches are kept. Older batches are looked up in the topic."""
LOCK_WAIT_S = 20.0
_POLL_S = 0.05

_TABLE = """CREATE TABLE IF NOT EXISTS _delivered_rocketmq_end (
    number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, pipeline TEXT NOT NULL, sink TEXT NOT NULL,
    incarnation TEXT NOT NULL, batch INTEGER NOT NULL, shard INTEGER NOT NULL, state TEXT NOT NULL)"""
_TOP = """CREATE TABLE IF NOT EXISTS _delivered_rocketmq_top (
    pipeline TEXT NOT NULL, sink TEXT NOT NULL, broker TEXT NOT NULL, top INTEGER NOT NULL,
    PRIMARY KEY (pipeline, sink, broker))"""

_FORMAT = """CREATE TABLE IF NOT EXISTS _delivered_rocketmq_format (
    only INTEGER PRIMARY KEY CHECK (only = 1), format INTEGER NOT NULL)"""


class State(StrEnum):
    NEW = "new"
    """No half message was ended."""
    STARTED = "begun"
    """Some may have been ended."""
    ENDED = "ended"
    VOID = "void"
    """Rolled back: must not be committed."""


class EndJournal:
    """One sink's journal. Several sinks may share a file."""

    def __init__(self, path: str, scope: Scope) -> None:
        self._path = path
        self._scope = scope
        self._lock = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock for ending half messages. Raises Unreachable if another process still holds it after 20 s."""
        deadline = time.monotonic() + LOCK_WAIT_S
        with self._lock, self._opened() as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        file.seek(0)
                        who = file.read().strip() or "Another process"
                        raise Unreachable("HALF_MESSAGES_LOCKED", who=who, path=self._path) from None
                    time.sleep(_POLL_S)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield

    def _opened(self) -> IO[str]:
        try:
            return Path(f"{self._path}.ending").open("a+", encoding="utf-8")
        except OSError as error:
            raise self._unusable(error) from None

    def begin(self, work: Work, name: str) -> State:
        """State of a shard's half messages; a new shard is durably recorded as started."""
        with self._writing() as connection:
            row = connection.execute("SELECT state FROM _delivered_rocketmq_end WHERE name = ?", (name,)).fetchone()
            if row is not None:
                return State(row[0])
            newest = connection.execute(
                "SELECT max(batch) FROM _delivered_rocketmq_end WHERE pipeline = ? AND sink = ? AND incarnation = ?",
                self._key(work.scope),
            ).fetchone()[0]
            # An older batch was ended, its record deleted. One without a predecessor may be started in another file.
            known = newest <= work.batch if newest is not None else work.batch == 0
            self._put(connection, name, self._key(work.scope), work.batch, work.shard, State.STARTED)
            return State.NEW if known else State.STARTED

    def end(self, work: Work, name: str, tops: Iterable[tuple[str, int]]) -> None:
        """Record that every half message of this name is visible.

        Args:
            tops: for each broker, the last of their offsets in its half queue.
        """
        with self._writing() as connection:
            connection.execute("UPDATE _delivered_rocketmq_end SET state = ? WHERE name = ?", (State.ENDED.value, name))
            connection.execute(
                "DELETE FROM _delivered_rocketmq_end WHERE pipeline = ? AND sink = ? AND incarnation = ? AND batch < ?",
                (*self._key(work.scope), work.batch - 1),
            )
            connection.executemany(
                "INSERT INTO _delivered_rocketmq_top VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET top = max(top, excluded.top)",
                [(self._scope.pipeline, self._scope.sink, broker, top) for broker, top in tops],
            )

    def void(self, names: Iterable[str]) -> int:
        """Forbid committing these, unless a process began to. Returns the number of new names."""
        with self._writing() as connection:
            known = {row[0] for row in connection.execute("SELECT name FROM _delivered_rocketmq_end")}
            new = [n for n in dict.fromkeys(names) if n not in known]
            self._forget(connection)
            for name in new:
                self._put(connection, name, (self._scope.pipeline, self._scope.sink, ""), -1, -1, State.VOID)
            return len(new)

    def is_visible(self, work: Work) -> bool:
        """Whether all its messages are visible; also true if a later batch was started."""
        with self._writing() as connection:
            row = connection.execute(
                "SELECT 1 FROM _delivered_rocketmq_end WHERE pipeline = ? AND sink = ? AND incarnation = ? "
                "AND (batch > ? OR batch = ? AND shard = ? AND state = ?)",
                (*self._key(work.scope), work.batch, work.batch, work.shard, State.ENDED.value),
            ).fetchone()
        return row is not None

    def decided_shards(self, batch: int) -> list[int]:
        """Shards of this batch or a later one whose half messages a process began to commit."""
        with self._writing() as connection:
            rows = connection.execute(
                "SELECT DISTINCT shard FROM _delivered_rocketmq_end WHERE pipeline = ? AND sink = ? "
                "AND incarnation = ? AND batch >= ? ORDER BY shard",
                (*self._key(self._scope), batch),
            ).fetchall()
        return [shard for (shard,) in rows]

    def tops(self) -> dict[str, int]:
        """By broker, the last offset in its half queue of this sink's ended half messages."""
        with self._writing() as connection:
            rows = connection.execute(
                "SELECT broker, top FROM _delivered_rocketmq_top WHERE pipeline = ? AND sink = ?",
                (self._scope.pipeline, self._scope.sink),
            ).fetchall()
        return dict(rows)

    def _forget(self, connection: sqlite3.Connection) -> None:
        own = "pipeline = ? AND sink = ?"
        sink = (self._scope.pipeline, self._scope.sink)
        connection.execute(
            f"DELETE FROM _delivered_rocketmq_end WHERE {own} AND incarnation = '' AND number <= "  # noqa: S608
            "(SELECT max(number) FROM _delivered_rocketmq_end) - ?",
            (*sink, VOID_KEPT),
        )
        connection.execute(
            f"DELETE FROM _delivered_rocketmq_end WHERE {own} AND incarnation NOT IN (SELECT incarnation "  # noqa: S608
            f"FROM _delivered_rocketmq_end WHERE {own} GROUP BY incarnation ORDER BY max(number) DESC LIMIT ?)",
            (*sink, *sink, INCARNATIONS_KEPT),
        )

    @staticmethod
    def _key(scope: Scope) -> tuple[str, str, str]:
        return scope.pipeline, scope.sink, scope.incarnation

    @staticmethod
    def _put(
        connection: sqlite3.Connection, name: str, key: tuple[str, str, str], batch: int, shard: int, state: State
    ) -> None:
        connection.execute(
            "INSERT INTO _delivered_rocketmq_end (name, pipeline, sink, incarnation, batch, shard, state) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (name, *key, batch, shard, state.value),
        )

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, durable on exit. Raises Unreachable; Refused: a later version of this package wrote it."""
        try:
            with closing(
                sqlite3.connect(f"file:{quote(self._path)}", uri=True, timeout=CONNECT_TIMEOUT_S, isolation_level=None)
            ) as connection:
                connection.execute("PRAGMA synchronous=EXTRA")
                connection.execute("BEGIN IMMEDIATE")
                for table in (_TABLE, _TOP, _FORMAT):
                    connection.execute(table)
                connection.execute("INSERT OR IGNORE INTO _delivered_rocketmq_format VALUES (1, ?)", (FORMAT,))
                (format_,) = connection.execute("SELECT format FROM _delivered_rocketmq_format").fetchone()
                check_format(format_, f"a journal of half messages in {self._path!r}", FORMAT)
                yield connection
                connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> Unreachable:
        return Unreachable("DATABASE_ERROR.ROCKETMQ_LEDGER", path=self._path, error=error)


# Commits and aborts the half messages that tasks sent.
#
# EndTransaction is not idempotent: a half message committed twice appears twice. So one process at a time ends half
# messages, and after a crash the topic, where each message names its half message, shows which were
# committed.

SETTLE_S = 4.0
"""Then no earlier request can take effect: brokers drop those queued for 3 s (waitTimeMillsInTransactionQueue), and
unsent ones are lost with their connection."""


_LAST_LOOKED_AT = 256
"""Messages of a queue: those of the newest batch, unless other producers have sent as many since."""


class RocketmqCommitter(Committer):
    """See `delivered.contract.sink.Committer`."""

    def __init__(self, options: RocketmqSinkOptions, scope: Scope) -> None:
        self._cluster = Cluster(options)
        self._scope = scope
        self._journal = EndJournal(options.ledger, scope)

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """Commit every half message exactly once."""
        handle = HalfMessages.of(prepared)
        try:
            with self._journal.held():
                return self._apply(work, handle)
        except Unreachable as error:
            self._cluster.close()
            return Unknown(str(error))

    def was_committed(self, work: Work, prepared: Prepared) -> bool:  # noqa: ARG002 - only owners write the journal
        """Whether the journal records that all its messages were confirmed or found in the topic."""
        return self._journal.is_visible(work)

    def visible_shards(self, batch: int) -> Sequence[int]:
        """By the journal; and, as that may be in the file of an older ledger, by the ids of each queue's last messages.

        Ids that a column sets show no batch. See `delivered.contract.sink.Committer`.
        """
        shards, own = set(self._journal.decided_shards(batch)), id_prefix(self._scope)
        places = self._cluster.places()
        for broker, queues in ends(self._cluster, places).items():
            for queue, end in queues.items():
                for message in retained(self._cluster, Place(broker, queue), max(0, end - _LAST_LOOKED_AT), end):
                    id_ = message.properties.get("UNIQ_KEY", "")
                    numbers = id_.removeprefix(own).split(".") if id_.startswith(own) else []
                    if len(numbers) == 3 and all(map(str.isdecimal, numbers)) and int(numbers[0]) >= batch:
                        shards.add(int(numbers[1]))
        return sorted(shards)

    def abort(self, prepared: Prepared) -> Outcome[None]:
        """Roll back, which ends the broker's transaction checks. Also runs in tasks, without a ledger."""
        if not prepared.handle:
            return Ok(None)
        handle = HalfMessages.of(prepared)
        return self._roll_back(handle.name, handle.by_broker)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        """Void half messages of this sink that are not in `keep` and that no process began to end."""
        kept = {HalfMessages.of(p).name for p in keep if p.handle}
        try:
            orphans: dict[str, dict[str, list[HalfMessage]]] = defaultdict(lambda: defaultdict(list))
            tops = self._journal.tops()
            for broker in dict.fromkeys(p.broker for p in self._cluster.places()):
                for message in open_half_messages(self._cluster, broker, tops.get(broker, -1) + 1):
                    name = message.properties.get("PGROUP", "")
                    if name.rpartition(".")[0] == producer_group(self._scope) and name not in kept:
                        orphans[name][broker].append(HalfMessage(message.place, message.offset))
            count = self._journal.void(orphans)
            for name, half_messages in orphans.items():
                self._roll_back(name, half_messages)
        except Unreachable as error:
            self._cluster.close()
            return Unknown(str(error))
        return Ok(count)

    def close(self) -> None:
        self._cluster.close()

    def _apply(self, work: Work, handle: HalfMessages) -> Outcome[None]:
        left: Mapping[str, Sequence[HalfMessage]] = handle.by_broker
        match self._journal.begin(work, handle.name):
            case State.ENDED:
                return Ok(None)
            case State.VOID:
                return Failed("its half messages were rolled back")
            case State.STARTED:
                left = self._uncommitted(handle)
            case State.NEW:
                pass
        expired = 0
        for broker, half_messages in left.items():
            ending = Ending(self._cluster, broker, handle.name)
            ending.end(half_messages, COMMIT)
            if ending.refused is not None:
                return Unknown(ending.refused)
            expired += len(ending.expired)
        if expired:
            return self._expired(handle, expired)
        tops = [(broker, half_messages[-1].offset) for broker, half_messages in handle.by_broker.items()]
        self._journal.end(work, handle.name, tops)
        return Ok(None)

    def _uncommitted(self, handle: HalfMessages) -> dict[str, list[HalfMessage]]:
        """Half messages that are not in the topic, after `SETTLE_S`. Raises Unreachable."""
        self._cluster.close()
        time.sleep(SETTLE_S)
        left: dict[str, list[HalfMessage]] = {}
        for broker, half_messages in handle.by_broker.items():
            ours = {h.place for h in half_messages}
            shown: Counter[int] = Counter()
            for queue, since in handle.since[broker].items():
                there = added(self._cluster, Place(broker, int(queue)), since)
                shown.update(m.half for m in there if m.half in ours)
            twice = [place for place, times in shown.items() if times > 1]
            if twice:
                raise InvariantBroken(
                    "COMMITTED_TWICE",
                    messages=len(twice),
                    handle=handle.name,
                    topic=self._cluster.topic,
                    first=min(twice),
                    broker=broker,
                )
            left[broker] = [h for h in half_messages if h.place not in shown]
        return left

    def _expired(self, handle: HalfMessages, count: int) -> Outcome[None]:
        total = sum(map(len, handle.by_broker.values()))
        if count == total:
            return Failed("the broker no longer has its half messages, and none of them was committed")
        return Unknown(
            f"{count} of {total} half messages are no longer in the broker's log, and the others are committed: "
            "compare the topic with the source manually"
        )

    def _roll_back(self, name: str, half_messages: Mapping[str, Sequence[HalfMessage]]) -> Outcome[None]:
        try:
            for broker, mine in half_messages.items():
                Ending(self._cluster, broker, name).end(mine, ROLLBACK)
        except Unreachable as error:
            self._cluster.close()
            return Unknown(str(error))
        return Ok(None)
