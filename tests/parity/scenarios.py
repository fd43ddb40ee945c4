"""Observations for the rows of `behaviours`: each function runs one connector and returns facts by name.

A scenario covers many rows with few queries. It knows neither the expected outcome nor which connector it runs.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.parity.world import Facts, Query, World, attempt, offsets, told

from delivered.connectors.kafka import SourceOptions

parse = SourceOptions.parse

# ------------------------------------------------------------------------------------------------ batch reads


def batch_offsets(w: World) -> Facts:
    topic = w.topic(10, 10, 1)
    facts: Facts = {
        "defaults": w.read(subscribe=topic),
        "earliest to latest": w.read(subscribe=topic, startingOffsets="earliest", endingOffsets="latest"),
        "words in any case": w.read(subscribe=topic, startingOffsets="earLiEst", endingOffsets="laTest"),
        "numbers, -2 and -1": w.read(
            subscribe=topic, startingOffsets=offsets(topic, [-2, 3, 0]), endingOffsets=offsets(topic, [-1, 7, 1])
        ),
        "a partition without offsets between": w.read(
            subscribe=topic, startingOffsets=offsets(topic, [10, 9, 0]), endingOffsets=offsets(topic, [10, 10, 0])
        ),
        "assign": w.read(assign=json.dumps({topic: [0, 2]})),
        "pattern": w.read(subscribePattern=f"{topic}$"),
        "pattern found in a part of the name": w.read(subscribePattern=topic[1:] + "$"),
        "pattern without a match": w.read(subscribePattern="no-such-topic-.*"),
        "two topics": w.read(subscribe=f"{topic},{w.topic(1)}"),
        "an empty topic": w.read(subscribe=w.topic(0, 0)),
        "start at the end": w.read(subscribe=topic, startingOffsets=offsets(topic, [10, 10, 1])),
        "a missing topic": w.read(subscribe="no-such-topic"),
        "assign a missing partition": w.read(assign=json.dumps({topic: [0, 7]})),
        "start names too few partitions": w.read(subscribe=topic, startingOffsets=offsets(topic, [0, 0])),
        "start names a foreign partition": w.read(subscribe=topic, startingOffsets=offsets(topic, [0, 0, 0, 0])),
        "start and end name different partitions": w.read(
            subscribe=topic, startingOffsets=offsets(topic, [0, 0, 0]), endingOffsets=offsets(topic, [1, 1])
        ),
        "start after end, as given": w.read(
            subscribe=topic, startingOffsets=offsets(topic, [1, 1, 1]), endingOffsets=offsets(topic, [0, 0, 0])
        ),
        "start beyond the latest": w.read(subscribe=topic, startingOffsets=offsets(topic, [50, 50, 50])),
    }
    frame = w.batch(subscribe=topic)
    facts["the same DataFrame twice in a query"] = told(
        r[0] for r in frame.union(frame).select("value").where("value < '03'").collect()
    )
    rdd = frame.select("value").rdd
    rdd.count()
    w.send(topic, {2: range(201, 205)})
    facts["an RDD of it read again sees later records"] = told(r[0] for r in rdd.collect())
    facts["a DataFrame read again sees later records"] = told(r[0] for r in frame.select("value").collect())
    return facts


def batch_times(w: World) -> Facts:
    now = int(time.time() * 1000) // 1000 * 1000
    first, second, third, end = (now - 5000 + 1000 * n for n in range(4))
    topic = str(w.kafka.topic(3))
    for start, at in ((0, first), (10, second), (20, third)):
        w.send(topic, {p: [v for v in range(start, start + 10) if v % 3 == p] for p in range(3)}, timestamp=at)
    each: Callable[[int], str] = lambda at: offsets(topic, [at] * 3)  # noqa: E731
    never = 2**62

    def read(**options: Any) -> Any:
        return w.read(subscribe=topic, **options)

    return {
        "per partition, start and end": read(
            startingOffsetsByTimestamp=each(second), endingOffsetsByTimestamp=each(third)
        ),
        "start by time, end by offset": read(
            startingOffsetsByTimestamp=each(first), endingOffsets=offsets(topic, [-1, -1, 1])
        ),
        "start by offset, end by time": read(
            startingOffsets=offsets(topic, [-2, -2, 0]), endingOffsetsByTimestamp=each(third)
        ),
        "start by time alone": read(startingOffsetsByTimestamp=each(second)),
        "end by time alone": read(endingOffsetsByTimestamp=each(third)),
        "startingTimestamp and endingTimestamp": read(startingTimestamp=second, endingTimestamp=third),
        "startingTimestamp alone": read(startingTimestamp=second),
        "endingTimestamp alone": read(endingTimestamp=third),
        "no record at or after the start": read(startingOffsetsByTimestamp=offsets(topic, [second, second, never])),
        "no record, strategy error": read(startingTimestamp=end, startingOffsetsByTimestampStrategy="error"),
        "no record, strategy latest": read(
            startingOffsetsByTimestamp=offsets(topic, [second, second, end]),
            startingOffsetsByTimestampStrategy="latest",
        ),
        "no record at or after the end": read(endingOffsetsByTimestamp=offsets(topic, [second, second, never])),
        "startingTimestamp wins over startingOffsetsByTimestamp": read(
            startingTimestamp=third, startingOffsetsByTimestamp=each(second), startingOffsets="earliest"
        ),
        "startingOffsetsByTimestamp wins over startingOffsets": read(
            startingOffsetsByTimestamp=each(second), startingOffsets="earliest"
        ),
        "start after end, by time": read(
            startingOffsets=offsets(topic, [7, 7, 7]), endingOffsetsByTimestamp=each(second)
        ),
        "times name too few partitions": read(startingOffsetsByTimestamp=offsets(topic, [second] * 2)),
        "times name a foreign partition": read(startingOffsetsByTimestamp=offsets(topic, [second] * 4)),
        "with assign": w.read(assign=json.dumps({topic: [0]}), startingOffsetsByTimestamp=offsets(topic, [second])),
        "with a pattern": w.read(subscribePattern=f"^{topic}$", startingTimestamp=third),
    }


def batch_columns(w: World) -> Facts:
    topic = str(w.kafka.topic(1))
    began = int(time.time() * 1000)
    w.send(topic, {0: ["1"]}, headers=[("a", b"b"), ("c", b"d")])
    w.send(topic, {0: ["2"]}, headers=[("e", b"f"), ("e", b"g"), ("n", None)], key=b"k")
    w.send(topic, {0: ["3"]})
    w.send(topic, {0: [None]}, key=b"4")
    w.send(topic, {0: [None]})
    plain = w.batch(subscribe=topic)
    frame = w.batch(subscribe=topic, includeHeaders="true")
    rows = frame.orderBy("offset").collect()
    appended = str(w.kafka.topic(1, message_timestamp_type="LogAppendTime"))
    w.send(appended, {0: ["1"]})
    told_headers = [
        None if r.headers is None else " ".join(f"{h.key}={h.value and bytes(h.value).decode()}" for h in r.headers)
        for r in rows
    ]
    wild = str(w.kafka.topic(1, message_timestamp_after_max_ms=2**63 - 1))
    w.send(wild, {0: ["1"]}, timestamp=1712345678123456789)
    counts = frame.selectExpr("count(*)", "count(key)", "count(value)", "max(offset)").first()
    return {
        "columns": plain.schema.simpleString(),
        "with headers": frame.schema.simpleString().removeprefix(plain.schema.simpleString()[:-1] + ","),
        "all columns may be null": all(f.nullable for f in frame.schema),
        "key and value are bytes": f"{type(rows[1].key).__name__} {bytes(rows[1].key).decode()}",
        "a missing key is null": rows[0].key is None,
        "a null value is null": rows[3].value is None and rows[3].key is not None,
        "key and value null": rows[4].value is None and rows[4].key is None,
        "topic, partition, offset": f"{rows[0].topic == topic} {rows[0].partition} {[r.offset for r in rows]}",
        "time of a record": began - 1000 <= rows[0].timestamp.timestamp() * 1000 <= time.time() * 1000 + 1000,
        "a time in nanoseconds, beyond all dates": attempt(
            lambda: w.batch(subscribe=wild).selectExpr("unix_micros(timestamp)").first()[0]
        ),
        "timestampType of a producer": rows[0].timestampType,
        "timestampType of the broker": w.batch(subscribe=appended).first().timestampType,
        "headers in order": told_headers[0],
        "a header twice, and one without value": told_headers[1],
        "no headers are null": told_headers[2],
        "counts without values": " ".join(str(c) for c in counts),
        "filter and projection": told(
            r[0] for r in frame.where("offset >= 1 AND key IS NOT NULL").select("offset").collect()
        ),
    }


def batch_pieces(w: World) -> Facts:
    """Ranges of tasks, as in the tests of Spark's range calculator, by what each task reads."""
    topic = str(w.kafka.topic(3))
    w.send(topic, {p: range(n) for p, n in enumerate((10_001, 15_001, 20_001))})

    def pieces(minimum: int | None, *ranges: tuple[int, int]) -> str:
        starts, ends = [r[0] for r in ranges], [r[1] for r in ranges]
        options: dict[str, Any] = {} if minimum is None else {"minPartitions": minimum}
        frame = w.batch(
            assign=json.dumps({topic: list(range(len(ranges)))}),
            startingOffsets=offsets(topic, starts), endingOffsets=offsets(topic, ends), **options,
        )  # fmt: skip
        task = frame.selectExpr("spark_partition_id() AS task", "partition", "offset")
        found = task.groupBy("task", "partition").agg({"offset": "min", "*": "count"}).collect()
        cut = sorted((r["partition"], r["min(offset)"], r["min(offset)"] + r["count(1)"]) for r in found)
        return " ".join(f"{p}:{a}-{b}" for p, a, b in cut)

    return {
        "one task for each partition": pieces(None, (1, 2), (1, 2), (1, 2)),
        "empty partitions have no task": pieces(None, (1, 2), (1, 1), (1, 1)),
        "minPartitions equals the partitions": pieces(3, (1, 2), (1, 2), (1, 2)),
        "one partition split in four": pieces(4, (1, 5)),
        "skewed partitions": pieces(4, (1, 5), (1, 21)),
        "very skewed partitions": pieces(4, (1, 2), (1, 1001)),
        "empty ranges ignored, the rest split": pieces(4, (1, 1), (1, 21)),
        "minPartitions below the partitions": pieces(1, (1, 5), (1, 21)),
        "range is no multiple of minPartitions": pieces(3, (1, 11)),
        "skewed partitions and an empty one": pieces(4, (1, 5), (1, 21), (1, 1)),
        "no offset is dropped": pieces(6, (0, 10), (0, 10), (0, 1)),
        "three large ones in nine": pieces(9, (0, 10000), (0, 15000), (0, 20000)),
        "a small one and two large ones": pieces(6, (0, 500), (0, 12000), (0, 15001)),
        "two small ones and a large one": pieces(6, (0, 1), (0, 1), (0, 10000)),
        "specific offsets in three": pieces(3, (1, 4)),
        "two partitions, one split in three": pieces(4, (0, 100), (0, 3)),
        "minPartitions above the offsets": pieces(9, (0, 2), (0, 1)),
    }


def batch_transactions(w: World) -> Facts:
    topic = str(w.kafka.topic(1))

    def both() -> str:
        return "; ".join(
            str(w.read(subscribe=topic, kafka__isolation__level=level))
            for level in ("read_committed", "read_uncommitted")
        )

    commit = w.transaction(topic, range(1, 6), end="open")
    facts: Facts = {"open": both(), "open, by default": w.read(subscribe=topic)}
    commit()
    facts["committed"] = both()
    w.transaction(topic, range(6, 11), end="abort")
    facts["aborted"] = both()
    facts["aborted, by default"] = w.read(subscribe=topic)
    w.transaction(topic, range(11, 16))
    facts["committed after aborted"] = both()
    only = str(w.kafka.topic(1))
    w.transaction(only, range(5), end="abort")
    facts["nothing but aborted"] = w.read(subscribe=only, kafka__isolation__level="read_committed")
    return facts


def batch_losses(w: World) -> Facts:
    topic = w.topic(50)
    w.delete_records(topic, 20)
    start = offsets(topic, [0])
    facts: Facts = {
        "deleted records, failOnDataLoss": w.read(subscribe=topic, startingOffsets=start),
        "deleted records, failOnDataLoss=false": w.read(subscribe=topic, startingOffsets=start, failOnDataLoss="false"),
        "earliest after a deletion": w.read(subscribe=topic),
    }
    frame = w.batch(subscribe=topic, startingOffsets="earliest")
    w.delete_records(topic, 40)
    facts["earliest is looked up when it is read"] = attempt(
        lambda: told(r[0] for r in frame.select("value").collect())
    )
    return facts


# ---------------------------------------------------------------------------------------------------- streams


def stream_start(w: World, start: str) -> Facts:
    """A stream from its start, records in between, a restart, records during the stop, and new partitions."""
    how, where, loss = start.replace(" from ", ", ").replace("failOnDataLoss=", "").split(", ")
    topic = str(w.kafka.topic(5, name=w.name() + "-suffix"))
    now = int(time.time() * 1000) // 1000 * 1000 - 5000
    before, after = now, now + 1000
    w.send(topic, {0: [20], 1: [10], 2: [0, 1], 3: [30, 31], 4: [40, 41, 42]}, timestamp=before)
    w.send(topic, {0: [21, 22], 1: [11, 12], 2: [2], 3: [32]}, timestamp=after)
    if where == "startingTimestamp":
        w.send(topic, {4: [43, 44]}, timestamp=after)
    options: dict[str, Any] = {"failOnDataLoss": loss, "kafka__metadata__max__age__ms": "100"}
    options[how] = {
        "subscribe": topic,
        "subscribePattern": f"{topic[:-3]}.*",
        "assign": json.dumps({topic: list(range(5))}),
    }[how]
    options |= {
        "earliest": {"startingOffsets": "earliest"},
        "latest": {"startingOffsets": "latest"},
        "offsets": {"startingOffsets": offsets(topic, [-2, -1, 0, 1, 2])},
        "startingOffsetsByTimestamp": {"startingOffsetsByTimestamp": offsets(topic, [after] * 4 + [before])},
        "startingTimestamp": {"startingTimestamp": after},
    }[where]
    checkpoint = w.checkpoint()
    first = Query(w, w.stream(**options), checkpoint)
    began = first.catch_up()
    w.send(topic, {0: [50], 1: [51]})
    first.catch_up()
    first.stop()
    w.send(topic, {p: [60 + p] for p in range(5)})
    again = Query(w, w.stream(**options), checkpoint)
    again.catch_up()
    if how != "assign":
        w.add_partitions(topic, 7)
        w.send(topic, {5: [70], 6: [71]})
        w.until(lambda: "70..71" in again.catch_up())
    w.send(topic, {0: [80]})
    again.catch_up()
    again.stop()
    return {start: f"{began}; in all {told([*first.values(), *again.values()])}"}


def stream_limits(w: World) -> Facts:
    topic = w.topic(101, 11, 1)
    first = w.topic(15)
    limited = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 10}
    batches = w.run(w.checkpoint(), **limited)
    checkpoint = w.checkpoint()
    once = Query(w, w.stream(**limited), checkpoint, trigger={"once": True})
    once.end()
    w.send(topic, {1: range(111, 121)})
    twice = Query(w, w.stream(**limited), checkpoint, trigger={"once": True})
    twice.end()
    stop = w.checkpoint()
    query = Query(w, w.stream(**limited), stop)
    query.wait(2)
    query.stop()
    rest = w.run(stop, **limited)
    five = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 5}
    small, large = w.topic(10), w.topic(0)
    w.send(large, {0: range(1000, 1020)})
    union = w.stream(subscribe=small, **five).union(w.stream(subscribe=large, **five))
    behind = w.run(w.checkpoint(), frame=union)
    low = w.topic(5)
    return {
        "AvailableNow keeps the limit": len(w.run(w.checkpoint(), subscribe=first, **five)),
        "first batch, shared by backlog": told(batches[0]),
        "second batch, shared by backlog": told(batches[1]),
        "all batches": told(v for b in batches for v in b),
        "Once has no limit": f"{len(once.batches)} {once.told()}",
        "Once again has no limit": f"{len(twice.batches)} {twice.told()}",
        "a stop between limited batches": told({*query.values(), *(v for b in rest for v in b)}),
        "the largest long as limit": w.run_told(
            subscribe=low, startingOffsets=offsets(low, [2]), maxOffsetsPerTrigger=2**63 - 1
        ),
        "two limited sources, one at its end": " | ".join(told(b) for b in behind),
    }


def stream_min_offsets(w: World) -> Facts:
    topic = w.topic(10, 5, 1)
    options = {"subscribe": topic, "startingOffsets": "earliest", "minOffsetsPerTrigger": 15}
    query = Query(w, w.stream(**options, maxTriggerDelay="5m"), w.checkpoint())
    first = query.catch_up()
    w.send(topic, {1: range(105, 110)})
    fewer = query.catch_up() == first
    w.send(topic, {0: range(10, 20)})
    w.until(lambda: query.catch_up() != first)
    enough = query.catch_up()
    query.stop()
    checkpoint = w.checkpoint()
    short = Query(w, w.stream(**options, maxTriggerDelay="2s"), checkpoint)
    begun = short.catch_up()
    w.send(topic, {1: range(110, 112)})
    w.until(lambda: short.catch_up() != begun)
    late = short.catch_up()
    short.stop()
    w.send(topic, {1: range(112, 114)})
    last = Query(w, w.stream(**options, maxTriggerDelay="5m"), checkpoint, trigger={"once": True})
    last.end()
    both = Query(w, w.stream(**options, maxTriggerDelay="5m", maxOffsetsPerTrigger=20), w.checkpoint())
    both.catch_up()
    both.stop()
    return {
        "the first batch is not held back": first,
        "fewer offsets wait": fewer,
        "enough offsets start a batch": enough,
        "maxTriggerDelay ends the wait": late,
        "Once does not wait": last.told(),
        "with a maximum, first batch": len(both.batches[0]),
    }


def _transactions(w: World, level: str) -> str:
    """Batches of three offsets over four transactions: commit markers and aborted records take offsets, too."""
    topic = str(w.kafka.topic(1))
    query = Query(
        w,
        w.stream(
            subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=3, kafka__isolation__level=level,
            kafka__metadata__max__age__ms="100",
        ),
        w.checkpoint(),
    )  # fmt: skip
    seen: list[str] = []

    def look() -> None:
        query.catch_up()
        seen.append(query.told())
        query.batches.clear()

    look()
    commit = w.transaction(topic, range(5), end="open")
    look()
    commit()
    look()
    w.transaction(topic, range(6, 11), end="abort")
    look()
    w.transaction(topic, range(12, 17))
    look()
    w.transaction(topic, [18])
    w.transaction(topic, [20])
    w.transaction(topic, [22, 23])
    look()
    query.stop()
    return ", ".join(seen)


def stream_transactions(w: World) -> Facts:
    facts: Facts = {level: _transactions(w, level) for level in ("read_committed", "read_uncommitted")}
    topic = str(w.kafka.topic(1))
    w.transaction(topic, range(4))
    query = Query(
        w, w.stream(subscribe=topic, startingOffsets="earliest"), w.checkpoint(),
        during=lambda n: None if n else w.transaction(topic, range(4, 8)) and None,
    )  # fmt: skip
    query.catch_up()
    query.catch_up()
    query.stop()
    facts["records sent while a batch is read belong to the next"] = " | ".join(told(b) for b in query.batches if b)
    nulls = str(w.kafka.topic(1))
    w.send(nulls, {0: [None] * 2})
    w.send(nulls, {0: [None]}, key=b"1")
    w.send(nulls, {0: ["2"]})
    rows: list[Any] = []
    frame = w.stream(subscribe=nulls, startingOffsets="earliest")
    writer = frame.writeStream.foreachBatch(lambda d, _: rows.extend(d.select("key", "value").collect()))
    found = writer.trigger(availableNow=True).option("checkpointLocation", w.checkpoint()).start()
    found.awaitTermination(60)
    facts["null keys and values"] = " ".join(
        f"{r[0] and bytes(r[0]).decode()}={r[1] and bytes(r[1]).decode()}" for r in rows
    )
    return facts


def stream_times(w: World) -> Facts:
    """Start by a time after which one partition has no record."""
    topic = str(w.kafka.topic(2))
    now = int(time.time() * 1000) - 5000
    w.send(topic, {0: [1, 2], 1: [11]}, timestamp=now)
    w.send(topic, {0: [3]}, timestamp=now + 1000)
    facts: Facts = {}
    for how, options in {
        "subscribe": {"subscribe": topic},
        "subscribePattern": {"subscribePattern": f"^{topic}$"},
    }.items():
        for what, times in {
            "startingOffsetsByTimestamp": {"startingOffsetsByTimestamp": offsets(topic, [now + 1000] * 2)},
            "startingTimestamp": {"startingTimestamp": now + 1000},
        }.items():
            for strategy in ("", "error", "latest"):
                given = {"startingOffsetsByTimestampStrategy": strategy} if strategy else {}
                name = f"{how}, {what}, no record after it, {strategy or 'default'}"
                facts[name] = attempt(lambda o={**options, **times, **given}: w.run_told(**o))
    return facts


def stream_losses(w: World) -> Facts:
    topic = w.topic(50)
    w.delete_records(topic, 20)
    start = {"subscribe": topic, "startingOffsets": offsets(topic, [0])}
    facts: Facts = {
        "deleted before the start, failOnDataLoss=false": attempt(lambda: w.run_told(failOnDataLoss="false", **start)),
        "deleted before the start, failOnDataLoss": attempt(lambda: w.run_told(**start)),
    }
    for loss in ("true", "false"):
        other = w.topic(10)
        checkpoint = w.checkpoint()
        given = {"subscribe": other, "startingOffsets": "earliest", "failOnDataLoss": loss}
        w.run(checkpoint, **given)
        w.send(other, {0: range(10, 20)})
        w.delete_records(other, 15)
        facts[f"deleted during a stop, failOnDataLoss={loss}"] = attempt(
            lambda g=given, c=checkpoint: told(v for b in w.run(c, **g) for v in b)
        )
    for loss in ("true", "false"):
        other = w.topic(10)
        checkpoint = w.checkpoint()
        given = {"subscribe": other, "startingOffsets": "earliest", "failOnDataLoss": loss}
        w.run(checkpoint, **given)
        w.delete(other)
        w.topic(4, name=other)
        facts[f"recreated during a stop, shorter, failOnDataLoss={loss}"] = attempt(
            lambda g=given, c=checkpoint: told(v for b in w.run(c, **g) for v in b)
        )
        w.send(other, {0: range(4, 20)})
    longer = w.topic(5)
    checkpoint = w.checkpoint()
    given = {"subscribe": longer, "startingOffsets": "earliest"}
    w.run(checkpoint, **given)
    w.delete(longer)
    w.topic(9, name=longer)
    facts["recreated during a stop, longer"] = attempt(lambda: told(v for b in w.run(checkpoint, **given) for v in b))
    noticed = w.topic(5)
    checkpoint = w.checkpoint()
    given = {"subscribe": noticed, "startingOffsets": "earliest", "checkpointLocation": checkpoint}
    w.run(checkpoint, **given)
    w.delete(noticed)
    w.topic(9, name=noticed)
    facts["recreated during a stop, longer, checkpointLocation on the source"] = attempt(
        lambda: told(v for b in w.run(checkpoint, **given) for v in b)
    )
    fewer = w.topic(3, 3, 3)
    checkpoint = w.checkpoint()
    given = {"subscribe": fewer, "startingOffsets": "earliest"}
    w.run(checkpoint, **given)
    facts["a topic removed from subscribe"] = attempt(
        lambda: told(v for b in w.run(checkpoint, subscribe=w.topic(2), startingOffsets="earliest") for v in b)
    )
    return facts


def stream_available_now_changes(w: World) -> Facts:
    """The topic is deleted and recreated while a query runs to what was its end."""
    facts: Facts = {}
    for name, partitions, records in (
        ("with fewer partitions", 3, range(15)),
        ("with fewer records", 5, range(10)),
        ("with as many records", 5, range(15)),
    ):
        topic = w.topic(15, 0, 0, 0, 0)

        def remake(number: int, topic: str = topic, partitions: int = partitions, records: range = records) -> None:
            if number == 0:
                w.delete(topic)
                w.kafka.topic(partitions, name=topic)
                w.send(topic, {0: records})

        def run(topic: str = topic, remake: Callable[[int], None] = remake) -> str:
            options = {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 5}
            frame = w.stream(**options, kafka__metadata__max__age__ms="100")
            query = Query(w, frame, w.checkpoint(), trigger={"availableNow": True}, during=remake)
            query.end()
            return query.told()

        facts[f"AvailableNow, recreated {name}"] = attempt(run)
    topic = w.topic(7)
    checkpoint = w.checkpoint()
    failing = w.stream(subscribe=topic, startingOffsets="earliest").selectExpr(
        "IF(CAST(CAST(value AS STRING) AS INT) = 6, raise_error('error for 6'), CAST(value AS STRING)) AS value"
    )

    def fails() -> str:
        query = Query(w, failing, checkpoint, trigger={"availableNow": True})
        try:
            query.end()
        except Exception as error:
            return "the row's own error" if "error for 6" in str(error) else str(error)[:200]
        return "no error"

    before = fails()
    w.add_partitions(topic, 3)
    facts["AvailableNow, a failed batch again after new partitions"] = f"{before}, {fails()}"
    return facts


def stream_patterns(w: World) -> Facts:
    prefix = w.name()
    options = {"subscribePattern": f"{prefix}-.*", "kafka__metadata__max__age__ms": "100"}
    first = w.topic(3, name=f"{prefix}-a")
    query = Query(w, w.stream(startingOffsets="latest", **options), w.checkpoint())
    query.catch_up()
    w.topic(2, name=f"{prefix}-b")
    w.until(lambda: query.catch_up() != "nothing")
    facts: Facts = {"a topic created later is read from its start": query.catch_up()}
    query.stop()
    checkpoint = w.checkpoint()
    loose = Query(w, w.stream(startingOffsets="earliest", failOnDataLoss="false", **options), checkpoint)
    loose.catch_up()
    w.delete(first)
    w.topic(0, name=f"{prefix}-c")
    w.send(f"{prefix}-c", {0: [900]})
    w.until(lambda: "900" in loose.catch_up())
    facts["a topic deleted, failOnDataLoss=false"] = told(loose.values())
    loose.stop()
    logs = sorted((Path(checkpoint) / "offsets").glob("[0-9]*"), key=lambda p: int(p.name))
    facts["no empty offsets are logged"] = all("\n{}" not in p.read_text() for p in logs)
    again = w.checkpoint()
    strict = {"startingOffsets": "earliest", "subscribePattern": f"{prefix}-[de]"}
    w.topic(2, name=f"{prefix}-d")
    w.topic(2, name=f"{prefix}-e")
    w.run(again, **strict)
    w.delete(f"{prefix}-e")
    w.topic(1, name=f"{prefix}-e")
    facts["a topic recreated during a stop, shorter"] = attempt(
        lambda: told(v for b in w.run(again, **strict) for v in b)
    )
    inside = w.topic(2, name=f"x{prefix}-y")
    both = Query(w, w.stream(startingOffsets="earliest", subscribePattern=f"{prefix}-y"), w.checkpoint())
    facts["a pattern found in a part of the name"] = both.catch_up()
    both.stop()
    w.delete(inside)
    return facts


def stream_churn(w: World) -> Facts:
    """Topics are created, deleted, recreated and written to as fast as the broker can, while a query reads them."""
    prefix, chance = w.name(), random.Random(7)
    options = {
        "subscribePattern": f"{prefix}-.*", "startingOffsets": "earliest", "failOnDataLoss": "false",
        "kafka__metadata__max__age__ms": "1", "kafka__request__timeout__ms": "3000",
        "fetchOffset__numRetries": "10", "fetchOffset__retryIntervalMs": "500",
    }  # fmt: skip
    query = Query(w, w.stream(**options), w.checkpoint())
    there: list[str] = []
    deleted: list[str] = []
    made = 0
    for _ in range(CHURN_STEPS):
        step = chance.randrange(10)
        if step == 0 or not there:
            there.append(w.create(f"{prefix}-{made}"))
            made += 1
        elif step == 1:
            deleted.append(there.pop(chance.randrange(len(there))))
            w.delete(deleted[-1])
        elif step == 2 and deleted:
            there.append(w.create(deleted.pop(chance.randrange(len(deleted)))))
        else:
            for topic in there:
                w.send(topic, {0: range(chance.randrange(10))})
        if (failed := query.query.exception()) is not None:
            return {"topics created, deleted and recreated all the time": str(failed)[:300]}
    w.send(w.create(f"{prefix}-last"), {0: [7777]})
    w.until(lambda: "7777" in query.catch_up())
    query.stop()
    return {"topics created, deleted and recreated all the time": True}


CHURN_STEPS = 150
"""Some ten of each kind; Spark's own test goes on for 20 s."""


def stream_checkpoints(w: World) -> Facts:
    topic = w.topic(3, 2)
    options = {"subscribe": topic, "startingOffsets": "earliest"}
    checkpoint = w.checkpoint()
    w.run(checkpoint, **options)
    logged = (Path(checkpoint) / "offsets" / "0").read_text().splitlines()[-1]
    facts: Facts = {"form of logged offsets": logged.replace(topic, "t").replace(" ", "")}
    idle = w.checkpoint()
    empty = w.topic(0)
    latest = {"subscribe": empty, "startingOffsets": "latest"}
    start = Query(w, w.stream(**latest), idle)
    start.catch_up()
    start.stop()
    w.send(empty, {0: [1, 2]})
    facts["a start without records is remembered"] = told(v for b in w.run(idle, **latest) for v in b)
    logged_2_1 = w.checkpoint()
    old = w.topic(5)
    w.run(logged_2_1, subscribe=old, startingOffsets="earliest")
    file = Path(logged_2_1) / "offsets" / "0"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], lines[1], json.dumps({old: {"0": 2}}, separators=(",", ":"))]))
    (file.parent / ".0.crc").unlink(missing_ok=True)
    facts["offsets that Spark's connector logged are read"] = attempt(
        lambda: told(v for b in w.run(logged_2_1, subscribe=old, startingOffsets="earliest") for v in b)
    )
    for name, written in (
        ("first offsets that Spark 2.1.0 wrote", f"\x19{json.dumps({old: {'0': 3}})}"),
        ("first offsets that a newer Spark wrote", f"\0v99999\n{json.dumps({old: {'0': 3}})}"),
    ):
        stored = w.checkpoint()
        place = Path(stored) / "sources" / "0" / "0"
        place.parent.mkdir(parents=True)
        place.write_text(written)
        facts[f"{name}, checkpointLocation on the source"] = attempt(
            lambda at=stored: told(
                v for b in w.run(at, subscribe=old, startingOffsets="earliest", checkpointLocation=at) for v in b
            )
        )
    sparks_own = Path(checkpoint) / "sources" / "0" / "0"
    facts["first offsets are in sources/0/0, after a zero byte"] = (
        sparks_own.exists() and sparks_own.read_bytes()[0] == 0
    )
    changed = w.checkpoint()
    w.run(changed, **options)
    w.send(topic, {0: [50]})
    facts["other starting offsets do not count for a checkpoint"] = told(
        v for b in w.run(changed, subscribe=topic, startingOffsets="latest") for v in b
    )
    more = w.topic(2)
    facts["a topic added to subscribe"] = told(
        v for b in w.run(changed, subscribe=f"{topic},{more}", startingOffsets="latest") for v in b
    )
    duplicates = w.topic(3)
    kept = w.checkpoint()
    columns = ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    frame = lambda: w.stream(subscribe=duplicates, startingOffsets="earliest").select(*columns).dropDuplicates()  # noqa: E731
    w.run(kept, frame=frame())
    w.send(duplicates, {0: [7]}, headers=[("a", b"b")])
    facts["state of a query without headers continues"] = told(v for b in w.run(kept, frame=frame()) for v in b)
    return facts


def stream_progress(w: World) -> Facts:
    topic = w.topic(5, 5)
    query = Query(w, w.stream(subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=2), w.checkpoint())
    query.catch_up()
    listed = [p["sources"][0] for p in query.query.recentProgress]
    query.stop()
    full = Query(w, w.stream(subscribe=topic, startingOffsets="earliest"), w.checkpoint())
    full.catch_up()
    progress = full.query.lastProgress
    full.stop()
    last, raw = progress["sources"][0], json.loads(progress.json)["sources"][0]

    def behind(source: dict[str, Any]) -> float:
        return float(source["metrics"].get("avgOffsetsBehindLatest", "nan"))

    def offsets(value: Any) -> str:
        return json.dumps(value).replace(topic, "t").replace(" ", "")

    return {
        "numInputRows": sum(s["numInputRows"] for s in listed),
        "names of metrics": " ".join(sorted(last["metrics"])),
        "behind with a limit": any(behind(s) > 0 for s in listed),
        "not behind without one": behind(last) == 0,
        "endOffset": offsets(raw["endOffset"]),
        "latestOffset": offsets(raw["latestOffset"]),
        "description names the topic": topic in last["description"],
        "the same in the progress as JSON, which Spark's JVM wrote": raw.get("metrics", {}) == dict(last["metrics"]),
    }


def stream_shapes(w: World) -> Facts:
    topic = w.topic(1)
    counts: list[Any] = []
    frame = w.stream(subscribe=topic, startingOffsets="earliest")
    windows = frame.withWatermark("timestamp", "10 seconds").groupBy(_window()).count()
    query = (
        windows.writeStream.foreachBatch(lambda d, _: counts.extend(d.collect()))
        .outputMode("complete").option("checkpointLocation", w.checkpoint()).start()
    )  # fmt: skip
    query.processAllAvailable()
    query.stop()
    begins = counts[-1]["window"]["start"].timestamp()
    joined = str(w.kafka.topic(2))
    values = w.stream(subscribe=joined, startingOffsets="earliest").selectExpr(
        "CAST(CAST(value AS STRING) AS INT) AS value", "CAST(CAST(value AS STRING) AS INT) % 5 AS key"
    )
    pairs = values.join(values.withColumnRenamed("value", "other"), "key").selectExpr(
        "concat(value, '-', other) AS value"
    )
    checkpoint = w.checkpoint()
    w.send(joined, {0: [1], 1: [2]})
    join = Query(w, pairs, checkpoint)
    join.catch_up()
    w.send(joined, {0: [6], 1: [3]})
    said = join.catch_up()
    rows = sum(json.loads(p.json)["numInputRows"] for p in join.query.recentProgress)
    join.stop()
    w.spark.conf.set("spark.sql.exchange.reuse", "false")
    try:
        twice = Query(w, pairs, w.checkpoint())
        twice.catch_up()
        twice.stop()
    finally:
        w.spark.conf.unset("spark.sql.exchange.reuse")
    scanned = sum(json.loads(p.json)["numInputRows"] for p in twice.query.recentProgress)
    offsets_logged = (Path(checkpoint) / "offsets" / "0").read_text().splitlines()
    wide = w.topic(10, 10, 1)
    tasks: list[int] = []
    cut = w.stream(subscribe=wide, startingOffsets="earliest", minPartitions="6")
    found = (
        cut.writeStream.foreachBatch(lambda d, _: tasks.append(d.rdd.getNumPartitions()))
        .trigger(availableNow=True).option("checkpointLocation", w.checkpoint()).start()
    )  # fmt: skip
    found.awaitTermination(60)
    return {
        "watermark on timestamp": f"{counts[-1]['count']} {time.time() - 600 < begins <= time.time()}",
        "self-join": said,
        "self-join logs one offset": len(offsets_logged) - 2,
        "rows read by a self-join": rows,
        "rows read by a self-join without exchange reuse": scanned,
        "minPartitions": max(tasks) >= 6,
    }


def _window() -> Any:
    from pyspark.sql.functions import window

    return window("timestamp", "5 seconds")


def stream_during(w: World) -> Facts:
    """Changes in Kafka while a batch runs."""
    topic = w.topic(10)

    def remake(number: int) -> None:
        if number == 0:
            w.delete(topic)
            w.kafka.topic(1, name=topic)

    query = Query(
        w, w.stream(subscribe=topic, startingOffsets="earliest", failOnDataLoss="false"), w.checkpoint(),
        during=remake,
    )  # fmt: skip
    attempt(query.catch_up)
    ended = query.query.exception() is None
    query.stop()
    groups = {}
    w.spark.conf.set("spark.sql.streaming.kafka.useDeprecatedOffsetFetching", "true")
    try:
        for option in ("kafka__group__id", "groupIdPrefix"):
            name = f"{w.name()}-group"
            reading = Query(
                w, w.stream(subscribe=w.topic(2), startingOffsets="earliest", **{option: name}), w.checkpoint()
            )
            reading.catch_up()
            found = [g.group_id for g in w.kafka.admin().list_consumer_groups().result(30).valid]
            groups[option] = any(g.startswith(name) for g in found)
            reading.stop()
    finally:
        w.spark.conf.unset("spark.sql.streaming.kafka.useDeprecatedOffsetFetching")
    stops = Query(w, w.stream(subscribe=w.topic(2), startingOffsets="earliest"), w.checkpoint())
    stops.catch_up()
    stops.stop()
    return {
        "a topic deleted in a batch, failOnDataLoss=false": ended,
        "a consumer group named by kafka.group.id, with deprecated offset fetching": groups["kafka__group__id"],
        "a consumer group named by groupIdPrefix, with deprecated offset fetching": groups["groupIdPrefix"],
        "a query stops on request": not stops.query.isActive and stops.query.exception() is None,
    }


def stream_modes(w: World) -> Facts:
    """Triggers and modes beyond micro-batches."""
    topic = w.topic(3)

    def run(trigger: dict[str, str], output: str = "append") -> Facts:
        frame = w.stream(subscribe=topic, startingOffsets="earliest").select("value")
        query = w.write_stream(frame, output, topic=w.topic(0)).trigger(**trigger).start()
        try:
            query.processAllAvailable() if "continuous" not in trigger else None
            return "runs"
        finally:
            query.stop()

    target = w.topic(0)

    def asynchronous() -> Any:
        frame = w.stream(subscribe=topic, startingOffsets="earliest").select("value")
        query = w.write_stream(frame, topic=target, asyncProgressTrackingEnabled="true").start()
        try:
            query.processAllAvailable()
        finally:
            query.stop()
        return w.values(target)

    return {
        "continuous processing": attempt(lambda: run({"continuous": "1 second"})),
        "asynchronous progress": attempt(asynchronous),
        "update mode": attempt(lambda: run({"processingTime": "0 seconds"}, "update")),
        "complete mode without aggregation": attempt(lambda: run({"processingTime": "0 seconds"}, "complete")),
    }


# ------------------------------------------------------------------------------------------------------ sinks


def sink_rows(w: World) -> Facts:
    """Written rows as a reader of the topic sees them."""
    headers = "array(struct('a' AS key, CAST('b' AS BINARY) AS value))"
    twice = "array(struct('e' AS key, CAST('f' AS BINARY) AS value), struct('e' AS key, CAST('g' AS BINARY) AS value))"

    def wrote(*columns: str, partitions: int = 1, rows: int = 1, **options: Any) -> Any:
        topic = str(w.kafka.topic(partitions))
        frame = w.spark.range(rows).selectExpr(*(c.replace("$t", topic) for c in columns))
        given = options if "'$t' AS topic" in columns else {"topic": topic, **options}
        written = w.write(frame, **given)
        if written != "written":
            return written
        return w.records(topic)

    def text(records: Any) -> str:
        if isinstance(records, str):
            return records
        shown = []
        for r in records:
            shown.append(
                f"{r.key() and r.key().decode()}={r.value() and r.value().decode()}"
                + "".join(f" {k}:{v and v.decode()}" for k, v in r.headers() or [])
            )
        return ", ".join(sorted(shown)) or "nothing"

    def places(records: Any) -> Any:
        return records if isinstance(records, str) else " ".join(sorted({str(r.partition()) for r in records}))

    def count(records: Any) -> Any:
        return records if isinstance(records, str) else len(records)

    keyed = ("CAST(id AS STRING) AS key", "CAST(id AS STRING) AS value")
    spread = {r.key(): r.partition() for r in wrote(*keyed, partitions=4, rows=5)}
    nulls = wrote(*keyed, "CAST(NULL AS INT) AS partition", partitions=4, rows=5)
    return {
        "value alone": text(wrote("'v' AS value")),
        "key and value": text(wrote("'k' AS key", "'v' AS value")),
        "binary key and value": text(wrote("CAST('k' AS BINARY) AS key", "CAST('v' AS BINARY) AS value")),
        "null key": text(wrote("CAST(NULL AS STRING) AS key", "'v' AS value")),
        "null value": text(wrote("'k' AS key", "CAST(NULL AS STRING) AS value")),
        "headers": text(wrote("'v' AS value", f"{headers} AS headers")),
        "a header twice": text(wrote("'v' AS value", f"{twice} AS headers")),
        "null headers": text(wrote("'v' AS value", f"IF(id < 0, {headers}, NULL) AS headers")),
        "a header without a key": text(
            wrote("'v' AS value", "array(struct(CAST(NULL AS STRING) AS key, CAST('b' AS BINARY) AS value)) AS headers")
        ),
        "a header without a value": text(
            wrote("'v' AS value", "array(struct('a' AS key, CAST(NULL AS BINARY) AS value)) AS headers")
        ),
        "a null among headers": text(wrote("'v' AS value", f"array_append({headers}, NULL) AS headers")),
        "topic column": text(wrote("'v' AS value", "'$t' AS topic")),
        "topic option wins over topic column": text(wrote("'v' AS value", "'no-such-topic' AS topic")),
        "null topic column with the option": text(wrote("'v' AS value", "CAST(NULL AS STRING) AS topic")),
        "many rows": told(r.value() for r in wrote("CAST(id AS STRING) AS value", rows=1000)),
        "structs by to_json": text(wrote("to_json(struct(id)) AS value")),
        "keys spread over partitions": " ".join(str(spread[str(n).encode()]) for n in range(5)),
        "partition column": places(wrote(*keyed, "2 AS partition", partitions=4, rows=5)),
        "null partition column": {r.key(): r.partition() for r in nulls} == spread,
        "partition column wins over partitioner.class": places(
            wrote(*keyed, "2 AS partition", partitions=4, rows=5, kafka__partitioner__class=_ROUND_ROBIN)
        ),
        "partitioner.class": count(wrote(*keyed, partitions=4, rows=5, kafka__partitioner__class=_ROUND_ROBIN)),
        "a missing partition": places(wrote(*keyed, "7 AS partition", **w.impatient)),
        "large values, small buffer": count(
            wrote("repeat('x', 15000) AS value", rows=200, kafka__buffer__memory="16384", kafka__batch__size="1000")
        ),
        "columns in upper case": text(wrote("'k' AS KEY", "'v' AS VALUE")),
    }


_ROUND_ROBIN = "org.apache.kafka.clients.producer.RoundRobinPartitioner"


def sink_refusals(w: World) -> Facts:
    topic = w.topic(0)
    one = w.spark.range(1)

    def written(*columns: str, mode: str = "append", **options: Any) -> Any:
        return w.write(one.selectExpr(*columns), mode, **options)

    given = {"topic": topic}
    return {
        "no topic": written("'v' AS value"),
        "no value": written("'v' AS key", **given),
        "null topic without the option": written("'v' AS value", "CAST(NULL AS STRING) AS topic"),
        "an invalid topic name": written("'v' AS value", "'a b' AS topic", **w.impatient),
        "topic is a number": written("'v' AS value", "1 AS topic"),
        "value is a number": written("id AS value", **given),
        "key is a number": written("'v' AS value", "id AS key", **given),
        "partition is text": written("'v' AS value", "'1' AS partition", **given),
        "partition is a long": written("'v' AS value", "0L AS partition", **given),
        "headers of another type": written("'v' AS value", "'h' AS headers", **given),
        "overwrite": written("'v' AS value", mode="overwrite", **given),
        "ignore": written("'v' AS value", mode="ignore", **given),
        "error if exists": written("'v' AS value", mode="errorifexists", **given),
        "a missing topic": written("'v' AS value", topic="no-such-topic", **w.impatient),
        "unknown column": written("'v' AS value", "id AS other", **given),
        "columns of the source": written("'v' AS value", "0L AS offset", "current_timestamp() AS timestamp", **given),
        "key.serializer": written("'v' AS value", kafka__key__serializer="foo", **given),
        "value.serializer": written("'v' AS value", kafka__value__serializer="foo", **given),
        "acks=1": written("'v' AS value", kafka__acks="1", **given),
        "acks=all": written("'v' AS value", kafka__acks="all", **given),
        "retries": written("'v' AS value", kafka__retries="3", **given),
        "enable.idempotence": written("'v' AS value", kafka__enable__idempotence="true", **given),
        "max.block.ms": written("'v' AS value", kafka__max__block__ms="5000", **given),
        "buffer.memory": written("'v' AS value", kafka__buffer__memory="33554432", **given),
        "linger.ms": written("'v' AS value", kafka__linger__ms="1", **given),
        "compression.type": written("'v' AS value", kafka__compression__type="gzip", **given),
        "an unknown option": written("'v' AS value", tpoic="x", **given),
        "includeHeaders": written("'v' AS value", includeHeaders="true", **given),
        "a DataFrame of the source, unchanged": w.write(
            w.batch(subscribe=w.topic(2), includeHeaders="true"), topic=w.topic(0)
        ),
    }


def sink_streams(w: World) -> Facts:
    def run(select: tuple[str, ...], target: str, mode: str = "append", **options: Any) -> tuple[Any, Any]:
        source = w.topic(5)
        frame = w.stream(subscribe=source, startingOffsets="earliest").selectExpr(*select)
        query = w.write_stream(frame, mode, **options).start()
        try:
            query.processAllAvailable()
            w.send(source, {0: range(5, 10)})
            query.processAllAvailable()
            progress = [json.loads(p.json)["sink"]["numOutputRows"] for p in query.recentProgress]
        finally:
            query.stop()
        return w.values(target), sum(progress)

    def values(*select: str, **options: Any) -> Any:
        topic = w.topic(0)
        chosen = tuple(s.replace("$t", topic) for s in select)
        given = {k: v.replace("$t", topic) for k, v in options.items()}
        return attempt(lambda: run(chosen, topic, **given)[0])

    target = w.topic(0)
    return {
        "topic column": values("'$t' AS topic", "value"),
        "topic option": values("value", topic="$t"),
        "topic option wins over topic column": values("'foo' AS topic", "value", topic="$t"),
        "no topic": values("value AS key", "value"),
        "no value": values("'$t' AS topic", "value AS key"),
        "topic is a number": values("1 AS topic", "value"),
        "value is a number": values("'$t' AS topic", "offset AS value"),
        "key is a number": values("'$t' AS topic", "offset AS key", "value"),
        "partition is text": values("'$t' AS topic", "value", "'1' AS partition"),
        "a missing topic": values("value", topic="no-such-topic", **w.impatient),
        "key.serializer": values("value", topic="$t", kafka__key__serializer="foo"),
        "value.serializer": values("value", topic="$t", kafka__value__serializer="foo"),
        "progress reports the rows written": attempt(lambda: run(("value",), target, topic=target)[1]),
    }


# ---------------------------------------------------------------------------------------------------- options

_JSON = '{"t": {"0": 0}}'
STREAM_OPTIONS: dict[str, dict[str, str]] = {
    "no topic": {},
    "subscribe and subscribePattern": {"subscribe": "t", "subscribePattern": "t.*"},
    "subscribe and assign": {"subscribe": "t", "assign": '{"t":[0]}'},
    "empty assign": {"assign": ""},
    "assign without partitions": {"assign": "{}"},
    "empty subscribe": {"subscribe": ""},
    "empty subscribePattern": {"subscribePattern": ""},
    "no bootstrap.servers": {"subscribe": "t", "kafka.bootstrap.servers": ""},
    "minOffsetsPerTrigger": {"subscribe": "t", "minOffsetsPerTrigger": "10"},
    "maxTriggerDelay": {"subscribe": "t", "minOffsetsPerTrigger": "10", "maxTriggerDelay": "5s"},
    "minOffsetsPerTrigger above the maximum": {
        "subscribe": "t",
        "minOffsetsPerTrigger": "20",
        "maxOffsetsPerTrigger": "15",
    },
    "minPartitions": {"subscribe": "t", "minPartitions": "4"},
    "maxRecordsPerPartition": {"subscribe": "t", "maxRecordsPerPartition": "10"},
    "MAXOFFSETSPERTRIGGER": {"subscribe": "t", "MAXOFFSETSPERTRIGGER": "1111"},
    "maxoffsetspertrigger": {"subscribe": "t", "maxoffsetspertrigger": "1111"},
    "MINOFFSETSPERTRIGGER": {"subscribe": "t", "MINOFFSETSPERTRIGGER": "1111"},
    "MAXTRIGGERDELAY": {"subscribe": "t", "MAXTRIGGERDELAY": "1111"},
    "KAFKACONSUMER.POLLTIMEOUTMS": {"subscribe": "t", "KAFKACONSUMER.POLLTIMEOUTMS": "1111"},
    "FETCHOFFSET.NUMRETRIES": {"subscribe": "t", "FETCHOFFSET.NUMRETRIES": "1111"},
    "FETCHOFFSET.RETRYINTERVALMS": {"subscribe": "t", "FETCHOFFSET.RETRYINTERVALMS": "1111"},
    "kafka.group.id": {"subscribe": "t", "kafka.group.id": "g"},
    "groupIdPrefix": {"subscribe": "t", "groupIdPrefix": "g"},
    "kafka.auto.offset.reset": {"subscribe": "t", "kafka.auto.offset.reset": "someValue"},
    "kafka.auto.offset.reset none": {"subscribe": "t", "kafka.auto.offset.reset": "none"},
    "kafka.auto.offset.reset earliest": {"subscribe": "t", "kafka.auto.offset.reset": "earliest"},
    "kafka.auto.offset.reset latest": {"subscribe": "t", "kafka.auto.offset.reset": "latest"},
    "kafka.enable.auto.commit": {"subscribe": "t", "kafka.enable.auto.commit": "true"},
    "kafka.interceptor.classes": {"subscribe": "t", "kafka.interceptor.classes": "someValue"},
    "kafka.key.deserializer": {"subscribe": "t", "kafka.key.deserializer": "someValue"},
    "kafka.value.deserializer": {"subscribe": "t", "kafka.value.deserializer": "someValue"},
    "kafka.isolation.level": {"subscribe": "t", "kafka.isolation.level": "read_uncommitted"},
    "kafka.max.poll.records": {"subscribe": "t", "kafka.max.poll.records": "10"},
    "kafka.metadata.max.age.ms": {"subscribe": "t", "kafka.metadata.max.age.ms": "100"},
    "kafka.request.timeout.ms": {"subscribe": "t", "kafka.request.timeout.ms": "3000"},
    "kafka.default.api.timeout.ms": {"subscribe": "t", "kafka.default.api.timeout.ms": "3000"},
    "startingOffsets in any case": {"subscribe": "t", "startingOffsets": "eArLiEsT"},
    "startingOffsets with a topic in capitals": {"subscribe": "topic-A", "startingOffsets": '{"topic-A":{"0":23}}'},
    "startingOffsets that are not JSON": {"subscribe": "t", "startingOffsets": "first"},
    "startingOffsets as a list": {"subscribe": "t", "startingOffsets": "[1]"},
    "startingOffsets of text": {"subscribe": "t", "startingOffsets": '{"t":{"0":"x"}}'},
    "startingOffsetsByTimestamp": {"subscribe": "t", "startingOffsetsByTimestamp": '{"t":{"0":1000}}'},
    "startingTimestamp": {"subscribe": "t", "startingTimestamp": "1000"},
    "startingTimestamp of text": {"subscribe": "t", "startingTimestamp": "yesterday"},
    "unknown strategy": {"subscribe": "t", "startingOffsetsByTimestampStrategy": "earliest"},
    "includeHeaders": {"subscribe": "t", "includeHeaders": "TRUE"},
    "an unknown option": {"subscribe": "t", "startingOffset": "earliest"},
}
"""Options of a stream's source, accepted or refused by `load()`."""


def options_stream(w: World) -> Facts:
    """Spark's connector by `load()`; this one by its option parser, without a session."""

    def load(given: dict[str, str]) -> str:
        if w.connector.ours:
            parse({k.lower(): v for k, v in {"kafka.bootstrap.servers": "fake:9092", **given}.items()})
        else:
            w.spark.readStream.format("kafka").options(**{"kafka.bootstrap.servers": "fake:9092", **given}).load()
        return "accepted"

    return {name: attempt(lambda g=given: load(g)) for name, given in STREAM_OPTIONS.items()}


def options_batch(w: World) -> Facts:
    topic = w.topic(2)
    return {
        "start at latest": w.read(subscribe=topic, startingOffsets="latest"),
        "start at latest, as -1": w.read(subscribe=topic, startingOffsets=offsets(topic, [-1])),
        "end at earliest": w.read(subscribe=topic, endingOffsets="earliest"),
        "end at earliest, as -2": w.read(subscribe=topic, endingOffsets=offsets(topic, [-2])),
        "no topic": w.read(),
        "subscribe and subscribePattern": w.read(subscribe=topic, subscribePattern=f"{topic}.*"),
        "subscribe and assign": w.read(subscribe=topic, assign=json.dumps({topic: [0]})),
        "empty assign": w.read(assign=""),
        "empty subscribe": w.read(subscribe=""),
        "empty subscribePattern": w.read(subscribePattern=""),
        "minPartitions=a": w.read(subscribe=topic, minPartitions="a"),
        "minPartitions=1.0": w.read(subscribe=topic, minPartitions="1.0"),
        "minPartitions=0": w.read(subscribe=topic, minPartitions="0"),
        "minPartitions=-1": w.read(subscribe=topic, minPartitions="-1"),
        "invalid isolation.level": w.read(subscribe=topic, kafka__isolation__level="intentionally_invalid"),
        "an offset below -2": w.read(subscribe=topic, startingOffsets=offsets(topic, [-3])),
    }


def options_start(w: World) -> Facts:
    """Batch options on a stream."""

    def run(**options: Any) -> Any:
        return attempt(lambda: w.run_told(subscribe=w.topic(1), startingOffsets="earliest", **options))

    return {
        "endingOffsets of a stream": run(endingOffsets="latest"),
        "endingOffsetsByTimestamp of a stream": run(endingOffsetsByTimestamp='{"t":{"0":1000}}'),
        "endingTimestamp of a stream": run(endingTimestamp="1000"),
        "the format by the name of its class": attempt(
            lambda: (
                w.spark.readStream.format(w.connector.class_name)
                .options(**{"kafka.bootstrap.servers": w.kafka.bootstrap, "subscribe": "t"})
                .load()
                and "accepted"
            )
        ),
    }
