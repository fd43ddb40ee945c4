"""Scripts about what others do to a table meanwhile: they hold it, read it at length, write to it, end what was
prepared in it."""

from __future__ import annotations

from delivered.verify.evidence import Stop
from delivered.verify.expiry import promise_lost
from delivered.verify.fixture import Fixture
from delivered.verify.scripts import Script, after, point_of, waits
from delivered.verify.services import VerifierError
from delivered.verify.systems.base import Lockable, LongReads, ReadDisturbed, SharedTable, TwoPhase

_HELD_S = 3.0


def lock_held(step: str) -> Script:
    """Another program holds what a writer must wait for when it comes to a step."""

    def script(fixture: Fixture) -> None:
        sink = fixture.setting.sink
        if not isinstance(sink, Lockable):
            raise _cannot(fixture, "be locked")
        fixture.send()
        run = fixture.start(f"{point_of(fixture, step)}:before!wait")
        hit = waits(fixture, run)
        if hit is not None:
            with sink.locked():
                run.go_on(hit)
                fixture.fire("lock held", seconds=_HELD_S)
                fixture.wait(after(_HELD_S), "the lock is held")
            fixture.end(run)
        fixture.drain()

    return script


def slow_reader(fixture: Fixture) -> None:
    """A reader is in the middle of its read while a batch commits: neither may harm the other."""
    sink = fixture.setting.sink
    if not isinstance(sink, LongReads):
        raise _cannot(fixture, "be read at length")
    fixture.send()
    run = fixture.start(f"{point_of(fixture, 'decide')}:before@batch=1!wait")
    hit = waits(fixture, run)
    if hit is not None:
        disturbed = None
        try:
            with sink.reading():
                run.go_on(hit)
                fixture.fire("reader slow", seconds=_HELD_S)
                fixture.wait(after(_HELD_S), "the reader reads")
        except ReadDisturbed as error:
            disturbed = str(error)
        fixture.stops.append(Stop((), disturbed, "a reader while a batch commits"))
        fixture.end(run)
    fixture.drain()


def other_writers(point: str) -> tuple[Script, tuple[str, ...]]:
    """Between a batch's look at the log and its commit, others commit: one without rows, one that only moves rows."""

    def script(fixture: Fixture) -> None:
        sink = fixture.setting.sink
        if not isinstance(sink, SharedTable):
            raise _cannot(fixture, "be written to by others")
        fixture.send()
        run = fixture.start(f"{point}@batch=1!wait")
        hit = waits(fixture, run)
        if hit is not None:
            sink.append_nothing()
            fixture.fire("another writer appended")
            sink.compact()
            fixture.fire("another writer compacted")
            run.go_on(hit)
            fixture.stops.append(Stop((), fixture.end(run), "the run between other writers"))
        fixture.drain()

    return script, ("another writer appended", "another writer compacted")


def table_altered(point: str) -> tuple[Script, tuple[str, ...]]:
    """The same with a commit after which the format lets nobody commit what rests on the state before: the batch may
    fail, and runs again."""

    def script(fixture: Fixture) -> None:
        sink = fixture.setting.sink
        if not isinstance(sink, SharedTable):
            raise _cannot(fixture, "be written to by others")
        fixture.send()
        run = fixture.start(f"{point}@batch=1!wait")
        hit = waits(fixture, run)
        if hit is not None:
            sink.describe("altered meanwhile")
            fixture.fire("table altered")
            run.go_on(hit)
            fixture.end(run)
        fixture.drain()

    return script, ("table altered",)


def rolled_back(moment: str, deterministic: bool) -> Script:
    """An operator ends prepared transactions by hand before, or after, their batch is decided."""

    def lose(fixture: Fixture) -> None:
        sink = fixture.setting.sink
        if not isinstance(sink, TwoPhase):
            raise _cannot(fixture, "prepare")
        ended = sink.roll_back_prepared()
        if ended:
            fixture.fire("prepared transactions rolled back", ended=ended)

    return promise_lost(moment, deterministic, lose)


def _cannot(fixture: Fixture, what: str) -> VerifierError:
    return VerifierError(
        "SINK_CANNOT", f"The sink of case {fixture.setting.name} cannot {what}: the fault is not for it."
    )
