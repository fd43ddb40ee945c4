"""The driver's requests of the Kafka source: partitions, offsets, and offsets of a consumer group."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

from delivered.clients.kafka import listing
from delivered.clients.kafka.errors import explain
from delivered.clients.kafka.librdkafka import check_settings
from delivered.clients.kafka.listing import Topic
from delivered.clients.kafka.outcomes import NoAnswer
from delivered.clients.kafka.path import SOURCE_SETTINGS
from delivered.clients.kafka.protocol import NoTopic, Wire
from delivered.clients.kafka.rows import Partition
from delivered.clients.kafka.settings import resolved
from delivered.connectors.kafka.offsets import EARLIEST, LATEST, Place, Timestamp
from delivered.connectors.kafka.options import OWNER, SourceOptions
from delivered.connectors.kafka.sink_options import is_internal
from delivered.model.errors import Unreachable, UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.patience import within

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
