"""Ends of the ledger's own transactions that its brokers lost (P28).

The next commit of the same producer id would end them, too, and make a record visible whose abort everybody acted on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from delivered.clients.kafka.login import NoAnswer
from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.transactions import Transaction, describe, end, initialise
from delivered.connectors.kafka.evidence import end_hanging, find_hanging, refused
from delivered.connectors.kafka.topics import HISTORY_PARTITION, STATE_PARTITION
from delivered.model.outcome import Failed, Ok, Outcome, Unknown


def take_id(wire: Wire, name: str, topic: str, timeout_ms: int, deadline: float) -> Outcome[Transaction]:
    """Initialise a transactional id of the ledger, once neither partition holds an open transaction of it.

    An open one is aborted first, by name: its outcome is known then, whatever its coordinator forgets.

    Raises:
        DeliveredError: one that ended is still open in a partition, and this user may not end it.
    """
    delays: list[None] = []
    try:
        before = describe(wire, name)
        if before is not None:
            while before.state == "Ongoing" and isinstance(
                found := end(wire, before.participant, commit=False), Unknown
            ):
                if time.monotonic() > deadline:
                    return found
                time.sleep(0.05)  # its coordinator moves or loads; the request is idempotent
            settle_ids(wire, [name], topic, deadline)
        outcome = initialise(wire, name, timeout_ms, deadline, lambda: delays.append(None))
        if delays and isinstance(outcome, Ok):
            settle_ids(wire, [name], topic, deadline)
    except NoAnswer as error:
        return Unknown(str(error))
    return outcome


def settle_ids(wire: Wire, names: Sequence[str], topic: str, deadline: float, *, known: bool = False) -> int:
    """End what these ids left open in the ledger's partitions: abort what their coordinator aborted, commit the rest.

    To commit is safe where nothing tells: a decision counts if it is in the ledger, and its participants are written
    again if they were aborted. A decision that was acknowledged must not vanish.

    Args:
        known: only what their coordinator reports as ended.

    Returns:
        How many there were.

    Raises:
        NoAnswer: a broker did not answer. DeliveredError: one is still open, and this user may not end it.
    """
    count = 0
    for found in find_hanging(wire, [(topic, STATE_PARTITION), (topic, HISTORY_PARTITION)], names, (), deadline):
        if known and found.committed is None:
            continue
        commit = found.committed is not False
        match end_hanging(wire, found, commit, deadline):
            case Ok():
                count += 1
            case Unknown(reason):
                raise NoAnswer(reason)
            case Failed(reason):
                # The next transaction of this producer id would end it, too. If that aborts, a decision vanishes.
                raise refused(found, commit, reason, by_hand=False)
    return count
