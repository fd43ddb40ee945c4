"""Markers: each shard of a batch writes one into its transaction, so it is visible if and only if the rows are.

Markers have their own partitions of the internal topic: a prepared transaction hides everything behind it in the
partitions it wrote to.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable

from delivered.clients.kafka.login import NoAnswer
from delivered.clients.kafka.protocol import Wire
from delivered.connectors.kafka.committed import HIDDEN_S, NOBODY, CommittedReader, Hidden, barrier
from delivered.connectors.kafka.topics import MARKER_PARTITIONS, MARKERS_FROM
from delivered.model import record_format
from delivered.model.errors import OutcomeUnknown
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work


def marker_partition(scope: Scope) -> int:
    digest = hashlib.blake2b(f"{scope.pipeline}\0{scope.sink}".encode(), digest_size=4).digest()
    return MARKERS_FROM + int.from_bytes(digest, "big") % MARKER_PARTITIONS


def marker_key(scope: Scope, shard: int) -> bytes:
    return json.dumps(["marker", scope.pipeline, scope.sink, shard], separators=(",", ":")).encode()


def marker_value(work: Work, fingerprint: Fingerprint) -> bytes:
    marker = {
        "incarnation": work.scope.incarnation,
        "batch": work.batch,
        "attempt": work.attempt,
        "fingerprint": str(fingerprint),
    }
    return json.dumps(record_format.numbered(marker), separators=(",", ":")).encode()


def read_marker(value: bytes) -> tuple[str, int, Fingerprint]:
    """Incarnation, batch and fingerprint of a marker."""
    marker = record_format.known(json.loads(value), "a marker")
    return marker["incarnation"], marker["batch"], Fingerprint.parse(marker["fingerprint"])


def find_marker(
    wire: Wire, topic: str, work: Work, wait_s: float, settle: Callable[[], object] = lambda: None
) -> Fingerprint | None:
    """Fingerprint in a shard's marker if its rows are visible, else None.

    Args:
        settle: called if an open transaction hides it for 2 s: its end may have been lost.

    Raises:
        OutcomeUnknown: the partition could not be read to its end.
    """
    partition, key = marker_partition(work.scope), marker_key(work.scope, work.shard)
    reader = CommittedReader(wire, topic, partition)
    found: Fingerprint | None = None

    def read(wait_s: float) -> None:
        nonlocal found
        for record in reader.read(time.monotonic() + wait_s, ours=lambda r: r.key == key):
            if record.key == key and record.value is not None and record.producer != NOBODY:
                incarnation, batch, fingerprint = read_marker(record.value)
                if (incarnation, batch) == (work.scope.incarnation, work.batch):
                    found = fingerprint

    try:
        try:
            read(min(wait_s, HIDDEN_S))
        except Hidden:
            settle()
            read(wait_s)
        if found is None:
            # Without a marker the rows are written again, so its absence must be certain.
            reader.reach(barrier(wire, topic, partition))
            read(wait_s)
        return found
    except NoAnswer as error:
        raise OutcomeUnknown(
            "MARKER_UNREADABLE",
            f"It is unknown whether shard {work.shard} of batch {work.batch} is visible: {error}.",
            next_step="find the transaction that blocks the partition with `delivered transactions list`; start again "
            "once it has ended",
        ) from None
