"""Markers: each shard of a batch writes one into its transaction, so it is visible if and only if the rows are.

Markers have their own partitions of the internal topic: a prepared transaction hides everything behind it in the
partitions it wrote to.

A marker counts if the producer and epoch that the decision names wrote it: brokers check who uses them (decision 113).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable

from delivered.clients.kafka.errors import NoAnswer
from delivered.clients.kafka.listing import partitions_of
from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.record_batch import Partition
from delivered.clients.kafka.transactions import Transaction, describe
from delivered.connectors.kafka.committed import HIDDEN_S, NOBODY, CommittedReader, Hidden, Record, barrier, damaged
from delivered.connectors.kafka.options import SinkOptions
from delivered.connectors.kafka.topics import MARKER_PARTITIONS, MARKERS_FROM, ledger_topic
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
    wire: Wire, topic: str, work: Work, held: Transaction, wait_s: float, settle: Callable[[], object] = lambda: None
) -> Fingerprint | None:
    """Fingerprint in a transaction's marker if its rows are visible, else None.

    Args:
        held: what the decision names.
        settle: called if an open transaction hides it for 2 s: its end may have been lost.

    Raises:
        OutcomeUnknown: the partition could not be read to its end, or another application wrote under the marker's key.
        InvariantBroken: LEDGER_DAMAGED.
    """
    partition, key = marker_partition(work.scope), marker_key(work.scope, work.shard)
    reader = CommittedReader(wire, topic, partition)
    found: Fingerprint | None = None
    foreign: Record | None = None

    def is_own(record: Record) -> bool:
        return (record.producer, record.epoch) == (held.producer_id, held.epoch)

    def read(wait_s: float) -> None:
        nonlocal found, foreign
        for record in reader.read(time.monotonic() + wait_s, ours=is_own):
            if is_own(record) and record.key in (key, b""):
                found = _own(topic, partition, record, work)
            elif record.key == key and _is_foreign(record, work):
                foreign = record

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
        if found is None and foreign is not None and not _was_aborted(wire, held):
            raise _overwritten(topic, partition, foreign, work)
        return found
    except NoAnswer as error:
        raise OutcomeUnknown(
            "MARKER_UNREADABLE",
            f"It is unknown whether shard {work.shard} of batch {work.batch} is visible: {error}.",
            next_step="find the transaction that blocks the partition with `delivered transactions list`; start again "
            "once it has ended",
        ) from None


def _own(topic: str, partition: int, record: Record, work: Work) -> Fingerprint | None:
    try:
        incarnation, batch, fingerprint = read_marker(record.value or b"")
    except (ValueError, KeyError, TypeError) as error:
        why = f"a marker cannot be read: {type(error).__name__}"
        raise damaged(topic, partition, record.offset, why) from None
    return fingerprint if (incarnation, batch) == (work.scope.incarnation, work.batch) else None


def _is_foreign(record: Record, work: Work) -> bool:
    """Whether no task of ours wrote a record under a marker's key."""
    if record.producer == NOBODY or record.value is None:
        return True
    try:
        incarnation, batch, _ = read_marker(record.value)
    except Exception:  # any bytes
        return True
    return (incarnation, batch) == (work.scope.incarnation, work.batch)


def _was_aborted(wire: Wire, held: Transaction) -> bool:
    """Whether its coordinator still knows that it aborted it; to expire or fence one, it does so under the next epoch.

    Raises:
        NoAnswer: the coordinator does not answer.
    """
    now = describe(wire, held.transactional_id)
    if now is None or now.participant.producer_id != held.producer_id:
        return False
    return now.state in ("PrepareAbort", "CompleteAbort") and now.participant.epoch - held.epoch in (0, 1)


def _overwritten(topic: str, partition: int, foreign: Record, work: Work) -> OutcomeUnknown:
    """Compaction keeps the newest record of a key, so it may have removed the marker."""
    return OutcomeUnknown(
        "MARKER_OVERWRITTEN",
        f"It is unknown whether shard {work.shard} of batch {work.batch} is visible: topic {topic!r}, partition "
        f"{partition}, offset {foreign.offset} holds a record under its marker's key that no task of this pipeline "
        f"wrote (producer id {foreign.producer}), and the marker itself is not there. Nothing was written.",
        next_step=f"take the right to write to {topic!r} from others; compare the shard's rows with the topic by "
        "`delivered audit`; then start under another pipeline name with the startingOffsets that follow from it",
    )


# Which partitions a sink's transactions may have written.


def written_partitions(wire: Wire, options: SinkOptions, scope: Scope) -> list[Partition]:
    """Every partition that a transaction of this sink may have written: its topic's and the markers'.

    If rows name their topics: those of all topics, except internal ones.
    """
    topics = [options.topic] if options.topic is not None else [t for t in wire.topics() if not t.startswith("__")]
    marker = ledger_topic(scope, options.ledger_topic), marker_partition(scope)
    return [*partitions_of(wire, topics), marker]
