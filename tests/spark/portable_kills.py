"""Kills over batches of `foreachBatch`, at random times and at crash points:

    everything   JVM, user's process and tasks
    process      the user's process alone; its JVM then ends by itself
    kernel       the user's process alone; its JVM was started by somebody else, goes on, and serves the next one
    tasks        the Python processes that run tasks
    client       of Spark Connect, alone; its query goes on in the server until the next client starts it again
    server       of Spark Connect

Most JVMs live through several kills, and processes are forked from this one, which saves starts and imports. Goes on
with what a folder holds: more kills in a second call.

    python -m tests.spark.portable_kills FOLDER --kills 20 [--kafka BOOTSTRAP TOPIC] [--seconds 200] [--connect]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import random
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from tests.kafka_tools import read_committed
from tests.spark.apps import jvm_host, portable

from delivered.crash import CRASH, CRASH_DIR
from delivered.prefork import TASKS
from delivered_lab.brokers.servers import free_ports
from delivered_lab.supervisor import hits, kill_tree

AHEAD, ROWS = 8, 40
"""Files that are there for each start, and rows of each. A batch reads one."""
OWN_JVM = {"everything": 1, "process": 2}
HOSTED = {"everything": 3, "kernel": 5, "tasks": 5}
CONNECT = {"everything": 1, "client": 2, "server": 2}
"""How often what is killed, by whose JVM it is."""
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


_LOADED = (
    *("delivered.spark.foreach", "delivered.engine.runner", "delivered.engine.context", "delivered.engine.decide"),
    *("delivered.engine.recover", "delivered.checkpoint.history", "delivered.pipeline.facts", "pyarrow.compute"),
    *("delivered.checkpoint.sidecar", "delivered.connectors.kafka", "delivered.connectors.sqlite"),
)
"""What the user's process would import after its start."""
_FORK = multiprocessing.get_context("fork")
Process = multiprocessing.context.ForkProcess


def logged(folder: Path) -> int:
    """Batches that Spark logged as done."""
    return max((int(f.name) + 1 for f in (folder / "checkpoint" / "commits").glob("[0-9]*")), default=0)


class Job:
    """The user's process, and the one that owns its JVM, if that is another.

    Attributes:
        connect: over Spark Connect.
    """

    def __init__(
        self, folder: Path, kafka: Sequence[str], seed: int, guarantee: str = "exactly_once", *, connect: bool = False
    ) -> None:
        self._folder, self._seed, self.connect = folder, seed, connect
        self._arguments = [str(folder), guarantee, *kafka]
        self._host: Process | None = None
        self._last = ""

    def _run(self, app: Callable[[], None], arguments: Sequence[str], **env: str) -> Process:
        process = _FORK.Process(target=_run, args=(app, arguments, env, self._folder / "output"))
        process.start()
        return process

    def _start(self, crash: str, points: Path, *, hosted: bool) -> Process:
        (self._folder / "ready").unlink(missing_ok=True)
        env = {CRASH: crash, CRASH_DIR: str(points)}
        if hosted:
            file = self._folder / "host.json"
            if self._host is None:
                file.unlink(missing_ok=True)
                ports = [str(port) for port in free_ports(1)] if self.connect else []
                self._host = host = self._run(jvm_host.main, [str(file), *ports])
                _until(file.exists, host)
            env |= json.loads(file.read_text())
        return self._run(portable.main, self._arguments, **env)

    def kill_once(self, number: int) -> str:
        """Kill at a random point, or at a random time; returns what and where, empty: the job ended before."""
        choice = random.Random(self._seed * 100_000 + number)
        hosted = self.connect or self._host is not None or choice.random() < 0.5
        weights = CONNECT if self.connect else HOSTED if hosted else OWN_JVM
        what = choice.choices(list(weights), list(weights.values()))[0]
        points_of = [p for p in POINTS if what != "tasks" or p.startswith("write")]
        # Points are in the environment of the process that is started now.
        point = choice.choice(points_of) if not self.connect and choice.random() < 0.6 else ""
        if point and not point.startswith("recover"):
            point += f"#{choice.randint(1, 2)}"
        wait = 2 * choice.random()
        points = self._folder / "points" / str(number)
        points.mkdir(parents=True)
        process = self._start(point, points, hosted=hosted)
        try:
            if point:
                _until(lambda: bool(hits(points)), process)
            else:
                _until((self._folder / "ready").exists, process)
                process.join(wait)
            if not process.is_alive():
                failed = f"the job failed, see {self._folder / 'output'}"
                # Spark may still give a task a process that was killed.
                assert process.exitcode == 0 or self._last == "tasks", failed
                self._last = ""
                return ""
            self._last = what
            self._kill(what, process, choice, {hit.pid for _, hit in hits(points)})
            return f"{what}, {point or 'random'}"
        finally:
            _end(process)

    def _kill(self, what: str, process: Process, choice: random.Random, halted: set[int]) -> None:
        """Args: halted: processes that wait at the point."""
        if what == "server":
            self.close()
        elif what == "everything":
            owners = [process, *([self._host] if self._host else [])]
            for owner in choice.sample(owners, len(owners)):
                _end(owner)
            self._host = None
        elif what == "tasks":
            done = logged(self._folder)
            for task in psutil.Process(self._host.pid).children(recursive=True) if self._host else []:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if task.pid in halted or task.name() == TASKS:
                        task.kill()
            _until(lambda: logged(self._folder) > done, process)  # or the job failed
        else:
            below = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            try:
                _, left = psutil.wait_procs([p for p in below if p.name() == "java"], timeout=WAIT_S)
                assert not left, "the JVM outlives the user's process"
            finally:
                for other in below:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        other.kill()

    def finish(self) -> int | None:
        """Run to the end; returns the exit code, None: it does not end."""
        process = self._start("", self._folder, hosted=self.connect or self._host is not None)
        try:
            process.join(WAIT_S)
            return process.exitcode
        finally:
            _end(process)
            self.close()

    def close(self) -> None:
        if self._host is not None:
            _end(self._host)
            self._host = None


def _run(app: Callable[[], None], arguments: Sequence[str], env: dict[str, str], output: Path) -> None:
    """The main function of a process, which gets a session and an environment of its own."""
    os.setsid()
    with output.open("ab", 0) as said:
        os.dup2(said.fileno(), sys.stdout.fileno())
        os.dup2(said.fileno(), sys.stderr.fileno())
    os.environ.update(env)
    sys.argv[1:] = arguments
    app()


def _load() -> None:
    for name in _LOADED:
        module = importlib.import_module(name)
        for part in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
            importlib.import_module(part.name)


def _end(process: Process) -> None:
    """Kill a process and all that it started."""
    kill_tree(process)
    process.join()


def _until(fact: Callable[[], bool], process: Process) -> None:
    """Wait for a fact, or for the end of the process."""
    deadline = time.monotonic() + WAIT_S
    while process.is_alive() and not fact():
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.02)


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


def kills(
    folder: Path, count: int, kafka: Sequence[str] = (), seconds: float = 1e9, seed: int = 0, **of: Any
) -> dict[str, Any]:
    """So many kills, or as many as the time allows; then one start that ends by itself. `of`: see `Job`."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")  # JVMs start more quickly
    _load()
    job, kept = Job(folder, kafka, seed, **of), folder / "kills.json"
    done: list[str] = json.loads(kept.read_text()) if kept.exists() else []
    end, first, number = time.monotonic() + seconds, len(done), len(list((folder / "points").glob("*")))
    try:
        while len(done) - first < count and time.monotonic() < end:
            produce(folder, max(0, logged(folder) + AHEAD - len(list((folder / "in").glob("*.json")))))
            if where := job.kill_once(number):
                done.append(where)
                kept.write_text(json.dumps(done))
            number += 1
        rows = produce(folder, 1)
        code = job.finish()
    finally:
        job.close()
    lost = damage(folder, rows, kafka) if code == 0 else {}
    return {"exit_code": code, "kills": len(done), "rows": rows, "damage": lost, "where": Counter(done)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--connect", action="store_true")
    parser.add_argument("--kafka", nargs=2, default=(), metavar=("BOOTSTRAP", "TOPIC"))
    given = parser.parse_args()
    found = kills(given.folder, given.kills, given.kafka, given.seconds, given.seed, connect=given.connect)
    print(json.dumps(found), flush=True)
    clean = found["exit_code"] == 0 and all(pair == (0, 0) for pair in found["damage"].values())
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
