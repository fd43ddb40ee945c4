"""What is wrong with a record batch from a broker, in words."""

from __future__ import annotations

from delivered.clients.kafka.rows import Partition
from delivered.model.errors import BadRecord, DeliveredError, UsageError

FAULTS = (
    "",
    "its length is {found} bytes, and the least is {wanted}",
    "its magic byte is {found}; only 0 to 2 are known",
    "",
    "its CRC-32C is {found:#x}, and its header says {wanted:#x}",
    "its offsets are impossible: the last one is {found} after the first",
    "it follows offset {found}",
    "it has {found} records, of at most {wanted}",
    "its compression is {found}, of at most {wanted}",
    "it is a control batch without a control record",
    "a record has {found} bytes, with {wanted} left",
    "record {found} is truncated",
    "a record has offset delta {found}, which is not ascending, or beyond the last one, {wanted}",
    "a key has {found} bytes, with {wanted} left",
    "a value has {found} bytes, with {wanted} left",
    "a record has {found} headers, with room for {wanted}",
    "a header's key or value has {found} bytes, with {wanted} left",
    "{found} bytes follow the last field",
    "more bytes than were counted ({found})",
)
"""By the fault's number in record_batch.c."""
_OLD_MAGIC = 3


class CorruptBatch(DeliveredError):
    """Bytes from a broker that are no valid record batch."""


class BatchTooLarge(BadRecord):
    """A record batch whose records are too many bytes, decompressed.

    Attributes:
        offset: of its first record.
        next_offset: after its last one.
        batch: its bytes, compressed, with the header.
    """

    offset: int
    next_offset: int
    batch: bytes


def fault(partition: Partition, number: int, base_offset: int, found: int, wanted: int) -> DeliveredError:
    """
    Args:
        number: the fault's in record_batch.c.
    """
    if number == _OLD_MAGIC:
        topic, at = partition
        return UsageError(
            "KAFKA_OLD_FORMAT",
            f"{topic}-{at} holds records of message format {found} at offset {base_offset}, as clients before Kafka "
            "0.11 wrote them. Only librdkafka reads those here.",
            next_step="read this topic through librdkafka, or copy it to a new topic",
        )
    return corrupt(partition, base_offset, FAULTS[number].format(found=found, wanted=wanted))


def corrupt(partition: Partition, base_offset: int, what: str) -> CorruptBatch:
    topic, number = partition
    return CorruptBatch(
        "KAFKA_CORRUPT_BATCH",
        f"The record batch of {topic}-{number} at offset {base_offset} is corrupt: {what}.",
        next_step="start again; if it recurs, the broker's log is damaged there: see the broker's log, and "
        "kafka-dump-log.sh --deep-iteration",
    )


def too_large(partition: Partition, batch: bytes, codec: str, limit: int, first: int, last: int) -> BatchTooLarge:
    topic, number = partition
    found = BatchTooLarge(
        "KAFKA_BATCH_TOO_LARGE",
        f"The record batch of {topic}-{number} at offset {first} has {len(batch)} bytes of {codec}, and more than "
        f"{limit} decompressed, which is the limit.",
        next_step="raise the source's option maxRecordBatchBytes, if its producer may send so much; or set "
        "on_bad_row: dead_letter with a dead_letter sink, which keeps the batch as it is",
    )
    found.offset, found.next_offset, found.batch = first, last + 1, batch
    return found
