"""The driver's requests of the Kafka source: partitions, offsets, where options say to start, where others stopped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

from delivered.clients.kafka import listing
from delivered.clients.kafka.errors import NoAnswer, explain
from delivered.clients.kafka.librdkafka import SOURCE_SETTINGS, check_settings
from delivered.clients.kafka.listing import Topic
from delivered.clients.kafka.protocol import NoTopic, Wire
from delivered.clients.kafka.record_batch import Partition
from delivered.clients.kafka.settings import resolved
from delivered.connectors.kafka.offsets import EARLIEST, LATEST, Place, Positions, Timestamp, Where
from delivered.connectors.kafka.options import OWNER, SourceOptions, is_internal
from delivered.contract.powers import Resumption
from delivered.contract.source import Offsets
from delivered.model.errors import Refused, Unreachable, UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.patience import within

# The driver's requests of the Kafka source: partitions, offsets, and offsets of a consumer group.

T = TypeVar("T")
_TIMES = {EARLIEST: listing.EARLIEST, LATEST: listing.LATEST}


class KafkaDriverClient:
    """Connects on first use. Not thread-safe."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._wire: Wire | None = None

    def partitions(self) -> tuple[dict[Partition, None], dict[str, str]]:
        """Partitions to read now, sorted, and topic -> topic id.

        Raises:
            UsageError: a named topic does not exist, or may not be read. (Topics matched by a pattern may come and go.)
        """
        options = self._options
        if options.pattern is not None:
            names = self._matching(re.compile(options.pattern))
        elif options.topics is not None:
            names = list(options.topics)
        else:
            names = sorted({t for t, _ in options.partitions or ()})
        found: dict[Partition, None] = {}
        ids: dict[str, str] = {}
        for topic, description in self._describe(names):
            if description is None or (options.pattern is not None and description.internal):
                continue
            ids[topic] = description.id
            found.update(dict.fromkeys((topic, p) for p in description.partitions))
        if options.partitions is not None:
            for topic, number in options.partitions:
                if topic in ids and (topic, number) not in found:
                    raise explain(OWNER, "_UNKNOWN_PARTITION", "", f"{topic}-{number}", options.servers)
            found = {p: None for p in options.partitions if p in found}
        return found, ids

    def _matching(self, pattern: re.Pattern[str]) -> list[str]:
        listed = self._ask(Wire.topics, self._options.what)
        return sorted(t for t in listed if pattern.search(t) and not is_internal(t))

    def _describe(self, names: list[str], missing_is_an_error: bool = False) -> list[tuple[str, Topic | None]]:
        """Topic and description; with a pattern, None for a topic that no longer exists."""
        if not names:
            return []
        found = self._ask(partial(listing.describe_topics, names=names), ",".join(names))
        if self._options.pattern is None or missing_is_an_error:
            for name, topic in found.items():
                if topic is None:
                    raise explain(OWNER, "UNKNOWN_TOPIC_OR_PART", "", name, self._options.servers)
        return list(found.items())

    def offsets(self, wanted: Mapping[Partition, Place]) -> dict[Partition, int | None]:
        """Resolve places to offsets. `LATEST` is the last stable offset, or the high watermark with read_uncommitted.

        None: no record at or after that time.
        """
        found: dict[Partition, int | None] = {}
        ask: dict[Partition, Place] = {}
        for partition, place in wanted.items():
            if isinstance(place, int) and place >= 0:
                found[partition] = place
            else:
                ask[partition] = place
        if ask:
            listed = self._list(ask)
            found.update({p: offset for p, (offset, _) in listed.items()})
        return {p: found[p] for p in wanted}

    def ends(self, partitions: Iterable[Partition]) -> tuple[dict[Partition, int], dict[Partition, int]]:
        """As `offsets` for `LATEST`, and the epochs of the leaders that answered (none before Kafka 2.1)."""
        ask: dict[Partition, Place] = dict.fromkeys(partitions, LATEST)
        listed = self._list(ask) if ask else {}
        ends = {p: offset or 0 for p, (offset, _) in listed.items()}
        return ends, {p: epoch for p, (_, epoch) in listed.items() if epoch is not None}

    def _list(self, ask: Mapping[Partition, Place]) -> dict[Partition, tuple[int | None, int | None]]:
        """Offset and leader epoch."""
        times = {p: v.ms if isinstance(v, Timestamp) else _TIMES[v] for p, v in ask.items()}
        committed_only = self._options.committed_only
        return self._ask(partial(listing.list_offsets, asked=times, committed_only=committed_only), self._options.what)

    def bounds(self, partition: Partition) -> tuple[int, int]:
        """First offset and end of one partition; (0, 0) if the partition does not exist."""
        try:
            self._describe([partition[0]], missing_is_an_error=True)
            low = self.offsets({partition: EARLIEST})[partition]
            high = self.offsets({partition: LATEST})[partition]
        except UsageError as error:
            if error.code == "DELIVERED_TOPIC_MISSING":
                return 0, 0
            raise
        return low or 0, high or 0

    def group_members(self, group: str) -> int:
        """Number of consumers in a group now."""
        return self._ask(partial(listing.group_members, group=group), group)

    def committed(self, group: str, partitions: list[Partition]) -> dict[Partition, int]:
        """Offsets that a consumer group has committed, of these partitions. Raises Unreachable, UsageError."""
        ask = partial(listing.committed_offsets, group=group, partitions=partitions)
        return self._ask(ask, f"group {group}")

    def commit(self, group: str, at: Mapping[Partition, int]) -> None:
        """Commit offsets to a consumer group. Raises Unreachable, UsageError."""
        if at:
            self._ask(partial(listing.commit_offsets, group=group, at=at), f"group {group}", CONNECT_TIMEOUT_S)

    def _ask(self, ask: Callable[[Wire], T], what: str, longest_s: float | None = None) -> T:
        """Ask until there is an answer: for 10 s, or for 120 s if brokers answered before and may be restarting.

        Args:
            ask: idempotent.
        """
        wire, servers = self.wire(), self._options.servers
        try:
            with nullcontext() if longest_s is None else within(longest_s):
                return wire.patiently(lambda: ask(wire))
        except listing.Refusal as error:
            raise explain(OWNER, error.name, str(error), error.what, servers) from None
        except NoTopic as error:
            raise explain(OWNER, "UNKNOWN_TOPIC_OR_PART", str(error), what, servers) from None
        except NoAnswer as error:
            raise explain(OWNER, "_TIMED_OUT", str(error), what, servers) from None
        except Unreachable as error:
            name = "_TRANSPORT" if error.may_come_back else "_AUTHENTICATION"
            raise explain(OWNER, name, error.message, what, servers) from None

    def wire(self) -> Wire:
        """Its connections. Raises UsageError: a setting that no client knows."""
        if self._wire is None:
            if set(self._options.client) - SOURCE_SETTINGS:
                check_settings(OWNER, self._options.client)
            self._wire = Wire(resolved(self._options.client))
        return self._wire

    def close(self) -> None:
        """Idempotent."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


def joined(partitions: Iterable[Partition]) -> str:
    """The first five partitions, for messages."""
    names = [f"{t}-{n}" for t, n in sorted(partitions)]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# Turns the user's starting and ending offsets into offsets of the partitions.


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


# Where another reader of the same topics stopped: a consumer group, a time, or offsets that it stored.


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
