"""What is done to a pipeline: each fault is a script over a fixture, and records what it did. Here: building blocks,
kills of driver, worker and task, two drivers on one checkpoint, restored state, and two parts that fail at a time;
interference.py has concurrent actions of others.

With the same seed a script does the same again. A fault that it cannot cause is not recorded; the case is then invalid.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from delivered import Guarantee
from delivered_lab.supervisor import Hit
from delivered_lab.verify.evidence import Stop
from delivered_lab.verify.fixture import HIT_TIMEOUT_S, Fixture
from delivered_lab.verify.services import Cluster, Run, VerifierError, last_words
from delivered_lab.verify.systems.base import LosesEnd
from delivered_lab.verify.workloads import POISON, STAGE_RERUNS

Script = Callable[[Fixture], None]
Scripted = tuple[Script, tuple[str, ...]]
"""A script, and the names that must fire in it."""
TRIES_MAX = 6
"""Attempts to reach a moment that runs keep missing; after that the case is invalid."""
ATTEMPTS_MAX = 4
RETRIES = {"master": f"local[2,{ATTEMPTS_MAX}]"}
"""More keys for a pipeline file whose tasks may fail three times. By default a local master gives up at once."""
STAGE_RERUN = {**RETRIES, "spark": {STAGE_RERUNS: "true"}}
"""More keys of a pipeline file: a failed task runs again in a new attempt of its stage, and is numbered 0 again."""
_KEYS_HELD = "LOCK_TIMEOUT"
"""The error of a writer whose keys are locked by another open transaction."""
BACK_FIRST_S = 3.0
"""The pipeline starts at most so long after the server is back: within it, the server finishes what it had open."""
HOUR_S = 3_600
_SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "100ms",
}
_SENDING = {"write": "write.send", "prepare": "write.flush", "decide": "commit.record"}
_POINTS = {
    Guarantee.EXACTLY_ONCE: {s.rpartition(".")[2]: s for s in ("write.prepare", "commit.decide", "commit.apply")}
    | {"write": "write.stage"},
    Guarantee.AT_LEAST_ONCE: _SENDING,
    Guarantee.AT_MOST_ONCE: _SENDING,
}


# -- building blocks ---------------------------------------------------------------------------------------------------


def step_name(guarantee: Guarantee, step: str) -> str:
    """A step's name under a guarantee."""
    return _POINTS[guarantee][step]


def case_step(fixture: Fixture, step: str) -> str:
    """The same for the guarantee of a fixture."""
    return step_name(fixture.setting.guarantee, step)


def after(seconds: float) -> Callable[[], bool]:
    """A condition that becomes true after this many seconds."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() >= until


def waits(fixture: Fixture, run: Run) -> Path | None:
    """Wait until the run has stopped at its point; None: it ended before."""
    found = run.wait_hit(HIT_TIMEOUT_S)
    if found is None:
        fixture.end(run)
        return None
    return found[0]


def at_point(where: Callable[[Fixture], str], harm: Callable[[Fixture, Run, Path], None], must: str = "") -> Script:
    """Do harm while the pipeline is stopped at a point; then that run ends, and another one must succeed.

    Args:
        harm: must release the run itself.
        must: names the moment if this run must succeed; empty: it may fail.
    """

    def script(fixture: Fixture) -> None:
        fixture.send()
        run = fixture.start(f"{where(fixture)}!wait")
        hit = waits(fixture, run)
        if hit is not None:
            harm(fixture, run, hit)
            code = fixture.end(run)
            if must:
                fixture.stops.append(Stop((), code, must))
        fixture.drain()

    return script


def at_each(
    name: str, points: tuple[str, ...], harm: Callable[[Fixture, Run, Path, Hit, str], None], action: str = "!wait"
) -> Scripted:
    """Do harm at each point, in a start of its own, whether the pipeline survives or fails.

    Args:
        harm: must release the run itself, and record what happened under this name.
    """

    def script(fixture: Fixture) -> None:
        for where in points:
            # A run may survive and go on to the end: the next one needs records of its own.
            fixture.send(1 / (len(points) + 1))
            run = fixture.start(f"{where}{action}")
            found = run.wait_hit(HIT_TIMEOUT_S)
            if found is not None:
                harm(fixture, run, *found, f"{name}@{where}")
            fixture.end(run)
        fixture.send()
        fixture.drain()

    return script, tuple(f"{name}@{p}" for p in points)


def must_go_through(fixture: Fixture, when: str) -> None:
    """One start, which must succeed."""
    fixture.stops.append(Stop((), fixture.end(fixture.start()), when))


# -- the driver --------------------------------------------------------------------------------------------------------


def nothing(fixture: Fixture) -> None:
    """Two starts, each with records to deliver: the second one is the plain restart that recovery is compared with."""
    fixture.send(0.5)
    must_go_through(fixture, "the first half")
    fixture.all_seen()
    fixture.send()
    fixture.drain()


def kill_at(fixture: Fixture, where: str) -> bool:
    """Start the pipeline, and kill its process tree when it has stopped at a point. False: it ended before."""
    run = fixture.start(where)
    found = run.wait_hit(HIT_TIMEOUT_S)
    if found is None:
        fixture.end(run)
        return False
    fixture.kill(run)
    fixture.fire(f"kill@{where}", pid=found[1].pid, facts=dict(found[1].facts))
    return True


def kills(*points: str) -> Scripted:
    """One kill after the other, each in a start of its own; then a start that succeeds."""

    def script(fixture: Fixture) -> None:
        fixture.send()
        for where in points:
            kill_at(fixture, where)
        fixture.drain()

    return script, tuple(f"kill@{p}" for p in points)


def random_kills(times: int) -> Scripted:
    """Kill the process tree at seeded random moments after a batch began.

    A moment is a fraction of the time that the previous run worked from its first batch to its end: a fixed number of
    seconds would be too late for one service and always in the first batch for another.
    """

    def script(fixture: Fixture) -> None:
        began_s, run = _wait_batch(fixture, 1 / (2 * times))
        fixture.end(run)
        length_s = time.monotonic() - began_s
        for share in [round(fixture.random.uniform(0, 0.9), 3) for _ in range(times)]:
            for _ in range(TRIES_MAX):
                began_s, run = _wait_batch(fixture, 1 / (3 * times))
                fixture.wait(after(share * length_s), "the moment comes")
                if run.lives:
                    fixture.kill(run)
                    fixture.fire("kill at random", share=share, after_s=round(time.monotonic() - began_s, 3))
                    break
                fixture.end(run)
                length_s = time.monotonic() - began_s  # this one was quicker
        if fixture.left:
            fixture.send()
        fixture.drain()

    return script, ("kill at random",) * times


def _wait_batch(fixture: Fixture, share: float) -> tuple[float, Run]:
    """Send a share of the records, start the pipeline and wait until it begins a batch; return when, and the run."""
    if fixture.left:
        fixture.send(share)
    planned, logged = len(fixture.batches_planned()), len(fixture.batches_logged())
    run = fixture.start()

    def started() -> bool:
        # A rerun batch already has its file: a new log entry shows progress.
        return not run.lives or len(fixture.batches_planned()) > planned or len(fixture.batches_logged()) > logged

    fixture.wait(started, "a batch begins")
    return time.monotonic(), run


# -- tasks -------------------------------------------------------------------------------------------------------------


def worker_killed(*points: str) -> Scripted:
    """At each point only the Python worker that stopped there is killed."""

    def harm(fixture: Fixture, run: Run, _: Path, hit: Hit, name: str) -> None:
        if run.kill_one(hit.pid):
            fixture.fire(name, pid=hit.pid)

    return at_each("worker killed", points, harm, action="")


def task_retried(*points: str) -> Scripted:
    """The first attempt of a task fails at the first point, the second one at the second, and so on."""
    where = [f"{p}@attempt={n}" for n, p in enumerate(points)]
    return _failing("task failed", points, where, "the run whose task failed")


def stage_rerun(*points: str) -> Scripted:
    """At each point a task fails, and runs again under the number of its first attempt."""
    return _failing("stage rerun", points, points, "the run whose stage ran again")


def _failing(name: str, points: Sequence[str], where: Sequence[str], when: str) -> Scripted:
    """One run, in which a task fails at each point, and which must succeed."""

    def script(fixture: Fixture) -> None:
        fixture.send()
        run = fixture.start(",".join(f"{p}!raise" for p in where))
        while (hit := run.wait_hit(HIT_TIMEOUT_S)) is not None:
            fixture.fire(f"{name}@{points[where.index(hit[1].point.partition('!')[0])]}", facts=dict(hit[1].facts))
        code = fixture.end(run)
        fixture.stops.append(Stop((), code, f"{when}: {last_words(run)}" if code else when))
        fixture.drain()

    return script, tuple(f"{name}@{p}" for p in points)


def speculation(where: str) -> Script:
    """An attempt is stopped until a second one of the same task, on another host, has completed the batch; then it
    resumes."""

    def script(fixture: Fixture) -> None:
        fixture.send()
        crash = f"{where}@shard=0@attempt=0!wait"
        before = dict(fixture.extra)
        with Cluster(fixture.folder) as cluster:
            hits = fixture.folder / f"run{len(fixture.runs) + 1}.hits"
            fixture.extra |= {"master": cluster.url, "spark": {**_SPECULATION, **cluster.conf(crash, hits)}}
            run = fixture.start(crash)
            found = run.wait_hit(HIT_TIMEOUT_S)
            if found is not None:
                fixture.wait(lambda: bool(fixture.batches_logged()) or not run.lives, "a second attempt ends the batch")
                if run.lives:
                    fixture.fire("a speculative attempt won", first=dict(found[1].facts))
                run.go_on(found[0])
            fixture.stops.append(Stop((), fixture.end(run), "the run with two attempts of a task"))
        fixture.extra = before
        fixture.drain()

    return script


def poison(fixture: Fixture) -> None:
    """The transform always fails at a record; once it is fixed, everything else must be delivered."""
    fixture.send()
    for _ in range(2):
        # The transform's own error; a Spark query ends with its own code if only the user can be the cause.
        code = fixture.must_stop("?", "QUERY_FAILED", when="a record that the transform cannot take")
        if code is not None and POISON in last_words(fixture.runs[-1]):
            fixture.fire("poison met")
    fixture.arrow = "delivered_lab.verify.workloads:drops_poison"
    fixture.drain()


def oversized(fixture: Fixture) -> None:
    """A record always exceeds the client's limit; once the limit is raised, it must be delivered too."""
    fixture.send()
    for _ in range(2):
        code = fixture.must_stop("RECORD_TOO_LARGE", when="a record that is too large")
        if code is not None:
            fixture.fire("record too large", code=code)
    fixture.extra["sink"] = {"kafka.message.max.bytes": "2097152"}
    fixture.drain()


def oversized_given_up(fixture: Fixture) -> None:
    """Under at_most_once a record that the sink rejects is given up, and counted; the others go on."""
    fixture.send()
    fixture.drain()
    fixture.audit()
    counts = (fixture.audited or {}).get("counts", {})
    if counts.get("given_up"):
        fixture.fire("record too large", **counts)


# -- F8: restored or damaged state -------------------------------------------------------------------------------------


def log_entry_removed(fixture: Fixture) -> None:
    """The last file of commits/ is missing: Spark reruns the last batch."""
    fixture.send(0.5)
    must_go_through(fixture, "the first half")
    remove_log_entry(fixture)
    fixture.send(0.5)
    fixture.drain()


def remove_log_entry(fixture: Fixture) -> None:
    """Of Spark's commit log, the last one."""
    newest = fixture.batches_logged()[-1]
    for name in (str(newest), f".{newest}.crc"):
        (fixture.checkpoint / "commits" / name).unlink(missing_ok=True)
    fixture.fire("last commit removed", batch=newest)


def older_checkpoint(fixture: Fixture) -> None:
    """An older copy of the checkpoint is restored: going on would skip or repeat records, so it must stop."""
    kept, newest = fixture.folder / "checkpoint.older", fixture.folder / "checkpoint.newest"
    fixture.send(0.3)
    must_go_through(fixture, "the first third")
    shutil.copytree(fixture.checkpoint, kept)
    fixture.send(0.3)
    must_go_through(fixture, "the second third")
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
    """The checkpoint is missing: reading from the start would write everything twice."""
    fixture.send(0.5)
    must_go_through(fixture, "the first half")
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


def state_damaged(fixture: Fixture) -> None:
    """The newest state of each partition is unreadable: going on would lose its sums. Then it is restored."""
    fixture.send(0.5)
    must_go_through(fixture, "the first half")
    folders = [p for p in (fixture.checkpoint / "state" / "0").iterdir() if p.name.isdigit()]
    newest = {max(p.glob("*.delta"), key=lambda f: int(f.stem)) for p in folders}
    kept = {p: p.read_bytes() for p in newest}
    fixture.send()
    for how in ("cut off", "deleted"):
        for path, data in kept.items():
            path.write_bytes(data[: len(data) // 2])
            if how == "deleted":
                path.unlink()
        fixture.fire(f"state {how}", files=[str(p.relative_to(fixture.checkpoint)) for p in newest])
        fixture.must_stop("STATE_UNREADABLE", when=f"with its state {how}")
        for path, data in kept.items():
            path.write_bytes(data)
    fixture.drain()


def shards_changed(change: Callable[[Fixture, int], None]) -> Script:
    """A batch reruns with a different number of shards than it was staged, and decided, with."""

    def script(fixture: Fixture) -> None:
        fixture.send()
        for shards, step in ((3, "prepare"), (5, "decide")):
            change(fixture, shards)
            kill_at(fixture, f"{case_step(fixture, step)}:after")
        change(fixture, 2)
        fixture.drain()

    return script


def by_hint(fixture: Fixture, shards: int) -> None:
    fixture.sql = f"SELECT /*+ REPARTITION({shards}, key) */ key, value FROM source"  # noqa: S608


def by_slices(fixture: Fixture, shards: int) -> None:
    fixture.extra["source"] = {"minPartitions": 4 * shards}


def by_shuffle(fixture: Fixture, shards: int) -> None:
    """For a stateful query. Spark keeps the number with which the checkpoint began, whatever is configured."""
    fixture.extra["spark"] = {"spark.sql.shuffle.partitions": str(shards)}


# -- F7: two drivers on one checkpoint ---------------------------------------------------------------------------------


def zombie(step: str, locked: str | None) -> Script:
    """A driver is paused before a step; another takes over and finishes; then the first one resumes.

    Args:
        locked: the error of other writers while one writer locks all of the sink.

    A paused driver that locks all of the sink cannot be superseded: the second one must report so, and the first must
    succeed. A two-phase upsert locks its keys: the second driver may be rejected because of them, and a start after the
    first one has ended continues. A driver that had already decided can no longer be stopped: it may end either way.
    """

    def script(fixture: Fixture) -> None:
        fixture.send()
        first = fixture.start(f"{case_step(fixture, step)}:before@batch=1!wait")
        hit = waits(fixture, first)
        if hit is None:
            return
        fixture.fire("paused", processes=first.pause())
        code = fixture.end(fixture.start("", "--takeover"))
        held = code is not None and code == locked
        if not held:
            upserts_prepared = fixture.setting.workload.replaces and not fixture.setting.sink.batch_atomic
            right = (code,) if upserts_prepared and code == _KEYS_HELD else ()
            fixture.stops.append(Stop(right, code, "the second driver, which takes over"))
        first.go_on(hit)
        first.resume()
        fixture.fire("woken up")
        code = fixture.end(first)
        if held:
            fixture.stops.append(Stop((), code, "the first driver, which held the sink"))
        elif step != "apply":
            fixture.stops.append(Stop((code or "an error",), code, "the zombie"))
        fixture.drain()

    return script


def start_a_second(fixture: Fixture, first: Run, hit: Path) -> None:
    """A second driver starts, without a takeover request."""
    code = fixture.must_stop("CHECKPOINT_OWNED", when="the second driver")
    fixture.fire("second driver", code=code)
    first.go_on(hit)


second_driver = at_point(
    lambda fixture: f"{case_step(fixture, 'decide')}:before@batch=1",
    start_a_second,
    must="the first driver, which nobody may disturb",
)
"""A second driver starts, without a takeover request, while the first one is in the middle of a batch."""


# -- two parts at a time: driver and server, hosts whose clocks differ, a source that lost its end ---------------------


def killed_together(*points: str) -> Scripted:
    """At each point driver and server are killed; the server is back first, by a seeded time; then the pipeline
    starts."""

    def script(fixture: Fixture) -> None:
        fixture.send()
        for where in points:
            run = fixture.start(where)
            if run.wait_hit(HIT_TIMEOUT_S) is None:
                fixture.end(run)
                continue
            pid = fixture.broker.pid
            fixture.broker.kill()
            fixture.kill(run)
            fixture.broker.restart()
            first_s = round(fixture.random.uniform(0, BACK_FIRST_S), 2)
            fixture.wait(after(first_s), "the server is back first")
            fixture.fire(f"driver and server killed@{where}", server=pid, back_first_s=first_s)
        fixture.drain()

    return script, tuple(f"driver and server killed@{p}" for p in points)


CLOCKS = ("a clock an hour ahead", "a clock that is right", "a clock an hour behind")


def clocks_differ(fixture: Fixture) -> None:
    """Three checkpoints follow each other, each on a host whose clock is earlier by an hour. The second one dies after
    a decision: the third must finish it, though by the clocks it is older than the first one's."""
    decide = case_step(fixture, "decide")
    fixture.send(0.3)
    fixture.clock_s = HOUR_S
    must_go_through(fixture, "on a host whose clock is an hour ahead")
    _clock_read(fixture, CLOCKS[0])
    _next_checkpoint(fixture)
    fixture.send(0.3)
    fixture.clock_s = 0
    if kill_at(fixture, f"{decide}:after"):
        fixture.fire(CLOCKS[1])
    _next_checkpoint(fixture)
    fixture.send()
    fixture.clock_s = -HOUR_S
    fixture.drain()
    _clock_read(fixture, CLOCKS[2])


def _clock_read(fixture: Fixture, name: str) -> None:
    """Recorded only if the commit engine really read that clock."""
    if fixture.clock_read(fixture.runs[-1]).exists():
        fixture.fire(name, seconds=fixture.clock_s)


def _next_checkpoint(fixture: Fixture) -> None:
    """A new checkpoint that starts where this one's last planned batch ended."""
    newest = fixture.batches_planned()[-1]
    offsets = (fixture.checkpoint / "offsets" / str(newest)).read_text(encoding="utf-8").splitlines()[2]
    fixture.checkpoint.rename(fixture.checkpoint.with_name(f"{fixture.checkpoint.name}.{len(fixture.runs)}"))
    fixture.extra["source"] = {"startingOffsets": json.dumps(json.loads(offsets))}
    fixture.extra["pipeline"] = {"new_checkpoint": "accept"}


LOST_END = ("the source lost its end", "its log grew past the position")


def source_lost_end(fixture: Fixture) -> None:
    """The source loses records that were delivered, and takes new ones, which now have their offsets: whoever goes on
    at the old position never reads them. Each start must say so."""
    source = fixture.setting.source
    if not isinstance(source, LosesEnd):
        raise VerifierError("SOURCE_CANNOT", case=fixture.setting.name)
    for share in (0.2, 0.1):  # in two record batches of each partition
        fixture.send(share)
    must_go_through(fixture, "the first part")
    before, server = source.read(), fixture.source_broker
    server.kill()
    partition, end = source.lose_end(server.folder)
    server.restart()
    fixture.lost += [r for r in before if r.partition == partition and r.position >= end]
    if fixture.lost:
        fixture.fire(LOST_END[0], partition=partition, end=end, records=len(fixture.lost))
    fixture.send()
    if sum(r.partition == partition for r in source.read()) > end + len(fixture.lost):
        fixture.fire(LOST_END[1])
    fixture.stays_down = True
    for _ in range(2):
        fixture.must_stop("DATA_LOST", when="the log that lost its end")
