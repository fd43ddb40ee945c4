"""Dead letters of records that never became rows, through the pipeline once more: decoded, transformed, to every sink.

As `Desk` does for one sink; but a letter is a source's record, its rows are made of it here, and one batch writes them
to all sinks. Its ledger is `<name>.dead-records`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import pyarrow as pa

from delivered.contract.source import COORDINATES, Source
from delivered.engine.dead_letters import validated
from delivered.engine.sinks import Sinks
from delivered.engine.transform import ArrowTransform, isolated
from delivered.model.bad_row import from_json_texts, reason_of
from delivered.model.errors import DeliveredError, Refused, UsageError
from delivered.model.rows import Origin, Rows
from delivered.operate.dead_letter_batches import RECORDS, DeadLetter, Desk
from delivered.pipeline.definition import Definition

KINDS = (Origin.SOURCE, Origin.TRANSFORM)
_REPLAY = "run `delivered replay` for the time of its record, or drop it"


class RecordDesk(Desk):
    """Dead letters of all sinks together."""

    def __init__(self, pipeline: Definition, incarnation: str) -> None:
        ends = zip(pipeline.sink_names, pipeline.sinks, strict=True)
        sinks = Sinks.of([(name, e.sink(), e.projection.route) for name, e in ends])
        super().__init__(pipeline, sinks.decider.name, sinks.decider.sink, incarnation, suffix=RECORDS)
        self._sinks = sinks
        self.label, self.folder = ", ".join(pipeline.sink_names), "(records)"
        self._made: dict[str, pa.RecordBatch] = {}
        self._columns: pa.Schema | None = None
        self._source_opened: Source | None = None

    def kept(self) -> None:
        """Those that a sink's database keeps are the sink's."""

    def not_here(self) -> str | None:
        """Why no letter can be retried without Spark; None: they can."""
        pipeline = self._pipeline
        if pipeline.transform.kind not in ("none", "arrow"):
            return f"the transform is in {pipeline.transform.kind}, which runs in Spark alone: {_REPLAY}"
        source = next(iter(pipeline.sources.values()))
        if source.is_spark_own:
            return f"the source {source.system!r} is Spark's own: {_REPLAY}"
        for name, endpoint in zip(pipeline.sink_names, pipeline.sinks, strict=True):
            if not endpoint.projection.is_plain:
                return f"the sink {name!r} has expressions in select or where, which run in Spark alone: {_REPLAY}"
        for member in self._sinks.members:
            if member.sink.schema_columns:
                return f"the sink {member.name!r} writes with a registry's schema, fixed when a query starts: {_REPLAY}"
        return None

    def _reasons(self, letters: Sequence[DeadLetter]) -> list[str | None]:
        why = self.not_here()
        return [why or self._reason(letter) for letter in letters]

    def _reason(self, letter: DeadLetter) -> str | None:
        """Why it still does not become rows that every sink accepts; None: it does, and they are known."""
        rows, why = self._rows_of(letter)
        if rows is None:
            return why
        for member in self._sinks.members:
            try:
                own = member.routed(Rows(rows))
                member.sink.check_schema(own.good.schema)
            except UsageError as error:
                return f"{member.name}: {error}"
            for rejected in validated(member.sink, own).rejected:
                return f"{member.name}: {rejected.reason}"
        self._made[letter.id] = rows
        return None

    def _rows_of(self, letter: DeadLetter) -> tuple[pa.RecordBatch | None, str]:
        source, transform = self._source(), self._pipeline.transform
        try:
            rows = source.decoded(_record(letter, source.raw_schema()))
        except (ValueError, TypeError, pa.ArrowException) as error:
            return None, f"its record does not suit the source's columns: {error}"
        if not rows.good.num_rows:
            return None, f"it cannot be decoded: {_why(rows)}"
        function = ArrowTransform(transform.select, transform.function)
        try:
            self._columns = self._columns or function(rows.good.slice(0, 0)).schema
            (part,) = isolated(function, rows, self._columns)
        except (DeliveredError, MemoryError):
            raise
        except Exception as error:  # also what would fail a task, such as a server that is down
            return None, reason_of(error)
        return (None if part.rejected else part.good), _why(part)

    def _as_rows(self, letters: Sequence[DeadLetter]) -> pa.RecordBatch:
        """
        Raises:
            Refused: a letter of a batch that has to be finished becomes no rows any more.
        """
        for letter in letters:
            why = None if letter.id in self._made else (self.not_here() or self._reason(letter))
            if why is not None:
                raise Refused("DEAD_LETTER_RECORD", id=letter.id, reason=why)
        batches = [self._made[letter.id] for letter in letters]
        tables = [pa.Table.from_batches([batch]) for batch in batches]
        table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
        rows = next(iter(table.to_batches()), batches[0])
        only = self._sinks.members[0]
        return rows if len(self._sinks.members) > 1 or only.route is None else only.route(rows)

    def _source(self) -> Source:
        if self._source_opened is None:
            self._source_opened = next(iter(self._pipeline.sources.values())).source().planned()
        return self._source_opened

    def _left_out(self) -> int:
        total = 0
        for member in self._sinks.members:
            if member.sink.capability().write.conditional:
                with closing(member.sink.committer(replace(self._scope, sink=member.name))) as committer:
                    total += sum(committer.left_out().values())
        return total


def _why(rows: Rows) -> str:
    return rows.rejected[0].reason if rows.rejected else ""


def _record(letter: DeadLetter, schema: pa.Schema) -> pa.RecordBatch:
    """The source's record, as it was read. A column that the letter does not have is null."""
    record = json.loads(letter.record)
    for name in COORDINATES:
        record.setdefault(name, getattr(letter, name))
    return from_json_texts([json.dumps(record)], schema)
