"""Scripts about what others do to a table meanwhile: they hold it, read it at length, write to it, end what was
prepared in it."""

from __future__ import annotations

from delivered.verify.bench import Bench
from delivered.verify.clients.base import Disturbed, Lockable, Prepares, ReadAtLength, Shared
from delivered.verify.evidence import Stop
from delivered.verify.expiry import promise_lost
from delivered.verify.scripts import Script, after, point_of, waits
from delivered.verify.services import Trouble

_HELD_S = 3.0


def lock_held(step: str) -> Script:
    """Another program holds what a writer must wait for when it comes to a step."""

    def script(bench: Bench) -> None:
        drain = bench.setting.drain
        if not isinstance(drain, Lockable):
            raise _cannot(bench, "be locked")
        bench.send()
        run = bench.start(f"{point_of(bench, step)}:before!wait")
        hit = waits(bench, run)
        if hit is not None:
            with drain.locked():
                run.go_on(hit)
                bench.fire("lock held", seconds=_HELD_S)
                bench.wait(after(_HELD_S), "the lock is held")
            bench.end(run)
        bench.drain()

    return script


def slow_reader(bench: Bench) -> None:
    """A reader is in the middle of its read while a batch commits: neither may harm the other."""
    drain = bench.setting.drain
    if not isinstance(drain, ReadAtLength):
        raise _cannot(bench, "be read at length")
    bench.send()
    run = bench.start(f"{point_of(bench, 'decide')}:before@batch=1!wait")
    hit = waits(bench, run)
    if hit is not None:
        disturbed = None
        try:
            with drain.reading():
                run.go_on(hit)
                bench.fire("reader slow", seconds=_HELD_S)
                bench.wait(after(_HELD_S), "the reader reads")
        except Disturbed as error:
            disturbed = str(error)
        bench.stops.append(Stop((), disturbed, "a reader while a batch commits"))
        bench.end(run)
    bench.drain()


def other_writers(point: str) -> tuple[Script, tuple[str, ...]]:
    """Between a batch's look at the log and its commit, others commit: one without rows, one that only moves rows."""

    def script(bench: Bench) -> None:
        drain = bench.setting.drain
        if not isinstance(drain, Shared):
            raise _cannot(bench, "be written to by others")
        bench.send()
        run = bench.start(f"{point}@batch=1!wait")
        hit = waits(bench, run)
        if hit is not None:
            drain.append_nothing()
            bench.fire("another writer appended")
            drain.compact()
            bench.fire("another writer compacted")
            run.go_on(hit)
            bench.stops.append(Stop((), bench.end(run), "the run between other writers"))
        bench.drain()

    return script, ("another writer appended", "another writer compacted")


def table_altered(point: str) -> tuple[Script, tuple[str, ...]]:
    """The same with a commit after which the format lets nobody commit what rests on the state before: the batch may
    fail, and runs again."""

    def script(bench: Bench) -> None:
        drain = bench.setting.drain
        if not isinstance(drain, Shared):
            raise _cannot(bench, "be written to by others")
        bench.send()
        run = bench.start(f"{point}@batch=1!wait")
        hit = waits(bench, run)
        if hit is not None:
            drain.describe("altered meanwhile")
            bench.fire("table altered")
            run.go_on(hit)
            bench.end(run)
        bench.drain()

    return script, ("table altered",)


def rolled_back(moment: str, deterministic: bool) -> Script:
    """An operator ends prepared transactions by hand before, or after, their batch is decided."""

    def lose(bench: Bench) -> None:
        drain = bench.setting.drain
        if not isinstance(drain, Prepares):
            raise _cannot(bench, "prepare")
        ended = drain.roll_back_prepared()
        if ended:
            bench.fire("prepared transactions rolled back", ended=ended)

    return promise_lost(moment, deterministic, lose)


def _cannot(bench: Bench, what: str) -> Trouble:
    return Trouble("SINK_CANNOT", f"The sink of cell {bench.setting.name} cannot {what}: the fault is not for it.")
