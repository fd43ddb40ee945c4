"""A standalone cluster of two workers and four executors, in which everything is killed at random: what each guarantee
lets through, and the longest time without a decision."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.kafka_tools import produce, read_committed
from tests.spark.standalone import Standalone, kill_tree

import delivered

if TYPE_CHECKING:
    from tests.support.servers import Kafka

APP = Path(__file__).parent / "apps" / "guarded.py"
RECORDS, AT_ONCE = 12_000, 400
KILLS = int(os.environ.get("DELIVERED_CLUSTER_KILLS", "8"))
"""Of each guarantee."""
WAIT_S = 400.0
_CONF = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.cores.max": "4",
    "spark.driver.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "4",
}


class Job:
    """A driver that is started again whenever it ended, as a supervisor does."""

    def __init__(self, cluster: Standalone, arguments: list[str]) -> None:
        self._cluster, self._arguments = cluster, arguments
        self.starts = 0
        self.process: psutil.Popen | None = None

    def keep_running(self) -> None:
        if self.process is None or self.process.poll() is not None:
            self.process = self._cluster.submit(APP, *self._arguments, conf=_CONF)
            self.starts += 1


def _executor(cluster: Standalone, _: Job, chance: random.Random) -> None:
    if found := cluster.executors():
        kill_tree(chance.choice(found))


def _worker(cluster: Standalone, _: Job, chance: random.Random) -> None:
    number = chance.randrange(len(cluster.workers))
    kill_tree(cluster.workers[number])
    cluster.workers[number] = cluster.start_worker(number)


def _master(cluster: Standalone, _: Job, __: random.Random) -> None:
    assert cluster.master is not None
    kill_tree(cluster.master)
    cluster.start_master()


def _driver(_: Standalone, job: Job, __: random.Random) -> None:
    if job.process is not None and job.process.poll() is None:
        kill_tree(job.process)


def _shuffle(cluster: Standalone, _: Job, __: random.Random) -> None:
    """The files that executors keep for tasks of the next stage."""
    for folder in cluster.folder.glob("local/*/*/blockmgr-*/*"):
        shutil.rmtree(folder, ignore_errors=True)


FAULTS: tuple[Callable[[Standalone, Job, random.Random], None], ...] = (_executor, _worker, _master, _driver, _shuffle)


@pytest.mark.matrix
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once", "at_most_once"])
def test_everything_is_killed(kafka: Kafka, tmp_path: Path, guarantee: str) -> None:
    seed = int(os.environ.get("DELIVERED_SEED", time.time_ns() % 2**31))
    chance = random.Random(seed)
    source, sink, stop = kafka.topic(4), kafka.topic(4), tmp_path / "stop"
    values = [b"%d" % n for n in range(RECORDS)]
    produce(kafka.bootstrap, source, [(v, v) for v in values])
    pipeline = delivered.Pipeline(
        name=sink,
        guarantee=guarantee,
        checkpoint=tmp_path / "checkpoint",
        source=delivered.kafka(kafka.bootstrap, subscribe=source, startingOffsets="earliest"),
        sinks=[delivered.kafka(kafka.bootstrap, topic=sink)],
    )
    local = {"SPARK_LOCAL_DIRS": str(tmp_path / "local"), "SPARK_WORKER_OPTS": "-Dspark.worker.cleanup.enabled=false"}
    longest_s, last, at, kills = 0.0, -1, time.monotonic(), Counter[str]()
    with Standalone(tmp_path, sys.executable, local, cores=2) as cluster:
        given = [kafka.bootstrap, source, sink, str(tmp_path / "checkpoint"), guarantee, str(stop)]
        job = Job(cluster, given)
        most = 0
        try:
            while (position := _logged(tmp_path)) < RECORDS // AT_ONCE - 1 or kills.total() < KILLS:
                job.keep_running()
                most = max(most, len(cluster.executors()))
                if position > last:
                    longest_s, last, at = (
                        max(longest_s, time.monotonic() - at if last >= 0 else 0.0),
                        position,
                        time.monotonic(),
                    )
                    if kills.total() < KILLS and chance.random() < 0.3:
                        fault = chance.choice(FAULTS)
                        fault(cluster, job, chance)
                        kills[fault.__name__.strip("_")] += 1
                elif position == RECORDS // AT_ONCE - 1:
                    break
                assert time.monotonic() - at < WAIT_S, (seed, kills, (tmp_path / "driver.log").read_text()[-6000:])
                time.sleep(0.1)
            stop.touch()
            assert job.process is not None
            assert job.process.wait(WAIT_S) == 0
        finally:
            if job.process is not None and job.process.poll() is None:
                kill_tree(job.process)
    found = Counter(int(m.value()) for m in read_committed(kafka.bootstrap, sink))
    lost, doubled = RECORDS - len(found), found.total() - len(found)
    (state,) = pipeline.status().sinks
    report = {
        "guarantee": guarantee, "seed": seed, "kills": dict(kills), "starts": job.starts, "executors": most,
        "longest_s": round(longest_s, 1), "lost": lost, "doubled": doubled, "batches": last + 1,
    }  # fmt: skip
    print(json.dumps(report))
    Path("build").mkdir(exist_ok=True)
    with Path("build/cluster-kills.jsonl").open("a") as out:
        out.write(json.dumps(report) + "\n")
    assert most == 4 and kills.total() > 0, report
    assert lost == 0 or guarantee == "at_most_once", report
    assert doubled == 0 or guarantee == "at_least_once", report
    assert state.records + state.given_up >= RECORDS if guarantee == "at_most_once" else True, (report, state)


def _logged(folder: Path) -> int:
    """The newest batch that Spark logged as done; -1: none."""
    done = [int(f.name) for f in (folder / "checkpoint" / "commits").glob("[0-9]*") if f.name.isdigit()]
    return max(done, default=-1)
