"""docs/migrate.md: from Spark's own Kafka connector to ours and back, on one checkpoint, with kills between.

A reader that is neither connector counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.kafka_tools import read_committed
from tests.spark.apps.migrate import query
from tests.support.halted import killed
from typer.testing import CliRunner, Result

from delivered import Pipeline
from delivered.audit.evidence import Verdict
from delivered.cli.main import app
from delivered_lab.supervisor import kill_tree, run

WAIT_S = 300.0
EXACTLY_ONCE = {"guarantee": "exactly_once"}
FIRST_START = {**EXACTLY_ONCE, "missingLedger": "accept"}


class Migration:
    """One checkpoint, a topic of two partitions with the numbers from 0 and from 10,000, and a target."""

    def __init__(self, kafka: Any, folder: Path, jars: str) -> None:
        self.bootstrap = kafka.bootstrap
        self.folder = folder
        self.jars = jars
        self.source, self.target = kafka.topic(2), kafka.topic(2)
        self.checkpoint = folder / "checkpoint"
        self.sent = 0
        self._commands = 0

    def send(self, each: int) -> None:
        """So many more in either partition: maxOffsetsPerTrigger=100 makes batches of 50 and 50."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.bootstrap, "acks": "all"})
        for n in range(self.sent, self.sent + each):
            for partition in (0, 1):
                producer.produce(self.source, str(10_000 * partition + n).encode(), partition=partition)
        assert producer.flush(30) == 0
        self.sent += each

    def expected(self) -> set[int]:
        return {10_000 * partition + n for partition in (0, 1) for n in range(self.sent)}

    def found(self, isolation: str = "read_committed") -> Counter[int]:
        return Counter(int(m.value()) for m in read_committed(self.bootstrap, self.target, isolation))

    def repeated(self, isolation: str = "read_committed") -> list[int]:
        """What came more than once. Nothing must be lost, nor be there that nobody sent."""
        found = self.found(isolation)
        assert set(found) == self.expected(), sorted(self.expected() - set(found))[:5]
        assert max(found.values()) <= 2
        return sorted(n for n, times in found.items() if times > 1)

    def unfinished(self) -> bool:
        """Whether Spark logged a batch that it did not finish: what the page tells a user to look at."""
        newest = {
            folder: max(int(p.name) for p in (self.checkpoint / folder).iterdir() if p.name.isdigit())
            for folder in ("offsets", "commits")
        }
        return newest["offsets"] > newest["commits"]

    def command(self, *connectors: str, hold: str | None = None, **options: str) -> list[str]:
        self._commands += 1
        given = {
            "bootstrap": self.bootstrap, "source": self.source, "sink": self.target, "jars": self.jars,
            "checkpoint": self.checkpoint, "turns": self.folder / f"turns-{self._commands}",
        }  # fmt: skip
        words = [f"--{k}={v}" for k, v in given.items()] + [f"--option={k}={v}" for k, v in options.items()]
        words += [f"--hold={hold}"] if hold else []
        return [sys.executable, "-m", "tests.spark.apps.migrate", *words, *connectors]

    def finish(self, spark: Any, connector: str, **options: str) -> None:
        """Run to the end of what is there, in this session."""
        given = argparse.Namespace(
            bootstrap=self.bootstrap, source=self.source, sink=self.target, checkpoint=str(self.checkpoint), hold=None
        )
        started = query(spark, connector, given, **options).start()
        assert started.awaitTermination(int(WAIT_S)), "the query did not end"

    def kill_sparks_own(self) -> None:
        """Spark's own connector dies when one task of batch 2 has written, and the other has not."""
        self.send(250)
        process = subprocess.Popen(self.command("kafka", hold="10149"), env=_environment(), start_new_session=True)
        try:
            deadline = time.monotonic() + WAIT_S
            while 149 not in self.found():
                assert process.poll() is None and time.monotonic() < deadline, "Spark's own connector did not write"
        finally:
            kill_tree(process)
            process.wait()


@pytest.fixture
def migration(kafka: Any, tmp_path: Path, spark_kafka_jars: str) -> Migration:
    if not spark_kafka_jars:
        pytest.skip("Spark's own Kafka connector cannot be had")
    return Migration(kafka, tmp_path, spark_kafka_jars)


@pytest.mark.matrix
def test_there_and_back_with_kills_between(migration: Migration, spark: Any) -> None:
    migration.kill_sparks_own()
    assert migration.unfinished()
    ours = migration.command("delivered_kafka", **FIRST_START)
    outcome = run(ours, "commit.decide:after@batch=3", migration.folder / "hits", timeout_s=WAIT_S, env=_environment())
    assert (outcome.exit_code, outcome.runs, len(outcome.kills)) == (0, 2, 1)
    # At the switch: what Spark's own connector wrote of the batch that it did not finish. No more.
    at_switch = list(range(100, 150))
    assert migration.repeated() == at_switch
    # From now on exactly once, and without the option of the first start.
    migration.send(100)
    again = migration.command("delivered_kafka", **EXACTLY_ONCE)
    outcome = run(
        again, "commit.decide:after@batch=5", migration.folder / "hits-2", timeout_s=WAIT_S, env=_environment()
    )
    assert (outcome.exit_code, outcome.runs, len(outcome.kills)) == (0, 2, 1)
    assert migration.repeated() == at_switch
    # Back: ours has finished its batch after the kill, so nothing repeats.
    assert not migration.unfinished()
    migration.send(100)
    migration.finish(spark, "kafka")
    assert migration.repeated() == at_switch
    # And to ours once more, without a kill: Spark's own connector has finished its batch, nothing repeats.
    assert not migration.unfinished()
    migration.send(50)
    migration.finish(spark, "delivered_kafka", **FIRST_START)
    assert migration.repeated() == at_switch


@pytest.mark.matrix
def test_back_without_finishing_repeats_that_batch(migration: Migration, spark: Any) -> None:
    """Ours dies between decision and the end of all transactions; Spark's own connector runs the batch again."""
    migration.send(150)
    command = migration.command("delivered_kafka", "kafka", **EXACTLY_ONCE)
    outcome = run(
        command, "commit.apply:after@batch=1", migration.folder / "hits", timeout_s=WAIT_S, env=_environment()
    )
    assert (outcome.exit_code, outcome.runs, len(outcome.kills)) == (0, 2, 1)
    batch = [*range(50, 100), *range(10_050, 10_100)]
    assert migration.repeated("read_uncommitted") == batch
    # A transaction that was not ended hides what follows it until it expires, or ours comes again and aborts it.
    migration.send(50)
    migration.finish(spark, "delivered_kafka", **FIRST_START)
    assert set(migration.repeated()) <= set(batch)


def test_ours_refuses_a_first_start_that_it_was_not_told_of(migration: Migration, spark: Any) -> None:
    """Without the option nothing is written, and Spark's own connector goes on as if nothing had been."""
    migration.send(50)
    migration.finish(spark, "kafka")
    migration.send(50)
    with pytest.raises(Exception, match="DELIVERED_LEDGER_MISSING"):
        migration.finish(spark, "delivered_kafka", **EXACTLY_ONCE)
    assert sum(migration.found().values()) == 100
    migration.finish(spark, "kafka")
    assert migration.repeated() == []


@pytest.mark.matrix
def test_adopted_on_a_new_checkpoint_nothing_is_read_twice_or_left_out(migration: Migration, spark: Any) -> None:
    """`delivered adopt`: from Spark's own connector to ours, killed between decision and Spark's log, audited."""
    migration.send(75)
    migration.finish(spark, "kafka")
    migration.send(75)
    ends = Counter(m.partition() for m in read_committed(migration.bootstrap, migration.target))
    old, file = migration.checkpoint, migration.folder / "orders.yaml"
    file.write_text(
        f"""
pipeline: orders
guarantee: exactly_once
checkpoint: ours
source: {{format: kafka, kafka.bootstrap.servers: "{migration.bootstrap}", subscribe: "{migration.source}",
         maxOffsetsPerTrigger: 50}}
transform: {{sql: "SELECT key, value FROM source"}}
sinks: [{{format: kafka, kafka.bootstrap.servers: "{migration.bootstrap}", topic: "{migration.target}"}}]
trigger: available_now
master: "local[2]"
"""
    )
    died = old / "offsets" / "99"
    died.write_text((old / "offsets" / "0").read_text())
    refused = _adopt(file, old, "--yes")
    assert refused.exit_code == 2 and "Batch 99" in refused.stderr and "not committed" in refused.stderr
    died.unlink()
    for words in (["--yes"], []):  # the second only looks at what the first one wrote
        shown = _adopt(file, old, *words)
        assert shown.exit_code == 0, shown.stderr
        assert [f"{migration.source}-{p}: starts at offset 75, 75 offsets ahead" in shown.stdout for p in (0, 1)] == [
            True,
            True,
        ]
    assert "at-least-once" in shown.stdout and "nothing written" in shown.stdout
    command = [sys.executable, "-m", "delivered.cli.main", "run", str(file)]
    killed(command, "commit.decide:after@batch=1", migration.folder)
    assert Pipeline.from_file(file).start(spark).awaitTermination(int(WAIT_S))
    assert migration.repeated() == []
    for wrong in (file, migration.folder / "again.yaml"):  # its checkpoint, and its ledger with another checkpoint
        if wrong != file:
            wrong.write_text(file.read_text().replace("checkpoint: ours", "checkpoint: other"))
        again = _adopt(wrong, old, "--yes")
        assert again.exit_code == 2 and "ADOPT_STARTED" in again.stderr, again.stderr
    report = Pipeline.from_file(file).audit(spark, sink_from={migration.target: {str(p): n for p, n in ends.items()}})
    assert report.verdict is Verdict.HELD and report.counts.sent == 150, str(report)


def _adopt(file: Path, old: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["adopt", str(file), "--from-checkpoint", str(old), *words])


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])}
