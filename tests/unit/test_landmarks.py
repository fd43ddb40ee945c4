"""Landmarks of a position in the checkpoint's sidecar, as a stream's reader keeps and checks them (P29)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from delivered.checkpoint.sidecar import LANDMARKS_FILE
from delivered.connectors.log import CONNECTOR, append
from delivered.contract.source import Offsets
from delivered.model.errors import InvariantBroken
from delivered.model.limits import LANDMARK_EVERY_S, LANDMARK_IDLE_EVERY_S
from delivered.pipeline.spec import Reading
from delivered.spark.readers import StreamReader


class Stream:
    """A log, and a checkpoint whose query starts any number of times."""

    def __init__(self, folder: Path) -> None:
        self.log, self.checkpoint = folder / "log", folder / "checkpoint"
        self.file = self.checkpoint / LANDMARKS_FILE

    def append(self, first: int, count: int) -> None:
        values = [f"v{i}".encode() for i in range(first, first + count)]
        append(str(self.log), pa.table({"key": values, "value": values}))

    def reader(self) -> StreamReader:
        source = CONNECTOR.source({"path": str(self.log)})
        return StreamReader(source, Reading(str(self.checkpoint)))

    def kept(self) -> Offsets:
        return dict(json.loads(self.file.read_text())["offsets"])


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    made = Stream(tmp_path)
    made.append(0, 10)
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the time of landmarks."""
    now = [0.0]
    monkeypatch.setattr("delivered.checkpoint.sidecar.time.monotonic", lambda: now[0])

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


def latest(reader: StreamReader, start: Offsets) -> Offsets:
    return reader.latestOffset(start, ReadAllAvailable())


def restored(stream: Stream) -> Offsets:
    """A stream that read twenty records, of a log that lost ten of them and got thirty others; its position."""
    shutil.copytree(stream.log, stream.log.with_name("copy"))
    stream.append(10, 10)
    reader = stream.reader()
    reader.prepareForTriggerAvailableNow()
    at = latest(reader, reader.initialOffset())
    assert latest(reader, at) == at
    reader.stop()
    assert stream.kept() == at
    stream.log.rename(stream.log.with_name("before"))
    stream.log.with_name("copy").rename(stream.log)
    stream.append(20, 30)
    return at


def test_another_history_is_noticed_at_each_start(stream: Stream) -> None:
    at = restored(stream)
    for start in (latest, lambda reader, at: reader.partitions({**at, "offsets": {"0": 0}}, at)):
        for _ in range(2):
            reader: Any = stream.reader()
            with pytest.raises(InvariantBroken, match=r"DATA_LOST.*older copy"):
                start(reader, at)
            reader.stop()
    assert stream.kept() == at


def test_a_checkpoint_that_was_restored_too_is_not_compared(stream: Stream) -> None:
    at = restored(stream)
    reader = stream.reader()
    earlier = {**at, "version": 0, "offsets": {"0": 10}}
    assert latest(reader, earlier)["offsets"] == {"0": 40}
    reader.stop()


def test_they_are_kept_now_and_then_not_for_each_batch(stream: Stream, clock: Callable[[float], None]) -> None:
    reader = stream.reader()
    first = latest(reader, reader.initialOffset())
    assert latest(reader, first) == first
    kept = stream.kept()
    stream.append(10, 10)
    second = latest(reader, first)
    assert latest(reader, second) == second
    assert stream.kept() == kept, "the stream has just written one"
    clock(LANDMARK_IDLE_EVERY_S)
    assert latest(reader, second) == second
    assert stream.kept() == second
    clock(LANDMARK_IDLE_EVERY_S)
    stream.append(20, 10)
    third = latest(reader, second)
    stream.append(30, 10)
    assert latest(reader, third) != third
    assert stream.kept() == second, "it has a backlog"
    clock(LANDMARK_EVERY_S)
    latest(reader, third)
    assert stream.kept() == third
    reader.stop()


def test_another_history_is_noticed_in_a_query_that_runs(stream: Stream, clock: Callable[[float], None]) -> None:
    """Not at once, but before its landmarks are replaced."""
    at = restored(stream)
    shutil.move(stream.log, stream.log.with_name("restored"))
    shutil.copytree(stream.log.with_name("before"), stream.log)
    reader = stream.reader()
    assert latest(reader, at) == at
    shutil.rmtree(stream.log)
    shutil.move(stream.log.with_name("restored"), stream.log)
    end = latest(reader, at)
    assert end["offsets"] == {"0": 40}
    clock(LANDMARK_EVERY_S)
    with pytest.raises(InvariantBroken, match=r"DATA_LOST.*older copy"):
        latest(reader, end)
    assert stream.kept() == at, "it is noticed again at the next start"
    reader.stop()


def test_without_a_checkpoint_nothing_is_kept(stream: Stream) -> None:
    reader = StreamReader(CONNECTOR.source({"path": str(stream.log)}), Reading())
    at = latest(reader, reader.initialOffset())
    assert latest(reader, at) == at
    assert not stream.file.exists()
    reader.stop()


def test_a_damaged_file_is_an_error(stream: Stream) -> None:
    stream.file.parent.mkdir(parents=True)
    stream.file.write_text("{")
    reader = stream.reader()
    with pytest.raises(InvariantBroken, match="LANDMARKS_DAMAGED"):
        latest(reader, reader.initialOffset())
    reader.stop()
