"""What is done to a pipeline: each fault is a script over a bench, and notes what it did.

A script may be started with the same seed again: it does the same. What it cannot cause it does not note, and the
cell is then invalid.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

from delivered.model.guarantee import Guarantee
from delivered.verify.bench import END_TIMEOUT_S, HIT_TIMEOUT_S, Bench
from delivered.verify.evidence import Stop
from delivered.verify.services import Run
from delivered.verify.wire import AnyRule

Script = Callable[[Bench], None]
TRIES_MAX = 6
"""How often a moment is tried, if the run ends before it, until the cell is called invalid."""


# -- pieces of scripts -----------------------------------------------------------------------------------


def waits(bench: Bench, run: Run) -> Path | None:
    """Until the run stands at its point; None: it ended before."""
    found = run.wait_hit(HIT_TIMEOUT_S)
    if found is None:
        bench.end(run)
        return None
    return found[0]


def _kill_at(bench: Bench, point: str) -> None:
    """Start the pipeline, and kill all of it where it stands at a named point."""
    run = bench.start(point)
    found = run.wait_hit(HIT_TIMEOUT_S)
    if found is None:
        bench.end(run)
        return
    _, hit = found
    bench.kill(run)
    bench.fire(f"kill@{point}", pid=hit.pid, facts=dict(hit.facts))


def kills(*points: str) -> tuple[Script, tuple[str, ...]]:
    """One kill after the other, each in a start of its own; then a start that ends."""

    def script(bench: Bench) -> None:
        bench.send()
        for point in points:
            _kill_at(bench, point)
        bench.drain()

    return script, tuple(f"kill@{p}" for p in points)


def nothing(bench: Bench) -> None:
    """Two starts, each with something to do: the second one is the plain restart that recovery is compared with."""
    bench.send(0.5)
    bench.stops.append(Stop((), bench.end(bench.start()), "the first half"))
    bench.all_seen()
    bench.send()
    bench.drain()


# -- F1 --------------------------------------------------------------------------------------------------


def producer_killed(bench: Bench) -> None:
    """The producing application is killed twice; it sends again what it was not told about."""
    bench.send(0.2)
    producer = bench.produce_aside(portion=40, pause_s=0.05)
    producer.start()
    run = bench.start()
    for acknowledged in (3, 9):
        bench.wait(lambda n=acknowledged: producer.acknowledged >= n, "portions are acknowledged")  # type: ignore[misc]
        bench.wait(lambda: True, "now")
        producer.kill()
        bench.fire("producer killed", acknowledged=producer.acknowledged)
        producer.start()
    producer.finish(END_TIMEOUT_S)
    bench.end(run)
    bench.drain()


def producer_killed_at(*moments: str) -> tuple[Script, tuple[str, ...]]:
    """The producing application is killed right before it sends a portion, and right after the portion was acknowledged
    and before it could note that."""

    def script(bench: Bench) -> None:
        bench.send(0.2)
        producer = bench.produce_aside(portion=40, pause_s=0.0)
        run = bench.start()
        for number, moment in enumerate(moments):
            stop = producer.start(3 + 4 * number, moment)
            bench.wait(stop.exists, f"the producer stands {moment} a send")
            producer.kill()
            bench.fire(f"producer killed {moment} a send", portion=3 + 4 * number)
        producer.start()
        producer.finish(END_TIMEOUT_S)
        bench.end(run)
        bench.drain()

    return script, tuple(f"producer killed {m} a send" for m in moments)


# -- F2 and F5: the network ------------------------------------------------------------------------------


def network(*rules: AnyRule, most: int = 4) -> tuple[Script, tuple[str, ...]]:
    """Rules of the proxy, while one start goes through all batches, or as many as it takes, and at most `most`."""
    names = tuple(r.name for r in rules for _ in range(r.times))

    def script(bench: Bench) -> None:
        assert bench.setting.proxy is not None  # noqa: S101 - the cell gave it one
        bench.send()
        bench.setting.proxy.add(*(copy(r) for r in rules))
        bench.drain(most)
        bench.setting.proxy.clear()

    return script, names


def black_hole(bench: Bench) -> None:
    """For some seconds nothing arrives anywhere; then every connection is reset. A pipeline may live through the first
    time, or end with an error; the second time comes in a batch all the same."""
    proxy = bench.setting.proxy
    assert proxy is not None  # noqa: S101
    bench.send(0.5)
    run = bench.start()
    for _ in range(2):
        run = _in_a_batch(bench, run)
        if not run.lives:
            break
        with proxy.black_hole():
            bench.fire("black hole", seconds=3)
            bench.wait(after(3.0), "the hole lasts")
        bench.fire("reset", connections=proxy.reset_all())
        if bench.left:
            bench.send()
    bench.end(run)
    bench.drain()


def _in_a_batch(bench: Bench, run: Run) -> Run:
    """Until a run, or the one that is started when it ended, begins its next batch. Returns the run."""
    for _ in range(TRIES_MAX):
        seen = len(bench.batches_planned())

        def begun(run: Run = run, seen: int = seen) -> bool:
            return not run.lives or len(bench.batches_planned()) > seen

        bench.wait(begun, "the next batch begins")
        if run.lives:
            break
        bench.end(run)
        run = bench.start()
    return run


# -- F3: the server dies ---------------------------------------------------------------------------------


def broker_killed(*points: str) -> tuple[Script, tuple[str, ...]]:
    """At each point the broker is killed and started again, while the pipeline goes on or fails as it likes."""

    def script(bench: Bench) -> None:
        broker = bench.setting.broker
        assert broker is not None  # noqa: S101
        for point in points:
            # A run may live through the broker's death and go on to the end: the next one needs records of its own.
            bench.send(1 / (len(points) + 1))
            run = bench.start(f"{point}!wait")
            hit = waits(bench, run)
            if hit is None:
                continue
            broker.kill()
            run.go_on(hit)
            bench.fire(f"broker killed@{point}", pid=broker.pid)
            bench.wait(after(1.0), "the broker is down")
            broker.restart()
            bench.end(run)
        bench.send()
        bench.drain()

    return script, tuple(f"broker killed@{p}" for p in points)


def source_killed(bench: Bench) -> None:
    """The server that holds the source is killed while a task is about to read from it and a producer sends to it; what
    that was not told about it does not send again."""
    bench.send(0.3)
    run = bench.start("source.read:before!wait")
    hit = waits(bench, run)
    producer = bench.produce_aside(portion=20, pause_s=0.05, again=False)
    producer.start()
    bench.wait(lambda: producer.acknowledged >= 3, "portions are acknowledged")
    if hit is not None:
        source_restarted(bench, lambda: run.go_on(hit))
    bench.end(run)
    producer.finish(END_TIMEOUT_S, most=3)
    bench.drain()


def source_restarted(bench: Bench, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Kill the server that holds the source, and start it again a second later."""
    broker = bench.source_broker
    broker.kill()
    bench.fire("source killed", pid=broker.pid)
    meanwhile()
    bench.wait(after(1.0), "the server is down")
    broker.restart()


# -- F4: memory and storage ------------------------------------------------------------------------------


def worker_killed(*points: str) -> tuple[Script, tuple[str, ...]]:
    """At each point the one Python worker that stands there is killed, and nothing else."""

    def script(bench: Bench) -> None:
        for point in points:
            # Spark may run the task again and go on to the end: the next start needs records of its own.
            bench.send(1 / (len(points) + 1))
            run = bench.start(point)
            found = run.wait_hit(HIT_TIMEOUT_S)
            if found is not None and run.kill_one(found[1].pid):
                bench.fire(f"worker killed@{point}", pid=found[1].pid)
            bench.end(run)
        bench.send()
        bench.drain()

    return script, tuple(f"worker killed@{p}" for p in points)


def disk_full(bench: Bench) -> None:
    """The disk of checkpoint, staging and table has no byte left for a while."""
    bench.send()
    run = bench.start(f"{point_of(bench, 'write')}:before!wait")
    hit = waits(bench, run)
    if hit is not None:
        filler = bench.checkpoint.parent / "filler"
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 65_536)
                file.flush()
        free = os.statvfs(bench.checkpoint.parent).f_bavail
        if free == 0:
            bench.fire("disk full", free_blocks=free)
        run.go_on(hit)
        with contextlib.suppress(TimeoutError):
            bench.end(run, 60)
        filler.unlink()
    bench.drain()


# -- F8: state put back ----------------------------------------------------------------------------------


def log_entry_removed(bench: Bench) -> None:
    """The last file of commits/ is gone: Spark runs the last batch again."""
    bench.send(0.5)
    bench.stops.append(Stop((), bench.end(bench.start()), "the first half"))
    newest = bench.batches_logged()[-1]
    for name in (str(newest), f".{newest}.crc"):
        (bench.checkpoint / "commits" / name).unlink(missing_ok=True)
    bench.fire("last commit removed", batch=newest)
    bench.send(0.5)
    bench.drain()


def older_checkpoint(bench: Bench) -> None:
    """An older copy of the checkpoint is put back: going on would skip or repeat records, so it must not."""
    kept, newest = bench.folder / "checkpoint.older", bench.folder / "checkpoint.newest"
    bench.send(0.3)
    bench.stops.append(Stop((), bench.end(bench.start()), "the first third"))
    shutil.copytree(bench.checkpoint, kept)
    bench.send(0.3)
    bench.stops.append(Stop((), bench.end(bench.start()), "the second third"))
    bench.checkpoint.rename(newest)
    shutil.copytree(kept, bench.checkpoint)
    bench.fire("older checkpoint put back")
    bench.send(0.1)
    bench.must_stop("LEDGER_AHEAD", when="the older checkpoint")
    shutil.rmtree(bench.checkpoint)
    newest.rename(bench.checkpoint)
    bench.send()
    bench.drain()


def checkpoint_deleted(bench: Bench) -> None:
    """The checkpoint is gone: reading from the start again would write everything twice."""
    bench.send(0.5)
    bench.stops.append(Stop((), bench.end(bench.start()), "the first half"))
    kept = bench.folder / "checkpoint.kept"
    bench.checkpoint.rename(kept)
    bench.fire("checkpoint deleted")
    bench.send(0.2)
    if bench.setting.guarantee is not Guarantee.AT_LEAST_ONCE:
        bench.must_stop("CHECKPOINT_NEW", when="the empty checkpoint")
        shutil.rmtree(bench.checkpoint, ignore_errors=True)
        kept.rename(bench.checkpoint)
    bench.send()
    bench.drain()


def shards_changed(change: Callable[[Bench, int], None]) -> Script:
    """A batch runs again with another number of shards than it was staged, and decided, with."""

    def script(bench: Bench) -> None:
        bench.send()
        for shards, point in ((3, f"{point_of(bench, 'prepare')}:after"), (5, f"{point_of(bench, 'decide')}:after")):
            change(bench, shards)
            _kill_at(bench, point)
        change(bench, 2)
        bench.drain()

    return script


def by_hint(bench: Bench, shards: int) -> None:
    bench.sql = f"SELECT /*+ REPARTITION({shards}, key) */ key, value FROM source"  # noqa: S608


def by_slices(bench: Bench, shards: int) -> None:
    bench.extra["source"] = {"minPartitions": 4 * shards}


def by_shuffle(bench: Bench, shards: int) -> None:
    """Of a query with state. Spark goes on with the number that the checkpoint began with, whatever is asked for."""
    bench.extra["spark"] = {"spark.sql.shuffle.partitions": str(shards)}


# -- names of steps --------------------------------------------------------------------------------------

_POINTS = {
    Guarantee.EXACTLY_ONCE: {
        "write": "write.stage",
        "prepare": "write.prepare",
        "decide": "commit.decide",
        "apply": "commit.apply",
    },
    Guarantee.AT_LEAST_ONCE: {"write": "write.send", "prepare": "write.flush", "decide": "commit.record"},
    Guarantee.AT_MOST_ONCE: {"write": "write.send", "prepare": "write.flush", "decide": "commit.record"},
}


def point(guarantee: Guarantee, step: str) -> str:
    """What a step is called under a guarantee."""
    return _POINTS[guarantee][step]


def point_of(bench: Bench, step: str) -> str:
    """The same for the guarantee of a bench."""
    return point(bench.setting.guarantee, step)


def after(seconds: float) -> Callable[[], bool]:
    """A fact that becomes true in so many seconds."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


def can_mount() -> bool:
    """Whether this process may mount a small disk."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Any:
    """A disk of its own for a folder, while it lasts."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
