"""The engine: what a batch is. Plan it, write its shards, decide it, apply it.

A number such as (P7) refers to a bug in another system: docs/pitfalls.md.

Driver:
runner.py    a batch from its plan to its decision: what every driver of batches calls
recover.py   before a batch: compare ledger and checkpoint (`judge`, pure); finish or abort what an earlier run left;
             plan each shard: write | skip | give up
decide.py    after a batch: checks the tasks' messages; the one record that makes it count (the line is marked there);
             makes decided participants visible, aborts orphans
context.py   the one driver that may decide; the sinks behind one ledger, their committers and targets
arbiter.py   at_most_once: the process that knows which attempt of a shard may send

Both know the sinks of a pipeline, one or several, with their routes, which are here: every batch is written to all of
them, and one ledger decides for all.

Executors, which load nothing of the driver's:
shard.py     a task's rows become a prepared shard, and those that a sink cannot hold dead letters; at_most_once: asks
             the arbiter
transform.py a function over Arrow batches; records that never become JVM rows; rows as columns, where Spark lies
             between source and sinks
keys.py      keys that occur twice: refused, or dropped by a dedup with a key table
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from delivered.contract.sink import DEAD_LETTERS, Sink
from delivered.contract.source import COORDINATES
from delivered.model.capability import LedgerPlace
from delivered.model.errors import UsageError
from delivered.model.identity import checked_name
from delivered.model.rows import OnBadRow, Rows

Route = Callable[[pa.RecordBatch], pa.RecordBatch]
"""Selects a sink's rows and columns of a batch. Picklable; deterministic."""


@dataclass(frozen=True)
class Columns:
    """A route over existing columns of the batch; expressions are computed earlier.

    Attributes:
        take: (name at the sink, column of the batch), in the sink's order.
        where: boolean column; rows in which it is not true are dropped. None: all rows.
    """

    take: tuple[tuple[str, str], ...]
    where: str | None = None

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        places = [self._place(batch.schema, column) for _, column in self.take]
        fields = [batch.schema.field(i).with_name(name) for i, (name, _) in zip(places, self.take, strict=True)]
        schema = pa.schema(fields)
        selected = pa.RecordBatch.from_arrays([batch.column(i) for i in places], schema=schema)
        if self.where is None:
            return selected
        mask = batch.column(self._place(batch.schema, self.where))
        if mask.null_count == 0 and mask.true_count == batch.num_rows:
            return selected
        return selected.filter(mask)  # null is not true

    def positions(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Where the selected rows are in their source; without columns if the batch does not say."""
        names = [n for n in COORDINATES if n in batch.schema.names]
        return Columns(tuple((n, n) for n in names), self.where)(batch) if names else batch.select([])

    @staticmethod
    def _place(schema: pa.Schema, column: str) -> int:
        place: int = schema.get_field_index(column)
        if place < 0:
            raise UsageError("SELECT_COLUMN.BATCH", column=column, columns=", ".join(schema.names))
        return place


def find_dead_letters_route(sink: Sink) -> Route | None:
    """How dead letters are written to a sink: as columns, or as one JSON value if it only accepts key and value."""
    try:
        sink.check_schema(DEAD_LETTERS)
    except UsageError:
        return as_key_and_value
    return None


def as_key_and_value(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rejecting sink as the key, all of the dead letter as JSON."""
    texts = [json.dumps(row, ensure_ascii=False) for row in rows.to_pylist()]
    columns = [rows.column(0).cast(pa.binary()), pa.array([t.encode() for t in texts], pa.binary())]
    return pa.RecordBatch.from_arrays(columns, names=["key", "value"])


def read_dead_letters(sink: Sink, pipeline: str, incarnation: str) -> Iterator[Mapping[str, Any]]:
    """Those that batches wrote to a dead-letter sink, by either route. Under at_least_once, some may be there twice."""
    scan = sink.scan().planned()
    for row in (r for piece in scan.slices() for batch in scan.read(piece) for r in batch.to_pylist()):
        fields = row if "record" in row else json.loads(row["value"])
        if (fields["pipeline"], fields["incarnation"]) == (pipeline, incarnation):
            yield fields


@dataclass(frozen=True)
class Member:
    """One of the sinks that every batch is written to.

    Attributes:
        name: unique in the pipeline; `Prepared.sink` refers to it.
        route: None: all rows, all columns.
        dead_letters: receives only the dead letters of the other members, through its route.
    """

    name: str
    sink: Sink
    route: Route | None = None
    dead_letters: bool = False

    def routed(self, rows: Rows) -> Rows:
        """The sink's rows and columns of a batch, with their positions in the source; none of them is rejected yet."""
        if self.route is None:
            return Rows(rows.good)
        records = self.route.positions(rows.good) if isinstance(self.route, Columns) else None
        return Rows(self.route(rows.good), (), records)


@dataclass(frozen=True)
class Sinks:
    """The sinks of a pipeline, which share every batch. Picklable, no connection.

    Attributes:
        members: in the order in which they are prepared and applied.
        on_bad_row: what happens to rows that a member rejects (`Sink.invalid_rows`).
    """

    members: tuple[Member, ...]
    on_bad_row: OnBadRow = OnBadRow.FAIL

    @classmethod
    def one(cls, sink: Sink, name: str | None = None) -> Sinks:
        """A single sink, which gets all rows."""
        return cls((Member(name or sink.name, sink),))

    @classmethod
    def of(
        cls,
        sinks: Sequence[tuple[str | None, Sink, Route | None]],
        on_bad_row: OnBadRow = OnBadRow.FAIL,
        dead_letter: tuple[str | None, Sink] | None = None,
    ) -> Sinks:
        """From (name, sink, route), in the user's order; the dead-letter sink comes last.

        Raises:
            UsageError: two sinks have the same name, so their ids at the servers would collide.
        """
        if dead_letter is not None:
            sinks = [*sinks, (*dead_letter, find_dead_letters_route(dead_letter[1]))]
        names = [checked_name("sink", name or sink.name) for name, sink, _ in sinks]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise UsageError("SINK_NAME_TWICE.PIPELINE", name=twice[0])
        last = len(sinks) - 1 if dead_letter is not None else None
        return cls(
            tuple(
                Member(name, sink, route, dead_letters=i == last)
                for i, (name, (_, sink, route)) in enumerate(zip(names, sinks, strict=True))
            ),
            on_bad_row,
        )

    @property
    def place(self) -> LedgerPlace:
        return LedgerPlace.among([m.sink.capability() for m in self.members])

    @property
    def decider(self) -> Member:
        """The one that keeps the ledger."""
        return self.members[self.place.sink]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(m.name for m in self.members)

    def check_schema(self, schema: pa.Schema) -> None:
        for member, own in self.own_schemas(schema):
            member.sink.check_schema(own)

    def ready_target(self, schema: pa.Schema) -> None:
        """Prepare every target, before a claim. The schema is that of the rows before routing."""
        for member, own in self.own_schemas(schema):
            member.sink.ready_target(own)

    def add_columns(self, schema: pa.Schema) -> None:
        """Extend every target, after recovery."""
        for member, own in self.own_schemas(schema):
            member.sink.add_columns(own)

    def with_sinks(self, sinks: Mapping[str, Sink]) -> Sinks:
        """A copy with these sinks in place of the members' of the same names."""
        return replace(self, members=tuple(replace(m, sink=sinks.get(m.name, m.sink)) for m in self.members))

    def own_schemas(self, schema: pa.Schema) -> Iterator[tuple[Member, pa.Schema]]:
        """Each member with the schema of its rows, which have `schema` before routing."""
        for member in self.members:
            unrouted = pa.RecordBatch.from_pylist([], schema=DEAD_LETTERS if member.dead_letters else schema)
            yield member, unrouted.schema if member.route is None else member.route(unrouted).schema
