"""Transactional ids, and which transactions of a cluster are a sink's.

A transactional id is `delivered.<pipeline>.<sink>.<check>.<shard>.<slot>`. Names may contain dots, so the check, a hash
of pipeline and sink, distinguishes pairs that join to the same name.

Initialising an id fences its previous holder. So slots alternate

- between batches: a batch does not wait until the previous one's transaction has ended at the brokers;
- between attempts of a task: overlapping attempts never share an id;
- between claims of the ledger: tasks of a driver that was superseded fence none of its successor.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from delivered.clients.kafka.login import NoAnswer
from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.transactions import OPEN_STATES, OpenTransaction, Transaction, describe, initialise, listed
from delivered.model.identity import Scope, Work
from delivered.model.limits import CLAIMS_APART, REQUEST_TIMEOUT_S, TRANSACTION_SLOTS
from delivered.model.outcome import Failed, Ok, Outcome, Unknown

_PARALLEL_MAX = 8


def id_prefix(scope: Scope) -> str:
    """Prefix of this sink's transactional ids in this pipeline, of all incarnations, and of no other ids."""
    check = hashlib.blake2b(f"{scope.pipeline}\0{scope.sink}".encode(), digest_size=4).hexdigest()
    return f"{scope.prefix}{check}."


def slot_of(batch: int, attempt: int, claim: int = 0) -> int:
    """Which of a shard's ids an attempt uses. Without a claim, those of release 0.1."""
    per_batch = TRANSACTION_SLOTS // 2
    turn = 0 if claim == 0 else 1 + (claim - 1) % CLAIMS_APART
    return turn * TRANSACTION_SLOTS + (batch % 2) * per_batch + attempt % per_batch


def transactional_id(work: Work) -> str:
    return f"{id_prefix(work.scope)}{work.shard}.{slot_of(work.batch, work.attempt, work.claim)}"


def is_ours(scope: Scope, candidate: str) -> bool:
    """Whether a transactional id belongs to a shard of this sink in this pipeline."""
    prefix = id_prefix(scope)
    return candidate.startswith(prefix) and re.fullmatch(r"\d+\.\d{1,2}", candidate[len(prefix) :]) is not None


def open_transactions(wire: Wire, scope: Scope) -> list[OpenTransaction]:
    """This sink's unfinished transactions in this pipeline, oldest first. Raises NoAnswer."""
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    found = [describe(wire, name) for name in listed(wire, partial(is_ours, scope), OPEN_STATES, deadline)]
    return sorted((t for t in found if t is not None and t.state in OPEN_STATES), key=lambda t: t.started_ms)


def abort_orphans(
    wire: Wire, scope: Scope, keep: Iterable[Transaction], timeout_ms: int, wait_s: float
) -> Outcome[int]:
    """Fence every id of this sink whose open or future transaction is not in `keep`.

    Fences instead of just aborting, so that a paused task cannot continue writing.

    Returns:
        Number of aborted transactions.
    """
    deadline = time.monotonic() + wait_s
    kept = {h.transactional_id: h for h in keep}

    def one(item: tuple[str, str]) -> Outcome[int]:
        name, state = item
        if name in kept:
            try:
                now = describe(wire, name)
            except NoAnswer as error:
                return Unknown(str(error))
            if now is not None and now.participant == kept[name]:
                return Ok(0)
        match initialise(wire, name, timeout_ms, deadline):
            case Ok():
                # PrepareCommit is already decided: just wait for it to complete.
                return Ok(1 if state in ("Ongoing", "PrepareAbort", "PrepareEpochFence") else 0)
            case Failed(reason) | Unknown(reason):
                return Unknown(reason)

    try:
        found = listed(wire, partial(is_ours, scope), (*OPEN_STATES, "Empty"), deadline)
    except NoAnswer as error:
        return Unknown(str(error))
    if not found:
        return Ok(0)
    total = 0
    with ThreadPoolExecutor(min(_PARALLEL_MAX, len(found))) as pool:
        for outcome in pool.map(one, sorted(found.items())):
            if not isinstance(outcome, Ok):
                return outcome
            total += outcome.value
    return Ok(total)
