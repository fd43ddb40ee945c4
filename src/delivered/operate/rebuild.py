"""A table written again from the source, next to the one that a pipeline writes; then they are swapped.

    1  replay: from the pipeline's first offsets to those of its newest decision, into the new table
    2  compare: the pipeline is stopped, both tables end at the same offsets; are their rows the same?
    3  swap: in the transaction that revises that decision, which then names the new table

The old table stays, under another name. Each step may be repeated: after a kill, the same call goes on.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar, runtime_checkable

import psutil

from delivered.checkpoint import sidecar
from delivered.checkpoint.folder import logged
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Offsets
from delivered.engine.context import Context
from delivered.engine.owner import living, new_owner
from delivered.ledger import Store, Swap, SwapsTables
from delivered.model.errors import DeliveredError, OutcomeUnknown, Refused, UsageError
from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.identity import by_source
from delivered.model.outcome import Failed, Ok, Unknown
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision, LedgerState
from delivered.operate.replay import (
    EARLIEST,
    check_replayable,
    check_target,
    derive,
    leaves,
    offsets_at,
    retargeted,
    short_hash,
)
from delivered.pipeline.definition import Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.spec import NO_INCARNATION

P = TypeVar("P", bound=Definition)

_TABLE_LENGTH_MAX = 40


@dataclass(frozen=True)
class Comparison:
    """
    Attributes:
        old, new: rows of the two tables, as a sum that does not depend on their order.
        columns: why they cannot have the same rows; empty: their columns are the same.
    """

    old: Fingerprint
    new: Fingerprint
    columns: str = ""

    @property
    def equal(self) -> bool:
        return not self.columns and self.old == self.new

    def __str__(self) -> str:
        if self.columns:
            return self.columns
        if self.old.count != self.new.count:
            return f"the old table has {self.old.count:,} rows, the new one {self.new.count:,}"
        return f"both tables have {self.old.count:,} rows, with {'the same' if self.equal else 'different'} content"


@dataclass(frozen=True)
class Rebuild(Generic[P]):
    """
    Attributes:
        pipeline: the replay into the new table, up to the newest decision. Run it to its end, again after a kill.
        table: the one that the pipeline writes.
        done: the tables have changed places already.
    """

    pipeline: P
    table: str
    done: bool
    _origin: Definition
    _swap: Swap

    @property
    def kept(self) -> str:
        """Name of the table's former rows after the swap."""
        return self._swap.kept

    def check_stopped(self) -> None:
        """
        Raises:
            Refused: the pipeline is running, has decided a batch since the replay, or has not finished its newest one;
                or the replay has not ended.
        """
        with _open(self._origin) as context:
            self._state(context, context.ledger.look())

    def compare(self) -> Comparison:
        """Read both tables. Call it while the pipeline is stopped."""
        old, new = (_only(p).sink().scan().planned() for p in (self._origin, self.pipeline))
        names = set(old.schema().names)
        if names != set(new.schema().names):
            ours, theirs = (", ".join(s.schema().names) for s in (old, new))
            columns = f"the old table has the columns {ours}, the new one {theirs}"
            return Comparison(Fingerprint(), Fingerprint(), columns)
        return Comparison(_content(old), _content(new))

    def swap(self) -> None:
        """Let the tables change places, in one transaction. May be called again.

        Raises:
            Refused: as `check_stopped`; or something in the database refers to the old table.
            OutcomeUnknown: the server did not answer; call again.
        """
        with _open(self._origin) as context:
            reach(StepId.RECOVER_CLAIM, Moment.BEFORE)
            self._state(context, context.ledger.look())
            # From here on, a driver that starts meanwhile fences this claim, or is fenced by it.
            state = context.ledger.claim(context.owner)
            reach(StepId.RECOVER_CLAIM, Moment.AFTER)
            if self._is_done(context):
                return
            last = self._state(context, replace(state, owner=None))
            targets = {k: v for k, v in last.targets.items() if k != context.scope.sink}
            if (new := _target_id(self.pipeline)) is not None:
                targets[context.scope.sink] = new
            revised = replace(last, owner=context.owner.id, revision=last.revision + 1, targets=targets)
            reach(StepId.COMMIT_DECIDE, Moment.BEFORE, batch=last.batch)
            outcome = context.ledger.decide(revised, self._swap)
            if isinstance(outcome, Unknown) and context.ledger.claim(context.owner).last == revised:
                outcome = Ok(None)
            match outcome:
                case Ok():
                    reach(StepId.COMMIT_DECIDE, Moment.AFTER, batch=last.batch)
                case Failed(reason):
                    raise DeliveredError("REBUILD_NOT_SWAPPED", reason=reason)
                case Unknown(reason):
                    raise OutcomeUnknown("REBUILD_UNKNOWN", reason=reason)

    def _state(self, context: Context, state: LedgerState) -> Decision:
        """The newest decision, if it is where the replay ended and nobody goes on."""
        if (owner := living(state.owner)) is not None:
            raise Refused("REBUILD_RUNNING", pipeline=self._origin.name, process=owner.process)
        last, until = state.last, dict(self.pipeline.until)
        with _open(self.pipeline) as rebuilt:
            filled = rebuilt.ledger.look().last
        if last is None or filled is None or not _ends(last) == _ends(filled) == until:
            raise Refused("REBUILD_BEHIND", pipeline=self._origin.name)
        if still := context.committers.open_transactions():
            raise Refused("REBUILD_UNFINISHED", open=len(still), pipeline=self._origin.name)
        return last

    def _is_done(self, context: Context) -> bool:
        with closing(_store(self._origin, context)) as store:
            return store.has_swapped(self._swap)


def rebuild(pipeline: P, into: str, start: str | None = None) -> Rebuild[P]:
    """See `delivered.Pipeline.rebuild`."""
    own = _only(pipeline)
    schema, table = _schema_and_table(own)
    key = short_hash([into, start, table])
    swap = Swap(into, f"{table[:_TABLE_LENGTH_MAX]}_before_{key}")
    with _open(pipeline) as context, closing(_store(pipeline, context)) as store:
        state = context.ledger.look()
        done = state.last is not None and store.has_swapped(swap)
        problem = None if done or state.last is None else store.cannot_swap()
    if state.last is None:
        raise UsageError("REBUILD_NOTHING", pipeline=pipeline.name, checkpoint=pipeline.checkpoint)
    if problem is not None:
        raise Refused("REBUILD_TARGET", label=own.label, problem=problem)
    if not into or "." in into or into == table:
        raise UsageError("REBUILD_INTO", into=into, table=table)
    target = retargeted(own, f"{schema}.{into}" if schema else into)
    replayed = derive(pipeline, f".rebuild-{key}", target)
    replayed.until = _ends(state.last)
    if not done:
        check_target(pipeline, target)
        for name, source in replayed.sources.items():
            check_replayable(name, source)
            first = lambda n=name, s=source: _first(pipeline, n, s, start)  # noqa: E731
            sidecar.keep_first(replayed.checkpoint, first, name)
    return Rebuild(replayed, table, done, pipeline, swap)


def _only(pipeline: Definition) -> Endpoint:
    if len(pipeline.sinks) > 1 or pipeline.dead_letter is not None:
        raise Refused("REBUILD_SINKS", pipeline=pipeline.name)
    return pipeline.sinks[0]


def _schema_and_table(own: Endpoint) -> tuple[str, str]:
    """Of the sink's table; of other sinks: empty."""
    name = next((v for k, v in own.options.items() if k.lower() in ("dbtable", "table")), "")
    schema, _, table = name.rpartition(".")
    return schema, table


@runtime_checkable
class _Swapping(SwapsTables, Store, Protocol):
    """A store that swaps tables."""


def _store(pipeline: Definition, context: Context) -> _Swapping:
    own = _only(pipeline)
    store = own.sink().store(context.scope)
    if isinstance(store, _Swapping):
        return store
    store.close()
    raise Refused("REBUILD_SINK", system=own.system)


def _first(pipeline: Definition, name: str, source: Endpoint, start: str | None) -> Offsets:
    """Where the source's first batch began; or as the user says: where a snapshot in the new table ends."""
    first = sidecar.kept_first(pipeline.checkpoint, name) if start is None else offsets_at(source, start, name)
    if first is None:
        raise Refused("REBUILD_START", checkpoint=pipeline.checkpoint)
    for where, at, kept in leaves("", first, offsets_at(source, EARLIEST, name)):
        if at < kept:
            raise Refused("REBUILD_RECORDS_GONE", position=at, where=where, kept=kept)
    return first


def _ends(last: Decision) -> dict[str, Offsets]:
    return {name: json.loads(text) for name, text in by_source(last.offsets).items()}


def _open(pipeline: Definition) -> closing[Context]:
    """The pipeline's ledger and committers. Claims nothing."""
    spec = pipeline.spec
    sinks = spec.open()
    scope = spec.scope(sinks, logged(pipeline.checkpoint)[0] or NO_INCARNATION)
    return closing(Context.open(sinks, scope, pipeline.guarantee, new_owner(psutil.Process())))


def _target_id(pipeline: Definition) -> str | None:
    """Identity of the table that a pipeline writes now."""
    with _open(pipeline) as context:
        return next((t.id for t in context.committers.targets().values()), None)


def _content(scan: BoundedScan) -> Fingerprint:
    """Of all rows, whatever the order of rows and columns."""
    names = sorted(scan.schema().names)
    batches = (batch for piece in scan.slices() for batch in scan.read(piece))
    return sum((fingerprint(batch.select(names), 0) for batch in batches), Fingerprint())
