"""Kills over batches of `foreachBatch`, at random times and at crash points: of the complete process tree, or of the
user's process alone, as of a notebook's kernel, whose JVM then has to end by itself.

Goes on with what a folder holds: more kills in a second call. The Python that runs the job may have another Spark.

    python -m tests.spark.portable_kills FOLDER --kills 20 [--python PYTHON] [--kafka] [--seconds 200]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil
from tests.kafka_tools import read_committed

from delivered.crash import CRASH, CRASH_DIR
from delivered_lab.supervisor import hits, kill_tree

FILES_PER_ROUND, ROWS = 6, 40
WAIT_S = 240.0
POINTS = (
    *("recover.claim:after", "recover.check:after", "write.stage:after", "write.prepare:before"),
    *("write.prepare:after", "commit.decide:before", "commit.decide:after", "commit.apply:before"),
    *("commit.apply:after", "log:before"),
)


def produce(folder: Path, files: int) -> int:
    """Add files; returns how many rows there are."""
    source = folder / "in"
    source.mkdir(parents=True, exist_ok=True)
    have = len(list(source.glob("*.json")))
    for number in range(have, have + files):
        lines = [json.dumps({"v": v}) for v in range(number * ROWS, (number + 1) * ROWS)]
        draft = source / f".{number}"
        draft.write_text("\n".join(lines))
        draft.rename(source / f"{number:06}.json")
    return (have + files) * ROWS


class Job:
    """
    Attributes:
        random: of this loop; seeded by the number of kills so far.
    """

    def __init__(self, folder: Path, python: str, kafka: Sequence[str]) -> None:
        self.folder = folder
        self.command = [python, "-m", "tests.spark.apps.portable", str(folder), *kafka]

    def start(self, crash: str = "", points: Path | None = None) -> subprocess.Popen[bytes]:
        (self.folder / "ready").unlink(missing_ok=True)
        env = {**os.environ, CRASH: crash, CRASH_DIR: str(points or self.folder)}
        with (self.folder / "output").open("ab") as said:
            return subprocess.Popen(self.command, env=env, stdout=said, stderr=said, start_new_session=True)

    def kill_once(self, number: int) -> str:
        """Kill the job at a random point, or at a random time of its work; returns where, empty: it ended before."""
        choice = random.Random(number)
        alone = choice.random() < 0.2
        point = choice.choice(POINTS) if choice.random() < 0.6 else ""
        nth = 1 if point.startswith("recover") else choice.randint(1, 3)
        points = self.folder / "points" / str(number)
        points.mkdir(parents=True, exist_ok=True)
        process = self.start(f"{point}#{nth}" if point else "", points)
        wait, others = 0.3 + 6 * choice.random(), list[psutil.Process]()
        try:
            deadline = time.monotonic() + WAIT_S
            ready_at = 0.0
            while process.poll() is None and time.monotonic() < deadline:
                if ready_at == 0.0 and (self.folder / "ready").exists():
                    ready_at = time.monotonic()
                now = not point and ready_at and time.monotonic() - ready_at > wait
                if now or (point and hits(points)):
                    where = f"{point}#{nth}" if point else "random"
                    if not alone:
                        return where
                    others = psutil.Process(process.pid).children(recursive=True)
                    process.kill()
                    _, left = psutil.wait_procs([p for p in others if p.name() == "java"], timeout=WAIT_S)
                    assert not left, "the JVM outlives the user's process"
                    return f"{where}, alone"
                time.sleep(0.02)
            return ""
        finally:
            for other in others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    other.kill()
            kill_tree(process.pid)
            process.wait()

    def finish(self) -> int:
        process = self.start()
        try:
            return process.wait(WAIT_S)
        finally:
            kill_tree(process.pid)


def damage(folder: Path, rows: int, kafka: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Lost and doubled records of each sink."""
    with sqlite3.connect(folder / "out.db") as connection:
        found = {"sqlite": Counter(v for (v,) in connection.execute("SELECT v FROM t"))}
    if kafka:
        found["kafka"] = Counter(int(m.value() or b"-1") for m in read_committed(*kafka))
    return {
        sink: (sum(v not in counts for v in range(rows)), sum(n - 1 for n in counts.values()))
        for sink, counts in found.items()
    }


def kills(folder: Path, count: int, python: str, kafka: Sequence[str] = (), seconds: float = 1e9) -> dict[str, object]:
    """So many kills, or as many as the time allows; then one start that ends by itself."""
    job, kept = Job(folder, python, kafka), folder / "kills.json"
    folder.mkdir(parents=True, exist_ok=True)
    done: list[str] = json.loads(kept.read_text()) if kept.exists() else []
    began, first, rows = time.monotonic(), len(done), 0
    while len(done) - first < count and time.monotonic() - began < seconds:
        rows = produce(folder, FILES_PER_ROUND)
        where = job.kill_once(len(done) + rows)
        if where:
            done.append(where)
            kept.write_text(json.dumps(done))
    rows = produce(folder, 1)
    code = job.finish()
    lost = damage(folder, rows, kafka) if code == 0 else {}
    return {"exit_code": code, "kills": len(done), "rows": rows, "damage": lost, "where": Counter(done)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--kafka", nargs=2, default=(), metavar=("BOOTSTRAP", "TOPIC"))
    given = parser.parse_args()
    found = kills(given.folder, given.kills, given.python, given.kafka, given.seconds)
    print(json.dumps(found), flush=True)
    clean = found["exit_code"] == 0 and all(pair == (0, 0) for pair in found["damage"].values())  # type: ignore[attr-defined]
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
