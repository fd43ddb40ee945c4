"""A replay as a pipeline of its own: range, name, checkpoint, target; what is refused. With logs and SQLite."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import delivered
from delivered.connectors.kafka.source import KafkaSource
from delivered.connectors.log import LogOptions, append
from delivered.connectors.log.source import LogSource
from delivered.connectors.pulsar.source import PulsarSource
from delivered.model.errors import DeliveredError
from delivered.pipeline.spec import Reading
from delivered.spark.readers import StreamReader

HOURS = [datetime(2026, 11, 24, h, tzinfo=UTC) for h in range(4)]
MS = [int(h.timestamp() * 1000) for h in HOURS]


def filled(path: Path, partitions: int = 1) -> str:
    """Two records of each hour, in two files."""
    for hours in (HOURS[:2], HOURS[2:]):
        times = pa.array([h for h in hours for _ in range(2)], pa.timestamp("us", "UTC"))
        keys = [b"%d" % n for n in range(len(times))]
        append(str(path), pa.table({"key": keys, "value": keys, "timestamp": times}), partition_by=partitions)
    return str(path)


def shop(folder: Path, **more: Any) -> delivered.Pipeline:
    source = {"source": delivered.log(filled(folder / "log"))} if "sources" not in more else {}
    sinks = [delivered.sqlite(str(folder / "shop.db"), "orders")]
    return delivered.Pipeline(
        name="shop", guarantee="exactly_once", checkpoint=folder / "checkpoint", **source, **{"sinks": sinks, **more}
    )


def test_a_log_finds_records_by_time(tmp_path: Path) -> None:
    source = LogSource(LogOptions.parse({"path": (path := filled(tmp_path / "log", partitions=2))}))
    pieces = source.driver().slices({}, source.driver().newest() or {})
    rows = [r for piece in pieces for b in source.read(piece) for r in b.to_pylist()]
    for ms in (*MS, MS[1] + 1, MS[3] + 1):
        since = LogSource(LogOptions.parse({"path": path, "startingTimestamp": str(ms)})).driver().initial()["offsets"]
        for partition, first in since.items():
            own = [r for r in rows if r["partition"] == int(partition)]
            later = [r["offset"] for r in own if r["timestamp"].timestamp() * 1000 >= ms]
            assert first == min(later, default=len(own))


def test_a_replay_is_a_pipeline_of_its_own(tmp_path: Path) -> None:
    pipeline = shop(tmp_path, new_checkpoint=True)
    made = pipeline.replay("2026-11-24T01:00:00Z", "2026-11-24T03:00", "again")
    assert made.name.startswith("shop.replay-")
    assert made.checkpoint == f"{pipeline.checkpoint}/delivered/{made.name}"
    assert (made.sinks[0].label, made.new_checkpoint, made.trigger.kind) == (
        "sqlite shop.db again",
        False,
        "available_now",
    )
    assert made.until["source"]["offsets"] == {"0": 6}
    kept = json.loads(Path(made.checkpoint, "delivered/source-offsets.json").read_text())
    assert kept["offsets"]["offsets"] == {"0": 2}
    assert (pipeline.name, pipeline.until, pipeline.sinks[0].label) == ("shop", {}, "sqlite shop.db orders")
    other = pipeline.replay(str(MS[0]), "2026-11-24T03:00", "again")
    assert other.name != made.name


def test_the_range_stays_that_of_the_first_call(tmp_path: Path) -> None:
    first = shop(tmp_path).replay("earliest", "latest", "again")
    append(str(tmp_path / "log"), pa.table({"key": [b"later"], "value": [b"later"]}))
    again = shop_again(tmp_path).replay("earliest", "latest", "again")
    assert (again.name, again.until) == (first.name, first.until)
    assert again.until["source"]["offsets"] == {"0": 8}


def shop_again(folder: Path) -> delivered.Pipeline:
    return delivered.Pipeline(
        name="shop", guarantee="exactly_once", checkpoint=folder / "checkpoint",
        source=delivered.log(str(folder / "log"), maxOffsetsPerTrigger=3),
        sinks=[delivered.sqlite(str(folder / "shop.db"), "orders")],
    )  # fmt: skip


def test_a_bounded_reader_ends_and_acknowledges_nothing(tmp_path: Path) -> None:
    filled(tmp_path / "log", partitions=2)
    source = LogSource(LogOptions.parse({"path": str(tmp_path / "log"), "maxOffsetsPerTrigger": "2", "reader": "me"}))
    ends = source.driver().newest() or {}
    until = {"version": ends["version"], "offsets": {"0": ends["offsets"]["0"] - 1, "1": ends["offsets"]["1"]}}
    append(str(tmp_path / "log"), pa.table({"key": [b"later"] * 9, "value": [b"x"] * 9}), partition_by=2)
    reader = StreamReader(source, Reading(str(tmp_path / "checkpoint"), until=until))
    reader.prepareForTriggerAvailableNow()
    at, batches, offsets = reader.initialOffset(), 0, []
    while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
        for piece in reader.partitions(at, end):
            offsets += [(r["partition"], r["offset"]) for b in reader.read(piece) for r in b.to_pylist()]
        reader.commit(end)
        at, batches = end, batches + 1
    assert at == until
    assert batches > 1
    assert sorted(offsets) == [(int(p), n) for p, end in until["offsets"].items() for n in range(end)]
    assert not (tmp_path / "log" / "_progress").exists()


def test_the_earlier_of_two_positions() -> None:
    kafka = KafkaSource.__new__(KafkaSource)
    assert kafka.earlier({"t": {"0": 5, "1": 2, "2": 9}}, {"t": {"0": 3, "1": 4}}) == {"t": {"0": 3, "1": 2}}
    pulsar = PulsarSource.__new__(PulsarSource)
    one, two = "persistent://public/default/one", "persistent://public/default/two"
    end, until = {one: {"-1": "7:5"}, two: {"0": "9:1>12"}}, {one: {"-1": "7:5:2"}, two: {"0": "10:0"}}
    found = pulsar.earlier(end, until)
    assert {t: at for t, at in found.items() if t in until} == {one: {"-1": "7:5:2"}, two: {"0": "9:1>12"}}


@pytest.mark.parametrize(
    ("start", "end", "into", "code"),
    [
        ("yesterday", "latest", "again", "REPLAY_TIME"),
        ("{not json", "latest", "again", "REPLAY_TIME"),
        ("2099-01-01", "latest", "again", "REPLAY_FUTURE"),
        ("earliest", "2099-01-01T00:00:00+02:00", "again", "REPLAY_FUTURE"),
        ("2026-11-24T03:00", "2026-11-24T01:00", "again", "REPLAY_RANGE"),
        ("latest", "earliest", "again", "REPLAY_RANGE"),
        ('{"7": 1}', "latest", "again", "PARTITION_UNKNOWN"),
        ("earliest", "latest", "orders", "REPLAY_TARGET"),
        ("earliest", "latest", delivered.endpoint("nosystem"), "FORMAT_UNKNOWN"),
    ],
)
def test_bad_input(tmp_path: Path, start: str, end: str, into: Any, code: str) -> None:
    with pytest.raises(DeliveredError, match=code):
        shop(tmp_path).replay(start, end, into)


def test_the_same_table_by_another_spelling_is_the_pipelines(tmp_path: Path) -> None:
    pipeline = shop(tmp_path)
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE orders /* delivered " + "a" * 32 + " */ (key BLOB)")
    with pytest.raises(DeliveredError, match="REPLAY_TARGET"):
        pipeline.replay("earliest", "latest", delivered.sqlite(f"{tmp_path}/./shop.db", "ORDERS"))


def test_sources_that_cannot_be_replayed(tmp_path: Path) -> None:
    for source in (
        delivered.endpoint("outbox", url=f"sqlite:///{tmp_path}/o.db"),
        delivered.endpoint("spark:rate"),
    ):
        with pytest.raises(DeliveredError, match="REPLAY_SOURCE"):
            shop(tmp_path, sources={"a": source}).replay("earliest", "latest", "again")


def test_records_that_are_gone(tmp_path: Path) -> None:
    """Retention may have deleted records of the time: only earliest says that this is known."""
    import deltalake

    pipeline = shop(tmp_path)
    deltalake.DeltaTable(str(tmp_path / "log")).delete("offset < 4")
    with pytest.raises(DeliveredError, match=r"REPLAY_RECORDS_GONE.*before offset 4"):
        pipeline.replay("2026-11-24T01:00", "latest", "again")
    assert pipeline.replay("2026-11-24T03:00", "latest", "again").until["source"]["offsets"] == {"0": 8}
    assert pipeline.replay("earliest", "latest", "again").until["source"]["offsets"] == {"0": 8}
