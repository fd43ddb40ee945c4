"""Which transactions, of any application, hide records from readers of committed records."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection

from delivered.clients.kafka.errors import NoAnswer
from delivered.clients.kafka.listing import OpenAt, hidden_in
from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.record_batch import Partition
from delivered.clients.kafka.transactions import OPEN_STATES, TransactionState, named
from delivered.contract.source import Blocking, HeldBack
from delivered.model.errors import Unreachable
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.patience import left_s

_COMMANDS_MAX = 5


def find_held_back(
    wire: Wire, partitions: Collection[Partition], servers: str, own: Callable[[str], bool] = lambda _: False
) -> HeldBack:
    """What transactions hide in these partitions.

    Args:
        servers: for commands.
        own: whether a transactional id is the pipeline's own, which is not reported.

    Raises:
        Unreachable: a broker did not answer.
    """
    deadline = time.monotonic() + left_s(REQUEST_TIMEOUT_S)
    try:
        hidden, transactions = hidden_in(wire, partitions, deadline)
        by_producer: dict[int, list[tuple[OpenAt, int]]] = {}
        for at, newest_ms in transactions:
            by_producer.setdefault(at.producer_id, []).append((at, newest_ms))
        known = named(wire, by_producer, deadline) if by_producer else {}
    except NoAnswer as error:
        raise Unreachable("KAFKA_NO_ANSWER.TRANSACTIONS", error=error) from None
    found = [_blocking(producer, at, known.get(producer), servers) for producer, at in by_producer.items()]
    others = sorted((b for b in found if not own(b.id)), key=lambda b: b.since_ms or 0)
    return HeldBack({f"{t}/{n}": count for (t, n), count in sorted(hidden.items())}, tuple(others))


def _blocking(producer: int, at: list[tuple[OpenAt, int]], known: TransactionState | None, servers: str) -> Blocking:
    starts = {f"{a.topic}/{a.partition}": a.start for a, _ in at}
    tool = f"kafka-transactions.sh --bootstrap-server {servers}"
    if known is None or known.state not in OPEN_STATES:  # the latter: its end was lost
        name = "" if known is None else known.transactional_id
        aborts = [f"{tool} abort --topic {a.topic} --partition {a.partition} --start-offset {a.start}" for a, _ in at]
        newest_ms = max(newest for _, newest in at)
        return Blocking(name, producer, newest_ms, None, starts, "; ".join(aborts[:_COMMANDS_MAX]))
    since = known.started_ms if known.started_ms >= 0 else None
    # Not `abort`: it ends one partition without the coordinator, and the application could still commit the others.
    end = f"{tool} forceTerminateTransaction --transactionalId {shlex.quote(known.transactional_id)}"
    return Blocking(known.transactional_id, producer, since, known.timeout_ms / 1000, starts, end)
