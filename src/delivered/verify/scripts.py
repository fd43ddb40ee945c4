"""What is done to a pipeline: each fault is a script over a fixture, and notes what it did.

A script may be started with the same seed again: it does the same. What it cannot cause it does not note, and the
case is then invalid.
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
from delivered.verify.evidence import Stop
from delivered.verify.fixture import END_TIMEOUT_S, HIT_TIMEOUT_S, Fixture
from delivered.verify.proxy import Rule
from delivered.verify.services import Run

Script = Callable[[Fixture], None]
TRIES_MAX = 6
"""How often a moment is tried, if the run ends before it, until the case is called invalid."""


# -- pieces of scripts -----------------------------------------------------------------------------------


def waits(fixture: Fixture, run: Run) -> Path | None:
    """Until the run stands at its point; None: it ended before."""
    found = run.wait_hit(HIT_TIMEOUT_S)
    if found is None:
        fixture.end(run)
        return None
    return found[0]


def _kill_at(fixture: Fixture, point: str) -> None:
    """Start the pipeline, and kill all of it where it stands at a named point."""
    run = fixture.start(point)
    found = run.wait_hit(HIT_TIMEOUT_S)
    if found is None:
        fixture.end(run)
        return
    _, hit = found
    fixture.kill(run)
    fixture.fire(f"kill@{point}", pid=hit.pid, facts=dict(hit.facts))


def kills(*points: str) -> tuple[Script, tuple[str, ...]]:
    """One kill after the other, each in a start of its own; then a start that ends."""

    def script(fixture: Fixture) -> None:
        fixture.send()
        for point in points:
            _kill_at(fixture, point)
        fixture.drain()

    return script, tuple(f"kill@{p}" for p in points)


def nothing(fixture: Fixture) -> None:
    """Two starts, each with something to do: the second one is the plain restart that recovery is compared with."""
    fixture.send(0.5)
    fixture.stops.append(Stop((), fixture.end(fixture.start()), "the first half"))
    fixture.all_seen()
    fixture.send()
    fixture.drain()


# -- F1 --------------------------------------------------------------------------------------------------


def producer_killed(fixture: Fixture) -> None:
    """The producing application is killed twice; it sends again what it was not told about."""
    fixture.send(0.2)
    producer = fixture.produce_aside(portion=40, pause_s=0.05)
    producer.start()
    run = fixture.start()
    for acknowledged in (3, 9):
        fixture.wait(lambda n=acknowledged: producer.acknowledged >= n, "portions are acknowledged")  # type: ignore[misc]
        fixture.wait(lambda: True, "now")
        producer.kill()
        fixture.fire("producer killed", acknowledged=producer.acknowledged)
        producer.start()
    producer.finish(END_TIMEOUT_S)
    fixture.end(run)
    fixture.drain()


def producer_killed_at(*moments: str) -> tuple[Script, tuple[str, ...]]:
    """The producing application is killed right before it sends a portion, and right after the portion was acknowledged
    and before it could note that."""

    def script(fixture: Fixture) -> None:
        fixture.send(0.2)
        producer = fixture.produce_aside(portion=40, pause_s=0.0)
        run = fixture.start()
        for number, moment in enumerate(moments):
            stop = producer.start(3 + 4 * number, moment)
            fixture.wait(stop.exists, f"the producer stands {moment} a send")
            producer.kill()
            fixture.fire(f"producer killed {moment} a send", portion=3 + 4 * number)
        producer.start()
        producer.finish(END_TIMEOUT_S)
        fixture.end(run)
        fixture.drain()

    return script, tuple(f"producer killed {m} a send" for m in moments)


# -- F2 and F5: the network ------------------------------------------------------------------------------


def network(*rules: Rule, most: int = 4) -> tuple[Script, tuple[str, ...]]:
    """Rules of the proxy, while one start goes through all batches, or as many as it takes, and at most `most`."""
    names = tuple(r.name for r in rules for _ in range(r.times))

    def script(fixture: Fixture) -> None:
        assert fixture.setting.proxy is not None  # noqa: S101 - the case gave it one
        fixture.send()
        fixture.setting.proxy.add(*(copy(r) for r in rules))
        fixture.drain(most)
        fixture.setting.proxy.clear()

    return script, names


def black_hole(fixture: Fixture) -> None:
    """For some seconds nothing arrives anywhere; then every connection is reset. A pipeline may live through the first
    time, or end with an error; the second time comes in a batch all the same."""
    proxy = fixture.setting.proxy
    assert proxy is not None  # noqa: S101
    fixture.send(0.5)
    run = fixture.start()
    for _ in range(2):
        run = _in_a_batch(fixture, run)
        if not run.lives:
            break
        with proxy.black_hole():
            fixture.fire("black hole", seconds=3)
            fixture.wait(after(3.0), "the hole lasts")
        fixture.fire("reset", connections=proxy.reset_all())
        if fixture.left:
            fixture.send()
    fixture.end(run)
    fixture.drain()


def _in_a_batch(fixture: Fixture, run: Run) -> Run:
    """Until a run, or the one that is started when it ended, begins its next batch. Returns the run."""
    for _ in range(TRIES_MAX):
        seen = len(fixture.batches_planned())

        def begun(run: Run = run, seen: int = seen) -> bool:
            return not run.lives or len(fixture.batches_planned()) > seen

        fixture.wait(begun, "the next batch begins")
        if run.lives:
            break
        fixture.end(run)
        run = fixture.start()
    return run


# -- F3: the server dies ---------------------------------------------------------------------------------


def broker_killed(*points: str) -> tuple[Script, tuple[str, ...]]:
    """At each point the broker is killed and started again, while the pipeline goes on or fails as it likes."""

    def script(fixture: Fixture) -> None:
        broker = fixture.setting.broker
        assert broker is not None  # noqa: S101
        for point in points:
            # A run may live through the broker's death and go on to the end: the next one needs records of its own.
            fixture.send(1 / (len(points) + 1))
            run = fixture.start(f"{point}!wait")
            hit = waits(fixture, run)
            if hit is None:
                continue
            broker.kill()
            run.go_on(hit)
            fixture.fire(f"broker killed@{point}", pid=broker.pid)
            fixture.wait(after(1.0), "the broker is down")
            broker.restart()
            fixture.end(run)
        fixture.send()
        fixture.drain()

    return script, tuple(f"broker killed@{p}" for p in points)


def source_killed(fixture: Fixture) -> None:
    """The server that holds the source is killed while a task is about to read from it and a producer sends to it; what
    that was not told about it does not send again."""
    fixture.send(0.3)
    run = fixture.start("source.read:before!wait")
    hit = waits(fixture, run)
    producer = fixture.produce_aside(portion=20, pause_s=0.05, again=False)
    producer.start()
    fixture.wait(lambda: producer.acknowledged >= 3, "portions are acknowledged")
    if hit is not None:
        source_restarted(fixture, lambda: run.go_on(hit))
    fixture.end(run)
    producer.finish(END_TIMEOUT_S, most=3)
    fixture.drain()


def source_restarted(fixture: Fixture, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Kill the server that holds the source, and start it again a second later."""
    broker = fixture.source_broker
    broker.kill()
    fixture.fire("source killed", pid=broker.pid)
    meanwhile()
    fixture.wait(after(1.0), "the server is down")
    broker.restart()


# -- F4: memory and storage ------------------------------------------------------------------------------


def worker_killed(*points: str) -> tuple[Script, tuple[str, ...]]:
    """At each point the one Python worker that stands there is killed, and nothing else."""

    def script(fixture: Fixture) -> None:
        for point in points:
            # Spark may run the task again and go on to the end: the next start needs records of its own.
            fixture.send(1 / (len(points) + 1))
            run = fixture.start(point)
            found = run.wait_hit(HIT_TIMEOUT_S)
            if found is not None and run.kill_one(found[1].pid):
                fixture.fire(f"worker killed@{point}", pid=found[1].pid)
            fixture.end(run)
        fixture.send()
        fixture.drain()

    return script, tuple(f"worker killed@{p}" for p in points)


def disk_full(fixture: Fixture) -> None:
    """The disk of checkpoint, staging and table has no byte left for a while."""
    fixture.send()
    run = fixture.start(f"{point_of(fixture, 'write')}:before!wait")
    hit = waits(fixture, run)
    if hit is not None:
        filler = fixture.checkpoint.parent / "filler"
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 65_536)
                file.flush()
        free = os.statvfs(fixture.checkpoint.parent).f_bavail
        if free == 0:
            fixture.fire("disk full", free_blocks=free)
        run.go_on(hit)
        with contextlib.suppress(TimeoutError):
            fixture.end(run, 60)
        filler.unlink()
    fixture.drain()


# -- F8: state put back ----------------------------------------------------------------------------------


def log_entry_removed(fixture: Fixture) -> None:
    """The last file of commits/ is gone: Spark runs the last batch again."""
    fixture.send(0.5)
    fixture.stops.append(Stop((), fixture.end(fixture.start()), "the first half"))
    newest = fixture.batches_logged()[-1]
    for name in (str(newest), f".{newest}.crc"):
        (fixture.checkpoint / "commits" / name).unlink(missing_ok=True)
    fixture.fire("last commit removed", batch=newest)
    fixture.send(0.5)
    fixture.drain()


def older_checkpoint(fixture: Fixture) -> None:
    """An older copy of the checkpoint is put back: going on would skip or repeat records, so it must not."""
    kept, newest = fixture.folder / "checkpoint.older", fixture.folder / "checkpoint.newest"
    fixture.send(0.3)
    fixture.stops.append(Stop((), fixture.end(fixture.start()), "the first third"))
    shutil.copytree(fixture.checkpoint, kept)
    fixture.send(0.3)
    fixture.stops.append(Stop((), fixture.end(fixture.start()), "the second third"))
    fixture.checkpoint.rename(newest)
    shutil.copytree(kept, fixture.checkpoint)
    fixture.fire("older checkpoint put back")
    fixture.send(0.1)
    fixture.must_stop("LEDGER_AHEAD", when="the older checkpoint")
    shutil.rmtree(fixture.checkpoint)
    newest.rename(fixture.checkpoint)
    fixture.send()
    fixture.drain()


def checkpoint_deleted(fixture: Fixture) -> None:
    """The checkpoint is gone: reading from the start again would write everything twice."""
    fixture.send(0.5)
    fixture.stops.append(Stop((), fixture.end(fixture.start()), "the first half"))
    kept = fixture.folder / "checkpoint.kept"
    fixture.checkpoint.rename(kept)
    fixture.fire("checkpoint deleted")
    fixture.send(0.2)
    if fixture.setting.guarantee is not Guarantee.AT_LEAST_ONCE:
        fixture.must_stop("CHECKPOINT_NEW", when="the empty checkpoint")
        shutil.rmtree(fixture.checkpoint, ignore_errors=True)
        kept.rename(fixture.checkpoint)
    fixture.send()
    fixture.drain()


def shards_changed(change: Callable[[Fixture, int], None]) -> Script:
    """A batch runs again with another number of shards than it was staged, and decided, with."""

    def script(fixture: Fixture) -> None:
        fixture.send()
        for shards, point in (
            (3, f"{point_of(fixture, 'prepare')}:after"),
            (5, f"{point_of(fixture, 'decide')}:after"),
        ):
            change(fixture, shards)
            _kill_at(fixture, point)
        change(fixture, 2)
        fixture.drain()

    return script


def by_hint(fixture: Fixture, shards: int) -> None:
    fixture.sql = f"SELECT /*+ REPARTITION({shards}, key) */ key, value FROM source"  # noqa: S608


def by_slices(fixture: Fixture, shards: int) -> None:
    fixture.extra["source"] = {"minPartitions": 4 * shards}


def by_shuffle(fixture: Fixture, shards: int) -> None:
    """Of a query with state. Spark goes on with the number that the checkpoint began with, whatever is asked for."""
    fixture.extra["spark"] = {"spark.sql.shuffle.partitions": str(shards)}


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


def point_of(fixture: Fixture, step: str) -> str:
    """The same for the guarantee of a fixture."""
    return point(fixture.setting.guarantee, step)


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
