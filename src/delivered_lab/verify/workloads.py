"""Workloads: seeded records of a source, what they must become, and the pipeline set-up that they need.

Those of operators have an event time and amounts, a stateful transform (operators.py) and its oracle (oracles.py). The
other transforms are here: functions over Arrow batches, as a user would name them in a pipeline file, and one from
DataFrame to DataFrame.
"""

from __future__ import annotations

import hashlib
import json
import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from delivered_lab.verify import oracles

PARTITIONS = 4
TABLE = "DELIVERED_VERIFY_TABLE"
"""Environment variable with the folder of a workload's static table."""
POISON = "poison"
WINDOW_S, WATERMARK_S, WINDOWS = 20, 100, 36
"""In event time, which is the record's number in seconds: 36 windows end at 720, and records go on until 1,200."""
MASTER = "local[2]"
"""Of a pipeline's Spark, unless a fault needs another one."""
STAGE_RERUNS = "spark.delivered_lab.verify.stageReruns"
"""Of a pipeline's Spark settings, in the loop: a failed task is numbered 0 again, as in a new attempt of its stage."""
_RANGE = 300


@dataclass(frozen=True)
class Record:
    """One record of a source.

    Attributes:
        id: unique, unless the workload sends a record twice on purpose.
        number: its position in the sequence of its key, from 0.
        filler: characters of payload beyond the header; raw: the value, in place of a generated one.
    """

    id: str
    key: str | None
    number: int
    partition: int
    filler: int = 0
    raw: str | None = None

    @property
    def value(self) -> str:
        if self.raw is not None:
            return self.raw
        # The payload derives from the id, so a record altered on its way is a different effect.
        pad = hashlib.blake2b(self.id.encode(), digest_size=16).hexdigest() * (self.filler // 32 + 1)
        return json.dumps({"id": self.id, "k": self.key, "n": self.number, "pad": pad[: self.filler]})


@dataclass(frozen=True)
class Effect:
    """What the sink must hold because of a record.

    Attributes:
        id: the record's, with a suffix if the record has several effects, and a digest of the content.
    """

    id: str
    key: str | None
    number: int | None


@dataclass(frozen=True)
class Workload:
    """
    Attributes:
        make: (random, count) -> records, in send order.
        effects: value of a source record -> values that the sink must hold for it.
        together: values of all source records -> values that the sink must hold, where an effect has many causes.
        sql: the transform, over the view `source`; arrow, python: the same as "module:function"; all None: none.
        kinds: SQL types of key and value in the output.
        ordered: effects of one key must appear in the order of their numbers.
        topics: of source and sink; more than one needs a source with topics.
        faults: those that are tried with it, besides those that name it.
        effect_reader: (key, value) of the sink -> effect; None: from the value, as `Record.value` wrote it.
        sink: more options of the sink in the pipeline file.
        oracle: values of all source records -> value by key of the rows that the sink must hold; None: rows have no
            identifying keys. accepts: (wanted, found) -> whether a value is as good; None: none is.
        output_mode: of the query. For "update" an oracle answers for any prefix of the batches.
        spark: configuration of the pipeline's session.
        table: (folder, number of the start): writes the static table for this start.
        sinks: those that it runs with; empty: all.
    """

    name: str
    text: str
    make: Callable[[random.Random, int], Iterator[Record]]
    effects: Callable[[str], list[str]] = lambda value: [value]
    sql: str | None = None
    arrow: str | None = None
    python: str | None = None
    together: Callable[[Sequence[str]], list[str]] | None = None
    kinds: tuple[str, str] = ("bytea", "bytea")
    ordered: bool = True
    rows_per_batch: int | None = None
    records: int = 1_200
    topics: int = 1
    faults: tuple[str, ...] = ("none", "killed-twice")
    deterministic: bool = True
    effect_reader: Callable[[str | None, str], Effect] | None = None
    sink: Mapping[str, str] = field(default_factory=dict)
    oracle: Callable[[Sequence[str]], dict[str, str]] | None = None
    accepts: Callable[[str, str], bool] | None = None
    output_mode: str = "append"
    spark: Mapping[str, str] = field(default_factory=dict)
    table: Callable[[Path, int], None] | None = None
    sinks: tuple[str, ...] = ()

    @property
    def replaces(self) -> bool:
        """A row replaces the one with its key, so the sink holds the newest of each."""
        return self.sink.get("mode") == "upsert"

    @property
    def needs_spark(self) -> bool:
        return self.sql is not None or self.python is not None

    def effect_of(self, key: str | None, value: str) -> Effect:
        """The effect that a row in the sink stands for."""
        if self.oracle is not None:
            return Effect(f"{key} = {value}", key, None)
        return (
            self.effect_reader(key, value) if self.effect_reader is not None else effect_of(value, self.deterministic)
        )

    def sink_options(self, upserts: bool) -> dict[str, str]:
        """Args: upserts: the sink can replace the row with the same key."""
        by_key = {"mode": "upsert", "keyColumns": "key"} if self.output_mode == "update" and upserts else {}
        return {**by_key, **self.sink}


def effect_of(value: str, deterministic: bool = True) -> Effect:
    """Parse an effect from a value in the sink; an unreadable one is an effect that was never sent."""
    digest = hashlib.blake2b(value.encode(), digest_size=6).hexdigest() if deterministic else "-"
    try:
        head, _, tail = value.partition("}")
        data = json.loads(head + "}")
        part = tail if deterministic else ""
        return Effect(f"{data['id']}{part}:{digest}", str(data["k"]), int(data["n"]))
    except (ValueError, KeyError, TypeError):
        return Effect(f"unreadable:{digest}", None, None)


def source_id(value: str) -> str:
    """The id of a record as found in the source."""
    try:
        return str(json.loads(value)["id"])
    except (ValueError, KeyError, TypeError):
        return f"unreadable:{hashlib.blake2b(value.encode(), digest_size=6).hexdigest()}"


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
    records: list[Record] = []
    far = oracles.LATE_S + 20
    for i in range(count):
        counts, first = i < _COUNTING * count, None
        if counts and i % 5 == 4:
            records.append(replace(records[i - 1 - random.randrange(4)], partition=i % PARTITIONS))
        else:
            if counts and i % 10 == 7 and i >= far:
                first = json.loads(records[i - far].value)
            key = f"k{i % 16}" if counts else oracles.TAIL
            amount = first["amount"] if first else random.randrange(1_000)
            records.append(_event(i, key, i, amount, first["id"] if first else ""))
        yield records[-1]


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
    sinks: tuple[str, ...] = ("sqlite", "postgres", "kafka", "delta"),
    **more: Any,
) -> Workload:
    """A stateful workload, in small batches, so that most of them find state of an earlier one."""
    shape: dict[str, Any] = {"faults": _FAULTS, "records": 750, "rows_per_batch": 75} | more
    spark = {"spark.sql.shuffle.partitions": "3", **shape.pop("spark", {})}
    return Workload(
        name, text, make, oracle=oracle, python=f"delivered_lab.verify.operators:{function}", kinds=("text", "text"),
        ordered=False, sinks=sinks, spark=spark, **shape,
    )  # fmt: skip


_EACH: dict[str, Any] = {"faults": _AT_EVERY_POINT}
_UPDATE: dict[str, Any] = {"output_mode": "update"}
OPERATORS = (
    _operator(
        "totals", "running count and sum by key, some of them null; update", _timed, oracles.totals, "totals",
        **_EACH, **_UPDATE,
    ),
    _operator(
        "windows", "count and sum by key and window, with late records; append", _timed, oracles.windows, "windows",
        ("kafka", "delta", "sqlite"), **_EACH,
    ),
    _operator("windows-update", "the same; update", _timed, oracles.windows, "windows", **_UPDATE),
    _operator(
        "sessions", "count and sum by key and session, with late records; append", _bursts, oracles.sessions,
        "sessions",
    ),
    _operator(
        "chained", "an aggregate by long windows of one by short windows; append", _timed, oracles.chained, "chained",
    ),
    _operator(
        "distinct", "dropDuplicates, of copies at any distance; append", _copies, oracles.distinct, "distinct",
    ),
    _operator(
        "distinct-within", "dropDuplicatesWithinWatermark: later copies come out again; append", _copies,
        oracles.distinct_within, "distinct_within",
    ),
    _operator(
        "join", "orders with payments of the same stream within 30 s; append", _payments, oracles.joined, "joined",
    ),
    _operator(
        "join-outer", "the same, and orders that nobody paid in time; append", _payments, oracles.joined_outer,
        "joined_outer",
    ),
    _operator(
        "lookup", "a join with a table that is another one after each start; append", _timed, oracles.looked_up,
        "looked_up", table=_regions, accepts=oracles.is_version,
    ),
    _operator(
        "visits", "transformWithState: several rows by key, and timers of event time; append", _visits, oracles.visits,
        "visits", spark={"spark.sql.streaming.stateStore.providerClass": _ROCKSDB},
    ),
    _operator("visits-pandas", "applyInPandasWithState: the same; append", _visits, oracles.visits, "visits_pandas"),
)  # fmt: skip


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
    """Partitions grow evenly, so that a batch is a range of numbers."""
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
            yield Record(f"{POISON}{i}", POISON, i, record.partition)


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


def in_kept_range(record_id: str) -> bool:
    """Keep every second range of 300 records."""
    return int(record_id[1:]) // _RANGE % 2 == 0


def is_poison(value: str | bytes) -> bool:
    return str(json.loads(value)["id"]).startswith(POISON)


def _sparse(value: str) -> list[str]:
    return [value] if in_kept_range(str(json.loads(value)["id"])) else []


def _no_poison(value: str) -> list[str]:
    return [] if is_poison(value) else [value]


def _windows(values: Sequence[str]) -> list[str]:
    """Count and sum per key and window, for windows that close before the records end."""
    found: dict[tuple[str, int], list[int]] = {}
    for value in values:
        data = json.loads(value)
        i = int(data["id"][1:])
        found.setdefault((data["k"], i // WINDOW_S), []).append(i)
    return [
        json.dumps({"id": f"{k}@{n}", "k": k, "n": n, "count": len(members), "sum": sum(members)})
        for (k, n), members in found.items()
        if n < WINDOWS
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
_MODULE = "delivered_lab.verify.workloads"

_OF_CHANGES = (
    "none", "lock-held", "replies-lost", "late-commit", "other-writers", "broker-killed", "broker-restarted",
    "killed-in-transaction", "worker-killed", "slow-reader", "killed-before", "killed-between", "killed-after",
    "killed-twice", "killed-after-staging", "killed-at-random", "task-retried", "zombie-decide", "zombie-prepare",
    "zombie-apply", "second-driver", "rolled-back-before-decide", "rolled-back-after-decide", "log-entry-removed",
    "older-checkpoint", "checkpoint-deleted",
)  # fmt: skip

_ALL: tuple[Workload, ...] = (
    Workload("unique", "ids, each once, spread evenly", _plain),
    Workload("keyed", "sequences of 16 keys in 4 partitions", _keyed),
    Workload(
        "topics", "two topics with four partitions each, in every batch", _topics, arrow=f"{_MODULE}:to_topics",
        topics=2,
    ),
    Workload("skewed", "nine of ten records in one partition, one partition empty", _skewed),
    Workload("doubled", "records that are in the source two and three times", _doubled),
    Workload(
        "sparse", "a filter that leaves nothing of some batches", _spread, _sparse, arrow=f"{_MODULE}:sparse",
        rows_per_batch=100,
    ),
    # Without a version, so that a batch applied late or twice shows.
    Workload(
        "changes", "upserts: the newest record of each of 16 keys is in the sink", _keyed, faults=_OF_CHANGES,
        sink={"mode": "upsert", "keyColumns": "key"},
    ),
    Workload("big", "records of 1 MB", _big, records=48, rows_per_batch=12),
    Workload(
        "fan-out-sql", "a filter, and one record to two, in SQL", _keyed, _fan_out, _FAN_OUT_SQL,
        kinds=("bytea", "text"), ordered=False,
    ),
    Workload("fan-out", "the same from Arrow to Arrow", _keyed, _fan_out, arrow=f"{_MODULE}:fan_out", ordered=False),
    Workload("sql", "a transform in SQL that changes nothing", _keyed, sql=_SAME_SQL),
    Workload(
        "windowed", "counts and sums per key and window of event time, with state and a watermark", _spread,
        together=_windows, python=f"{_MODULE}:windowed", kinds=("text", "text"), ordered=False,
    ),
    Workload(
        "poison", "two records that the transform cannot take", _poisoned, _no_poison,
        arrow=f"{_MODULE}:refuses_poison", faults=(),
    ),
    Workload("oversized", "a record that is too large for the sink as it is set", _oversized, faults=()),
    Workload(
        "random", "a transform that gives other rows each time", _keyed, arrow=f"{_MODULE}:other_each_time", faults=(),
        deterministic=False,
    ),
    Workload(
        "random-sql", "the same in SQL", _keyed, sql=_RANDOM_SQL, kinds=("bytea", "text"), faults=(),
        deterministic=False,
    ),
)  # fmt: skip
WORKLOADS = {w.name: w for w in (*OPERATORS, *_ALL)}


def records(workload: Workload, seed: int, count: int | None = None) -> list[Record]:
    """The same seed gives the same records."""
    return list(workload.make(random.Random(f"{workload.name}-{seed}"), count or workload.records))  # noqa: S311


def _made(batch: pa.RecordBatch, rows: list[tuple[bytes | None, bytes]]) -> pa.RecordBatch:
    kinds = [batch.schema.field(name).type for name in ("key", "value")]
    columns = [pa.array([r[i] for r in rows], kind) for i, kind in enumerate(kinds)]
    return pa.RecordBatch.from_arrays(columns, names=["key", "value"])


def values(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Of messages, for a table."""
    return batch.select(["value"])


def fan_out(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Drop multiples of three; duplicate even numbers."""
    rows = []
    for key, value in zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True):
        n = int(json.loads(value)["n"])
        if n % 3:
            rows += [(key, value + part) for part in ((b"#0", b"#1") if n % 2 == 0 else (b"#0",))]
    return _made(batch, rows)


def other_each_time(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Not deterministic: every run of a batch gives other values."""
    keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
    return _made(batch, [(k, v + b"#" + uuid.uuid4().hex.encode()) for k, v in zip(keys, values, strict=True)])


def to_topics(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Send every row to the sink's topic of the same number."""
    targets = ["-out".join(name.rsplit("-in", 1)) for name in batch.column("topic").to_pylist()]
    columns = [batch.column("key"), batch.column("value"), pa.array(targets, pa.string())]
    return pa.RecordBatch.from_arrays(columns, names=["key", "value", "topic"])


def sparse(batch: pa.RecordBatch) -> pa.RecordBatch:
    kept = [in_kept_range(str(json.loads(v)["id"])) for v in batch.column("value").to_pylist()]
    return batch.filter(pa.array(kept, pa.bool_()))


def refuses_poison(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A transform that was not written for such a record."""
    for value in batch.column("value").to_pylist():
        if is_poison(value):
            raise ValueError(f"{POISON}: cannot parse {value[:40]!r}")
    return batch


def drops_poison(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The fixed version."""
    kept = [not is_poison(v) for v in batch.column("value").to_pylist()]
    return batch.filter(pa.array(kept, pa.bool_()))


def windowed(frame: Any) -> Any:
    """Count and sum per key and window. In SQL expressions: this module is also loaded without Spark."""
    return (
        frame.selectExpr(
            "CAST(key AS STRING) AS k", "CAST(substr(get_json_object(CAST(value AS STRING), '$.id'), 2) AS INT) AS i"
        )
        .selectExpr("k", "i", "timestamp_seconds(i) AS at")
        .withWatermark("at", f"{WATERMARK_S} seconds")
        .selectExpr("k", "i", f"window(at, '{WINDOW_S} seconds') AS w")
        .groupBy("k", "w")
        .agg({"*": "count", "i": "sum"})
        .selectExpr("k", f"unix_timestamp(w.start) DIV {WINDOW_S} AS n", "`count(1)` AS c", "`sum(i)` AS s")
        .where(f"n < {WINDOWS}")
        .selectExpr(
            "k AS key",
            """concat('{"id": "', k, '@', n, '", "k": "', k, '", "n": ', n, ', "count": ', c, ', "sum": ', s, '}')"""
            " AS value",
        )
    )
