"""Scripts about transactions of a broker: they expire, or the broker is restarted while they are open."""

from __future__ import annotations

from collections.abc import Callable

from delivered.verify.bench import HIT_TIMEOUT_S, Bench
from delivered.verify.scripts import Script, waits

TRANSACTION_TIMEOUT_S = 10
"""Of cells in which transactions must expire. Longer than a batch on a busy machine, its first imports included."""
_EXPIRED_TIMEOUT_S = 60


def _open(bench: Bench) -> list[str]:
    return bench.setting.drain.open_transactions(bench.setting.name)


def promise_lost(moment: str, deterministic: bool, lose: Callable[[Bench], None]) -> Script:
    """What tasks prepared is lost before, or after, their batch is decided.

    Args:
        lose: sees to it, and notes it.
    """

    def script(bench: Bench) -> None:
        bench.send()
        run = bench.start(f"commit.decide:{moment}!wait")
        hit = waits(bench, run)
        if hit is None:
            return
        lose(bench)
        if moment == "before":
            run.go_on(hit)
            bench.end(run)
        else:
            bench.kill(run)
        if deterministic:
            bench.drain()
            return
        bench.stays_down = True
        bench.must_stop("REPLAY_DIFFERS", when="the batch runs again and gives other rows")

    return script


def expired(moment: str, deterministic: bool) -> Script:
    """The broker aborts prepared transactions before, or after, their batch is decided."""

    def lose(bench: Bench) -> None:
        opened = _open(bench)
        bench.wait(lambda: not _open(bench), "transactions expire", _EXPIRED_TIMEOUT_S)
        if opened:
            bench.fire("transactions expired", opened=opened)

    return promise_lost(moment, deterministic, lose)


def paused_past_timeout(bench: Bench) -> None:
    """All of a driver is paused with a prepared batch until its transactions are gone; then it wakes up and decides."""
    bench.send()
    run = bench.start("commit.decide:before@batch=1!wait")
    hit = waits(bench, run)
    if hit is None:
        return
    opened, processes = _open(bench), run.pause()
    bench.wait(lambda: not _open(bench), "transactions expire", _EXPIRED_TIMEOUT_S)
    if opened:
        bench.fire("paused past the time-out", opened=opened, processes=processes)
    run.go_on(hit)
    run.resume()
    bench.end(run)
    bench.drain()


def broker_restarted(*points: str) -> tuple[Script, tuple[str, ...]]:
    """At each point the broker is stopped as an operator does it, with transactions open, and started again."""

    def script(bench: Bench) -> None:
        broker = bench.broker
        for point in points:
            bench.send(1 / (len(points) + 1))
            run = bench.start(f"{point}!wait")
            found = run.wait_hit(HIT_TIMEOUT_S)
            if found is None:
                bench.end(run)
                continue
            opened = _open(bench)
            broker.stop()
            broker.restart()
            if opened:
                bench.fire(f"broker restarted@{point}", opened=opened)
            run.go_on(found[0])
            bench.end(run)
        bench.send()
        bench.drain()

    return script, tuple(f"broker restarted@{p}" for p in points)
