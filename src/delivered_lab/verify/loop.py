"""A pipeline without Spark: the product's own connectors and commit engine in a loop that stands in for it.

    python -m delivered_lab.verify.loop pipeline.yaml [--takeover] [--accounts]

It keeps a checkpoint as Spark does (metadata, offsets/N before a batch, commits/N after it), runs each shard in a
worker process, retries a failed task as often as the master allows (`local[2,4]`: three times), in new attempts of its
stage if `STAGE_RERUNS` is set, and reruns a batch with
the same number and offsets after a crash. It cannot show what Spark itself does; for that, use the verifier's service
`spark`. Transforms: none, or Arrow to Arrow.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import re
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import psutil

from delivered.checkpoint.positions import stream_driver
from delivered.contract.powers import planned
from delivered.contract.source import Slice
from delivered.crash import install_from_environment
from delivered.engine import grants
from delivered.engine.context import Context
from delivered.engine.direct import ArrowTransform, Direct, pack
from delivered.engine.granting import registered
from delivered.engine.runner import Runner
from delivered.engine.shard import write_shard
from delivered.engine.sinks import Sinks
from delivered.entry import Pipeline
from delivered.model.bad_row import OnBadRow
from delivered.model.errors import DeliveredError
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import BatchPlan, CheckpointView, DriverAddress, Owner, ShardMessage
from delivered_lab.verify.workloads import STAGE_RERUNS

WORKERS = 2
_CLIENTS = {"kafka": ("confluent_kafka",), "postgres": ("psycopg",), "delta": ("deltalake", "pyarrow.parquet")}


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
        self._write(self.folder / "offsets" / str(batch), f"v1\n{{}}\n{offsets}")

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


def task(sinks: Sinks, direct: Direct, plan: BatchPlan, shard: int, attempt: int, piece: Slice) -> ShardMessage:
    """One attempt of a task of a batch, in a worker process."""
    install_from_environment()
    asks = partial(grants.may_send, plan, shard)
    return write_shard(sinks, plan, shard, attempt, direct.rows(iter([pack(piece)])), direct.schema(), asks)


class NoPandas(MetaPathFinder):
    """Blocks pandas, which `pyarrow.array` imports if it can, to check its input's type: 1.3 s of CPU in each of the
    three processes of a start, and two thirds of the time of a start. Nothing here needs it."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        del path, target
        if fullname == "pandas":
            raise ModuleNotFoundError("a loop without Spark goes without pandas", name=fullname)


class Loop:
    """One driver."""

    def __init__(self, pipeline: Pipeline | Path) -> None:
        self.pipeline = Pipeline.from_file(pipeline) if isinstance(pipeline, Path) else pipeline
        transform = self.pipeline.transform
        if transform.kind not in ("none", "arrow"):
            raise DeliveredError(
                "LOOP_TRANSFORM",
                f"A loop without Spark cannot run a transform in {transform.kind}.",
                next_step="delivered verify --service spark",
            )
        if not all(s.projection.is_all for s in self.pipeline.sinks):
            raise DeliveredError(
                "LOOP_SINKS",
                "A loop without Spark runs sinks without select and where.",
                next_step="delivered verify --service spark",
            )
        self.spec = self.pipeline.spec
        self.sinks = self.spec.open()
        (source,) = self.pipeline.sources.values()
        self.source = planned(source.source())
        made = Direct if self.pipeline.on_bad_row is OnBadRow.FAIL else Direct.rejecting
        self.direct = made(self.source, ArrowTransform(transform.select, transform.function))
        if transform.function is None or transform.function.__module__.startswith("delivered."):  # else it may use it
            sys.meta_path.insert(0, NoPandas())
        failures = re.fullmatch(r"local\[\w+,(\d+)\]", self.pipeline.master or "")
        self.attempts_max = int(failures[1]) if failures else 1
        self.stage_reruns = (self.pipeline.conf or {}).get(STAGE_RERUNS) == "true"

    def runner(self, checkpoint: Checkpoint) -> Runner:
        scope = self.spec.scope(self.sinks, checkpoint.incarnation)
        own = psutil.Process()
        owner = Owner(uuid.uuid4().hex, os.uname().nodename, own.pid, int(own.create_time() * 1000))
        context = Context.open(self.sinks, scope, self.pipeline.guarantee, owner, self.spec.tolerance)
        return Runner(self.sinks, context, partial(registered, scope, owner, DriverAddress()))

    def accounts(self) -> dict[str, int]:
        last = self.runner(Checkpoint(Path(self.pipeline.checkpoint))).context.ledger.look().last
        accounts = [] if last is None else list(last.accounts.values())
        return {"decided": sum(a.total.count for a in accounts), "given_up": sum(a.given_up.count for a in accounts)}

    def run(self, takeover: bool) -> int:
        """Deliver everything that was there at the start. Returns the number of batches run."""
        # First of all, while this process has no threads or connections, so that dying workers take nothing along.
        pool = self._workers()
        try:
            return self._run(takeover, pool)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _workers(self) -> ProcessPoolExecutor:
        """Forked after all imports, which would otherwise dominate the start of a case, twice."""
        systems = [s.system for s in self.pipeline.sinks]
        wanted = [m for s in systems for m in (f"delivered.connectors.{s}.writer", *_CLIENTS.get(s, ()))]
        for module in wanted:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        pool = ProcessPoolExecutor(WORKERS, multiprocessing.get_context("fork"))
        pool.submit(os.getpid).result()  # starts all of them
        return pool

    def _run(self, takeover: bool, pool: ProcessPoolExecutor) -> int:
        refusal = self.pipeline.plan(takeover=takeover)
        error = getattr(refusal, "error", None)
        if error is not None:
            raise error
        self.sinks.check_schema(self.direct.schema())
        checkpoint = Checkpoint(Path(self.pipeline.checkpoint))
        driver = stream_driver(self.source, str(checkpoint.folder))
        driver.freeze()
        runner, batches = self.runner(checkpoint), 0
        while True:
            newest, logged = checkpoint.newest("offsets"), checkpoint.newest("commits")
            if newest is not None and newest != logged:
                batch = newest
                start = self._end(checkpoint, batch - 1, driver)
                end = json.loads(checkpoint.offsets(batch))
            else:
                batch = 0 if newest is None else newest + 1
                start = self._end(checkpoint, batch - 1, driver)
                driver.acknowledge(start)
                end = driver.latest(start, self.source.rows_per_batch_max)
                if end == start:
                    if batches:
                        reach(StepId.LOG, Moment.AFTER, batch=batch - 1)
                    return batches
                checkpoint.plan(batch, json.dumps(end))
            view = CheckpointView(checkpoint.incarnation, batch, checkpoint.offsets(batch), logged)
            plan = runner.plan(view, self.direct.schema())
            runner.finish(plan, partial(self._tasks, plan, pool, driver.slices(start, end)))
            reach(StepId.LOG, Moment.BEFORE, batch=batch)
            checkpoint.log(batch)
            batches += 1

    def _end(self, checkpoint: Checkpoint, batch: int, driver: Any) -> dict[str, Any]:
        found: dict[str, Any] = driver.initial() if batch < 0 else json.loads(checkpoint.offsets(batch))
        return found

    def _tasks(
        self, plan: BatchPlan, pool: ProcessPoolExecutor, pieces: Sequence[Slice], messages: list[ShardMessage | None]
    ) -> None:
        def attempt(shard: int, number: int) -> Future[ShardMessage]:
            return pool.submit(task, self.sinks, self.direct, plan, shard, number, pieces[shard])

        tasks = [attempt(n, 0) for n in range(len(pieces))]
        failed: Exception | None = None
        for shard, t in enumerate(tasks):
            for number in range(1, self.attempts_max + 1):
                try:
                    messages.append(t.result())
                    break
                except Exception as error:
                    if number == self.attempts_max or isinstance(error, BrokenProcessPool):
                        failed = failed or error
                        break
                    t = attempt(shard, 0 if self.stage_reruns else number)
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
    # Workers must find `task` under the module's own name.
    from delivered_lab.verify.loop import main as run

    sys.exit(run())
