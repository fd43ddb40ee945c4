"""How long Kafka keeps the records from a position on, by a topic's settings and the time of its first record there.

Brokers delete complete segments, some time after their newest record is older than `retention.ms`, or while the log is
larger than `retention.bytes`. So what is said here is the earliest time; of a limit in bytes, at the rate at which the
log has grown since that record.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

from delivered.clients.kafka.consumer import TOPIC_CONFIG, describe_configs, log_bytes
from delivered.clients.kafka.record_batch import Partition
from delivered.connectors.kafka.options import EARLIEST, LATEST, Positions, SourceOptions
from delivered.connectors.kafka.reader import KafkaDriverClient, find_write_times, joined
from delivered.contract.source import Retained

CLOCKS_APART_MS = 60_000
"""Of brokers, of hosts that write records, and of the one that compares."""

_SETTINGS = ("cleanup.policy", "retention.ms", "retention.bytes")


@dataclass(frozen=True)
class Retention:
    """A topic's settings.

    Attributes:
        ms_max, bytes_max: from which age and size on records are deleted; None: from none on.
        compacts: removes records with newer ones of their key, at any time.
    """

    ms_max: int | None
    bytes_max: int | None
    compacts: bool

    def reach_ms(self, size: int | None) -> int | None:
        """Records written before this time, in ms since 1970, may have been removed; None: of any age; 0: none.

        Args:
            size: of the partition's log, in bytes; None: unknown.
        """
        # What a limit in bytes cuts is at least that long afterwards, and only compaction makes it shorter.
        if self.bytes_max is not None and (size is None or size >= self.bytes_max or self.compacts):
            return None
        return 0 if self.ms_max is None else _now_ms() - self.ms_max + CLOCKS_APART_MS


def retention_of(client: KafkaDriverClient, topic: str) -> Retention | None:
    """None: this user may not see the topic's settings. Raises Unreachable, UsageError."""
    found = client.ask(partial(describe_configs, kind=TOPIC_CONFIG, name=topic, keys=_SETTINGS), topic)
    policy, *limits = ((found or {}).get(key) for key in _SETTINGS)
    if policy is None or None in limits:
        return None
    ms_max, bytes_max = (int(n) if "delete" in policy and int(n) >= 0 else None for n in limits if n is not None)
    return Retention(ms_max, bytes_max, "compact" in policy)


def reach_ms(client: KafkaDriverClient, partitions: Collection[Partition]) -> dict[Partition, int | None]:
    """`Retention.reach_ms` of each partition; absent: this user may not see its topic's settings.

    Raises:
        Unreachable, UsageError: no answer.
    """
    found: dict[Partition, int | None] = {}
    for topic in sorted({t for t, _ in partitions}):
        own, retention = [p for p in partitions if p[0] == topic], retention_of(client, topic)
        if retention is None:
            continue
        has_limit = retention.bytes_max is not None
        sizes = client.ask(partial(log_bytes, partitions=own), topic) if has_limit else {}
        found |= {p: retention.reach_ms(sizes.get(p)) for p in own}
    return found


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def find_retained(options: SourceOptions, client: KafkaDriverClient, at: Positions) -> Retained:
    """See `delivered.contract.source.SourceDriver`."""
    partitions, ids = client.partitions()
    again = [p for p in at.at if p in partitions and at.ids.get(p[0], ids[p[0]]) != ids[p[0]]]
    kept = {p: o for p, o in at.at.items() if p in partitions and p not in again}
    first = {p: o or 0 for p, o in client.offsets(dict.fromkeys(kept, EARLIEST)).items()}
    ends = {p: o or 0 for p, o in client.offsets(dict.fromkeys(kept, LATEST)).items()}
    waiting = {p: (max(o, first[p]), ends[p]) for p, o in kept.items() if ends[p] > max(o, first[p])}
    unknown = [f"{joined(again)}: the topic was deleted and recreated"] if again else []
    if absent := [p for p in at.at if p not in partitions]:
        unknown.append(f"{joined(absent)}: no longer there, or no longer read")
    until: dict[str, int] = {}
    written = find_write_times(options, waiting) if waiting else {}
    for topic in sorted({t for t, _ in written}):
        since = {p: ms for p, ms in written.items() if p[0] == topic}
        retention = retention_of(client, topic)
        if retention is None:
            unknown.append(f"{topic}: this user may not see its settings (DescribeConfigs)")
            continue
        if retention.compacts:
            unknown.append(f"{topic}: it is compacted, which removes records at any time")
        limits = [] if retention.ms_max is None else [{p: ms + retention.ms_max for p, ms in since.items()}]
        if retention.bytes_max is not None:
            sizes = client.ask(partial(log_bytes, partitions=list(since)), topic)
            if since.keys() - sizes.keys():
                unknown.append(f"{topic}: this user may not see the size of its log (Describe on the cluster)")
            limits.append(_by_size(since, sizes, retention.bytes_max, first, waiting))
        for (name, number), ms in ((p, min(found)) for p in since if (found := [t[p] for t in limits if p in t])):
            until[f"{name}/{number}"] = ms
    missing = {f"{t}/{n}": first[t, n] - o for (t, n), o in kept.items() if first[t, n] > o}
    return Retained(missing, until, "; ".join(unknown))


def _by_size(
    since: Mapping[Partition, int],
    sizes: Mapping[Partition, int],
    bytes_max: int,
    first: Mapping[Partition, int],
    waiting: Mapping[Partition, tuple[int, int]],
) -> dict[Partition, int]:
    """When the log behind these records will have grown to its limit, if it grows on as it has since then."""
    now, until = _now_ms(), dict[Partition, int]()
    for partition, size in sizes.items():
        start, end = waiting[partition]
        behind = size * (end - start) / max(1, end - first[partition])
        took_ms = max(1, now - since[partition])
        until[partition] = now + int(max(0.0, bytes_max - behind) / max(behind, 1.0) * took_ms)
    return until
