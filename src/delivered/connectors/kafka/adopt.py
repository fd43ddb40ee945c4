"""Where another reader of the same topics stopped: a consumer group, a time, or offsets that it stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from delivered.clients.kafka.rows import Partition
from delivered.connectors.kafka.admin import KafkaDriverClient, joined
from delivered.connectors.kafka.offsets import EARLIEST, LATEST, Positions, Timestamp
from delivered.connectors.kafka.options import SourceOptions
from delivered.contract.powers import Resumption
from delivered.contract.source import Offsets
from delivered.model.errors import Refused


class KafkaAdopter:
    """See `delivered.contract.powers.Adopts`."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def of_offsets(self, offsets: Offsets) -> Resumption:
        at = Positions.from_json(offsets).at
        with self._connected() as client:
            return self._resumption(client, at, "was never read by the old job")

    def of_group(self, group: str) -> Resumption:
        with self._connected() as client:
            if members := client.group_members(group):
                raise Refused(
                    "ADOPT_RUNNING",
                    f"The consumer group {group!r} has {members} members: the old job is still reading.",
                    next_step="stop it, wait until the group is empty (kafka-consumer-groups --describe), then repeat",
                )
            at = client.committed(group, list(client.partitions()[0]))
            if not at:
                raise Refused(
                    "ADOPT_GROUP_UNKNOWN",
                    f"The consumer group {group!r} has no committed offset of {self._options.what}.",
                    next_step="correct the group or the topics; offsets of an empty group expire "
                    "(offsets.retention.minutes)",
                )
            return self._resumption(client, at, None)

    def of_time(self, ms: int) -> Resumption:
        with self._connected() as client:
            found = client.offsets(dict.fromkeys(client.partitions()[0], Timestamp(ms)))
            ends = client.offsets(dict.fromkeys(found, LATEST))
            at = {p: o if o is not None else ends[p] or 0 for p, o in found.items()}
            return self._resumption(client, at, None)

    def _resumption(self, client: KafkaDriverClient, at: Mapping[Partition, int], unread: str | None) -> Resumption:
        """
        Args:
            unread: what is known of a partition without an offset; None: nothing, so it must be empty.
        """
        partitions, ids = client.partitions()
        first = {p: o or 0 for p, o in client.offsets(dict.fromkeys(partitions, EARLIEST)).items()}
        ends = {p: o or 0 for p, o in client.offsets(dict.fromkeys(partitions, LATEST)).items()}
        if left_out := at.keys() - partitions.keys():
            raise Refused(
                "ADOPT_PARTITIONS",
                f"The old job has offsets of {joined(left_out)}, which the pipeline ({self._options.what}) does not "
                "read: their further records would be skipped.",
                next_step="read the same topics as the old job",
            )
        missing = partitions.keys() - at.keys()
        unknown = [p for p in missing if ends[p] > first[p]] if unread is None else []
        if unknown:
            raise Refused(
                "ADOPT_PARTITIONS",
                f"The old job has no offset of {joined(unknown)}, which hold records: whether it read them is unknown.",
                next_step="commit an offset of them for the group (kafka-consumer-groups --reset-offsets --to-offset), "
                "or adopt from a checkpoint",
            )
        gone = {p: o for p, o in at.items() if o < first[p]}
        if gone and self._options.fail_on_data_loss:
            partition, offset = next(iter(sorted(gone.items())))
            raise Refused(
                "ADOPT_RECORDS_GONE",
                f"The old job stopped at offset {offset} of {joined([partition])}, but Kafka's first record is "
                f"{first[partition]}: the records between are deleted (retention).",
                next_step="to go on without them: failOnDataLoss: false",
            )
        ahead = {p: o for p, o in at.items() if o > ends[p]}
        if ahead:
            partition, offset = next(iter(sorted(ahead.items())))
            raise Refused(
                "ADOPT_OFFSETS_AHEAD",
                f"The old job stopped at offset {offset} of {joined([partition])}, but its last readable record is "
                f"before {ends[partition]}: the topic was created anew, or a transaction of a producer is still open.",
                next_step="compare the topic with the old job's; an open transaction ends by itself "
                "(kafka-transactions find-hanging)",
            )
        start = {p: max(at.get(p, first[p]), first[p]) for p in partitions}
        notes = [f"{joined([p])} {unread or 'is empty'}: it begins at {first[p]}" for p in sorted(missing)]
        return Resumption(
            Positions(start, ids).to_json(),
            {f"{t}-{n}": (o, ends[t, n] - o) for (t, n), o in start.items()},
            tuple(notes),
        )

    @contextmanager
    def _connected(self) -> Iterator[KafkaDriverClient]:
        client = KafkaDriverClient(self._options)
        try:
            yield client
        finally:
            client.close()
