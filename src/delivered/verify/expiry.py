"""Scripts about transactions of a broker: they expire, or the broker is restarted while they are open."""

from __future__ import annotations

from collections.abc import Callable

from delivered.verify.fixture import HIT_TIMEOUT_S, Fixture
from delivered.verify.scripts import Script, waits

TRANSACTION_TIMEOUT_S = 10
"""Of cases in which transactions must expire. Longer than a batch on a busy machine, its first imports included."""
_EXPIRED_TIMEOUT_S = 60


def _open(fixture: Fixture) -> list[str]:
    return fixture.setting.sink.open_transactions(fixture.setting.name)


def promise_lost(moment: str, deterministic: bool, lose: Callable[[Fixture], None]) -> Script:
    """What tasks prepared is lost before, or after, their batch is decided.

    Args:
        lose: sees to it, and notes it.
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
    """The broker aborts prepared transactions before, or after, their batch is decided."""

    def lose(fixture: Fixture) -> None:
        opened = _open(fixture)
        fixture.wait(lambda: not _open(fixture), "transactions expire", _EXPIRED_TIMEOUT_S)
        if opened:
            fixture.fire("transactions expired", opened=opened)

    return promise_lost(moment, deterministic, lose)


def paused_past_timeout(fixture: Fixture) -> None:
    """All of a driver is paused with a prepared batch until its transactions are gone; then it wakes up and decides."""
    fixture.send()
    run = fixture.start("commit.decide:before@batch=1!wait")
    hit = waits(fixture, run)
    if hit is None:
        return
    opened, processes = _open(fixture), run.pause()
    fixture.wait(lambda: not _open(fixture), "transactions expire", _EXPIRED_TIMEOUT_S)
    if opened:
        fixture.fire("paused past the time-out", opened=opened, processes=processes)
    run.go_on(hit)
    run.resume()
    fixture.end(run)
    fixture.drain()


def broker_restarted(*points: str) -> tuple[Script, tuple[str, ...]]:
    """At each point the broker is stopped as an operator does it, with transactions open, and started again."""

    def script(fixture: Fixture) -> None:
        broker = fixture.broker
        for point in points:
            fixture.send(1 / (len(points) + 1))
            run = fixture.start(f"{point}!wait")
            found = run.wait_hit(HIT_TIMEOUT_S)
            if found is None:
                fixture.end(run)
                continue
            opened = _open(fixture)
            broker.stop()
            broker.restart()
            if opened:
                fixture.fire(f"broker restarted@{point}", opened=opened)
            run.go_on(found[0])
            fixture.end(run)
        fixture.send()
        fixture.drain()

    return script, tuple(f"broker restarted@{p}" for p in points)
