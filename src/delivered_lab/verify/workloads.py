"""Seeded input, and the expected output."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from delivered_lab.verify import transforms
from delivered_lab.verify.operator_workloads import OPERATORS
from delivered_lab.verify.workload import PARTITIONS, Record, Workload

_BIG = 1 << 20
"""A record that fills a broker's default limit, except for its own framing."""
_OVERSIZE = 1_200_000
"""Above a client's default limit, 1,000,000 bytes, and below the test broker's."""


def _plain(random: random.Random, count: int) -> Iterator[Record]:
    del random
    for i in range(count):
        yield Record(f"r{i}", f"k{i}", 0, i % PARTITIONS)


def _keyed(random: random.Random, count: int) -> Iterator[Record]:
    numbers: dict[int, int] = {}
    for i in range(count):
        key = random.randrange(16)
        numbers[key] = numbers.get(key, -1) + 1
        # A key lives in one partition, as with producers that hash keys.
        yield Record(f"r{i}", f"k{key}", numbers[key], key % PARTITIONS, random.randrange(200))


def _skewed(random: random.Random, count: int) -> Iterator[Record]:
    """Nine of ten records in partition 0, none in the last."""
    numbers: dict[int, int] = {}
    for i in range(count):
        partition = 0 if random.random() < 0.9 else random.randrange(1, PARTITIONS - 1)
        numbers[partition] = numbers.get(partition, -1) + 1
        yield Record(f"r{i}", f"k{partition}", numbers[partition], partition)


def _doubled(random: random.Random, count: int) -> Iterator[Record]:
    """Every fifth record is sent twice, every fiftieth three times; the source holds all copies."""
    for record in _keyed(random, count):
        i = int(record.id[1:])
        for _ in range(3 if i % 50 == 0 else 2 if i % 5 == 0 else 1):
            yield record


def _spread(random: random.Random, count: int) -> Iterator[Record]:
    """Partitions grow evenly, so that a batch is a stretch of numbers."""
    del random
    for i in range(count):
        yield Record(f"r{i}", f"k{i % 16}", i // 16, i % PARTITIONS)


def _topics(random: random.Random, count: int) -> Iterator[Record]:
    for record in _keyed(random, count):
        yield replace(record, partition=int(record.key[1:]) % (2 * PARTITIONS) if record.key else 0)


def _poisoned(random: random.Random, count: int) -> Iterator[Record]:
    """Two records in the middle that no transform accepts."""
    for i, record in enumerate(_keyed(random, count)):
        yield record
        if i in (count // 2, count // 2 + 1):
            yield Record(f"{transforms.POISON}{i}", transforms.POISON, i, record.partition)


def _oversized(random: random.Random, count: int) -> Iterator[Record]:
    """One record above the limit of the sink's client."""
    for i, record in enumerate(_keyed(random, count)):
        yield replace(record, filler=_OVERSIZE) if i == count // 2 else record


def _big(random: random.Random, count: int) -> Iterator[Record]:
    for record in _plain(random, count):
        yield Record(record.id, record.key, 0, record.partition, _BIG - 2048)


def _fan_out(value: str) -> list[str]:
    """Multiples of three are dropped; even numbers are duplicated."""
    n = int(json.loads(value)["n"])
    if n % 3 == 0:
        return []
    return [value + "#0", value + "#1"] if n % 2 == 0 else [value + "#0"]


def _sparse(value: str) -> list[str]:
    return [value] if transforms.in_kept_stretch(str(json.loads(value)["id"])) else []


def _no_poison(value: str) -> list[str]:
    return [] if str(json.loads(value)["id"]).startswith(transforms.POISON) else [value]


def _windows(values: Sequence[str]) -> list[str]:
    """Count and sum per key and window, for windows that close before the records end."""
    found: dict[tuple[str, int], list[int]] = {}
    for value in values:
        data = json.loads(value)
        i = int(data["id"][1:])
        found.setdefault((data["k"], i // transforms.WINDOW_S), []).append(i)
    return [
        json.dumps({"id": f"{k}@{n}", "k": k, "n": n, "count": len(members), "sum": sum(members)})
        for (k, n), members in found.items()
        if n < transforms.WINDOWS
    ]


_FAN_OUT_SQL = """
SELECT key, concat(value, '#', part) AS value FROM (
  SELECT key, CAST(value AS STRING) AS value,
         explode(CASE WHEN get_json_object(CAST(value AS STRING), '$.n') % 2 = 0
                      THEN array('0', '1') ELSE array('0') END) AS part
  FROM source
  WHERE get_json_object(CAST(value AS STRING), '$.n') % 3 <> 0)
"""
_RANDOM_SQL = "SELECT key, concat(CAST(value AS STRING), '#', uuid()) AS value FROM source"
_SAME_SQL = "SELECT key, value FROM source"
_MODULE = "delivered_lab.verify.transforms"

_OF_CHANGES = (
    "none", "lock-held", "replies-lost", "late-commit", "other-writers", "broker-killed", "broker-restarted",
    "killed-in-transaction", "worker-killed", "slow-reader", "killed-before", "killed-between", "killed-after",
    "killed-twice", "killed-after-staging", "killed-at-random", "task-retried", "zombie-decide", "zombie-prepare",
    "zombie-apply", "second-driver", "rolled-back-before-decide", "rolled-back-after-decide", "log-entry-removed",
    "older-checkpoint", "checkpoint-deleted",
)  # fmt: skip

WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        *OPERATORS,
        Workload("unique", "ids, each once, spread evenly", _plain),
        Workload("keyed", "sequences of 16 keys in 4 partitions", _keyed),
        Workload(
            "topics",
            "two topics with four partitions each, in every batch",
            _topics,
            arrow=f"{_MODULE}:to_topics",
            topics=2,
        ),
        Workload("skewed", "nine of ten records in one partition, one partition empty", _skewed),
        Workload("doubled", "records that are in the source two and three times", _doubled),
        Workload(
            "sparse",
            "a filter that leaves nothing of whole batches",
            _spread,
            _sparse,
            arrow=f"{_MODULE}:sparse",
            rows_per_batch=100,
        ),
        Workload(
            "changes",
            "upserts: the newest record of each of 16 keys is in the sink",
            _keyed,
            faults=_OF_CHANGES,
            # Without a version, so that a batch applied late or twice shows.
            sink={"mode": "upsert", "keyColumns": "key"},
        ),
        Workload("big", "records of 1 MB", _big, records=48, rows_per_batch=12),
        Workload(
            "fan-out-sql",
            "a filter, and one record to two, in SQL",
            _keyed,
            _fan_out,
            _FAN_OUT_SQL,
            kinds=("bytea", "text"),
            ordered=False,
        ),
        Workload(
            "fan-out", "the same from Arrow to Arrow", _keyed, _fan_out, arrow=f"{_MODULE}:fan_out", ordered=False
        ),
        Workload("sql", "a transform in SQL that changes nothing", _keyed, sql=_SAME_SQL),
        Workload(
            "windowed",
            "counts and sums per key and window of event time, with state and a watermark",
            _spread,
            together=_windows,
            python=f"{_MODULE}:windowed",
            kinds=("text", "text"),
            ordered=False,
        ),
        Workload(
            "poison",
            "two records that the transform cannot take",
            _poisoned,
            _no_poison,
            arrow=f"{_MODULE}:refuses_poison",
            faults=(),
        ),
        Workload("oversized", "a record that is too large for the sink as it is set", _oversized, faults=()),
        Workload(
            "random",
            "a transform that gives other rows each time",
            _keyed,
            arrow=f"{_MODULE}:other_each_time",
            faults=(),
            deterministic=False,
        ),
        Workload(
            "random-sql",
            "the same in SQL",
            _keyed,
            sql=_RANDOM_SQL,
            kinds=("bytea", "text"),
            faults=(),
            deterministic=False,
        ),
    )
}


def records(workload: Workload, seed: int, count: int | None = None) -> list[Record]:
    """The same seed gives the same records."""
    return list(workload.make(random.Random(f"{workload.name}-{seed}"), count or workload.records))  # noqa: S311
