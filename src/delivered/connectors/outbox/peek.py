"""Reads of a slot's changes that consume nothing, and the one call that moves the slot.

A peek decodes from the slot's confirmed position on. A transaction belongs to the range in which its commit record
begins, so a range gives the same rows whenever it is read, until the slot has been advanced past it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from delivered.connectors.outbox.database import connect, explaining, sqlstate
from delivered.connectors.outbox.options import OWNER, OutboxOptions
from delivered.connectors.outbox.pgoutput import Begin, Change, Decoder, Relation
from delivered.connectors.outbox.slot import NUMBER, check_slot, state
from delivered.contract.source import Offsets
from delivered.model import patience
from delivered.model.errors import DeliveredError, InvariantBroken
from delivered.model.limits import SOURCE_PATIENCE_S
from delivered.patterns.caller import quoted

if TYPE_CHECKING:
    import psycopg

_ROWS_FETCHED = 2_000
_IN_USE, _NOT_READY, _UNDEFINED, _REMOVED = "55006", "55000", "42704", "58P01"

_PEEK = (
    "pg_logical_slot_peek_binary_changes(%(slot)s, ('0/0'::pg_lsn + %(end)s), %(count)s, 'proto_version', '1', "
    "'publication_names', %(publication)s)"
)
_END = f"""
WITH m AS MATERIALIZED (SELECT ({NUMBER.format("lsn")})::bigint AS at, get_byte(data, 0) AS kind, n
    FROM {_PEEK} WITH ORDINALITY AS p(lsn, xid, data, n)),
  c AS (SELECT at, kind, count(*) FILTER (WHERE kind IN (68, 73, 84, 85)) OVER (ORDER BY n) AS total FROM m)
SELECT coalesce(max(total), 0), max(at) FILTER (WHERE kind = 67 AND total <= %(rows)s AND total > 0),
  min(at) FILTER (WHERE kind = 67 AND total > 0) FROM c
"""  # 67: commit; 68, 73, 84, 85: delete, insert, truncate, update

_RELATIONS = f"""
WITH m AS MATERIALIZED (SELECT ({NUMBER.format("lsn")})::bigint AS at, get_byte(data, 0) AS kind, n,
    CASE WHEN get_byte(data, 0) IN (82, 84, 89) THEN data END AS data
    FROM {_PEEK} WITH ORDINALITY AS p(lsn, xid, data, n)),
  c AS (SELECT at, n, data, max(at) FILTER (WHERE kind = 67) OVER (ORDER BY n) AS before FROM m)
SELECT before, at, data FROM c WHERE data IS NOT NULL ORDER BY n
"""  # 82: relation, 84: truncate, 89: type


def peek_end(
    connection: psycopg.Connection[Any], options: OutboxOptions, until: int, rows_max: int | None
) -> int | None:
    """Where a batch from the slot's position on may end; None: nothing happened until `until`.

    Args:
        connection: in autocommit.
        rows_max: a batch ends after whole transactions, the first of which may have more rows.
    """
    # A transaction of one row has three to four messages. Without a limit, one change is enough to know.
    count = 1 if rows_max is None else 4 * rows_max + 4
    given = {"rows": rows_max or 0, "end": until, "count": count, **_names(options)}
    with _reading(options):
        row = connection.execute(_END, given).fetchone()
    if row is None or not row[0]:
        return None
    return until if rows_max is None else min(until, int(row[1] or row[2]))


@dataclass(frozen=True)
class Seen:
    """A table's shape before its next rows, or its truncation.

    Attributes:
        before: end of the last transaction before it; None: it is in the first one.
        at: position of its own record.
    """

    before: int | None
    at: int
    relation: Relation
    truncates: bool


def relations(
    connection: psycopg.Connection[Any], options: OutboxOptions, table: int | None, end: int, count: int | None
) -> list[Seen]:
    """In order, from the slot's position on; repeated whenever PostgreSQL repeats it.

    Args:
        connection: in autocommit.
        table: oid.
        count: ends after the transaction with this many changes; None: at `end`.
    """
    with _reading(options):
        rows = connection.execute(_RELATIONS, {"end": end, "count": count, **_names(options)}).fetchall()
    decoder, found = Decoder(), list[Seen]()
    for before, at, data in rows:
        changes = decoder.decode(data)
        if data[:1] == b"R":
            found.append(Seen(before, at, decoder.relations[int.from_bytes(data[1:5], "big")], False))
        found += [Seen(before, at, c.relation, True) for c in changes if isinstance(c, Change)]
    return [one for one in found if one.relation.oid == table]


def peek(options: OutboxOptions, start: Offsets, end: int) -> Iterator[tuple[Begin, int, Change]]:
    """Changes of the transactions whose commit record begins in [start, end), in order of commits, each with the
    position of its own record; bounded memory.

    Raises:
        InvariantBroken: the slot did not have all of them.
    """
    at, begin, decoder = int(start["lsn"]), None, Decoder()
    connection = connect(options)
    try:
        with explaining(options), _reading(options):
            check_slot(state(connection, options), options, start)
            for position, data in _messages(connection, options, end):
                for message in decoder.decode(data):
                    if isinstance(message, Begin):
                        begin = message
                    elif begin is not None and at <= begin.lsn < end:
                        yield begin, position, message
            # The slot only moves forward: if it is not past the start now, it was not while this read.
            check_slot(state(connection, options), options, start)
    finally:
        connection.close()


def _messages(connection: psycopg.Connection[Any], options: OutboxOptions, end: int) -> Iterator[tuple[int, bytes]]:
    """Position and data of each until `end`, some at a time."""
    statement = f"SELECT ({NUMBER.format('lsn')})::bigint, data FROM {_PEEK}"

    def begin() -> tuple[Any, list[Any]]:
        connection.rollback()
        cursor = connection.cursor(name="wal", binary=True)
        try:
            with _reading(options):
                cursor.execute(statement, {"end": end, "count": None, **_names(options)})
                return cursor, cursor.fetchmany(_ROWS_FETCHED)
        except BaseException:
            cursor.close()
            raise

    # A plan looks at the slot, too, to see the columns of the next rows.
    cursor, rows = waiting(options, begin)
    with cursor:
        while rows:
            yield from rows
            rows = cursor.fetchmany(_ROWS_FETCHED)


def tables(start: Offsets) -> frozenset[int]:
    """Oids under which the table's changes are in the log."""
    return frozenset([start["#table"], *start.get("leaves", ())])


def advance(connection: psycopg.Connection[Any], options: OutboxOptions, position: int) -> None:
    """Move the slot on, so that the server may remove WAL. Idempotent.

    Args:
        connection: in autocommit.
    """
    with _reading(options):
        connection.execute(
            "SELECT pg_replication_slot_advance(slot_name, '0/0'::pg_lsn + %s) FROM pg_replication_slots "
            "WHERE slot_name = %s AND confirmed_flush_lsn < '0/0'::pg_lsn + %s",
            [position, options.slot, position],
        )


def _names(options: OutboxOptions) -> dict[str, str]:
    return {"slot": options.slot, "publication": quoted("postgres", options.publication)}


@contextlib.contextmanager
def _reading(options: OutboxOptions) -> Iterator[None]:
    """Explain what only decoding meets."""
    try:
        yield
    except DeliveredError:
        raise
    except Exception as error:
        code = sqlstate(error)
        text = " ".join(str(error).split())
        if code == _IN_USE:
            raise SlotInUse(
                "OUTBOX_SLOT_IN_USE",
                f"{OWNER}: the slot {options.slot} at {options.system} is in use: {text}.",
                next_step="stop the other reader (SELECT * FROM pg_replication_slots), or name another slot",
            ) from error
        if code == _UNDEFINED and "publication" in text:
            raise InvariantBroken(
                "OUTBOX_PUBLICATION",
                f"{OWNER}: {options.system} cannot decode the changes of the slot {options.slot}: {text}. The "
                "publication did not exist when they were written.",
                next_step="compare the table with what was delivered, drop the slot, and start a new checkpoint",
            ) from error
        if code in (_NOT_READY, _REMOVED):
            raise InvariantBroken(
                "OUTBOX_WAL_REMOVED",
                f"{OWNER}: {options.system} cannot read the slot {options.slot}: {text}.",
                next_step="raise max_slot_wal_keep_size; compare the outbox with what was delivered; drop the slot and "
                "start a new checkpoint",
            ) from error
        raise


class SlotInUse(DeliveredError):
    """Another session decodes from the slot at this moment."""


def waiting(options: OutboxOptions, ask: Any) -> Any:
    """Ask again while another session uses the slot: a task that was killed may still be decoding."""
    return patience.wait_out(
        f"the slot {options.slot}", ask, lambda error: isinstance(error, SlotInUse), SOURCE_PATIENCE_S / 4
    )
