"""One task, one shard: read the rows, prepare at every sink, report to the driver."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain

import pyarrow as pa

from delivered.contract import build
from delivered.contract.sink import DEAD_LETTERS, Writer
from delivered.engine.dead_letters import dead_letters, refused_row, validated
from delivered.engine.sinks import Member, Sinks
from delivered.model.bad_row import OnBadRow
from delivered.model.errors import BadRecord, InvariantBroken
from delivered.model.fingerprint import Fingerprint, fingerprint, seed_of
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work
from delivered.model.limits import SHARDS_MAX
from delivered.model.ranges import ROW_UNWRITABLE, of_values, unwritable
from delivered.model.rows import Rows
from delivered.model.step import Moment, parts, reach
from delivered.model.work import Action, BatchPlan, Prepared, ShardMessage

log = logging.getLogger(__name__)

RECENT_BYTES_MAX = 16 << 20
"""Of a sink's last rows, which most writers hold, too, until they write them."""


def fingerprint_seed(scope: Scope) -> int:
    """Equal for all incarnations, so that an audit can sum fingerprints."""
    return seed_of(scope.pipeline, scope.sink)


def write_shard(
    sinks: Sinks,
    plan: BatchPlan,
    shard: int,
    attempt: int,
    batches: Iterator[Rows],
    schema: pa.Schema,
    may_send: Callable[[], bool] | None = None,
) -> ShardMessage:
    """Carry out the batch's plan for this shard.

    Args:
        shard: 0-based; stable across reruns of the batch.
        attempt: 0 for the first attempt of this task in this run of the batch.
        batches: good rows have `schema`; consumed once, unless the shard is skipped.
        may_send: under at_most_once, whether this attempt may send, asked once, when its first rows are there; at most
            one attempt of a shard may ever get it. None: the first attempt, if the caller never numbers two
            attempts of one shard alike.

    Raises:
        InvariantBroken: the shard is out of bounds, or not part of the batch being repaired.
    """
    if not 0 <= shard < SHARDS_MAX:
        raise InvariantBroken("SHARDS_TOO_MANY", shard=shard, batch=plan.batch, shards_max=SHARDS_MAX)
    action = plan.action_for(shard)
    if action is Action.SKIP:
        return ShardMessage(plan, shard, attempt, Action.SKIP)
    if action is Action.WRITE and plan.guarantee is Guarantee.AT_MOST_ONCE:
        batches, some = _peeked(batches)
        if some and not (may_send() if may_send is not None else attempt == 0):
            # Another attempt of this shard may have sent records; sending again could duplicate them.
            action = Action.GIVE_UP
    lines = _lines(sinks, plan, shard)
    if action in (Action.COMPARE, Action.GIVE_UP):
        for rows in batches:
            for _ in _split(lines, rows, plan.batch, shard):
                pass  # counted
        if action is Action.COMPARE:
            return ShardMessage(plan, shard, attempt, action, compared=_fingerprints(lines))
        return ShardMessage(plan, shard, attempt, action, given_up={n.scope.sink: n.total + n.dropped for n in lines})
    with ExitStack() as undo:
        for line in lines:
            if line.wanted:
                line.open(plan, shard, attempt, schema)
                undo.callback(line.abort)
        began = time.monotonic()
        _stage(lines, plan, shard, attempt, batches)
        staged = time.monotonic()
        participants: list[Prepared] = []
        for line, prepared in _prepare(lines, plan, shard, attempt):
            participants.append(prepared)
            undo.callback(line.abort_prepared, prepared)
        undo.pop_all()
    prepare_s, size = time.monotonic() - staged, sum(n.bytes for n in lines if n.writer is not None)
    # Unacknowledged records that the sink gave up: only counted, as it is unknown which they are.
    dropped = {n.scope.sink: n.dropped for n in lines}
    unanswered = {p.sink: Fingerprint(sum(p.given_up.values())) + dropped[p.sink] for p in participants}
    return ShardMessage(
        plan, shard, attempt, Action.WRITE, tuple(participants), unanswered, _fingerprints(lines),
        staged - began, prepare_s, size,
    )  # fmt: skip


def _peeked(batches: Iterator[Rows]) -> tuple[Iterator[Rows], bool]:
    """The batches from the first one with rows, and whether there is one."""
    first = next(filter(len, batches), None)
    return (iter(()), False) if first is None else (chain((first,), batches), True)


@dataclass
class _Line:
    """One sink's share of a shard.

    Attributes:
        wanted: rows are written; otherwise they are only checked for dead letters.
        dropped: invalid rows, which are left out.
        recent: the last rows, with the index of their first one, to find what a library failed for; `recent_bytes`
            together.
    """

    member: Member
    scope: Scope
    seed: int
    on_bad_row: OnBadRow
    wanted: bool
    rows: int = 0
    bytes: int = 0
    total: Fingerprint = Fingerprint()
    dropped: Fingerprint = Fingerprint()
    writer: Writer | None = None
    recent: deque[tuple[int, pa.RecordBatch]] = field(default_factory=deque)
    recent_bytes: int = 0

    def open(self, plan: BatchPlan, shard: int, attempt: int, schema: pa.Schema) -> None:
        unrouted = DEAD_LETTERS if self.member.dead_letters else schema
        routed = self.member.routed(Rows(pa.RecordBatch.from_pylist([], schema=unrouted))).good.schema
        work = Work(self.scope, plan.batch, shard, attempt, plan.epoch)
        self.writer = build(Writer, self.member.sink.writer, work, plan.guarantee, routed)

    def count(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Add the rows to the sink's fingerprint; return them."""
        self.total += fingerprint(self.member.sink.records(rows), self.seed)
        self.bytes += rows.nbytes
        return rows

    @contextmanager
    def naming_the_row(self, rows: pa.RecordBatch | None = None) -> Iterator[None]:
        """Within, an error about values is one of the row that has them, if it is among the last ones.

        Args:
            rows: those that are written; counted.

        Raises:
            BadRecord: such an error.
        """
        if rows is not None:
            self.recent.append((self.total.count - rows.num_rows, rows))
            self.recent_bytes += rows.nbytes
            while len(self.recent) > 1 and self.recent_bytes > RECENT_BYTES_MAX:
                self.recent_bytes -= self.recent.popleft()[1].nbytes
        try:
            with of_values(f"The sink {self.scope.sink!r}"):
                yield
        except BadRecord as error:
            if error.code != ROW_UNWRITABLE:
                raise
            for first, some in reversed(self.recent):
                if (refused := refused_row(self.member.sink, some)) is not None:
                    at, reason = refused
                    raise unwritable(f"Row {first + at} of the shard, {reason}") from error
            raise

    def abort(self) -> None:
        if self.writer is not None:
            self.writer.abort()

    def abort_prepared(self, prepared: Prepared) -> None:
        """Abort what this sink prepared when another sink failed: it is never reported to the driver, so no decision
        can name it, and open transactions block readers. If unreachable now, the next recovery aborts it."""
        if not prepared.handle:
            return
        try:
            committer = self.member.sink.committer(self.scope)
            try:
                committer.abort(prepared)
            finally:
                committer.close()
        except Exception as error:
            log.warning(
                "shard %d at %r could not be aborted; the next start does it: %s",
                prepared.shard,
                self.scope.sink,
                error,
            )


def _fingerprints(lines: Sequence[_Line]) -> dict[str, Fingerprint]:
    """Dead letters are only counted: they contain row numbers, and rows may arrive in another order."""
    read = [n for n in lines if n.writer is None]
    return {n.scope.sink: Fingerprint(n.total.count) if n.member.dead_letters else n.total for n in read}


def _lines(sinks: Sinks, plan: BatchPlan, shard: int) -> list[_Line]:
    """One per sink that this shard is written to; with dead letters, also those that reject rows; all sinks if the
    batch's rows are compared."""
    rewritten = plan.rewrite.get(shard)
    written = [m for m in sinks.members if rewritten is None or m.name in rewritten]
    lines = []
    every = plan.action is Action.COMPARE or any(m.dead_letters for m in written)
    for member in sinks.members if every else written:
        scope = replace(plan.scope, sink=member.name)
        lines.append(_Line(member, scope, fingerprint_seed(scope), sinks.on_bad_row, member in written))
    return lines


def _split(lines: Sequence[_Line], rows: Rows, batch: int, shard: int) -> Iterator[tuple[_Line, pa.RecordBatch]]:
    """Each sink's good rows, counted, in sink order; the dead letters come last."""
    letters = []
    for line in (n for n in lines if not n.member.dead_letters):
        own = line.member.routed(rows)
        if line.on_bad_row is not OnBadRow.FAIL:
            own = validated(line.member.sink, own)
        if line.on_bad_row is OnBadRow.DROP:
            line.dropped += Fingerprint(len(rows.rejected) + len(own.rejected))
        elif own.rejected:
            letters.append(dead_letters(line.scope, own.rejected, batch, shard, line.rows))
        line.rows += len(own)
        if own.good.num_rows:
            yield line, line.count(own.good)
    for line in (n for n in lines if n.member.dead_letters):
        if rows.rejected:
            letters.insert(0, dead_letters(line.scope, rows.rejected, batch, shard, line.rows))
            line.rows += len(rows.rejected)
        for written in letters:
            yield line, line.count(line.member.routed(Rows(written)).good)


def _stage(lines: Sequence[_Line], plan: BatchPlan, shard: int, attempt: int, batches: Iterator[Rows]) -> None:
    write = parts(plan.guarantee).write
    facts = {"batch": plan.batch, "shard": shard, "attempt": attempt}
    reach(write, Moment.BEFORE, **facts)
    for batch in batches:
        for line, rows in _split(lines, batch, plan.batch, shard):
            if line.writer is not None:
                with line.naming_the_row(rows):
                    line.writer.stage(rows)
                reach(write, Moment.AFTER, rows=line.total.count, sink=line.scope.sink, **facts)


def _prepare(lines: Sequence[_Line], plan: BatchPlan, shard: int, attempt: int) -> Iterator[tuple[_Line, Prepared]]:
    step = parts(plan.guarantee).promise
    facts = {"batch": plan.batch, "shard": shard, "attempt": attempt}
    for line in lines:
        if line.writer is not None:
            reach(step, Moment.BEFORE, sink=line.scope.sink, **facts)
            # Only now is the fingerprint complete: sinks that store it with the rows write it last.
            work = Work(line.scope, plan.batch, shard, attempt, plan.epoch)
            with line.naming_the_row():
                prepared = Prepared.of(work, line.total, line.writer.prepare(line.total))
            yield line, prepared
            reach(step, Moment.AFTER, sink=line.scope.sink, **facts)
