"""Scripts for a queue's receivers: killed at each of their steps, at random moments, or together with the driver;
waking up late; and losing the queue's server."""

from __future__ import annotations

import time
from pathlib import Path

from delivered.model.step import ROLE_OF_STEP, Moment, Role, StepId
from delivered_lab.verify.fixture import END_TIMEOUT_S, HIT_TIMEOUT_S, Fixture
from delivered_lab.verify.interference import source_restarted
from delivered_lab.verify.scripts import Script, after, waits
from delivered_lab.verify.services import Run, VerifierError

POINTS = tuple(
    f"{s}:{m}"
    for s, role in ROLE_OF_STEP.items()
    if role is Role.RECEIVER and s is not StepId.RECEIVE_QUARANTINE
    for m in Moment
    if (s, m) != (StepId.RECEIVE_TAKE, Moment.BEFORE)
)
"""What a receiver of good messages reaches, in this order: nothing stops before it takes a message."""


def killed(*points: str) -> tuple[Script, tuple[str, ...]]:
    """At each point, or at all of them, the receiver is killed and another one continues. The pipeline reads half
    way through, so that redelivered messages are already in the sink."""
    points = points or POINTS

    def script(fixture: Fixture) -> None:
        for number, point in enumerate(points):
            _kill_at(fixture, point, 1 / (len(points) + 1))
            if len(points) > 1 and number == len(points) // 2:
                fixture.end(fixture.start())
        fixture.send()
        fixture.drain()

    return script, tuple(f"kill@{p}" for p in points)


def killed_at_random(times: int) -> tuple[Script, tuple[str, ...]]:
    """A moment is a fraction of the time that a receiver needed for as many messages, counted from its first ones."""

    def script(fixture: Fixture) -> None:
        share = 1 / (times + 2)
        _, began_s = _at_work(fixture, share)
        fixture.arrive()
        length_s = time.monotonic() - began_s
        for moment in [round(fixture.random.uniform(0, 1), 3) for _ in range(times)]:
            run, began_s = _at_work(fixture, share)
            fixture.wait(after(moment * length_s), "the moment comes")
            fixture.receivers.kill(run)
            fixture.fire("receiver killed at random", share=moment, after_s=round(time.monotonic() - began_s, 3))
        fixture.send()
        fixture.drain()

    return script, ("receiver killed at random",) * times


def killed_with_driver(*pairs: tuple[str, str]) -> tuple[Script, tuple[str, ...]]:
    """For each pair, the receiver stops at one point, the driver at the other, and both are killed."""

    def script(fixture: Fixture) -> None:
        share = 1 / (2 * len(pairs) + 1)
        for of_receiver, of_driver in pairs:
            fixture.send(share)
            receiver = _standing(fixture, of_receiver, share)
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
    hit = _hit(receiver)
    producer = fixture.producer(portion=20, pause_s=0.05, again=False)
    producer.start()
    fixture.wait(lambda: producer.acknowledged >= 3, "portions are acknowledged")
    source_restarted(fixture)
    receiver.go_on(hit)
    producer.finish(END_TIMEOUT_S, most=3)
    fixture.drain()


def zombie(fixture: Fixture) -> None:
    """A receiver is paused with the messages it took, until another one took all of them; then it resumes, and must not
    append again what the log holds."""
    first = fixture.receivers.start("receive.persist:before!wait")
    fixture.send(0.4, arrive=False)
    hit = _hit(first)
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


def _kill_at(fixture: Fixture, point: str, share: float) -> None:
    fixture.receivers.kill(_standing(fixture, point, share))
    fixture.fire(f"kill@{point}")


def _standing(fixture: Fixture, point: str, share: float) -> Run:
    """Start a receiver and send it a share of the records; returns it once it has stopped at its point."""
    run = fixture.receivers.start(point)
    fixture.send(share, arrive=False)
    _hit(run)
    return run


def _at_work(fixture: Fixture, share: float) -> tuple[Run, float]:
    """Start a receiver with a share of the records ahead of it; once it took some, returns it and the time."""
    run = fixture.receivers.start("receive.take:after!wait")
    fixture.send(share, arrive=False)
    hit = _hit(run)
    run.go_on(hit)
    return run, time.monotonic()


def _hit(run: Run) -> Path:
    found = run.wait_hit(HIT_TIMEOUT_S)
    if found is None:
        raise VerifierError("RECEIVER_FAILED", f"{run.name} ended with {run.code} before it came to its point.")
    return found[0]
