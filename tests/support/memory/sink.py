"""The sink: rows with `value`, and optionally `key`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from tests.support.memory import MemorySinkOptions
from tests.support.memory.world import ROWS, Opened, Participant, State, World, world

from delivered.contract.sink import BoundedScan, Changes, Sink, Writer
from delivered.contract.source import Finding, Offsets, Slice
from delivered.model.capability import Commit, Guarantee, SinkCapability
from delivered.model.errors import BadRecord, PromiseBroken, UsageError
from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.work import Promise

if TYPE_CHECKING:
    from tests.support.memory.store import MemoryCommitter

    from delivered.ledger import Store


Canonical = Callable[[pa.RecordBatch], pa.RecordBatch]


class StagingWriter(Writer):
    """exactly_once: rows stay in a participant of their own until it is decided."""

    def __init__(self, world: World, work: Work, canonical: Canonical) -> None:
        self._world = world
        self._canonical = canonical
        self._participant: Participant = world.open(work)

    def stage(self, batch: pa.RecordBatch) -> None:
        self._world.gate()
        self._participant.rows.append(self._canonical(batch))

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        self._world.gate()
        if self._participant.state is not State.OPEN:
            raise PromiseBroken(
                "PREPARE_FAILED", f"Shard {self._participant.work.shard} was aborted while it was written."
            )
        self._participant.state = State.PREPARED
        return Promise(Opened(self._participant.id, fingerprint.count))

    def abort(self) -> None:
        """Leaves prepared rows alone: like a prepared transaction, they are the driver's to end."""
        self._world.gate()
        if self._participant.state is State.OPEN:
            self._participant.state = State.ABORTED


class SendingWriter(Writer):
    """at_least_once, at_most_once: staged rows are visible at once."""

    def __init__(self, world: World, work: Work, canonical: Canonical) -> None:
        self._world = world
        self._canonical = canonical
        self._work = work

    def stage(self, batch: pa.RecordBatch) -> None:
        self._world.show(self._work, [self._canonical(batch)])

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        self._world.gate()
        return Promise()

    def abort(self) -> None:
        """Nothing to do: sent rows cannot be withdrawn."""


@dataclass(frozen=True)
class MemorySink(Sink):
    options: MemorySinkOptions

    def capability(self) -> SinkCapability:
        one = self.options.commit is Commit.ONE_TRANSACTION
        return SinkCapability(
            system="memory",
            commit=self.options.commit,
            mechanism="one transaction" if one else "two-phase commit",
            stage="a list of its own per shard, invisible",
            prepare="the list is closed",
            decide="one record, and the rows with it" if one else "one record in the world's ledger",
            apply="nothing is left to do" if one else "the rows become visible, shard by shard",
            send="rows are visible at once",
            batch_atomic=one,
            validates=True,
            local=True,
            no_position="",
        )

    def preflight(self, guarantee: Guarantee) -> Sequence[Finding]:
        world(self.options.world)
        return ()

    def check_schema(self, schema: pa.Schema) -> None:
        names = set(schema.names)
        if "value" not in names or not names <= {"key", "value"}:
            raise UsageError("COLUMNS", f"It writes value and, optionally, key; it was given {schema.names}.")

    def invalid_rows(self, batch: pa.RecordBatch) -> pa.Array | None:
        longest = self.options.value_bytes_max
        if longest is None:
            return None
        long = pc.greater(pc.binary_length(self.records(batch).column("value")), longest)
        return pc.if_else(long, f"value longer than {longest} bytes", pa.scalar(None, pa.string()))

    def records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
        columns = [arrays[f.name].cast(f.type) if f.name in arrays else pa.nulls(batch.num_rows, f.type) for f in ROWS]
        return pa.RecordBatch.from_arrays(columns, schema=ROWS)

    def writer(self, work: Work, guarantee: Guarantee, schema: pa.Schema) -> Writer:
        if guarantee is Guarantee.EXACTLY_ONCE:
            return StagingWriter(self._world, work, self._accepted)
        return SendingWriter(self._world, work, self._accepted)

    def scan(self) -> MemoryScan:
        return MemoryScan(self.options.world)

    def store(self, scope: Scope) -> Store:
        from tests.support.memory.store import MemoryStore

        return MemoryStore(self._world, scope)

    def committer(self, scope: Scope) -> MemoryCommitter:
        from tests.support.memory.store import MemoryCommitter

        return MemoryCommitter(self._world, scope, self.options.commit)

    def _accepted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The records, if none of them is refused."""
        reasons = self.invalid_rows(batch)
        if reasons is not None and reasons.null_count < len(reasons):
            raise BadRecord("ROW_REFUSED", f"A row was refused: {reasons.drop_null()[0].as_py()}.")
        return self.records(batch)

    @property
    def _world(self) -> World:
        return world(self.options.world)


@dataclass(frozen=True)
class MemoryScan(BoundedScan):
    """What readers of a world's sink see."""

    world: str

    def schema(self) -> pa.Schema:
        return ROWS

    def slices(self, since: Offsets | None = None, until: Offsets | None = None) -> Sequence[Slice]:
        """Args: since: {"0": n}: the first row."""
        start = (since or {}).get("0", 0)
        return [Slice((start, max(start, (self.position() if until is None else until)["0"])))]

    def position(self) -> Offsets:
        return {"0": sum(batch.num_rows for _, batch in world(self.world).visible)}

    def kept(self, position: Offsets) -> Mapping[str, Any]:
        """The fingerprint of all rows."""
        return {"rows": str(self._fingerprint(position))}

    def changes(self, position: Offsets, before: Mapping[str, Any] | None) -> Changes:
        now, then = self._fingerprint(position), Fingerprint.parse((before or self.kept(position))["rows"])
        if now == then:
            return Changes()
        return Changes(altered=(f"{then.count} rows had another fingerprint than the {now.count} that are there now",))

    def _fingerprint(self, position: Offsets) -> Fingerprint:
        (piece,) = self.slices(None, position)
        return sum((fingerprint(batch, 0) for batch in self.read(piece)), Fingerprint())

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        start, end = piece.data
        rows = pa.Table.from_batches([batch for _, batch in world(self.world).visible], ROWS)
        yield from rows.slice(start, end - start).to_batches()
