"""A column with the number of the batch that wrote a row, which orders the rows of a table for audits.

Several writers may share a table: pipelines, sinks of one, and the checkpoints (incarnations) of a sink, whose batches
all start at 0. The ledger's table `writer` numbers them. A row has `writer * 2^40 + batch`, so the first writer of a
table, mostly the only one, leaves plain batch numbers.

A position names the last batch of each writer. Rows without a number are of other clients: they have no order, so if
there are any at a position, more of them are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeGuard

from delivered.contract.sink import Changes
from delivered.contract.source import Offsets
from delivered.kits.sql.database import C, Dialect, Server, quoted, scope_values
from delivered.kits.sql.sink import PreparedRows, find_decided
from delivered.kits.sql.table import SLICES_MAX, RowSum, difference, spread
from delivered.model.errors import InvariantBroken, UsageError
from delivered.model.identity import Scope, Work, batches_text

WRITER_VERSION = 6
"""Version of the ledger's tables that introduced `writer`."""
BATCHES = 2**40
"""Batches of one writer."""
WRITERS = 2**23
SLICE_ROWS = 250_000
"""Rows that a slice has at most, if one batch does not have more."""
COUNTED_MAX = 5_000_000
"""Rows before a position that are counted, by the column's index."""
HASHED_MAX = 100_000
"""Rows before a position that are hashed; of more, those of at most `SAMPLES` batches."""
SAMPLES = 20
SHOWN_MAX = 3
"""Changed ranges that are named."""
COUNTS = 50
"""Ranges of batches whose rows are counted."""

_SCOPE = "pipeline = :pipeline AND sink = :sink AND incarnation = :incarnation"


def has_batches(position: Offsets | None) -> TypeGuard[Offsets]:
    """Whether a position is one of these."""
    return position is not None and "batches" in position


def _last_batches(position: Offsets) -> dict[int, int]:
    """Writer -> its last batch."""
    return {int(writer): int(last) for writer, last in position["batches"].items()}


def _differences(before: Sequence[Any], now: Sequence[Any]) -> list[str]:
    """Of the facts about ranges of numbers, as sentences."""
    changes = []
    for (start, stop, *then), (_, _, *found) in zip(before, now, strict=True):
        if change := difference(RowSum(*then), RowSum(*found)):
            writer = f" of writer {start // BATCHES}" if start >= BATCHES else ""
            changes.append(f"{batches_text(start % BATCHES, (stop - 1) % BATCHES)}{writer}: {change}")
    return changes


Range = tuple[int, int]
"""The first number, and the one after the last."""


@dataclass(frozen=True)
class NumberedTable(Generic[C]):
    """A table whose rows have such numbers. Methods raise the client's errors.

    Attributes:
        table: quoted for SQL.
        target: the table, for the ledger; also once it was renamed, where the server reports that.
        name: for messages.
        identity: distinguishes it from a recreated one; None: unknown.
        column: name.
        hashed: SQL of the sum of all rows' hashes, of these columns.
        alone: serializes changes of tables.
    """

    server: Server[C]
    table: str
    target: str
    name: str
    identity: str | None
    column: str
    hashed: Callable[[Sequence[str]], str]
    alone: Callable[[C], AbstractContextManager[None]]

    def number(self, connection: C, work: Work) -> int:
        """The number of the rows of a batch. Outside a transaction; registers their writer."""
        if not 0 <= work.batch < BATCHES:
            raise InvariantBroken("BATCH_NUMBER", batch=work.batch, batches=BATCHES)
        writer = self._writer(connection, work.scope)
        if writer is None:
            with self.alone(connection):
                writer = self._writer(connection, work.scope)
                if writer is None:
                    writer = self._register(connection, work.scope)
        return writer * BATCHES + work.batch

    def _writer(self, connection: C, scope: Scope) -> int | None:
        row = connection.execute(
            self._sql(f"SELECT number FROM {{writer}} WHERE target = :target AND {_SCOPE}"),
            {"target": self.target, **scope_values(scope)},
        ).fetchone()
        return None if row is None else int(row[0])

    def _register(self, connection: C, scope: Scope) -> int:
        (known,) = connection.execute(
            self._sql("SELECT max(number) FROM {writer} WHERE target = :target"), {"target": self.target}
        ).fetchone()
        # The table may have rows of writers whose ledger is, or was, elsewhere.
        there = self._newest(connection, WRITERS * BATCHES)
        number = max(-1 if known is None else int(known), -1 if there is None else there // BATCHES) + 1
        connection.execute(
            self._sql(
                "INSERT INTO {writer} (target, number, pipeline, sink, incarnation) "
                "VALUES (:target, :number, :pipeline, :sink, :incarnation)"
            ),
            {"target": self.target, "number": number, **scope_values(scope)},
        )
        return number

    def position(self, connection: C) -> Offsets:
        """Rows of batches in flight lie behind it, if they show already."""
        with self._snapshot(connection):
            lasts = {w: self._decided(connection, w, last) for w, last in self._ends(connection).items()}
            return {
                "batches": {str(writer): last for writer, last in lasts.items() if last >= 0},
                "unnumbered": self._any(connection, self._unnumbered),
                "column": self.column,
                "table": self.identity,
            }

    def is_of(self, position: Offsets) -> bool:
        return bool(position["table"] == self.identity)

    def ranges(self, connection: C, since: Offsets, until: Offsets | None) -> list[Range | None]:
        """What lies between two positions of this table, in ranges of numbers; None: rows without a number."""
        ends = self._ends(connection) if until is None else _last_batches(until)
        starts, found = _last_batches(since), list[Range | None]()
        for writer, last in sorted(ends.items()):
            first, stop = writer * BATCHES + starts.get(writer, -1) + 1, writer * BATCHES + last + 1
            if first < stop:
                found += self._split(connection, first, stop)
        if not since["unnumbered"] and (until is None or until["unnumbered"]):
            found += [None] * self._any(connection, self._unnumbered)
        return found

    def within(self, range_: Range | None) -> str:
        """SQL for the rows of one of them."""
        return self._unnumbered if range_ is None else self._between(*range_)

    def before(self, position: Offsets) -> str:
        """SQL for rows that lie before a position."""
        parts = [self._between(w * BATCHES, w * BATCHES + last + 1) for w, last in _last_batches(position).items()]
        parts += [self._unnumbered] if position["unnumbered"] else []
        return f"({' OR '.join(parts) or '1 = 0'})"

    def kept(
        self, connection: C, position: Offsets, columns: Sequence[str], known: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Facts about the rows before a position: how many there are, in ranges of batches; how many have no number;
        and hashes of some.

        Args:
            columns: hashed.
            known: compute these facts again.
        """
        others = self._unnumbered if position["unnumbered"] else "1 = 0"
        with self._snapshot(connection):
            if known is None:
                rows = self._count(connection, self.before(position), COUNTED_MAX)
                unnumbered = self._count(connection, others, COUNTED_MAX)
                counted = [] if rows is None else self._ranges(position)
                hashed = self._sampled(connection, position, rows)
            else:
                unnumbered = None if known["unnumbered"] is None else self._count(connection, others, None)
                counted, hashed = ([(start, stop) for start, stop, *_ in known[of]] for of in ("counts", "hashes"))
            counts = [[*range_, self._count(connection, self._between(*range_), None)] for range_ in counted]
            hashes = [[*range_, *self._sum(connection, range_, columns)] for range_ in hashed]
        return {"columns": list(columns), "unnumbered": unnumbered, "counts": counts, "hashes": hashes}

    def changes(self, connection: C, position: Offsets, before: Mapping[str, Any], there: Sequence[str]) -> Changes:
        """What happened since to what lay before a position of this table. Args: there: the table's columns."""
        if missing := [name for name in (self.column, *before["columns"]) if name not in there]:
            what = f"table {self.name}: columns were removed: {', '.join(missing)}"
            return Changes(altered=(what,), continues=self.column not in missing)
        now = self.kept(connection, position, before["columns"], before)
        others = difference(RowSum(before["unnumbered"] or 0), RowSum(now["unnumbered"] or 0))
        changes = [f"rows without a number: {others}"] * (others is not None)
        changes += _differences(before["counts"], now["counts"])
        changes = changes or _differences(before["hashes"], now["hashes"])
        # Added rows have older numbers, or none: no audit that continues would read them.
        lost = any("added" in change for change in changes)
        altered = tuple(f"table {self.name}, {change}" for change in changes[:SHOWN_MAX])
        return Changes(altered=altered, continues=not lost)

    def _ranges(self, position: Offsets) -> list[Range]:
        """All batches before a position, in at most `COUNTS` ranges for each writer."""
        return [
            (writer * BATCHES + first, writer * BATCHES + min(first + step, last + 1))
            for writer, last in _last_batches(position).items()
            for step in (-(-(last + 1) // COUNTS),)
            for first in range(0, last + 1, step)
        ]

    def _sampled(self, connection: C, position: Offsets, rows: int | None) -> list[Range]:
        """The numbers whose rows are hashed: all, or those of a few batches, spread evenly."""
        lasts = _last_batches(position)
        if rows is not None and rows <= HASHED_MAX:
            return [(w * BATCHES, w * BATCHES + last + 1) for w, last in lasts.items()]
        total, left, found = sum(last + 1 for last in lasts.values()), HASHED_MAX, list[Range]()
        for writer, last in lasts.items():
            count = max(1, SAMPLES * (last + 1) // total)
            for start, stop in spread(writer * BATCHES, writer * BATCHES + last + 1, count, 1):
                size = self._count(connection, self._between(start, stop), left)
                if size is not None:
                    found.append((start, stop))
                    left -= size
        return found

    def _ends(self, connection: C) -> dict[int, int]:
        """The newest batch of each writer that has rows; by the column's index."""
        found, first = dict[int, int](), self._extreme(connection, f"min({self._column})", f"{self._column} >= 0")
        while first is not None:
            writer, stop = first // BATCHES, (first // BATCHES + 1) * BATCHES
            found[writer] = (self._newest(connection, stop) or first) % BATCHES
            first = self._extreme(connection, f"min({self._column})", f"{self._column} >= {stop}")
        return found

    def _newest(self, connection: C, stop: int) -> int | None:
        """The greatest number below this one."""
        return self._extreme(connection, f"max({self._column})", f"{self._column} >= 0 AND {self._column} < {stop}")

    def _extreme(self, connection: C, what: str, where: str) -> int | None:
        (value,) = connection.execute(f"SELECT {what} FROM {self.table} WHERE {where}").fetchone()
        return None if value is None else int(value)

    def _decided(self, connection: C, writer: int, last: int) -> int:
        """The newest batch of a writer that is decided and shows completely, if the ledger here knows; -1: none.

        Raises:
            UsageError: `last` is a batch that never started. No audit would read its rows.
        """
        if self.server.version(connection) < WRITER_VERSION:
            return last
        row = connection.execute(
            self._sql("SELECT pipeline, sink, incarnation FROM {writer} WHERE target = :target AND number = :number"),
            {"target": self.target, "number": writer},
        ).fetchone()
        if row is None:  # of a ledger elsewhere
            return last
        scope = Scope(*row)
        (newest,) = connection.execute(
            self._sql(f"SELECT max(batch) FROM {{decision}} WHERE {_SCOPE}"), scope_values(scope)
        ).fetchone()
        question = self._sql(f"SELECT max(batch) FROM {{started}} WHERE {_SCOPE}")
        (started,) = connection.execute(question, scope_values(scope)).fetchone()
        if newest is None and started is None:
            return last
        known = max(-1 if newest is None else int(newest), 0 if started is None else int(started))
        if last > known + 1:
            raise UsageError(
                "BATCH_COLUMN.AHEAD", table=self.name, name=self.column, number=writer * BATCHES + last, known=known
            )
        if newest is None:
            return -1
        return min(last, int(newest) if self._shows(connection, scope, int(newest)) else int(newest) - 1)

    def _shows(self, connection: C, scope: Scope, batch: int) -> bool:
        """Whether all prepared transactions of a decided batch have ended: by their markers."""
        gids = {PreparedRows.of(p).gid for p in find_decided(connection, self._sql, Work(scope, batch, 0))} - {""}
        if not gids:
            return True
        values = {**scope_values(scope), "batch": batch}
        markers = connection.execute(self._sql(f"SELECT gid FROM {{marker}} WHERE {_SCOPE} AND batch = :batch"), values)
        return gids <= {gid for (gid,) in markers.fetchall()}

    def _split(self, connection: C, first: int, stop: int) -> list[Range]:
        rows = self._count(connection, self._between(first, stop), None) or 0
        step = max(1, (stop - first) * SLICE_ROWS // max(rows, 1))
        step = max(step, -(-(stop - first) // SLICES_MAX))
        return [(at, min(at + step, stop)) for at in range(first, stop, step)] if rows else []

    def _count(self, connection: C, where: str, at_most: int | None) -> int | None:
        """The number of rows; None: more than `at_most`."""
        limit = "" if at_most is None else f" LIMIT {at_most + 1}"
        some = f"SELECT 1 AS one FROM {self.table} WHERE {where}{limit}"
        (count,) = connection.execute(f"SELECT count(*) FROM ({some}) AS some_rows").fetchone()
        return None if at_most is not None and count > at_most else int(count)

    def _sum(self, connection: C, range_: Range, columns: Sequence[str]) -> list[Any]:
        """The number of rows, and the sum of their hashes."""
        statement = f"SELECT count(*), {self.hashed(columns)} FROM {self.table} WHERE {self._between(*range_)}"
        count, total = connection.execute(statement).fetchone()
        return [int(count), str(total or "")]

    def _any(self, connection: C, where: str) -> bool:
        return connection.execute(f"SELECT 1 FROM {self.table} WHERE {where} LIMIT 1").fetchone() is not None

    def _between(self, first: int, stop: int) -> str:
        return f"{self._column} >= {first} AND {self._column} < {stop}"

    @contextmanager
    def _snapshot(self, connection: C) -> Iterator[None]:
        for statement in self._sql.snapshot:
            connection.execute(statement)
        yield
        connection.execute("COMMIT")

    @property
    def _sql(self) -> Dialect:
        return self.server.dialect

    @property
    def _column(self) -> str:
        return quoted(self.column)

    @property
    def _unnumbered(self) -> str:
        return f"({self._column} IS NULL OR {self._column} < 0)"
