"""Inbox: a consumer records a message's id in the transaction of its effect, so a duplicate has no effect.

    with consume(connection, from_kafka(consumer, message), consumer="mail") as first:
        if first:
            connection.execute("INSERT INTO mails ...")
    # the id and the effect are committed, or neither; then the message is acknowledged

`inbox` is the first half alone, without commit and acknowledgement. A delivery is a message of confluent-kafka, pika or
RocketMQ; the clients are the caller's, and none is imported here. Needs neither Spark nor a connector.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from delivered.model.errors import BadRecord, InvariantBroken, Refused, UsageError
from delivered.model.options import check_argument
from delivered.patterns.caller import NOW_MS, Caller, check_dialect, quoted

__all__ = ["Delivery", "clean", "consume", "ddl", "from_kafka", "from_rabbitmq", "from_rocketmq", "inbox"]

TABLE = "inbox"
ID_BYTES_MAX = 512
CONSUMER_BYTES_MAX = 128
CLEANED_MAX = 500
"""Rows that one call of `clean` deletes."""

# Bytes in MySQL: its collations ignore trailing spaces, so a new id could be mistaken for an old one.
_TYPES = {
    "postgres": ('TEXT COLLATE "C"', 'TEXT COLLATE "C"', ""),
    "mysql": (f"VARBINARY({CONSUMER_BYTES_MAX})", f"VARBINARY({ID_BYTES_MAX})", " ENGINE=InnoDB"),
    "sqlite": ("TEXT", "TEXT", ""),
}
KAFKA_HEADERS = ("delivered.id", "id")
"""Of the sinks (messageIdColumns), and of an outbox."""


def ddl(dialect: str, table: str = TABLE) -> str:
    """The CREATE TABLE IF NOT EXISTS statement.

    Args:
        dialect: postgres, mysql (and MariaDB), or sqlite.
    """
    consumer, message, tail = _TYPES[check_dialect(dialect)]
    default = f" DEFAULT ({NOW_MS[dialect]})"
    return (
        f"CREATE TABLE IF NOT EXISTS {quoted(dialect, table)} (\n  consumer {consumer} NOT NULL,\n"
        f"  message_id {message} NOT NULL,\n  received_ms BIGINT NOT NULL{default},\n"
        f"  PRIMARY KEY (consumer, message_id),\n  UNIQUE (received_ms, consumer, message_id)\n){tail}"
    )


@contextlib.contextmanager
def inbox(
    connection: Any, message_id: str | bytes | uuid.UUID | None, *, consumer: str, table: str = TABLE
) -> Iterator[bool]:
    """Whether the message is new to this consumer. Never commits; commit after the block.

    An exception in the block rolls the id and the block's changes back to a savepoint, so a caller that catches it and
    commits loses nothing. If another transaction holds the same id, this waits: if it commits, the message is a
    duplicate; if it rolls back, the message is new. If the database ends the wait (PostgreSQL: lock_timeout, or a
    serialization failure under REPEATABLE READ; MySQL: innodb_lock_wait_timeout; SQLite: the connection's timeout),
    the client's own error is raised: roll back, and do not acknowledge.

    Args:
        connection: of psycopg 3, PyMySQL or sqlite3; a SQLAlchemy Session or Connection.
        message_id: assigned by the sender, the same in every resend; at most 512 bytes of UTF-8.
        consumer: each has its own set of ids.

    Raises:
        Refused: the connection is in autocommit, or the table does not exist.
        BadRecord: the value is not a valid id.
        InvariantBroken: the transaction ended inside the block.
    """
    values = _stored("consumer", consumer, CONSUMER_BYTES_MAX), _stored("message_id", message_id, ID_BYTES_MAX)
    caller = Caller(connection, what="inbox")
    columns = ("consumer", "message_id")

    def committed() -> Exception:
        return InvariantBroken("INBOX_TRANSACTION_ENDED", id=values[1])

    if caller.dialect == "postgres":  # an acknowledged message must survive a crash of the server
        caller.execute(
            "SELECT set_config('synchronous_commit', 'on', true) "
            "WHERE current_setting('synchronous_commit') IN ('off', 'local')"
        )
    with caller.savepoint(committed):
        try:
            name, row = caller.quoted(table), [*map(caller.exact, values)]
            first = caller.insert(name, columns, row)
            where = f"WHERE consumer = ? AND message_id = ?{caller.latest}"
            if not first and not caller.execute(f"SELECT 1 FROM {name} {where}", row).rows:  # noqa: S608
                raise Refused("INBOX_ROW", table=table, id=values[1])
        except Exception as error:
            _refuse_missing(caller, table, error)
            raise
        yield first


@dataclass(frozen=True)
class Delivery:
    """One delivery of a message, by any broker.

    Attributes:
        id: assigned by the sender; None: it assigned none.
        acknowledge: acknowledges the message at the broker.
        give_back: let the broker deliver it again.
    """

    id: str | bytes | None
    acknowledge: Callable[[], object]
    give_back: Callable[[], object]


_consuming: dict[int, object] = {}
"""Connections, by id, with an open block of `consume`; of threads, too."""


@contextlib.contextmanager
def consume(connection: Any, delivery: Delivery, *, consumer: str, table: str = TABLE) -> Iterator[bool]:
    """Whether the message is new to this consumer. At the end of the block: commit, then acknowledge.

    An exception in the block or in the commit is raised after a rollback, and the message is given back. If the
    acknowledgement fails, the client's error is raised: the effect stays, and the message comes again without effect.

    Args, Raises: as `inbox`.
    """
    check_argument("consume", "delivery", delivery, Delivery, "a delivery", "connection, from_kafka(...), ...")
    if _consuming.setdefault(id(connection), mine := object()) is not mine:
        delivery.give_back()
        raise UsageError("INBOX_IN_USE", id=delivery.id)
    try:
        with inbox(connection, delivery.id, consumer=consumer, table=table) as first:
            yield first
        _end(connection, "commit")
    except BaseException:
        with contextlib.suppress(Exception):  # the connection is lost, and with it the transaction
            _end(connection, "rollback")
        delivery.give_back()
        raise
    finally:
        del _consuming[id(connection)]
    delivery.acknowledge()


def _end(connection: Any, how: Literal["commit", "rollback"]) -> None:
    getattr(connection, how)()
    sqlite = isinstance(connection, sqlite3.Connection) and connection.in_transaction
    if sqlite and getattr(connection, "autocommit", None) is True:
        connection.execute(how)  # with autocommit=True, sqlite3's own methods do nothing


def from_kafka(consumer: Any, message: Any, *, headers: Sequence[str] = KAFKA_HEADERS) -> Delivery:
    """Of a `confluent_kafka.Consumer` with enable.auto.commit=false: automatic commits acknowledge before the effect.

    A message that is given back is read again before any later one of its partition: committing one of those would
    acknowledge it, too. Later ones that the application holds already (`consume(100)`) come again, without effect.

    Args:
        headers: where the id is; the first one that the message has.
    """

    def give_back() -> None:
        from confluent_kafka import TopicPartition

        consumer.seek(TopicPartition(message.topic(), message.partition(), message.offset()))

    def acknowledge() -> None:
        from confluent_kafka import TopicPartition

        (at,) = consumer.position([TopicPartition(message.topic(), message.partition())])
        if at.offset > message.offset():  # else an earlier message was given back, and has not been read yet
            consumer.commit(message, asynchronous=False)

    present = dict(message.headers() or ())
    message_id = next((present[name] for name in headers if name in present), None)
    return Delivery(message_id, acknowledge, give_back)


def from_rabbitmq(channel: Any, method: Any, properties: Any) -> Delivery:
    """Of a pika channel: what basic_get returns, or a consumer's callback gets. The id is the property message_id."""

    def give_back() -> None:
        with contextlib.suppress(Exception):  # a closed channel has returned its messages
            channel.basic_nack(method.delivery_tag)

    return Delivery(properties.message_id, lambda: channel.basic_ack(method.delivery_tag), give_back)


def from_rocketmq(consumer: Any, message: Any) -> Delivery:
    """Of a `rocketmq.SimpleConsumer`. The id is the message's only key, or that of its keys which is its message id.

    A message that is given back comes again when its invisible duration ends.
    """
    keys = set(message.keys)
    chosen = keys if len(keys) == 1 else keys & {message.message_id}  # the client keeps keys in no order
    return Delivery(next(iter(chosen), None), lambda: consumer.ack(message), lambda: None)


def clean(connection: Any, *, ttl: dt.timedelta, table: str = TABLE, limit: int = CLEANED_MAX) -> int:
    """Delete ids older than `ttl`, at most `limit` of them, in the open transaction of `connection`.

    Call it between messages, in a separate transaction, until it returns less than `limit`. A duplicate that arrives
    after its id was deleted counts as new: choose a `ttl` longer than the broker may redeliver or anybody may replay.

    Returns: number of deleted rows.
    """
    check_argument("clean", "ttl", ttl, dt.timedelta, "a timedelta", "connection, ttl=timedelta(days=30)")
    if ttl <= dt.timedelta(0) or limit < 1:
        raise UsageError("INBOX_TTL", ttl=ttl, limit=limit)
    caller = Caller(connection, what="inbox.clean")
    name, age = caller.quoted(table), int(ttl.total_seconds() * 1000)
    try:
        # Read without locks and deleted by key, so running consumers are not blocked.
        old = caller.execute(
            f"SELECT consumer, message_id FROM {name} WHERE received_ms < {NOW_MS[caller.dialect]} - ? "  # noqa: S608
            f"ORDER BY received_ms LIMIT {int(limit)}",
            (age,),
        ).rows
    except Exception as error:
        _refuse_missing(caller, table, error)
        raise
    delete = f"DELETE FROM {name} WHERE consumer = ? AND message_id = ?"  # noqa: S608
    return sum(caller.execute(delete, row).count for row in old)


def _refuse_missing(caller: Caller, table: str, error: Exception) -> None:
    if caller.missing(error):
        raise Refused("INBOX_TABLE", table=table, dialect=caller.dialect) from error


def _stored(name: str, value: str | bytes | uuid.UUID | None, bytes_max: int) -> str:
    text: Any = str(value) if isinstance(value, uuid.UUID) else value
    try:
        text = text.decode() if isinstance(text, bytes) else text
        fits = isinstance(text, str) and 0 < len(text.encode()) <= bytes_max and "\0" not in text
    except UnicodeError:
        fits = False
    if not fits:
        raise BadRecord("INBOX_VALUE", name=name, value=value, value_type=type(value).__name__, bytes_max=bytes_max)
    return str(text)
