"""Workloads of operators: records with an event time and amounts, a stateful transform, and its oracle."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from delivered_lab.verify import oracles
from delivered_lab.verify.workload import PARTITIONS, Record, Workload

_COUNTING = 0.6
"""Share of the records; the rest is the tail, see oracles.py."""


def _event(number: int, key: str | None, at: int, amount: int, copied: str = "", **more: str) -> Record:
    name = copied or f"e{number}"
    data = {"id": name, "k": key, "at": oracles.START_S + at, "amount": amount, **more}
    return Record(name, key, number, number % PARTITIONS, raw=json.dumps(data))


def _timed(random: random.Random, count: int) -> Iterator[Record]:
    """Some without a key, some late."""
    for i in range(count):
        counts = i < _COUNTING * count
        key = None if i % 50 == 49 else f"k{random.randrange(16)}"
        late = counts and i > oracles.LATE_S and i % 20 == 0
        at = i - oracles.LATE_S if late else max(0, i - random.randrange(oracles.JITTER_S))
        yield _event(i, key if counts else oracles.TAIL, at, random.randrange(1_000))


def _bursts(random: random.Random, count: int) -> Iterator[Record]:
    """Four keys at a time, each for a while, then four others; all return later."""
    for record in _timed(random, count):
        i = record.number
        data = json.loads(record.value)
        if data["k"] not in (None, oracles.TAIL):
            data["k"] = f"k{i // 70 % 3 * 4 + i % 4}"
        yield replace(record, key=data["k"], raw=json.dumps(data))


def _copies(random: random.Random, count: int) -> Iterator[Record]:
    """Every fifth record again a little later, every tenth much later; only late copies have a new event time."""
    made: list[Record] = []
    far = oracles.LATE_S + 20
    for i in range(count):
        counts, first = i < _COUNTING * count, None
        if counts and i % 5 == 4:
            made.append(replace(made[i - 1 - random.randrange(4)], partition=i % PARTITIONS))
        else:
            if counts and i % 10 == 7 and i >= far:
                first = json.loads(made[i - far].value)
            key = f"k{i % 16}" if counts else oracles.TAIL
            amount = first["amount"] if first else random.randrange(1_000)
            made.append(_event(i, key, i, amount, first["id"] if first else ""))
        yield made[-1]


def _payments(random: random.Random, count: int) -> Iterator[Record]:
    """Orders; some are not paid, some are paid twice, and some too late."""
    due: dict[int, list[str]] = {}
    for i in range(count):
        counts = i < _COUNTING * count
        amount, waiting = random.randrange(1_000), due.pop(i, [])
        if waiting and counts:
            due.setdefault(i + 1, []).extend(waiting[1:])
            yield _event(i, "k", i, amount, kind="payment", ref=waiting[0])
        elif not counts:
            yield _event(i, oracles.TAIL, i, amount, kind=("order", "payment")[i % 2], ref="")
        else:
            for after in random.choice([(), (5,), (12,), (3, 20), (2 * oracles.JOIN_S,)]):
                due.setdefault(i + after, []).append(f"e{i}")
            yield _event(i, "k", i, amount, kind="order", ref="")


def _visits(random: random.Random, count: int) -> Iterator[Record]:
    """Four visits at a time; an ended visit never resumes."""
    for i in range(count):
        key = f"v{i // 15 + random.randrange(4)}" if i < _COUNTING * count else oracles.TAIL
        yield _event(i, key, i, random.randrange(1_000))


def _regions(folder: Path, number: int) -> None:
    """A line per key, with the number of the start."""
    folder.mkdir(exist_ok=True)
    keys = [*(f"k{i}" for i in range(16)), oracles.NOBODY, oracles.TAIL]
    lines = [json.dumps({"k": k, "says": f"{k}/{number}"}) for k in keys]
    (folder / "regions.json").write_text("\n".join(lines), encoding="utf-8")


_FAULTS = ("none", "killed-everywhere", "killed-twice", "killed-after", "log-entry-removed", "killed-at-random")
_AT_EVERY_POINT = (
    *_FAULTS, "producer-killed-at", "lock-held", "other-writers", "replies-lost", "killed-in-transaction",
    "broker-killed", "worker-killed", "slow-reader", "fetch-lost", "killed-before", "killed-between", "zombie-decide",
    "second-driver", "older-checkpoint", "checkpoint-deleted",
)  # fmt: skip
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def _operator(
    name: str,
    text: str,
    make: Callable[[random.Random, int], Iterator[Record]],
    oracle: Callable[[Sequence[str]], dict[str, str]],
    function: str,
    *sinks: str,
    **more: Any,
) -> Workload:
    """A stateful workload, in small batches, so that most of them find state of an earlier one."""
    shape: dict[str, Any] = {"faults": _FAULTS, "records": 750, "rows_per_batch": 75} | more
    spark = {"spark.sql.shuffle.partitions": "3", **shape.pop("spark", {})}
    return Workload(
        name, text, make, oracle=oracle, python=f"delivered_lab.verify.operators:{function}", kinds=("text", "text"),
        ordered=False, sinks=sinks, spark=spark, **shape,
    )  # fmt: skip


_EACH = {"faults": _AT_EVERY_POINT}
_UPDATE = {"output_mode": "update"}
OPERATORS = (
    _operator(
        "totals", "running count and sum by key, some of them null; update", _timed, oracles.totals, "totals",
        "sqlite", "postgres", "kafka", "delta", **_EACH, **_UPDATE,
    ),
    _operator(
        "windows", "count and sum by key and window, with late records; append", _timed, oracles.windows, "windows",
        "kafka", "delta", "sqlite", **_EACH,
    ),
    _operator(
        "windows-update", "the same; update", _timed, oracles.windows, "windows",
        "sqlite", "postgres", "kafka", "delta", **_UPDATE,
    ),
    _operator(
        "sessions", "count and sum by key and session, with late records; append", _bursts, oracles.sessions,
        "sessions", "sqlite", "postgres", "kafka", "delta",
    ),
    _operator(
        "chained", "an aggregate by long windows of one by short windows; append", _timed, oracles.chained, "chained",
        "sqlite", "postgres", "kafka", "delta",
    ),
    _operator(
        "distinct", "dropDuplicates, of copies at any distance; append", _copies, oracles.distinct, "distinct",
        "sqlite", "postgres", "kafka", "delta",
    ),
    _operator(
        "distinct-within", "dropDuplicatesWithinWatermark: later copies come out again; append", _copies,
        oracles.distinct_within, "distinct_within", "sqlite", "postgres", "kafka", "delta",
    ),
    _operator(
        "join", "orders with payments of the same stream within 30 s; append", _payments, oracles.joined, "joined",
        "sqlite", "postgres", "kafka", "delta",
    ),
    _operator(
        "join-outer", "the same, and orders that nobody paid in time; append", _payments, oracles.joined_outer,
        "joined_outer", "sqlite", "postgres", "kafka", "delta",
    ),
    _operator(
        "lookup", "a join with a table that is another one after each start; append", _timed, oracles.looked_up,
        "looked_up", "sqlite", "postgres", "kafka", "delta", table=_regions, accepts=oracles.is_version,
    ),
    _operator(
        "visits", "transformWithState: several rows by key, and timers of event time; append", _visits, oracles.visits,
        "visits", "sqlite", "postgres", "kafka", "delta",
        spark={"spark.sql.streaming.stateStore.providerClass": _ROCKSDB},
    ),
    _operator(
        "visits-pandas", "applyInPandasWithState: the same; append", _visits, oracles.visits, "visits_pandas",
        "sqlite", "postgres", "kafka", "delta",
    ),
)  # fmt: skip
