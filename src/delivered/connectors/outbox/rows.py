"""What the source reads, as rows: messages of an outbox, and a table's changes, cut where the table changed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.connectors.outbox import NEW, OWNER, ROUTE, OutboxOptions, slot
from delivered.connectors.outbox.pgoutput import BYTEA, UNCHANGED, Begin, Change, Op, Relation, Row, Value, unhexed
from delivered.connectors.outbox.positions import text
from delivered.connectors.outbox.slot import State, check_identity, check_slot, find_keys, lsn_text, state
from delivered.contract.source import Offsets
from delivered.kits.sql.database import days, micros
from delivered.model.errors import BadRecord, DeliveredError, InvariantBroken, UsageError
from delivered.model.rows import Origin, Rejection, Rows
from delivered.patterns.caller import quoted
from delivered.source import COLUMNS as OF_MESSAGES
from delivered.source import HEADERS, TIMESTAMP, id_bytes, id_text

if TYPE_CHECKING:
    import psycopg

# What an outbox or a change stream has and no row can hold, as dead letters of its source.

CHANGE = pa.field("_change", pa.map_(pa.string(), pa.binary()))
"""In a dead letter of a change stream: the table's columns, in the text form of PostgreSQL's log."""
MESSAGE = pa.field(
    "_message", pa.struct([pa.field(n, pa.binary()) for n in ("id", "aggregatetype", "aggregateid", "type", "payload")])
)
"""In a dead letter of an outbox: its columns. `value` and `key` also keep columns of their own."""


def reject_change(
    reason: str, op: str, position: int, names: Sequence[str], values: Sequence[bytes | None]
) -> Rejection:
    change = list(zip(names, values, strict=True))
    return Rejection(
        Origin.SOURCE, reason, {"_op": op, "_deleted": op == "delete", "_lsn": position, CHANGE.name: change}
    )


# Rows of an outbox as messages, routed as by Debezium's outbox event router.

COLUMNS = pa.schema([f for f in OF_MESSAGES if f.name != "partition"]).append(HEADERS)
"""No partition, so that a sink chooses it by the key. offset: where the commit record begins, or the row's number.
timestamp: of the commit; null if polled."""
BYTES_MAX = 16 << 20
MESSAGES_MAX = 16_384
Message = Sequence[bytes | None]
"""Id, aggregate type, aggregate id, type, payload: as they are if they are bytes; else as the database writes them."""


class Events:
    """Collects messages; an id that comes twice in one slice is refused.

    Args:
        options: with the route, and whether payloads must be JSON.
        rejects: a message that cannot be delivered does not end the read; it is rejected.
    """

    def __init__(self, options: OutboxOptions, *, rejects: bool) -> None:
        self._options = options
        self._rejects = rejects
        self._seen: set[bytes] = set()
        self._topics: dict[bytes | None, str | None] = {}
        self._clear()

    def _clear(self) -> None:
        self._bytes = 0
        self._keys: list[bytes | None] = []
        self._values: list[bytes | None] = []
        self._topic: list[str | None] = []
        self._offsets: list[int] = []
        self._times: list[int | None] = []
        self._headers: list[list[tuple[str, bytes]]] = []
        self._rejected: list[Rejection] = []

    @property
    def empty(self) -> bool:
        return not self._keys and not self._rejected

    @property
    def full(self) -> bool:
        return len(self._keys) + len(self._rejected) >= MESSAGES_MAX or self._bytes >= BYTES_MAX

    def add(self, offset: int, time_us: int | None, message: Message) -> None:
        """
        Raises:
            BadRecord: the id is null or came before, the aggregate type is no text, or the payload is not JSON; and it
                is not rejected.
        """
        id_, kind, key, type_, payload = message
        self._bytes += 100 + len(payload or b"")
        try:
            known = self._checked(id_, kind, key, payload)
        except BadRecord as error:
            if not self._rejects:
                raise
            named = dict(zip(MESSAGE.type.names, message, strict=True))
            record = {"key": key, "value": payload, "timestamp": time_us, MESSAGE.name: named}
            self._rejected.append(Rejection(Origin.SOURCE, error.message, record, offset=offset))
            return
        self._keys.append(key)
        self._values.append(payload)
        self._topic.append(self._topics[kind])
        self._offsets.append(offset)
        self._times.append(time_us)
        self._headers.append([("id", known), *([("type", type_)] if type_ is not None else [])])

    def _checked(self, id_: bytes | None, kind: bytes | None, key: bytes | None, payload: bytes | None) -> bytes:
        """The id."""
        if id_ is None or id_ in self._seen:
            name = self._options.columns[0]
            raise BadRecord(
                "OUTBOX_ID.NULL_OR_TWICE",
                outbox=self._options.outbox,
                rows=f"a row whose {name} is null" if id_ is None else f"two rows with {name} {text(id_)}",
                kind=text(kind),
                key=text(key),
                name=name,
            )
        self._seen.add(id_)
        if self._options.json and payload is not None:
            self._check_json(id_, payload)
        if kind not in self._topics:
            self._topics[kind] = self._routed(id_, kind)
        return id_

    def _routed(self, id_: bytes, kind: bytes | None) -> str | None:
        """None: the row names no aggregate type to route by; the sink decides what happens to it."""
        if ROUTE not in self._options.topic:
            return self._options.topic
        try:
            return None if kind is None else self._options.topic.replace(ROUTE, kind.decode())
        except UnicodeDecodeError as error:
            name = self._options.columns[1]
            raise BadRecord(
                "OUTBOX_TOPIC", id=text(id_), outbox=self._options.outbox, name=name, kind=kind, error=error
            ) from None

    def take(self) -> Rows:
        """All messages since the last call."""
        times = self._times
        arrays = [
            pa.array(self._keys, pa.binary()),
            pa.array(self._values, pa.binary()),
            pa.array(self._topic, pa.string()),
            pa.array(self._offsets, pa.int64()),
            pa.array(times, pa.int64()).cast(TIMESTAMP),
            pa.array([-1 if t is None else 1 for t in times], pa.int32()),
            pa.array(self._headers, HEADERS.type),
        ]
        rows = Rows(pa.RecordBatch.from_arrays(arrays, schema=COLUMNS), self._rejected)
        self._clear()
        return rows

    def restored(self, raw: pa.RecordBatch) -> Iterator[Rows]:
        """Dead letters, in `COLUMNS` and MESSAGE, one by one."""
        for at in range(raw.num_rows):
            row = raw.slice(at, 1)
            message = row.column(MESSAGE.name)[0].as_py()
            if message is None:
                yield Rows(row.select(COLUMNS.names))
                continue
            offset, time_us = (row.column(n).cast(pa.int64())[0].as_py() for n in ("offset", "timestamp"))
            self.add(offset, time_us, [message[n] for n in MESSAGE.type.names])
            yield self.take()

    def _check_json(self, id_: bytes, payload: bytes) -> None:
        try:
            json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise BadRecord(
                "OUTBOX_PAYLOAD.ROW", id=text(id_), outbox=self._options.outbox, payload=payload[:200], error=error
            ) from None

    def batches(self, rows: Iterator[Sequence[tuple[Any, ...]]]) -> Iterator[Rows]:
        """Rows as the client returns them: number, id, aggregate type, aggregate id, type, payload."""
        for some in rows:
            for number, *message in some:
                self.add(int(number), None, [_bytes(value) for value in message])
                if self.full:
                    yield self.take()
        if not self.empty:
            yield self.take()


class Reader:
    """Reads the columns of an outbox from decoded rows, by name: columns may be added and dropped."""

    def __init__(self, options: OutboxOptions) -> None:
        self._options = options
        self._at: dict[Relation, list[tuple[int, bool]]] = {}

    def read(self, relation: Relation, row: Row) -> Message:
        known = self._at.get(relation)
        if known is None:
            known = self._at[relation] = self._places(relation)
        return [_value(row[at], is_bytes) for at, is_bytes in known]

    def id_of(self, relation: Relation, row: Row) -> bytes | str | None:
        """As a parameter of a statement: bytes for bytea, otherwise PostgreSQL's text."""
        id_ = self.read(relation, row)[0]
        return id_ if self._at[relation][0][1] else id_text(id_)

    def _places(self, relation: Relation) -> list[tuple[int, bool]]:
        """Where each column is, and whether it is bytea. A renamed column has its former name in older rows."""
        places = []
        for names in self._options.names:
            at = next((relation.columns.index(name) for name in names if name in relation.columns), None)
            if at is None:
                raise BadRecord(
                    "OUTBOX_COLUMN",
                    outbox=self._options.outbox,
                    names=" or ".join(names),
                    columns=", ".join(relation.columns),
                    first_name=names[0],
                )
            places.append((at, relation.types[at] == BYTEA))
        return places


def _value(value: Value, is_bytes: bool) -> bytes | None:
    if isinstance(value, bytes):
        return unhexed(value) if is_bytes else value
    if value is UNCHANGED:
        raise InvariantBroken("PGOUTPUT.NO_VALUE")
    return None


def _bytes(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return bytes(value) if isinstance(value, memoryview | bytearray) else id_bytes(str(value))


# A table's changes as rows: its columns, and three that say what happened.
#
# A sink that upserts takes them with keyColumns, versionColumn `_lsn` and deleteColumn `_deleted`.

CHANGES_MAX = 8_192


class Changes:
    """Collects changes as columns.

    Args:
        rejects: a value that Spark has not does not end the read; its change is rejected.
    """

    def __init__(self, options: OutboxOptions, layout: Layout, *, rejects: bool) -> None:
        self._options = options
        self._layout = layout
        self._rejects = rejects
        self._keys = frozenset(layout.keys)
        self._schema = layout.columns
        self._table = pa.schema([f for f in layout.columns if f not in ADDED])
        self._names = self._table.names
        self._at: dict[Relation, list[int | None]] = {}
        self._clear()

    def _clear(self) -> None:
        self._rows: list[list[bytes | None]] = []
        self._ops: list[str] = []
        self._lsns: list[int] = []
        self._rejected: list[Rejection] = []
        self._bytes = 0

    @property
    def empty(self) -> bool:
        return not self._rows

    @property
    def full(self) -> bool:
        return len(self._rows) >= CHANGES_MAX or self._bytes >= BYTES_MAX

    def add(self, position: int, change: Change) -> None:
        """Raises BadRecord: the change cannot be given as rows."""
        relation = change.relation
        match change.op:
            case Op.INSERT:
                self._append("insert", position, relation, change.new)
            case Op.UPDATE:
                if change.old is not None and self._key(relation, change.old) != self._key(relation, change.new or ()):
                    self._append("delete", position, relation, change.old)
                self._append("update", position, relation, _filled(change))
            case Op.DELETE:
                self._append("delete", position, relation, change.old)
            case Op.TRUNCATE:
                if not self._options.accepts(position):
                    raise truncated(self._options, position)

    def take(self) -> Rows:
        """All changes since the last call."""
        arrays = self._arrays()
        arrays += [
            pa.array(self._ops, pa.string()),
            pa.array([op == "delete" for op in self._ops], pa.bool_()),
            pa.array(self._lsns, pa.int64()),
        ]
        rows = Rows(pa.RecordBatch.from_arrays(arrays, schema=self._schema), self._rejected)
        self._clear()
        return rows

    def restore(self, op: str, position: int, change: Sequence[tuple[str, bytes | None]]) -> None:
        """A change that was rejected once, by its columns. Raises ValueError: the rows have other columns now."""
        values = dict(change)
        if set(values) != set(self._names):
            raise ValueError(f"it has the columns {', '.join(values)}, and the source has {', '.join(self._names)}")
        self._rows.append([values[name] for name in self._names])
        self._ops.append(op)
        self._lsns.append(position)

    def _arrays(self) -> list[pa.Array]:
        """The table's columns. Rows with a value that Spark has not are left out, if they are accepted or rejected."""
        try:
            columns = list(zip(*self._rows, strict=True)) if self._rows else [()] * len(self._table)
            return [_array(f.type, values) for f, values in zip(self._table, columns, strict=True)]
        except _NO_VALUE:
            kept = [n for n in range(len(self._rows)) if self._fits(n)]
            if len(kept) == len(self._rows):
                raise
            self._rows, self._ops, self._lsns = (
                [self._rows[n] for n in kept], [self._ops[n] for n in kept], [self._lsns[n] for n in kept]
            )  # fmt: skip
            return self._arrays()

    def _fits(self, at: int) -> bool:
        """Whether Spark has all values of a row; if not, it is accepted or rejected.

        Raises:
            BadRecord: it is neither.
        """
        row, position = self._rows[at], self._lsns[at]
        for field, value in zip(self._table, row, strict=True):
            try:
                _array(field.type, [value])
            except _NO_VALUE as error:
                if self._options.accepts(position):
                    return False
                bad = self._no_value(field, position, error)
                if not self._rejects:
                    raise bad from error
                self._rejected.append(reject_change(bad.message, self._ops[at], position, self._names, row))
                return False
        return True

    def _no_value(self, field: pa.Field, position: int, error: Exception) -> BadRecord:
        return BadRecord(
            "OUTBOX_VALUE.CHANGE",
            column=field.name,
            table=self._options.table,
            position=lsn_text(position),
            type=field.type,
            error=error,
        )

    def _append(self, op: str, position: int, relation: Relation, row: Row | None) -> None:
        at = self._at.get(relation)
        if at is None:
            at = self._at[relation] = self._places(relation)
        values: list[bytes | None] = []
        for place, name in zip(at, self._names, strict=True):
            value = None if place is None or row is None else row[place]
            if value is None and name in self._keys:
                if self._options.accepts(position):
                    return
                raise BadRecord(
                    "OUTBOX_IDENTITY.LOG",
                    table=self._options.table,
                    operation=op,
                    position=lsn_text(position),
                    name=name,
                )
            if value is UNCHANGED:
                raise BadRecord("OUTBOX_UNCHANGED", table=self._options.table, name=name)
            values.append(value)  # type: ignore[arg-type]
            self._bytes += 16 + len(value or b"")  # type: ignore[arg-type]
        self._rows.append(values)
        self._ops.append(op)
        self._lsns.append(position)

    def _places(self, relation: Relation) -> list[int | None]:
        """Where each column is in the row; None: the row is from before it was added."""
        known = {name: (type_, modifier) for name, type_, modifier, _ in self._layout.shape}
        for name, *kind in zip(relation.columns, relation.types, relation.modifiers, strict=True):
            if name not in known:
                raise self._other(f"got the column {name}, which this query does not have")
            if known[name] != tuple(kind):
                raise self._other(f"has another type of the column {name} than this query")
        for name in set(known) - set(relation.columns) - self._layout.optional:
            raise self._other(f"has no column {name} any more, which this query has")
        return [relation.columns.index(n) if n in relation.columns else None for n in self._names]

    def _other(self, what: str) -> BadRecord:
        return BadRecord("OUTBOX_COLUMNS.CHANGED", table=self._options.table, what=what)

    def _key(self, relation: Relation, row: Row) -> list[Value]:
        """By the primary key; if it is not known, by the replica identity."""
        by = [name in self._keys for name in relation.columns] if self._keys else relation.keys
        return [value for value, key in zip(row, by, strict=True) if key]


def truncated(options: OutboxOptions, position: int) -> BadRecord:
    return BadRecord("OUTBOX_TRUNCATED", table=options.table, position=lsn_text(position))


def _filled(change: Change) -> Row | None:
    """The new row; values that did not change from the old one, if the log has it."""
    if change.new is None or change.old is None:
        return change.new
    return tuple(o if n is UNCHANGED else n for n, o in zip(change.new, change.old, strict=True))


_NO_VALUE = (pa.ArrowInvalid, ValueError, ArithmeticError)


def _array(kind: pa.DataType, values: Sequence[bytes | None]) -> pa.Array:
    """Values in PostgreSQL's text form. Raises one of `_NO_VALUE`."""
    if pa.types.is_binary(kind):
        return pa.array([None if v is None else bytes.fromhex(v[2:].decode()) for v in values], kind)
    texts = pa.array(values, pa.binary()).cast(pa.string())
    if pa.types.is_string(kind):
        return texts
    if pa.types.is_boolean(kind):
        return pc.equal(texts, "t")
    if pa.types.is_decimal(kind):
        return pa.array([None if v is None else Decimal(v.decode()) for v in values], kind)
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        if pa.types.is_timestamp(kind):
            zoned = kind.tz is not None
            return pa.array([None if v is None else micros(v.decode(), zoned) for v in values], pa.int64()).cast(kind)
        if pa.types.is_date32(kind):
            return pa.array([None if v is None else days(v.decode()) for v in values], pa.int32()).cast(kind)
        raise


def change_batches(
    options: OutboxOptions,
    layout: Layout,
    changes_: Iterator[tuple[Begin, int, Change]],
    emptied: int | None = None,
    *,
    rejects: bool,
) -> Iterator[Rows]:
    """Changes, each with its transaction and position, as rows.

    Args:
        emptied: position of a TRUNCATE: rows of its transaction that are before it are left out.
    """
    changes = Changes(options, layout, rejects=rejects)
    for begin, position, change in changes_:
        if emptied is not None and position < emptied < begin.lsn:
            continue
        changes.add(position, change)
        if changes.full:
            yield changes.take()
    if not changes.empty:
        yield changes.take()


def restore_changes(options: OutboxOptions, layout: Layout, raw: pa.RecordBatch) -> Iterator[Rows]:
    """Dead letters, in the columns of `layout` and CHANGE, one by one. Raises ValueError."""
    for at in range(raw.num_rows):
        row = raw.slice(at, 1)
        change = row.column(CHANGE.name)[0].as_py()
        if change is None:
            yield Rows(row.select(layout.columns.names))
            continue
        op, position = (row.column(f.name)[0].as_py() for f in (ADDED[0], ADDED[2]))
        changes = Changes(options, layout, rejects=True)
        changes.restore(op, position, change)
        yield changes.take()


# Cuts the batches of a change stream where its table changed, and judges the change.

log = logging.getLogger("delivered.patterns.outbox")


class Shapes:
    """Of a change stream's driver. Offsets hold "#shape", "#partitions" and "#columns": those of the rows up to there.

    Args:
        run: calls a function with the driver's connection.
    """

    def __init__(self, options: OutboxOptions, run: Callable[[Callable[[Any], Any]], Any]) -> None:
        self._options = options
        self._run = run

    def check_catalogue(self, start: Offsets, state: State) -> Offsets:
        """What changed with the table and is not in the log. Returns what the offsets of the next batch keep of it; the
        shape stays until rows have another one.

        Raises:
            Refused: the log cannot identify rows any more.
            InvariantBroken: a partition brought or took rows, or a column was dropped and added again.
        """
        options = self._options
        self._run(lambda c: check_identity(c, options, published=True))
        now, known = self._run(lambda c: slot.leaves(c, options)), start.get("#partitions")
        if known is not None and known != now:
            found, at = self._run(lambda c: slot.partition_differences(c, known, now)), int(start["lsn"])
            if found and not self._accepted(found, at):
                raise InvariantBroken(
                    "OUTBOX_PARTITIONS", change=self._said(found), position=lsn_text(at), resume=_on(at)
                )
        kept = {"#shape": start["#shape"]} if "#shape" in start else {}
        return kept | ({"#partitions": now} if now or known else {}) | {"#columns": self._columns(start, state)}

    def _columns(self, start: Offsets, state: State) -> list[list[Any]]:
        """Name and number of each; the log does not say that one of them was dropped and added again in between."""
        now = [[name, number] for name, number in zip(state.columns, state.numbers, strict=True)]
        known = dict(start.get("#columns", ()))
        differences = [
            f"the column {n} was dropped and added again" for n, number in now if known.get(n, number) != number
        ]
        if differences:
            self._refuse(differences, int(start["lsn"]))
        return now

    def cut(self, start: Offsets, end: int) -> tuple[int, Offsets]:
        """Where a batch of one shape ends, and that shape.

        Raises:
            InvariantBroken: the first rows have another shape than those before, and `schemaChange` does not accept it.
            BadRecord: the table is truncated first.
        """
        options, at = self._options, int(start["lsn"])
        known = parse_shape(start.get("#shape"))
        for one in self._seen(start["#table"], end):
            before = one.before if one.before is not None and one.before > at else None
            if one.truncates and options.accepts(one.at):
                continue
            if not one.truncates:
                new = build_shape(one.relation)
                if known is None or new == known or self._extends(known, new):
                    known = new
                    continue
            if before is not None:
                end = before
                break
            if one.truncates or known is None:
                raise truncated(options, one.at)
            self._accept(known, new, at)
            known = new
        return end, {} if known is None else {"#shape": [list(column) for column in known]}

    def truncated(self, end: Offsets, until: int) -> Offsets:
        """Where the table was truncated, if the user accepts that: earlier rows of that transaction are not there."""
        accepted = self._options.accepted
        if accepted is None:
            return {}
        is_accepted = any(s.truncates and s.at == accepted for s in self._seen(end["#table"], until))
        return {"truncated": accepted} if is_accepted else {}

    def _seen(self, table: int | None, end: int) -> Sequence[slot.Seen]:
        options = self._options
        seen: Sequence[slot.Seen] = self._run(
            lambda c: slot.waiting(options, lambda: slot.relations(c, options, table, end, None))
        )
        return seen

    def _extends(self, known: Shape, new: Shape) -> bool:
        if not added_columns(known, new):
            return False
        _, defaults = self._run(lambda c: table_shape(c, self._options, state(c, self._options)))
        return is_extended(known, new, defaults)

    def _accept(self, known: Shape, new: Shape, at: int) -> None:
        if added_columns(new, known):
            return  # columns were dropped: the rows come without them, which needs a restart

        def type_name(oid: int, modifier: int) -> str:
            return str(self._run(lambda c: c.execute("SELECT format_type(%s, %s)", [oid, modifier]).fetchone())[0])

        self._refuse(find_differences(known, new, type_name), at)

    def _refuse(self, differences: Sequence[str], at: int) -> None:
        if not self._accepted(differences, at):
            raise InvariantBroken(
                "OUTBOX_SCHEMA", change=self._said(differences), position=lsn_text(at), resume=_on(at)
            )

    def _accepted(self, differences: Sequence[str], at: int) -> bool:
        if self._options.schema_change != NEW and not self._options.accepts(at):
            return False
        log.warning("%s The query goes on after it (schemaChange).", self._said(differences))
        return True

    def _said(self, differences: Sequence[str]) -> str:
        return f"{OWNER}: {self._options.table} at {self._options.system}: {'; '.join(differences)}."


def _on(at: int) -> str:
    return (
        f'write .option("schemaChange", "{lsn_text(at)}"), with which the query goes on after this change, or '
        '"new", which accepts every later one, too; nothing is skipped'
    )


# The columns of a table as PostgreSQL's log gives them with its rows, and what differs between two of them.
#
# A row in the log has the columns that the table had when it was written, whatever the table has by now. So a batch of
# a change stream has rows of one shape, except that columns may be added to it: a row from before has null there, as in
# the table.

Column = tuple[str, int, int, bool]
"""Name, oid of its type, modifier of the type, and whether it belongs to the replica identity."""
Shape = tuple[Column, ...]


def build_shape(relation: Relation) -> Shape:
    return tuple(zip(relation.columns, relation.types, relation.modifiers, relation.keys, strict=True))


def parse_shape(value: Sequence[Sequence[Any]] | None) -> Shape | None:
    """From offsets, as JSON; None: no row was read yet, or by a release that did not keep it."""
    return None if value is None else tuple((str(n), int(t), int(m), bool(k)) for n, t, m, k in value)


def column_names(shape: Shape) -> tuple[str, ...]:
    return tuple(column[0] for column in shape)


def added_columns(before: Shape, after: Shape) -> frozenset[str] | None:
    """Columns that `after` has more, if nothing else differs; None: something does."""
    more = frozenset(column_names(after)) - frozenset(column_names(before))
    return more if tuple(c for c in after if c[0] not in more) == before else None


def find_differences(before: Shape, after: Shape, type_name: Callable[[int, int], str]) -> list[str]:
    """What changed, in words: "the column name was renamed to title".

    Args:
        type_name: oid and modifier of a type -> its name.
    """
    old, new = {c[0]: c for c in before}, {c[0]: c for c in after}
    lost, more = [n for n in old if n not in new], [n for n in new if n not in old]
    texts = []
    for name in list(lost):
        at = column_names(before).index(name)
        if len(before) == len(after) and after[at][0] in more and after[at][1:3] == before[at][1:3]:
            texts.append(f"the column {name} was renamed to {after[at][0]}")
            lost.remove(name)
            more.remove(after[at][0])
    texts += [f"the column {name} was dropped" for name in lost]
    texts += [f"the column {name} was added" for name in more]
    for name in set(old) & set(new):
        if old[name][1:3] != new[name][1:3]:
            types = " to ".join(type_name(*c[1:3]) for c in (old[name], new[name]))
            texts.append(f"the type of the column {name} changed from {types}")
    identities = [", ".join(c[0] for c in shape if c[3]) or "nothing" for shape in (before, after)]
    if identities[0] != identities[1] and {c[0] for c in before if c[3]} - set(lost) != {c[0] for c in after if c[3]}:
        texts.append(f"the replica identity changed from {identities[0]} to {identities[1]}")
    return texts or ["the order of the columns changed"]


# The columns of a change stream.

OP, DELETED, LSN = "_op", "_deleted", "_lsn"
ADDED = (pa.field(OP, pa.string()), pa.field(DELETED, pa.bool_()), pa.field(LSN, pa.int64()))

_TYPES = {
    "bool": pa.bool_(), "int2": pa.int16(), "int4": pa.int32(), "int8": pa.int64(), "oid": pa.int64(),
    "float4": pa.float32(), "float8": pa.float64(), "bytea": pa.binary(), "date": pa.date32(),
    "timestamp": pa.timestamp("us"), "timestamptz": pa.timestamp("us", "UTC"),
}  # fmt: skip
"""All others are text, as PostgreSQL writes it: uuid, json, arrays, enums, intervals, numeric without a precision."""

_COLUMNS = """
SELECT a.attname, CASE WHEN (WITH RECURSIVE b(oid) AS (SELECT a.atttypid UNION SELECT p.typbasetype FROM b
    JOIN pg_type p ON p.oid = b.oid) SELECT bool_or(oid = 'bytea'::regtype) FROM b)
  THEN 'bytea'::regtype::oid ELSE a.atttypid END::bigint, a.atttypmod,
  a.atthasdef OR a.atthasmissing OR a.attidentity <> ''
FROM pg_attribute a WHERE a.attrelid = to_regclass(%(table)s) AND a.attnum > 0 AND NOT a.attisdropped
  AND a.attname = ANY (%(carried)s) ORDER BY a.attnum
"""


@dataclass(frozen=True)
class Layout:
    """
    Attributes:
        columns: the table's, then `ADDED`.
        keys: of the primary key; none: it is not known.
        shape: names and types as the rows have them.
        optional: columns that older rows have not, and for which null is their value.
    """

    columns: pa.Schema
    keys: tuple[str, ...]
    shape: Shape
    optional: frozenset[str] = frozenset()


def layout(connection: psycopg.Connection[Any], options: OutboxOptions) -> Layout:
    """Raises UsageError: there is no such table."""
    now = state(connection, options)
    table = table_shape(connection, options, now)
    if not table[0]:
        raise UsageError("OUTBOX_TABLE.CHANGES", system=options.system, table=options.table)
    fields, optional = _unread(connection, options, now, *table)
    return Layout(
        pa.schema([*_fields(connection, fields), *ADDED]),
        _keys(connection, options, table[0], fields),
        fields,
        optional,
    )


def table_shape(
    connection: psycopg.Connection[Any], options: OutboxOptions, now: State
) -> tuple[Shape, frozenset[str]]:
    """The table now, without its replica identity, of the columns that the log carries; and columns with a default."""
    parameters = {"table": quoted("postgres", options.table), "carried": list(now.carried)}
    rows = connection.execute(_COLUMNS, parameters).fetchall()
    return tuple((n, t, m, False) for n, t, m, _ in rows), frozenset(n for n, *_, default in rows if default)


def is_extended(before: Shape, after: Shape, defaults: frozenset[str]) -> bool:
    """Whether `after` has only more columns, which rows from before have null in."""
    more = added_columns(before, after)
    return more is not None and not more & defaults


def _unread(
    connection: psycopg.Connection[Any], options: OutboxOptions, now: State, table: Shape, defaults: frozenset[str]
) -> tuple[Shape, frozenset[str]]:
    """The shape of the next rows, extended as far as columns were only added since; and those columns."""
    seen = _seen(connection, options, now, table)
    if not seen:
        return table, frozenset()
    first = [s for before, s in seen if before is None]
    found, optional = first[-1], frozenset[str]()
    # A table that was changed within one transaction: its rows have all columns, some of them null.
    for other in first[:-1]:
        lost = tuple(c for c in other if c[0] not in column_names(found))
        optional |= frozenset(column_names(found)) ^ frozenset(column_names(other))
        found += lost
    for one in [*(s for before, s in seen if before is not None), table]:
        base = found if one is not table else _plain(found)
        if not is_extended(base, one, defaults):
            break
        optional |= added_columns(base, one) or frozenset()
        found = one
    return found, optional


def _plain(of: Shape) -> Shape:
    return tuple((n, t, m, False) for n, t, m, _ in of)


def _seen(
    connection: psycopg.Connection[Any], options: OutboxOptions, now: State, table: Shape
) -> list[tuple[int | None, Shape]]:
    """Shapes of the table's unread rows, each with the end of the transaction before it; None: there is none."""
    try:
        check_slot(now, options, {"lsn": 0})
    except DeliveredError:
        return []  # said by preflight
    end = now.flushed or 0
    for count in (1, None):  # one transaction is enough if it has the shape that the table has
        relations = slot.waiting(
            options, lambda count=count: slot.relations(connection, options, now.table, end, count)
        )
        seen = [(s.before, build_shape(s.relation)) for s in relations if not s.truncates]
        if seen and all(_plain(s) == table for _, s in seen):
            break
    if seen and all(before is not None for before, _ in seen):
        seen[0] = (None, seen[0][1])  # transactions of other tables come first
    return seen


def _keys(connection: psycopg.Connection[Any], options: OutboxOptions, table: Shape, found: Shape) -> tuple[str, ...]:
    """Names of the primary key's columns in rows of the shape `found`; the table may have renamed them since."""
    keys, now, then = find_keys(connection, options), column_names(table), column_names(found)
    if set(keys) <= set(then):
        return keys
    if set(keys) <= set(now) and [c[1] for c in table] == [c[1] for c in found]:
        return tuple(then[now.index(key)] for key in keys)
    return tuple(c[0] for c in found if c[3])


def _fields(connection: psycopg.Connection[Any], of: Shape) -> list[pa.Field]:
    oids = [oid for _, oid, _, _ in of]
    known = dict(connection.execute("SELECT oid::bigint, typname FROM pg_type WHERE oid = ANY (%s)", [oids]).fetchall())
    return [pa.field(name, _type(known.get(oid, ""), modifier)) for name, oid, modifier, _ in of]


def _type(name: str, modifier: int) -> pa.DataType:
    if name == "numeric" and modifier >= 4:
        precision, scale = (modifier - 4) >> 16 & 0xFFFF, (modifier - 4) & 0x7FF
        if precision <= 38 and scale <= precision:
            return pa.decimal128(precision, scale)
    return _TYPES.get(name, pa.string())
