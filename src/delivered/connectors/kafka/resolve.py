"""Turns the user's starting and ending offsets into offsets of the partitions."""

from __future__ import annotations

from collections.abc import Mapping

from delivered.clients.kafka.rows import Partition
from delivered.connectors.kafka.admin import KafkaDriverClient, joined
from delivered.connectors.kafka.offsets import EARLIEST, LATEST, Place, Timestamp, Where
from delivered.connectors.kafka.options import OWNER, SourceOptions
from delivered.model.errors import UsageError


def resolve(
    client: KafkaDriverClient,
    options: SourceOptions,
    where: Where,
    ends: Mapping[Partition, int],
    missing: int | None,
) -> dict[Partition, int]:
    """Resolve a place to an offset per partition.

    Args:
        ends: of the partitions to read, now.
        missing: used for a time after the last record; None: that is an error.
    """
    places: dict[Partition, Place] = {}
    silent = [p for p in ends if where.place(p) is None]
    foreign = [p for p in where.each if p not in ends]
    if silent or foreign:
        problem = f"does not name {joined(silent)}" if silent else f"names {joined(foreign)}, not read here"
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option {where.option!r} {problem}; it must name exactly the partitions that are read.",
            next_step="name them all; -2 means the earliest offset, -1 the latest",
        )
    for partition, end in ends.items():
        place = where.place(partition)
        # The end is the snapshot's, so that a batch's start and end, and a frozen stream, agree.
        places[partition] = end if place == LATEST or place is None else place
    found = client.offsets(places)
    late = [p for p, offset in found.items() if offset is None]
    if late and missing is None:
        ms = where.place(late[0])
        raise UsageError(
            "OPTION_VALUE",
            f"{OWNER}: option {where.option!r}: {joined(late)} has no record at or after "
            f"{ms.ms if isinstance(ms, Timestamp) else ms} ms.",
            next_step='use an earlier time, or .option("startingOffsetsByTimestampStrategy", "latest")',
        )
    # Never beyond the snapshot's end: records may have been appended since.
    at = {p: ends[p] if o is None else o for p, o in found.items()}
    if options.fail_on_data_loss:
        _check_range(client, where, at, ends)
    return {p: min(o, ends[p]) for p, o in at.items()}


def _check_range(
    client: KafkaDriverClient, where: Where, at: Mapping[Partition, int], ends: Mapping[Partition, int]
) -> None:
    """Reject offsets of the user's that do not exist."""
    named = {p: o for p, o in at.items() if where.place(p) == o}
    if not named:
        return
    low = client.offsets(dict.fromkeys(named, EARLIEST))
    for partition, offset in named.items():
        first, last = low[partition] or 0, ends[partition]
        if not first <= offset <= last:
            raise UsageError(
                "OFFSET_OUT_OF_RANGE",
                f"{OWNER}: option {where.option!r} names offset {offset} of {joined([partition])}, which has "
                f"offsets {first} to {last}.",
                next_step='name an offset that exists, or .option("failOnDataLoss", "false")',
            )
