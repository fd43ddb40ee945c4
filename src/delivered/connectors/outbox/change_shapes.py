"""Cuts the batches of a change stream where its table changed, and judges the change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from delivered.connectors.outbox import layout, partitions, peek, server, shape
from delivered.connectors.outbox.changes import truncated
from delivered.connectors.outbox.identity import check_identity
from delivered.connectors.outbox.options import NEW, OWNER, OutboxOptions
from delivered.connectors.outbox.shape import Shape
from delivered.contract.source import Offsets
from delivered.model.errors import InvariantBroken

log = logging.getLogger("delivered.patterns.outbox")


class Shapes:
    """Of a change stream's driver. Offsets hold "#shape", "#partitions" and "#columns": those of the rows up to there.

    Args:
        run: calls a function with the driver's connection.
    """

    def __init__(self, options: OutboxOptions, run: Callable[[Callable[[Any], Any]], Any]) -> None:
        self._options = options
        self._run = run

    def check_catalogue(self, start: Offsets, state: server.State) -> Offsets:
        """What changed with the table and is not in the log. Returns what the offsets of the next batch keep of it; the
        shape stays until rows have another one.

        Raises:
            Refused: the log cannot identify rows any more.
            InvariantBroken: a partition brought or took rows, or a column was dropped and added again.
        """
        options = self._options
        self._run(lambda c: check_identity(c, options, published=True))
        now, known = self._run(lambda c: partitions.leaves(c, options)), start.get("#partitions")
        if known is not None and known != now:
            found, at = self._run(lambda c: partitions.differences(c, known, now)), int(start["lsn"])
            if found and not self._accepted(found, at):
                raise InvariantBroken(
                    "OUTBOX_PARTITIONS",
                    f"{self._said(found)} All changes before {server.lsn_text(at)} were delivered; its rows "
                    "came or went without a change in the log.",
                    next_step=f"bring the sink's table in line with the source's, then {_on(at)}",
                )
        kept = {"#shape": start["#shape"]} if "#shape" in start else {}
        return kept | ({"#partitions": now} if now or known else {}) | {"#columns": self._columns(start, state)}

    def _columns(self, start: Offsets, state: server.State) -> list[list[Any]]:
        """Name and number of each; the log does not say that one of them was dropped and added again in between."""
        now = [[name, number] for name, number in zip(state.columns, state.numbers, strict=True)]
        known = dict(start.get("#columns", ()))
        found = [f"the column {n} was dropped and added again" for n, number in now if known.get(n, number) != number]
        if found:
            self._refuse(found, int(start["lsn"]))
        return now

    def cut(self, start: Offsets, end: int) -> tuple[int, Offsets]:
        """Where a batch of one shape ends, and that shape.

        Raises:
            InvariantBroken: the first rows have another shape than those before, and nobody accepted that.
            BadRecord: the table is truncated first.
        """
        options, at = self._options, int(start["lsn"])
        known = shape.restored(start.get("#shape"))
        for one in self._seen(start["#table"], end):
            before = one.before if one.before is not None and one.before > at else None
            if one.truncates and options.accepts(one.at):
                continue
            if not one.truncates:
                new = shape.of_relation(one.relation)
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
        found = any(s.truncates and s.at == accepted for s in self._seen(end["#table"], until))
        return {"truncated": accepted} if found else {}

    def _seen(self, table: int | None, end: int) -> Sequence[peek.Seen]:
        options = self._options
        found: Sequence[peek.Seen] = self._run(
            lambda c: peek.waiting(options, lambda: peek.relations(c, options, table, end, None))
        )
        return found

    def _extends(self, known: Shape, new: Shape) -> bool:
        if not shape.added(known, new):
            return False
        _, defaults = self._run(lambda c: layout.table_shape(c, self._options, server.state(c, self._options)))
        return layout.is_extended(known, new, defaults)

    def _accept(self, known: Shape, new: Shape, at: int) -> None:
        if shape.added(new, known):
            return  # columns were dropped: the rows come without them, which needs a restart

        def type_name(oid: int, modifier: int) -> str:
            return str(self._run(lambda c: c.execute("SELECT format_type(%s, %s)", [oid, modifier]).fetchone())[0])

        self._refuse(shape.differences(known, new, type_name), at)

    def _refuse(self, found: Sequence[str], at: int) -> None:
        if not self._accepted(found, at):
            raise InvariantBroken(
                "OUTBOX_SCHEMA",
                f"{self._said(found)} All changes before {server.lsn_text(at)} were delivered; rows that were not "
                "written since are not in the log in their new form.",
                next_step=f"adapt transform and sink, compare the sink's table with the source's, then {_on(at)}",
            )

    def _accepted(self, found: Sequence[str], at: int) -> bool:
        if self._options.schema_change != NEW and not self._options.accepts(at):
            return False
        log.warning("%s The query goes on after it (schemaChange).", self._said(found))
        return True

    def _said(self, found: Sequence[str]) -> str:
        return f"{OWNER}: {self._options.table} at {self._options.system}: {'; '.join(found)}."


def _on(at: int) -> str:
    return (
        f'write .option("schemaChange", "{server.lsn_text(at)}"), with which the query goes on after this change, or '
        '"new", which accepts every later one, too; nothing is skipped'
    )
