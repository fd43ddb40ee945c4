"""Compare rewritten shards of a decided batch with the decision.

A shard that comes back shorter was decided with records that the source no longer has. The rest is written, and the
missing ones are given up, if the user accepts that (`Tolerance.lost_records`): the revision counts them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from delivered.engine.context import Context
from delivered.engine.messages import written
from delivered.model.errors import DeliveredError, InvariantBroken, ReplayDiffers
from delivered.model.options import shown
from delivered.model.work import Account, Decision, ShardMessage

LOST = "source"
"""Reason of what is given up because the source no longer has it (`Prepared.given_up`)."""

log = logging.getLogger(__name__)


def repaired(context: Context, last: Decision, messages: Sequence[ShardMessage]) -> Decision:
    """The next revision of the decision, with new participants replacing those that timed out.

    Raises:
        ReplayDiffers: the rerun had other shards, other rows, or fewer rows that the user did not give up. What it
            prepared was aborted.
        InvariantBroken: a shard that had to be rewritten was not.
    """
    plan = messages[0].plan
    new = {(p.shard, p.sink): p for p in written(messages)}
    try:
        missing = _missing(last, plan.rewrite, messages)
        if missing and not context.tolerance.lost_records:
            raise _records_missing(context, last, missing)
    except InvariantBroken:
        for p in new.values():
            if p.handle:
                context.committers.abort(p)
        raise
    accounts = dict(last.accounts)
    participants = []
    for before in last.participants:
        now = new.get((before.shard, before.sink), before)
        lost = before.fingerprint - now.fingerprint
        if lost.count:
            account = accounts[before.sink]
            accounts[before.sink] = Account(account.total - lost, account.given_up + lost)
            log.warning(
                "batch %d, shard %d, sink %s: gave up %d records that the source no longer has",
                last.batch, before.shard, before.sink, lost.count,
            )  # fmt: skip
        given_up = Counter(before.given_up) + Counter({LOST: lost.count})
        participants.append(replace(now, given_up={**now.given_up, **given_up}))
    return replace(
        last,
        owner=context.owner.id,
        participants=tuple(participants),
        accounts=accounts,
        decided_at_ms=time.time_ns() // 1_000_000,
        revision=last.revision + 1,
    )


def _missing(
    last: Decision, rewrite: Mapping[int, frozenset[str]], messages: Sequence[ShardMessage]
) -> dict[tuple[int, str], int]:
    """(shard, sink) -> number of decided records that the rerun lacks. Raises if it differs in any other way."""
    decided = {(p.shard, p.sink): p.fingerprint for p in last.participants}
    shards = len({p.shard for p in last.participants})
    if len(messages) != shards:
        raise ReplayDiffers(
            "REPLAY_SHARDS_DIFFER",
            f"Batch {last.batch} was decided with {shards} shards but reran with {len(messages)}; shards "
            f"{sorted(rewrite)} must be rewritten and can no longer be identified. Nothing more was applied.",
            next_step="start again with the previous number of partitions (spark.sql.shuffle.partitions, repartition)",
        )
    if {(p.shard, p.sink) for p in written(messages)} != {
        (shard, s) for shard, sinks in rewrite.items() for s in sinks
    }:
        raise InvariantBroken(
            "REWRITE_INCOMPLETE",
            f"Batch {last.batch}: shards {sorted(rewrite)} had to be rewritten, but the tasks wrote "
            f"{sorted(p.shard for p in written(messages))}. Nothing more was applied.",
            next_step="start the pipeline again; the batch runs again",
        )
    missing: dict[tuple[int, str], int] = {}
    for p in written(messages):
        before = decided[p.shard, p.sink]
        if p.fingerprint.count < before.count:
            missing[p.shard, p.sink] = before.count - p.fingerprint.count
        elif before != p.fingerprint:
            raise ReplayDiffers(
                "REPLAY_DIFFERS",
                f"Batch {last.batch}, shard {p.shard}, sink {last.scope_of(p).sink!r}: decided with fingerprint "
                f"{before}, but reran with {p.fingerprint}. The transform is not deterministic. Nothing more was "
                "applied; what the other shards of the batch wrote is visible.",
                next_step="remove what changes between runs (rand(), now(), a lookup) from the transform, then start "
                "again",
            )
    return missing


def _records_missing(context: Context, last: Decision, missing: Mapping[tuple[int, str], int]) -> ReplayDiffers:
    parts = [f"{n:,} of shard {shard} at sink {sink!r}" for (shard, sink), n in sorted(missing.items())]
    return ReplayDiffers(
        "REPLAY_RECORDS_MISSING",
        f"Batch {last.batch} was decided, but its prepared rows were dropped before they became visible, and it reran "
        f"without {sum(missing.values()):,} of them ({', '.join(parts[:20])}): the source no longer has their records. "
        "Nothing more was applied; what the other shards of the batch wrote is visible. The batch has the offsets from "
        f"{shown(_start_of(context, last))} to {shown(last.offsets)}",
        next_step="restore the source's records and start again; or give up what is missing, and write the rest, once, "
        'with .option("lostRecords", "accept"). If the source lost nothing (the log has no warning of '
        "failOnDataLoss), the transform is not deterministic: remove what changes between runs from it",
    )


def _start_of(context: Context, last: Decision) -> str:
    """Where the previous batch ended, if the ledger still says so."""
    with suppress(DeliveredError):
        for decision in context.ledger.history():
            if decision.batch == last.batch - 1:
                return decision.offsets
    return "the start" if last.batch == 0 else "the end of the batch before"
