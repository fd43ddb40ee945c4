"""A pipeline without Spark: the product's own connectors and commit engine in a loop that stands in for it.

    python -m delivered_lab.verify.loop pipeline.yaml [--takeover] [--accounts]

It keeps a checkpoint as Spark does (metadata, offsets/N before a batch, commits/N after it), runs each shard in a
worker process, retries a failed task as often as the master allows (`local[2,4]`: three times), in new attempts of its
stage if `STAGE_RERUNS` is set, and reruns a batch with the same number and offsets after a crash. It cannot show what
Spark itself does; for that, use the verifier's service `spark`. Transforms: none, or Arrow to Arrow.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from delivered import DeliveredError, Pipeline
from delivered.crash import install_from_environment
from delivered.machine import NoPandas
from delivered.testing import Batches, Task
from delivered_lab.verify.workloads import STAGE_RERUNS

WORKERS = 2
_CLIENTS = {"kafka": ("confluent_kafka",), "postgres": ("psycopg",), "delta": ("deltalake", "pyarrow.parquet")}


_TASK_RUNS = threading.Lock()


def start_workers(systems: Sequence[str]) -> ProcessPoolExecutor:
    """Forked after all imports, which would otherwise dominate the start of a case, twice."""
    for module in (m for s in systems for m in _CLIENTS.get(s, ())):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    pool = ProcessPoolExecutor(WORKERS, multiprocessing.get_context("fork"), _end_after_driver)
    pool.submit(os.getpid).result()  # starts all of them
    return pool


def _run(task: Task) -> Any:
    with _TASK_RUNS:
        return task()


def _end_after_driver() -> None:
    """A worker whose driver was killed still finishes its task, as Spark's may; then it ends."""
    driver = multiprocessing.parent_process()

    def wait() -> None:
        if driver is not None:
            driver.join()
            with _TASK_RUNS:
                os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


class Checkpoint:
    """Spark's layout. Every file is written atomically."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("offsets", "commits"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        metadata = folder / "metadata"
        if not metadata.exists():
            self._write(metadata, json.dumps({"id": str(uuid.uuid4())}))
        self.incarnation = str(json.loads(metadata.read_text())["id"])

    def newest(self, name: str) -> int | None:
        return max((int(p.name) for p in (self.folder / name).iterdir() if p.name.isdigit()), default=None)

    def offsets(self, batch: int) -> str:
        return (self.folder / "offsets" / str(batch)).read_text().split("\n", 2)[2].strip()

    def plan(self, batch: int, offsets: str) -> None:
        planned = json.dumps({"batchTimestampMs": time.time_ns() // 1_000_000})
        self._write(self.folder / "offsets" / str(batch), f"v1\n{planned}\n{offsets}")

    def log(self, batch: int) -> None:
        self._write(self.folder / "commits" / str(batch), "v1\n{}")

    @staticmethod
    def _write(path: Path, text: str) -> None:
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)


class Loop:
    """One driver."""

    def __init__(self, pipeline: Pipeline | Path) -> None:
        self.pipeline = Pipeline.from_file(pipeline) if isinstance(pipeline, Path) else pipeline
        self.batches = Batches(self.pipeline)
        function = self.pipeline.transform.function
        if function is None or function.__module__.startswith("delivered_lab."):  # others may use it
            sys.meta_path.insert(0, NoPandas())
        failures = re.fullmatch(r"local\[\w+,(\d+)\]", self.pipeline.master or "")
        self.attempts_max = int(failures[1]) if failures else 1
        self.stage_reruns = (self.pipeline.conf or {}).get(STAGE_RERUNS) == "true"

    def accounts(self) -> dict[str, int]:
        return self.batches.accounts(Checkpoint(Path(self.pipeline.checkpoint)).incarnation)

    def run(self, takeover: bool) -> int:
        """Deliver everything that was there at the start. Returns the number of batches run."""
        # First of all, while this process has no threads or connections, so that dying workers take nothing along.
        pool = start_workers([s.system for s in self.pipeline.sinks])
        try:
            return self._run(takeover, pool)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, takeover: bool, pool: ProcessPoolExecutor) -> int:
        checkpoint, batches, count = Checkpoint(Path(self.pipeline.checkpoint)), self.batches, 0
        batches.start(checkpoint.incarnation, takeover=takeover)
        driver = batches.driver
        while True:
            newest, logged = checkpoint.newest("offsets"), checkpoint.newest("commits")
            reruns = newest is not None and newest != logged
            batch = 0 if newest is None else newest if reruns else newest + 1
            start = driver.initial() if batch == 0 else json.loads(checkpoint.offsets(batch - 1))
            if not reruns:
                driver.acknowledge(start)
                end = driver.latest(start, batches.rows_max)
                if end == start:
                    if count:
                        batches.finished(batch - 1)
                    return count
                checkpoint.plan(batch, json.dumps(end))
            offsets = checkpoint.offsets(batch)
            batches.run(batch, offsets, logged, start, json.loads(offsets), partial(self._messages, pool))
            checkpoint.log(batch)
            count += 1

    def _messages(self, pool: ProcessPoolExecutor, tasks: Sequence[Task]) -> Iterator[Any]:
        running = [pool.submit(_run, task) for task in tasks]
        failed: Exception | None = None
        for task, attempt in zip(tasks, running, strict=True):
            for number in range(1, self.attempts_max + 1):
                try:
                    yield attempt.result()
                    break
                except Exception as error:
                    if number == self.attempts_max or isinstance(error, BrokenProcessPool):
                        failed = failed or error
                        break
                    attempt = pool.submit(_run, replace(task, attempt=0 if self.stage_reruns else number))
        if failed is not None:
            raise failed  # Spark aborts what tasks prepared that succeeded; running ones it kills


def main() -> int:
    install_from_environment()
    began = time.monotonic()
    try:
        loop = Loop(Path(sys.argv[1]))
        if "--accounts" in sys.argv:
            sys.stdout.write(json.dumps(loop.accounts()) + "\n")
            return 0
        batches = loop.run("--takeover" in sys.argv)
    except DeliveredError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(f"{batches} batches in {time.monotonic() - began:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
