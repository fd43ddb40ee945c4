"""Sinks added to a pipeline and removed, and two drivers at once: rows of docs/checkpoint.md."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.kafka_tools import read_committed
from tests.spark.life import PLAIN, WAIT_S, Life, once, rows
from tests.support.halted import halted

import delivered
from delivered_lab.supervisor import release

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.servers import Kafka

checkpoint = pytest.mark.checkpoint
APP = Path(__file__).parent / "apps" / "run_file.py"
PLAN = "import delivered, sys; print(delivered.Pipeline.from_file(sys.argv[1]).plan())"


class Topic:
    """A topic as a sink, and which of the records of each start it has."""

    def __init__(self, kafka: Kafka, name: str) -> None:
        self.kafka, self.topic = kafka, kafka.topic(1)
        self.sink = delivered.kafka(kafka.bootstrap, topic=self.topic, name=name)

    def has(self) -> Counter[int]:
        return by_start((m.value() or b"").decode() for m in read_committed(self.kafka.bootstrap, self.topic))


def by_start(values: Any) -> Counter[int]:
    """Start -> how many of its 20 records."""
    return Counter(int(v) // 20 for v in values)


def whole(*starts: int) -> dict[int, int]:
    return dict.fromkeys(starts, 20)


@pytest.mark.matrix  # crash/test_group.py: sinks that come, go and change places
@checkpoint("a sink, added to others", "continues", "it gets the rows from the next batch on")
@checkpoint("a sink, removed", "continues", "what it has stays")
@checkpoint("the order of the sinks", "continues", "the first one's ledger decides, and the batches so far are known")
@checkpoint(
    "the sink whose ledger decided, removed", "refused", "`DECIDER_REMOVED`, until another one of the sinks has decided"
)
def test_sinks_come_and_go(kafka: Kafka, spark: SparkSession, tmp_path: Path) -> None:
    a, b, database = Topic(kafka, "a"), Topic(kafka, "b"), tmp_path / "out.db"
    life = Life(spark, tmp_path, a.sink, "SELECT key, value FROM source")
    table = delivered.sqlite(str(database), "rows", name="table", select=["CAST(value AS STRING) AS v"])

    def start(*sinks: Any, **more: Any) -> None:
        life.start(sinks=list(sinks), **more)

    start(a.sink)
    start(a.sink, b.sink)
    assert (a.has(), b.has()) == (whole(0, 1), whole(1))
    start(a.sink)
    assert (a.has(), b.has()) == (whole(0, 1, 2), whole(1))
    start(b.sink, a.sink)
    life.refused("DECIDER_REMOVED", sinks=[a.sink])  # its records (4) come with the next batch
    start(a.sink, b.sink)
    start(a.sink)
    assert (a.has(), b.has()) == (whole(*range(7)), whole(1, 3, 4, 5))

    # Its own transaction carries the decision: it always decides, and here its last batch is not finished.
    start(a.sink, table)
    newest = max(int(p.name) for p in (tmp_path / "checkpoint" / "commits").glob("[0-9]*"))
    for name in (f"{newest}", f".{newest}.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    life.refused("DECIDER_REMOVED", sinks=[a.sink])
    assert a.has() == whole(*range(8))
    start(a.sink, table)
    life.refused("DECIDER_REMOVED", sinks=[a.sink])
    start(a.sink, missing_ledger=True)
    start(a.sink)
    assert a.has() == whole(*range(13))
    assert by_start(rows(database)) == whole(7, 8, 9)
    assert b.has() == whole(1, 3, 4, 5)


@pytest.mark.matrix
@checkpoint("a copy of the checkpoint, run while the original runs", "refused", "`CHECKPOINT_OWNED`, on one machine")
@checkpoint("such a copy, with `--takeover` or on another machine", "continues", "the original is refused: `FENCED`")
@pytest.mark.parametrize(
    "logged",
    [pytest.param(True, id="the same batch", marks=pytest.mark.matrix), pytest.param(False, id="other offsets")],
)
def test_two_drivers_on_two_copies(spark: SparkSession, tmp_path: Path, logged: bool) -> None:
    """The original waits right before its decision, while the copy claims, decides the same batch and goes on."""
    life = Life(spark, tmp_path, delivered.sqlite(str(tmp_path / "out.db"), "rows"))
    pipeline = {
        "pipeline": "life", "guarantee": "exactly_once", "trigger": "available_now", "transform": {"sql": PLAIN},
        "source": {"format": "log", "path": "in", "maxOffsetsPerTrigger": 20}, "master": "local[1]",
        "sinks": [{"format": "sqlite", "path": "out.db", "table": "rows"}],
    }  # fmt: skip
    original, copy = tmp_path / "original.yaml", tmp_path / "copy.yaml"
    for file in (original, copy):
        file.write_text(yaml.safe_dump({**pipeline, "checkpoint": file.stem}))
    life.produce()
    life.produce()
    command = [sys.executable, str(APP), str(original)]
    with halted(command, "commit.decide:before@batch=1!wait", tmp_path) as (process, hit):
        shutil.copytree(tmp_path / "original", tmp_path / "copy")
        asked = subprocess.run([sys.executable, "-c", PLAN, str(copy)], capture_output=True, text=True)
        assert "DELIVERED_CHECKPOINT_OWNED" in asked.stdout, asked
        second = delivered.Pipeline.from_file(copy)
        if not logged:  # it was copied a moment earlier, and its batch 1 has 30 records
            for name in ("1", ".1.crc"):
                (tmp_path / "copy" / "offsets" / name).unlink()
            second = delivered.Pipeline.from_file(copy, {"source.maxOffsetsPerTrigger": 30})
        life.produce()
        second.start(spark, takeover=True).awaitTermination(WAIT_S)
        assert once(rows(tmp_path / "out.db"), 60)
        release(hit)
        assert process.wait(WAIT_S) != 0
    assert "DELIVERED_FENCED" in (tmp_path / "output").read_text()
    assert once(rows(tmp_path / "out.db"), 60)
    life.produce()
    with pytest.raises(Exception, match="DELIVERED_LEDGER_AHEAD"):
        delivered.Pipeline.from_file(original).start(spark).awaitTermination(WAIT_S)
    second.start(spark).awaitTermination(WAIT_S)
    assert once(rows(tmp_path / "out.db"), 80)
