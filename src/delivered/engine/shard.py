"""One task, one shard: read the rows, prepare at every sink, report to the driver.

Rows that a sink cannot hold, and all others that were rejected, become dead letters of the batch, with the reason and
the position in their source.

Under at_most_once a task asks the arbiter which attempt of a shard may send. The first one that asks; every other one
never (decision 097). Spark's own numbers cannot answer this: it numbers attempts from 0 again when it reruns a stage
(P31), and Python tasks do not learn the number of the stage's attempt.
"""

from __future__ import annotations

import json
import logging
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from delivered.contract.connector import build
from delivered.contract.sink import DEAD_LETTERS, Sink, Writer
from delivered.contract.source import COORDINATES
from delivered.engine import Member, Sinks
from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, InvariantBroken, Unreachable
from delivered.model.fingerprint import Fingerprint, fingerprint, seed_of
from delivered.model.identity import Scope, Work
from delivered.model.limits import CONNECT_TIMEOUT_S, GRANT_WAIT_S, REQUEST_TIMEOUT_S, SHARDS_MAX
from delivered.model.rows import (
    ROW_UNWRITABLE,
    OnBadRow,
    Origin,
    Rejection,
    Rows,
    first_reason,
    of_values,
    plain_rows,
    unwritable,
)
from delivered.model.step import Moment, parts, reach
from delivered.model.work import NO, YES, Action, Arbiter, BatchPlan, Prepared, ShardMessage

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
        batches, some = _peek(batches)
        if some and not (may_send() if may_send is not None else attempt == 0):
            # Another attempt of this shard may have sent records; sending again could duplicate them.
            action = Action.GIVE_UP
    shares = _build_shares(sinks, plan, shard)
    if action in (Action.COMPARE, Action.GIVE_UP):
        for rows in batches:
            for _ in _split(shares, rows, plan.batch, shard):
                pass  # counted
        if action is Action.COMPARE:
            return ShardMessage(plan, shard, attempt, action, compared=_fingerprints(shares))
        return ShardMessage(plan, shard, attempt, action, given_up={n.scope.sink: n.total + n.dropped for n in shares})
    with ExitStack() as undo:
        for share in shares:
            if share.wanted:
                share.open(plan, shard, attempt, schema)
                undo.callback(share.abort)
        began = time.monotonic()
        _stage(shares, plan, shard, attempt, batches)
        staged = time.monotonic()
        participants: list[Prepared] = []
        for share, prepared in _prepare(shares, plan, shard, attempt):
            participants.append(prepared)
            undo.callback(share.abort_prepared, prepared)
        undo.pop_all()
    prepare_s, size = time.monotonic() - staged, sum(n.bytes for n in shares if n.writer is not None)
    # Unacknowledged records that the sink gave up: only counted, as it is unknown which they are.
    dropped = {n.scope.sink: n.dropped for n in shares}
    unanswered = {p.sink: Fingerprint(sum(p.given_up.values())) + dropped[p.sink] for p in participants}
    return ShardMessage(
        plan, shard, attempt, Action.WRITE, tuple(participants), unanswered, _fingerprints(shares),
        staged - began, prepare_s, size,
    )  # fmt: skip


def _peek(batches: Iterator[Rows]) -> tuple[Iterator[Rows], bool]:
    """The batches from the first one with rows, and whether there is one."""
    first = next(filter(len, batches), None)
    return (iter(()), False) if first is None else (chain((first,), batches), True)


@dataclass
class _Share:
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
                if (refused := find_refused_row(self.member.sink, some)) is not None:
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


def _fingerprints(shares: Sequence[_Share]) -> dict[str, Fingerprint]:
    """Dead letters are only counted: they contain row numbers, and rows may arrive in another order."""
    read = [n for n in shares if n.writer is None]
    return {n.scope.sink: Fingerprint(n.total.count) if n.member.dead_letters else n.total for n in read}


def _build_shares(sinks: Sinks, plan: BatchPlan, shard: int) -> list[_Share]:
    """One per sink that this shard is written to; with dead letters, also those that reject rows; all sinks if the
    batch's rows are compared."""
    rewritten = plan.rewrite.get(shard)
    written = [m for m in sinks.members if rewritten is None or m.name in rewritten]
    shares = []
    every = plan.action is Action.COMPARE or any(m.dead_letters for m in written)
    for member in sinks.members if every else written:
        scope = replace(plan.scope, sink=member.name)
        shares.append(_Share(member, scope, fingerprint_seed(scope), sinks.on_bad_row, member in written))
    return shares


def _split(shares: Sequence[_Share], rows: Rows, batch: int, shard: int) -> Iterator[tuple[_Share, pa.RecordBatch]]:
    """Each sink's good rows, counted, in sink order; the dead letters come last."""
    letters = []
    for share in (n for n in shares if not n.member.dead_letters):
        own = given = share.member.routed(rows)
        if share.on_bad_row is not OnBadRow.FAIL:
            own = validate(share.member.sink, own)
        if share.on_bad_row is OnBadRow.DROP:
            share.dropped += Fingerprint(len(rows.rejected) + len(own.rejected))
        elif own.rejected:
            letters.append(build_dead_letters(share.scope, own.rejected, batch, shard, share.rows))
        share.rows += given.good.num_rows
        if own.good.num_rows:
            yield share, share.count(own.good)
    for share in (n for n in shares if n.member.dead_letters):
        if rows.rejected:
            letters.insert(0, build_dead_letters(share.scope, rows.rejected, batch, shard, share.rows))
            share.rows += len(rows.rejected)
        for written in letters:
            yield share, share.count(share.member.routed(Rows(written)).good)


def _stage(shares: Sequence[_Share], plan: BatchPlan, shard: int, attempt: int, batches: Iterator[Rows]) -> None:
    write = parts(plan.guarantee).write
    facts = {"batch": plan.batch, "shard": shard, "attempt": attempt}
    reach(write, Moment.BEFORE, **facts)
    for batch in batches:
        for share, rows in _split(shares, batch, plan.batch, shard):
            if share.writer is not None:
                with share.naming_the_row(rows):
                    share.writer.stage(rows)
                reach(write, Moment.AFTER, rows=share.total.count, sink=share.scope.sink, **facts)


def _prepare(shares: Sequence[_Share], plan: BatchPlan, shard: int, attempt: int) -> Iterator[tuple[_Share, Prepared]]:
    step = parts(plan.guarantee).promise
    facts = {"batch": plan.batch, "shard": shard, "attempt": attempt}
    for share in shares:
        if share.writer is not None:
            reach(step, Moment.BEFORE, sink=share.scope.sink, **facts)
            # Only now is the fingerprint complete: sinks that store it with the rows write it last.
            work = Work(share.scope, plan.batch, shard, attempt, plan.epoch)
            with share.naming_the_row():
                prepared = Prepared.of(work, share.total, share.writer.prepare(share.total))
            yield share, prepared
            reach(step, Moment.AFTER, sink=share.scope.sink, **facts)


# Rows that a sink cannot hold, and dead letters.


def validate(sink: Sink, rows: Rows) -> Rows:
    """The rows that the sink and its server can hold; the others are rejected."""
    reasons = find_reasons(sink, rows.good) if rows.good.num_rows else None  # without rows, a sink may not be ready
    if reasons is None:
        return rows
    valid, at = pc.is_null(reasons), pc.indices_nonzero(pc.is_valid(reasons))
    sources = rows.good if rows.records is None else rows.records
    topic, partition, offset = (_find_coordinates(sources, n, at) for n in COORDINATES)
    texts, bad = reasons.take(at).to_pylist(), plain_rows(rows.good.take(at))
    rejected = [
        Rejection(Origin.SINK, texts[n], bad[n], topic[n], partition[n], offset[n], row)
        for n, row in enumerate(at.to_pylist())
    ]
    return Rows(rows.good.filter(valid), [*rows.rejected, *rejected])


def find_reasons(sink: Sink, rows: pa.RecordBatch) -> pa.Array | None:
    """Each row's reason for rejection (null: valid), by the sink, then by its server; None if all are valid."""
    reasons = sink.invalid_rows(rows)
    if reasons is not None and reasons.null_count == len(reasons):
        reasons = None
    valid = rows if reasons is None else rows.filter(pc.is_null(reasons))
    refused = sink.refused_rows(valid) if valid.num_rows else None
    if refused is None or reasons is None:
        return reasons if refused is None else refused
    return pc.replace_with_mask(reasons.cast(pa.string()), pc.is_null(reasons), refused)


def find_refused_row(sink: Sink, rows: pa.RecordBatch) -> tuple[int, str] | None:
    """The first row that the sink or its server rejects, and why; None: there is none, or it cannot be found now."""
    try:
        return first_reason(find_reasons(sink, rows))
    except Exception as error:
        log.warning("which row is to blame could not be found: %s", error)
        return None


def build_dead_letters(
    scope: Scope, rejected: Sequence[Rejection], batch: int, shard: int, first: int
) -> pa.RecordBatch:
    """One dead letter for each.

    Args:
        scope: of the sink that rejected the rows; of the dead-letter sink, if source or transform did.
        first: number of the first row among those of the rejecting sink in this shard; among what source and transform
            rejected, of the first of these.
    """
    letters = [
        {
            "sink": scope.sink if r.origin is Origin.SINK else r.origin.value,
            "reason": r.reason,
            "batch": batch,
            "shard": shard,
            "row": first + (r.row if r.origin is Origin.SINK else number),
            "topic": r.topic,
            "partition": r.partition,
            "offset": r.offset,
            "record": r.text,
            "pipeline": scope.pipeline,
            "incarnation": scope.incarnation,
        }
        for number, r in enumerate(rejected)
    ]
    return pa.RecordBatch.from_pylist(letters, schema=DEAD_LETTERS)


def _find_coordinates(rows: pa.RecordBatch, name: str, at: pa.Array) -> list[Any]:
    """One of the rows' coordinates; None: unknown, or a user's column of the same name."""
    if name in rows.schema.names:
        with suppress(pa.ArrowInvalid):
            return list(rows.column(name).take(at).cast(DEAD_LETTERS.field(name).type).to_pylist())
    return [None] * len(at)


# at_most_once: which attempt of a shard may send.

_RETRY_S = 0.2


def may_send(plan: BatchPlan, shard: int) -> bool:
    """Ask the driver whether this attempt of the shard may send records. Runs in a task, before its first record.

    While another attempt holds the grant and lives, waits for its end, at most `GRANT_WAIT_S`: a speculative copy that
    answered Spark at once would end the attempt that is sending.

    Raises:
        Unreachable: the driver does not answer. Nothing was sent.
    """
    arbiter = plan.arbiter
    if arbiter is None:
        return False
    _release()
    request = json.dumps({"token": arbiter.token, "shard": shard, "attempt": uuid.uuid4().hex}).encode() + b"\n"
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            connection, answer = _ask(arbiter, request)
        except OSError as error:
            if time.monotonic() > deadline:
                raise _unreachable(plan, arbiter, shard, error) from None
            time.sleep(_RETRY_S)
            continue
        if answer == YES:
            _hold(connection)
            return True
        connection.close()
        return False


def check_reachable(arbiter: Arbiter) -> None:
    """Ask for a shard under a token that grants none. Raises OSError: the driver does not answer."""
    request = json.dumps({"token": arbiter.token, "shard": 0, "attempt": ""}).encode() + b"\n"
    connection, _ = _ask(arbiter, request)
    connection.close()


def _ask(arbiter: Arbiter, request: bytes) -> tuple[socket.socket, bytes]:
    connection = socket.create_connection((arbiter.host, arbiter.port), CONNECT_TIMEOUT_S)
    try:
        connection.settimeout(GRANT_WAIT_S + REQUEST_TIMEOUT_S)
        connection.sendall(request)
        answer = b""
        while answer not in (YES, NO):
            received = connection.recv(len(YES))
            if not received:
                raise ConnectionError("the driver closed the connection")
            answer += received
    except BaseException:
        connection.close()
        raise
    return connection, answer


_held: socket.socket | None = None
"""Open as long as this process lives or until its next shard: so the arbiter knows that the attempt lives, or that
Spark has its result."""


def _hold(connection: socket.socket) -> None:
    global _held
    _held = connection


def _release() -> None:
    global _held
    if _held is not None:
        with suppress(OSError):
            _held.close()
        _held = None


def _unreachable(plan: BatchPlan, arbiter: Arbiter, shard: int, error: OSError) -> Unreachable:
    return Unreachable(
        "GRANT_UNREACHABLE.SHARD", shard=shard, batch=plan.batch, host=arbiter.host, port=arbiter.port, error=error
    )
