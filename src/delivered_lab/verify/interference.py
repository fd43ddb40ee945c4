"""Scripts for interference around a pipeline: its producer, network, servers and disk; others that lock, read, write or
alter its table, or end its prepared transactions; and a queue's receivers, which are killed or paused."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from delivered_lab.supervisor import Hit
from delivered_lab.verify.evidence import Stop
from delivered_lab.verify.fixture import END_TIMEOUT_S, HIT_TIMEOUT_S, Fixture
from delivered_lab.verify.proxy import Rule
from delivered_lab.verify.scripts import TRIES_MAX, Script, Scripted, after, at_each, at_point, case_step, waits
from delivered_lab.verify.services import Run, VerifierError
from delivered_lab.verify.systems.base import Lockable, LongReads, ReadDisturbed, SharedTable, TwoPhase

TRANSACTION_TIMEOUT_S = 10
"""For cases in which transactions must expire. Longer than a batch on a busy machine, including its first imports."""
_EXPIRED_TIMEOUT_S = 60
_HELD_S = 3.0
_PRODUCER_KILLED = "producer killed {} a send"
RECEIVER_POINTS = (
    "receive.take:after", "receive.persist:before", "receive.persist:after", "receive.ack:before", "receive.ack:after",
)  # fmt: skip
"""What a receiver of good messages reaches, in this order: nothing stops before it takes a message."""


def _able(fixture: Fixture, power: Any, what: str) -> Any:
    """Raises VerifierError: the sink lacks this ability."""
    sink = fixture.setting.sink
    if not isinstance(sink, power):
        name = fixture.setting.name
        raise VerifierError("SINK_CANNOT", name=name, what=what)
    return sink


# -- F1: the producer --------------------------------------------------------------------------------------------------


def producer_killed(fixture: Fixture) -> None:
    """The producer application is killed twice; it resends what was not acknowledged."""
    fixture.send(0.2)
    producer = fixture.producer(portion=40, pause_s=0.05)
    producer.start()
    run = fixture.start()
    for acknowledged in (3, 9):
        fixture.wait(lambda n=acknowledged: producer.acknowledged >= n, "portions are acknowledged")  # type: ignore[misc]
        producer.kill()
        fixture.fire("producer killed", acknowledged=producer.acknowledged)
        producer.start()
    producer.finish(END_TIMEOUT_S)
    fixture.end(run)
    fixture.drain()


def producer_killed_at(*moments: str) -> Scripted:
    """The producer application is killed right before it sends a portion, and right after the acknowledgement, before
    it could record it."""

    def script(fixture: Fixture) -> None:
        fixture.send(0.2)
        run = fixture.start()
        kill_producer(fixture, moments, portion=40)
        fixture.end(run)
        fixture.drain()

    return script, tuple(map(_PRODUCER_KILLED.format, moments))


def kill_producer(fixture: Fixture, moments: Sequence[str], portion: int, again: bool = True) -> None:
    """A producer application sends all that is left, in portions of so many records, and is killed at these moments.

    Args:
        again: after a restart it resends what was not acknowledged.
    """
    producer = fixture.producer(portion, pause_s=0.0, again=again)
    for number, moment in enumerate(moments):
        stop = producer.start(3 + 4 * number, moment)
        fixture.wait(stop.exists, f"the producer stands {moment} a send")
        producer.kill()
        fixture.fire(_PRODUCER_KILLED.format(moment), portion=3 + 4 * number)
    producer.start()
    producer.finish(END_TIMEOUT_S)


# -- F2 and F5: the network --------------------------------------------------------------------------------------------


def network(*rules: Rule, most: int = 4) -> Scripted:
    """Proxy rules, while one start goes through all batches, or as many starts as it takes, at most `most`."""

    def script(fixture: Fixture) -> None:
        fixture.send()
        fixture.proxy.add(*(copy(r) for r in rules))
        fixture.drain(most)
        fixture.proxy.clear()

    return script, tuple(r.name for r in rules for _ in range(r.times))


def black_hole(fixture: Fixture) -> None:
    """A black hole for some seconds, then every connection is reset. The first time the pipeline may survive or fail;
    the second time still hits a batch."""
    fixture.send(0.5)
    run = fixture.start()
    for _ in range(2):
        run = _in_a_batch(fixture, run)
        if not run.lives:
            break
        with fixture.proxy.black_hole():
            fixture.fire("black hole", seconds=3)
            fixture.wait(after(3.0), "the hole lasts")
        fixture.fire("reset", connections=fixture.proxy.reset_all())
        if fixture.left:
            fixture.send()
    fixture.end(run)
    fixture.drain()


def _in_a_batch(fixture: Fixture, run: Run) -> Run:
    """Wait until a run, or its restart if it ended, begins its next batch. Returns the run."""
    for _ in range(TRIES_MAX):
        seen = len(fixture.batches_planned())

        def started(run: Run = run, seen: int = seen) -> bool:
            return not run.lives or len(fixture.batches_planned()) > seen

        fixture.wait(started, "the next batch begins")
        if run.lives:
            break
        fixture.end(run)
        run = fixture.start()
    return run


# -- F3: servers -------------------------------------------------------------------------------------------------------


def kill_broker(fixture: Fixture, run: Run, hit: Path, name: str = "broker killed") -> None:
    """The server of the sink is killed, the run goes on, and the server is restarted a second later."""
    fixture.broker.kill()
    run.go_on(hit)
    fixture.fire(name, pid=fixture.broker.pid)
    fixture.wait(after(1.0), "the broker is down")
    fixture.broker.restart()


def broker_killed(*points: str) -> Scripted:
    """At each point the broker is killed and restarted."""

    def harm(fixture: Fixture, run: Run, stands: Path, _: Hit, name: str) -> None:
        kill_broker(fixture, run, stands, name)

    return at_each("broker killed", points, harm)


def broker_restarted(*points: str) -> Scripted:
    """At each point the broker is shut down cleanly, with transactions open, and restarted."""

    def harm(fixture: Fixture, run: Run, stands: Path, _: Hit, name: str) -> None:
        opened = _open(fixture)
        fixture.broker.stop()
        fixture.broker.restart()
        if opened:
            fixture.fire(name, opened=opened)
        run.go_on(stands)

    return at_each("broker restarted", points, harm)


def source_killed(fixture: Fixture) -> None:
    """The source's server is killed while a task is about to read from it and a producer, which does not resend
    unacknowledged records, sends to it."""
    fixture.send(0.3)
    run = fixture.start("source.read:before!wait")
    hit = waits(fixture, run)
    producer = fixture.producer(portion=20, pause_s=0.05, again=False)
    producer.start()
    fixture.wait(lambda: producer.acknowledged >= 3, "portions are acknowledged")
    if hit is not None:
        source_restarted(fixture, lambda: run.go_on(hit))
    fixture.end(run)
    producer.finish(END_TIMEOUT_S, most=3)
    fixture.drain()


def source_restarted(fixture: Fixture, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Kill the server that holds the source, and restart it a second later."""
    broker = fixture.source_broker
    broker.kill()
    fixture.fire("source killed", pid=broker.pid)
    meanwhile()
    fixture.wait(after(1.0), "the server is down")
    broker.restart()


# -- F4: storage -------------------------------------------------------------------------------------------------------


def disk_full(fixture: Fixture) -> None:
    """The disk of checkpoint, staging and table is full for a while."""
    fixture.send()
    run = fixture.start(f"{case_step(fixture, 'write')}:before!wait")
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


# -- other users of the table ------------------------------------------------------------------------------------------


def hold_lock(fixture: Fixture, run: Run, hit: Path) -> None:
    """Another program holds the lock that the writer needs next."""
    with _able(fixture, Lockable, "be locked").locked():
        run.go_on(hit)
        fixture.fire("lock held", seconds=_HELD_S)
        fixture.wait(after(_HELD_S), "the lock is held")


def lock_held(step: str) -> Script:
    """The same when a writer reaches a step."""
    return at_point(lambda fixture: f"{case_step(fixture, step)}:before", hold_lock)


def read_slowly(fixture: Fixture, run: Run, hit: Path) -> None:
    """A reader is in the middle of its read while the batch goes on."""
    disturbed = None
    try:
        with _able(fixture, LongReads, "be read at length").reading():
            run.go_on(hit)
            fixture.fire("reader slow", seconds=_HELD_S)
            fixture.wait(after(_HELD_S), "the reader reads")
    except ReadDisturbed as error:
        disturbed = str(error)
    fixture.stops.append(Stop((), disturbed, "a reader while a batch commits"))


slow_reader = at_point(lambda fixture: f"{case_step(fixture, 'decide')}:before@batch=1", read_slowly)
"""A batch commits in the middle of a read: reader and writer must not disturb each other."""


OTHERS = ("another writer appended", "another writer compacted")


def write_as_others(fixture: Fixture, run: Run, hit: Path) -> None:
    """Others commit: one without rows, one that only moves rows."""
    table = _able(fixture, SharedTable, "be written to by others")
    table.append_nothing()
    fixture.fire(OTHERS[0])
    table.compact()
    fixture.fire(OTHERS[1])
    run.go_on(hit)


def other_writers(where: str) -> Scripted:
    """The same between a batch's read of the log and its commit."""
    script = at_point(lambda _: f"{where}@batch=1", write_as_others, must="the run between other writers")
    return script, OTHERS


def table_altered(where: str) -> Scripted:
    """The same with a commit after which the format rejects any commit based on the earlier state: the batch may fail,
    and runs again."""

    def harm(fixture: Fixture, run: Run, hit: Path) -> None:
        _able(fixture, SharedTable, "be written to by others").describe("altered meanwhile")
        fixture.fire("table altered")
        run.go_on(hit)

    return at_point(lambda _: f"{where}@batch=1", harm), ("table altered",)


# -- F7: prepared transactions that expire, or are ended by others -----------------------------------------------------


def _open(fixture: Fixture) -> list[str]:
    return fixture.setting.sink.open_transactions(fixture.setting.name)


def _expire(fixture: Fixture) -> list[str]:
    """Wait until all currently open transactions have expired; return them."""
    opened = _open(fixture)
    fixture.wait(lambda: not _open(fixture), "transactions expire", _EXPIRED_TIMEOUT_S)
    return opened


def _promise_lost(moment: str, deterministic: bool, lose: Callable[[Fixture], None]) -> Script:
    """What tasks prepared is lost before, or after, the decision on their batch.

    Args:
        lose: causes the loss and records it.
    """

    def script(fixture: Fixture) -> None:
        fixture.send()
        run = fixture.start(f"commit.decide:{moment}!wait")
        hit = waits(fixture, run)
        if hit is None:
            return
        lose(fixture)
        if moment == "before":
            run.go_on(hit)
            fixture.end(run)
        else:
            fixture.kill(run)
        if deterministic:
            fixture.drain()
            return
        fixture.stays_down = True
        fixture.must_stop("REPLAY_DIFFERS", when="the batch runs again and gives other rows")

    return script


def expired(moment: str, deterministic: bool) -> Script:
    """The broker aborts prepared transactions before, or after, the decision on their batch."""

    def lose(fixture: Fixture) -> None:
        if opened := _expire(fixture):
            fixture.fire("transactions expired", opened=opened)

    return _promise_lost(moment, deterministic, lose)


def rolled_back(moment: str, deterministic: bool) -> Script:
    """An operator ends prepared transactions by hand before, or after, the decision on their batch."""

    def lose(fixture: Fixture) -> None:
        if ended := _able(fixture, TwoPhase, "prepare").roll_back_prepared():
            fixture.fire("prepared transactions rolled back", ended=ended)

    return _promise_lost(moment, deterministic, lose)


def _pause_until_expired(fixture: Fixture, run: Run, hit: Path) -> None:
    processes = run.pause()
    if opened := _expire(fixture):
        fixture.fire("paused past the time-out", opened=opened, processes=processes)
    run.go_on(hit)
    run.resume()


paused_past_timeout = at_point(lambda _: "commit.decide:before@batch=1", _pause_until_expired)
"""All of a driver is paused with a prepared batch until its transactions have expired; then it resumes and decides."""


# -- receivers of a queue ----------------------------------------------------------------------------------------------


def receiver_killed(*points: str) -> tuple[Script, tuple[str, ...]]:
    """At each point, or at all of them, the receiver is killed and another one continues. The pipeline reads half
    way through, so that redelivered messages are already in the sink."""
    points = points or RECEIVER_POINTS

    def script(fixture: Fixture) -> None:
        for number, point in enumerate(points):
            _kill_receiver_at(fixture, point, 1 / (len(points) + 1))
            if len(points) > 1 and number == len(points) // 2:
                fixture.end(fixture.start())
        fixture.send()
        fixture.drain()

    return script, tuple(f"kill@{p}" for p in points)


def receiver_killed_at_random(times: int) -> tuple[Script, tuple[str, ...]]:
    """A moment is a fraction of the time that a receiver needed for as many messages, counted from its first ones."""

    def script(fixture: Fixture) -> None:
        share = 1 / (times + 2)
        _, began_s = _start_receiver_at_work(fixture, share)
        fixture.arrive()
        length_s = time.monotonic() - began_s
        for moment in [round(fixture.random.uniform(0, 1), 3) for _ in range(times)]:
            run, began_s = _start_receiver_at_work(fixture, share)
            fixture.wait(after(moment * length_s), "the moment comes")
            fixture.receivers.kill(run)
            fixture.fire("receiver killed at random", share=moment, after_s=round(time.monotonic() - began_s, 3))
        fixture.send()
        fixture.drain()

    return script, ("receiver killed at random",) * times


def receiver_and_driver_killed(*pairs: tuple[str, str]) -> tuple[Script, tuple[str, ...]]:
    """For each pair, the receiver stops at one point, the driver at the other, and both are killed."""

    def script(fixture: Fixture) -> None:
        share = 1 / (2 * len(pairs) + 1)
        for of_receiver, of_driver in pairs:
            fixture.send(share)
            receiver = _start_receiver_until(fixture, of_receiver, share)
            run = fixture.start(of_driver)
            stood = waits(fixture, run) is not None
            if stood:
                fixture.kill(run)
            fixture.receivers.kill(receiver)
            if stood:
                fixture.fire(f"kill@{of_receiver} and {of_driver}")
        fixture.send()
        fixture.drain()

    return script, tuple(f"kill@{a} and {b}" for a, b in pairs)


def queue_killed(fixture: Fixture) -> None:
    """The server is killed when a receiver has persisted messages but not acknowledged them, while a producer, which
    does not resend unacknowledged records, sends."""
    fixture.send(0.2)
    receiver = fixture.receivers.start("receive.ack:before!wait")
    fixture.send(0.2, arrive=False)
    hit = _wait_receiver(receiver)
    producer = fixture.producer(portion=20, pause_s=0.05, again=False)
    producer.start()
    fixture.wait(lambda: producer.acknowledged >= 3, "portions are acknowledged")
    source_restarted(fixture)
    receiver.go_on(hit)
    producer.finish(END_TIMEOUT_S, most=3)
    fixture.drain()


def receiver_zombie(fixture: Fixture) -> None:
    """A receiver is paused with the messages it took, until another one took all of them; then it resumes, and must not
    append again what the log holds."""
    first = fixture.receivers.start("receive.persist:before!wait")
    fixture.send(0.4, arrive=False)
    hit = _wait_receiver(first)
    first.pause()
    fixture.fire("receiver paused")
    source_restarted(fixture)  # an unresponsive consumer is dropped, and its messages are redelivered to others
    fixture.receivers.start(alongside=True)
    fixture.arrive()
    fixture.end(fixture.start())
    first.go_on(hit)
    first.resume()
    fixture.fire("receiver woken up")
    fixture.send()
    fixture.drain()


def _kill_receiver_at(fixture: Fixture, point: str, share: float) -> None:
    fixture.receivers.kill(_start_receiver_until(fixture, point, share))
    fixture.fire(f"kill@{point}")


def _start_receiver_until(fixture: Fixture, point: str, share: float) -> Run:
    """Start a receiver and send it a share of the records; returns it once it has stopped at its point."""
    run = fixture.receivers.start(point)
    fixture.send(share, arrive=False)
    _wait_receiver(run)
    return run


def _start_receiver_at_work(fixture: Fixture, share: float) -> tuple[Run, float]:
    """Start a receiver with a share of the records ahead of it; once it took some, returns it and the time."""
    run = fixture.receivers.start("receive.take:after!wait")
    fixture.send(share, arrive=False)
    hit = _wait_receiver(run)
    run.go_on(hit)
    return run, time.monotonic()


def _wait_receiver(run: Run) -> Path:
    found = run.wait_hit(HIT_TIMEOUT_S)
    if found is None:
        raise VerifierError("RECEIVER_FAILED.POINT", name=run.name, exit_code=run.code)
    return found[0]
