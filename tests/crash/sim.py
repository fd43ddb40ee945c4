"""Simulates Spark: offset and commit logs, tasks, drivers that die, are paused, or start twice.

One `Sim` is one pipeline in one in-memory world. A driver is two processes, one that plans and one that commits, as in
Spark; everything passed between them and the tasks is pickled. A crash point stops a process in one of these ways:

    kill        the process dies there: a task (Spark reruns it) or the driver (it is restarted)
    tree        the driver dies with all its tasks
    fail        an exception: a task is rerun, a query stops and is restarted in the same session
    zombie      the driver with all its tasks is paused; another driver runs; the first resumes at a chosen moment
    zombie_task the task is paused and given up by Spark; it resumes at a chosen moment
"""

from __future__ import annotations

import itertools
import json
import pickle
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import pyarrow as pa
from tests.support.memory import CONNECTOR
from tests.support.memory.world import ROWS, Answer, State, make_world
from tests.support.steps import ROLE_OF_STEP, Role

from delivered.engine import Sinks
from delivered.engine.arbiter import Grants
from delivered.engine.context import Context
from delivered.engine.runner import Runner
from delivered.engine.shard import fingerprint_seed, write_shard
from delivered.model import step
from delivered.model.capability import Commit, Guarantee, SourceCapability
from delivered.model.errors import DeliveredError
from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.identity import Scope
from delivered.model.rows import Rows
from delivered.model.step import Moment, StepId
from delivered.model.work import Arbiter, BatchPlan, CheckpointView, Decision, Owner, ShardMessage, Tolerance
from delivered.planner import CheckpointFacts, Plan, Request, SinkFacts, SourceFacts, make_plan

T = TypeVar("T")
HOWS = ("kill", "tree", "fail", "zombie", "zombie_task")
END = "end"
STARTS_MAX = 8
ATTEMPTS_MAX = 4
WAIT_S = 20.0


class Dead(BaseException):
    """This process was killed: not an Exception, so no code under test handles it."""


class Failure(Exception):
    """An exception at a crash point."""


@dataclass
class Crash:
    """One stop of one process.

    Attributes:
        point: "commit.decide:after".
        nth: counted over all processes of the simulation that are not zombies yet.
        resume: for zombies: the point that the other driver has reached when the zombie resumes, or END.
        same_owner: for zombies: the other driver is a restart in the same session.
    """

    point: str
    nth: int = 1
    how: str = "tree"
    resume: str = END
    same_owner: bool = False
    seen: int = 0
    hit: bool = False


@dataclass
class Checkpoint:
    """
    Attributes:
        start: offsets of the first batch; empty: the source's own. until: the source's end for this checkpoint.
    """

    incarnation: str = "inc-1"
    start: dict[str, int] = field(default_factory=dict)
    until: int | None = None
    offsets: dict[int, dict[str, int]] = field(default_factory=dict)
    commits: set[int] = field(default_factory=set)


@dataclass
class Process:
    """A driver with its tasks, or a task alone."""

    name: str
    dead: bool = False


class Pause:
    """A paused process."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.thread: threading.Thread | None = None


class Driver:
    """One session: contexts survive a query's restart."""

    def __init__(self, sim: Sim, owner: str) -> None:
        self.sim = sim
        sim.hold()
        self.process = Process(owner)
        scope = Scope("p", sim.sinks.decider.name, sim.checkpoint.incarnation)
        self.planner, self.committer = (
            Runner(
                sim.sinks,
                Context.open(sim.sinks, scope, sim.guarantee, Owner(owner), sim.tolerance),
                self._register,
            )
            for _ in range(2)
        )
        self.grants = sim.arbiters.setdefault(owner, Grants())
        self.before: int | None = None

    def _register(self) -> Arbiter:
        arbiter = Arbiter("", 0, uuid.uuid4().hex)
        self.grants.plan("p/memory", arbiter.token)
        return arbiter

    def run(self) -> None:
        """One start of the query: batches until the source is empty."""
        while (view := self.sim.next_batch()) is not None:
            self.before = None
            plan = _travel(self.planner.plan(view, ROWS, keeps_state=lambda: self.sim.keeps_state))
            self.before = view.batch
            self._commit(view, plan)
            step.reach(StepId.LOG, Moment.BEFORE, batch=view.batch)
            self.sim.gate()
            self.sim.checkpoint.commits.add(view.batch)
        if self.before is not None:
            step.reach(StepId.LOG, Moment.AFTER, batch=self.before)

    def _commit(self, view: CheckpointView, plan: BatchPlan) -> None:
        done: list[ShardMessage | None] = []

        def tasks(messages: list[ShardMessage | None]) -> None:
            messages += done or self.sim.tasks(self, plan)
            done[:] = messages
            if None in messages:
                raise Failure("a task failed too often")

        for _ in range(1 + self.sim.commit_again):
            self.committer.finish(plan, tasks, run=view.run)


def planned(sinks: Sinks, guarantee: Guarantee) -> Plan:
    """The plan of a pipeline with these sinks."""
    plan = make_plan(
        Request(
            pipeline="orders",
            guarantee=guarantee,
            sources=(SourceFacts("log in", SourceCapability("log", replayable=True)),),
            sinks=tuple(SinkFacts(m.name, "sink", m.sink.capability()) for m in sinks.members),
            checkpoint=CheckpointFacts("/checkpoint"),
        )
    )
    assert isinstance(plan, Plan), plan
    return plan


def _travel(value: T) -> T:
    copy: T = pickle.loads(pickle.dumps(value))
    return copy


@dataclass
class Sim:
    """
    Attributes:
        crashes: in any order, each once.
        change: (batch of rows, number of the run) -> rows: a transform that is not deterministic.
        commit_again: number of repeated commit calls for each batch.
        on_start: called before each start of a driver, with its number from 0.
        starts_max: starts of a driver; 1: a killed one is not restarted.
        runs: each checkpoint is a run of `df.write`.
        keeps_state: the query is stateful: Spark keeps what tasks read (`read`) of a logged batch.
        stages_rerun: a task that runs again does so in another attempt of its stage: its attempt is 0 again (P31).
        arbiters: by owner: a driver's process outlives a query.
    """

    guarantee: Guarantee
    commit: Commit = Commit.TWO_PHASE
    crashes: tuple[Crash, ...] = ()
    batches: int = 2
    shards: int = 2
    rows: int = 4
    rows_per_read: int = 2
    tolerance: Tolerance = field(default_factory=Tolerance)
    change: Callable[[pa.RecordBatch, int], pa.RecordBatch] | None = None
    commit_again: int = 0
    expire_on_start: bool = False
    on_start: Callable[[Sim, int], None] | None = None
    keeps_state: bool = False
    stages_rerun: bool = False
    arbiters: dict[str, Grants] = field(default_factory=dict)
    starts_max: int = STARTS_MAX
    runs: bool = False
    read: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    problems: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    reached: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    guarantees: set[Guarantee] = field(default_factory=set)
    held: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.name = f"sim-{id(self)}"
        self.world = make_world(self.name)
        self.world.gate = self.gate
        self.world.inputs = [
            [(b"k", f"{p}-{i}".encode()) for i in range(self.batches * self.rows)] for p in range(self.shards)
        ]
        self.sinks = self.make_sinks()
        self.source = CONNECTOR.source({"world": self.name})
        self._local = threading.local()
        self._pauses: list[tuple[Crash, Pause]] = []
        self._stop = False
        self._decided: tuple[int, list[Decision]] = (0, [])
        self._tasks = itertools.count()

    def make_sinks(self) -> Sinks:
        return Sinks.one(CONNECTOR.sink({"world": self.name, "commit": self.commit.value}))

    def hold(self) -> None:
        """From here on, the steps of this guarantee's plan may be reached. A decided batch is finished under its own
        guarantee."""
        if self.guarantee not in self.guarantees:
            plan = planned(self.sinks, self.guarantee)
            self.guarantees.add(self.guarantee)
            self.held |= {step.id.value for step in (*plan.steps, *plan.recovery)}

    # -- the world's side --------------------------------------------------------------------------------------

    def gate(self) -> None:
        """A dead process changes nothing."""
        for process in self._mine():
            if process.dead:
                raise Dead(process.name)

    def _mine(self) -> Iterator[Process]:
        for name in ("driver", "task"):
            process = getattr(self._local, name, None)
            if process is not None:
                yield process

    def reach(self, point: str, facts: dict[str, object]) -> None:
        self.gate()
        self.reached[point] += 1
        if point.partition(":")[0] not in self.held:
            self.problems.append(f"{point} is reached, and no plan of {sorted(self.guarantees)} holds it")
        self.watch(point)
        for crash, pause in self._pauses:
            if crash.resume == point and not getattr(self._local, "zombie", False):
                self._resume(crash, pause)
        if getattr(self._local, "zombie", False):
            return
        for crash in self.crashes:
            if crash.point == point and not crash.hit:
                crash.seen += 1
                if crash.seen == crash.nth:
                    crash.hit = True
                    self._crash(crash, point)

    def _crash(self, crash: Crash, point: str) -> None:
        task: Process | None = getattr(self._local, "task", None)
        driver: Process = self._local.driver
        match crash.how:
            case "fail":
                raise Failure(point)
            case "kill" if task is not None:
                task.dead = True
                raise Dead(point)
            case "kill" | "tree":
                driver.dead = True
                raise Dead(point)
            case "zombie" | "zombie_task":
                pause: Pause = self._local.pause
                self._local.zombie = True
                self._pauses.append((crash, pause))
                pause.reached.set()
                if not pause.go_on.wait(WAIT_S):
                    self.problems.append(f"a zombie at {point} was never resumed")
                if self._stop:
                    raise Dead(point)
            case _:
                raise AssertionError(crash.how)

    def _resume(self, crash: Crash, pause: Pause) -> None:
        if (crash, pause) not in self._pauses:
            return
        self._pauses.remove((crash, pause))
        pause.go_on.set()
        assert pause.thread is not None
        pause.thread.join(WAIT_S)
        if pause.thread.is_alive():
            self.problems.append(f"a zombie of {crash.point} did not end")

    # -- Spark's side ------------------------------------------------------------------------------------------

    def next_batch(self) -> CheckpointView | None:
        """Log the offsets of the next batch, unless one is logged but not committed."""
        self.gate()
        log = self.checkpoint
        newest = max(log.offsets, default=None)
        if newest is None or newest in log.commits:
            start = log.offsets[newest] if newest is not None else self._first(log)
            until = log.until
            ends = {p: len(self.world.inputs[int(p)]) if until is None else until for p in start}
            end = {p: min(at + self.rows, ends[p]) for p, at in start.items()}
            if end == start:
                return None
            newest = 0 if newest is None else newest + 1
            log.offsets[newest] = end
        logged = max(log.commits, default=None)
        return CheckpointView(log.incarnation, newest, json.dumps(log.offsets[newest]), logged, self.runs)

    def _first(self, log: Checkpoint) -> dict[str, int]:
        found: dict[str, int] = log.start or self.source.driver().initial()
        return found

    def tasks(self, driver: Driver, plan: BatchPlan) -> list[ShardMessage | None]:
        log = self.checkpoint
        source = self.source.driver()
        start = log.offsets[plan.batch - 1] if plan.batch else self._first(log)
        slices = source.slices(start, log.offsets[plan.batch])
        return [self._shard(driver, plan, shard, piece) for shard, piece in enumerate(slices)]

    def _shard(self, driver: Driver, plan: BatchPlan, shard: int, piece: object) -> ShardMessage | None:
        for launch in range(ATTEMPTS_MAX):
            attempt = 0 if self.stages_rerun else launch
            found: list[ShardMessage] = []
            if any(c.how == "zombie_task" and not c.hit for c in self.crashes):
                pause = Pause()
                self._in_thread(driver.process, pause, partial(self._task, driver, plan, shard, attempt, piece, found))
            else:
                self._task(driver, plan, shard, attempt, piece, found)
            self.gate()
            if found:
                return _travel(found[0])
        return None

    def _task(
        self, driver: Driver, plan: BatchPlan, shard: int, attempt: int, piece: object, found: list[ShardMessage]
    ) -> None:
        self._local.task = task = Process(f"task {shard}.{attempt}")
        own = uuid.uuid4().hex

        def may_send() -> bool:
            grant = driver.grants.ask(plan.arbiter.token, shard, own) if plan.arbiter is not None else None
            return grant is not None and grant.attempt == own

        number = next(self._tasks)
        try:
            message = write_shard(self.sinks, plan, shard, attempt, self._read(piece), ROWS, may_send)
            found.append(replace(message, task=number))
        except Dead:
            if not task.dead:
                raise
        except Exception as error:
            self.errors.append(error)
        finally:
            self._local.task = None

    def _read(self, piece: object) -> Iterator[Rows]:
        partition, start, end = piece.data  # type: ignore[attr-defined]
        values: list[bytes] = []
        for at in range(start, end, self.rows_per_read):
            part = type(piece)((partition, at, min(at + self.rows_per_read, end)))
            for batch in self.source.read(part):
                rows = self.change(batch, self.starts) if self.change else batch
                values += rows.column("value").to_pylist()
                yield Rows(rows)
        self.read[partition, end] = values

    def state(self) -> Counter[bytes]:
        """What tasks read of the logged batches, the last time they read a whole shard."""
        ends = {(int(p), at) for n in self.checkpoint.commits for p, at in self.checkpoint.offsets[n].items()}
        return Counter(v for (p, end), values in self.read.items() if (int(p), end) in ends for v in values)

    def _in_thread(self, driver: Process, pause: Pause, run: Callable[[], None]) -> None:
        """Run something that may be paused; return once it ended or was paused."""

        def body() -> None:
            self._local.driver = driver
            self._local.pause = pause
            try:
                run()
            except BaseException as error:
                self.errors.append(error)
            finally:
                pause.reached.set()

        pause.thread = threading.Thread(target=body, daemon=True)
        pause.thread.start()
        if not pause.reached.wait(WAIT_S):
            self.problems.append("a process hangs")

    # -- the whole ---------------------------------------------------------------------------------------------

    def run(self) -> Sim:
        """Start drivers until one reaches the end of the source; then resume every zombie."""
        step.install(self.reach)
        try:
            self._run()
            for crash, pause in list(self._pauses):
                self._resume(crash, pause)
            if not self._done() and self.starts_max > 1:
                self._run()
        finally:
            step.install(None)
            self._stop = True
            for _, pause in self._pauses:
                pause.go_on.set()
        return self

    def _done(self) -> bool:
        log = self.checkpoint
        ends = {str(p): len(rows) if log.until is None else log.until for p, rows in enumerate(self.world.inputs)}
        return bool(log.commits) and log.offsets.get(max(log.commits)) == ends and max(log.offsets) in log.commits

    def _run(self) -> None:
        driver: Driver | None = None
        for _ in range(self.starts_max):
            if self.on_start is not None:
                self.on_start(self, self.starts)
            if self.expire_on_start and self.starts:
                self.world.expire()
            if driver is None:
                driver = Driver(self, f"driver-{self.starts}")
            self.starts += 1
            again = driver
            ended: list[bool] = []

            def start(driver: Driver = driver, ended: list[bool] = ended) -> None:
                driver.run()
                ended.append(True)

            zombies = [c for c in self.crashes if c.how == "zombie" and not c.hit]
            pause = Pause()
            if zombies:
                self._in_thread(driver.process, pause, start)
                paused = [c for c, p in self._pauses if p is pause]
                if paused:
                    name = again.process.name if paused[0].same_owner else f"driver-{self.starts}"
                    driver = Driver(self, name)
                    continue
            else:
                self._local.driver = driver.process
                try:
                    start()
                except BaseException as error:
                    if not isinstance(error, Dead | Exception):
                        raise
                    self.errors.append(error)
            if ended:
                return
            if driver.process.dead or (isinstance(self.errors[-1], Exception) and self._fenced(self.errors[-1])):
                driver = None
        self.problems.append(f"not done after {self.starts} starts; last error: {self.errors[-1:]!r}")

    @staticmethod
    def _fenced(error: BaseException) -> bool:
        return type(error).__name__ == "Fenced"

    # -- what a reader sees ------------------------------------------------------------------------------------

    def decisions(self) -> list[Decision]:
        texts = [t for room in self.world.rooms.values() for t in room.decisions]
        if self._decided[0] != len(texts):
            self._decided = (len(texts), [Decision.from_json(t) for t in texts])
        return self._decided[1]

    def watch(self, point: str) -> None:
        """Check the invariants that always hold."""
        if self.guarantee is not Guarantee.EXACTLY_ONCE or self.change or self.tolerance != Tolerance():
            return
        decided = {(d.scope.incarnation, d.batch): d for d in self.decisions()}
        seen: Counter[tuple[str, int]] = Counter()
        with self.world.lock:
            for work, batch in self.world.visible:
                seen[(work.scope.incarnation, work.batch)] += batch.num_rows
        for key, count in seen.items():
            if key not in decided:
                self.problems.append(f"at {point}: batch {key} is visible and not decided")
            elif self.commit is Commit.ONE_TRANSACTION and count != decided[key].fingerprint.count:
                self.problems.append(f"at {point}: batch {key} is torn: {count} rows")

    def visible(self) -> Counter[bytes]:
        return Counter(v for _, batch in self.world.visible for v in batch.column("value").to_pylist())

    def expected(self) -> Counter[bytes]:
        return Counter(v for rows in self.world.inputs for _, v in rows if v is not None)

    def lost(self) -> int:
        return sum((self.expected() - self.visible()).values())

    def duplicated(self) -> int:
        return sum((self.visible() - self.expected()).values())

    def last(self) -> Decision:
        return self.decisions()[-1]

    def given_up(self) -> int:
        return self.last().given_up.count

    def verdict(self) -> list[str]:
        """What is wrong in the end, by the guarantee's oracle."""
        found = list(self.problems)
        lost, duplicated = self.lost(), self.duplicated()
        match self.guarantee:
            case Guarantee.EXACTLY_ONCE:
                if lost or duplicated:
                    found.append(f"lost {lost}, duplicated {duplicated}")
                found += self._account()
            case Guarantee.AT_LEAST_ONCE:
                if lost:
                    found.append(f"lost {lost}")
            case Guarantee.AT_MOST_ONCE:
                given_up = self.given_up() if self.decisions() else 0
                if duplicated:
                    found.append(f"duplicated {duplicated}")
                if lost > given_up:
                    found.append(f"lost {lost}, counted as given up {given_up}")
        return found

    def _totals(self) -> Iterable[str]:
        seed = fingerprint_seed(Scope("p", "memory", "any"))
        seen = sum((fingerprint(b, seed) for _, b in self.world.visible), Fingerprint())
        if self.decisions() and self.last().total != seen:
            yield f"the ledger accounts for {self.last().total}, readers see {seen}"

    def _account(self) -> Iterable[str]:
        yield from self._totals()
        decided = Counter((d.scope.incarnation, d.batch, d.revision) for d in self.decisions())
        if any(n > 1 for n in decided.values()):
            yield f"a batch was decided twice: {decided}"
        zombies = any(c.how.startswith("zombie") for c in self.crashes)
        # A fenced driver paused before aborting orphans may abort its successor's participants: they are rewritten.
        if not zombies and not self.expire_on_start and any(d.revision for d in self.decisions()):
            yield "a shard was written again although no promise expired"
        left = [p for p in self.world.unsettled() if p.state in (State.OPEN, State.PREPARED)]
        # Nobody aborts what a task prepares that outlives its driver: it times out, or the next start aborts it.
        # If a stage ran again in full, only the next attempt of a shard knows the former one, if the sink looks.
        if left and not self.stages_rerun and not any(c.how == "zombie_task" for c in self.crashes):
            yield f"{len(left)} participants outlived their batch"


def role(point: str) -> Role:
    return ROLE_OF_STEP[StepId(point.split(":", maxsplit=1)[0])]


def points() -> list[str]:
    """Every crash point of a pipeline; those of receivers, key tables, sagas and audits have their own tests."""
    own = {s for s, r in ROLE_OF_STEP.items() if r in (Role.RECEIVER, Role.WORKER, Role.AUDITOR)}
    own |= {StepId.DEDUP_NOTE, StepId.DEDUP_KEEP}
    return [f"{s}:{m}" for s in StepId if s not in own for m in Moment]


__all__ = ["END", "HOWS", "Answer", "Checkpoint", "Crash", "Driver", "Failure", "Sim", "points", "role"]


def codes(sim: Sim) -> list[str]:
    return [e.code.removeprefix("DELIVERED_") for e in sim.errors if isinstance(e, DeliveredError)]


def again(sim: Sim, **changes: object) -> Sim:
    """Restart the pipeline on the same world and checkpoint."""
    for name, value in {"crashes": (), "problems": [], "errors": [], **changes}.items():
        setattr(sim, name, value)
    return sim.run()


def other_rows(batch: pa.RecordBatch, run: int) -> pa.RecordBatch:
    values = [b"%s in run %d" % (v, run) for v in batch.column("value").to_pylist()]
    return pa.record_batch([batch.column("key"), pa.array(values, pa.binary())], schema=batch.schema)
