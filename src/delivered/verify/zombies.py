"""F7: two drivers on one checkpoint, one of them paused past every time-out, or uninvited."""

from __future__ import annotations

from delivered.verify.bench import Bench
from delivered.verify.evidence import Stop
from delivered.verify.scripts import Script, point_of, waits

_KEYS_HELD = "LOCK_TIMEOUT"
"""How a writer is turned away whose keys another one's open transaction holds."""


def zombie(step: str, locked: str | None) -> Script:
    """A driver is paused before a step; another takes over and finishes; the first one wakes up and goes on.

    Args:
        locked: how others are turned away while one writer holds all of the sink.

    One that holds all of the sink while it is paused cannot be taken over from: the other must say so, and the first
    ends well. With upserts by two phases it holds its keys: the other may be turned away by them, and whoever starts
    when the first one has ended goes on. One that had decided has nothing left that it could be stopped from: it may
    end either way.
    """

    def script(bench: Bench) -> None:
        bench.send()
        first = bench.start(f"{point_of(bench, step)}:before@batch=1!wait")
        hit = waits(bench, first)
        if hit is None:
            return
        first.pause()
        bench.fire("paused", processes=len(first.workers()))
        code = bench.end(bench.start("", "--takeover"))
        held = code is not None and code == locked
        if not held:
            upserts_prepared = bench.setting.workload.replaces and not bench.setting.drain.batch_atomic
            right = (code,) if upserts_prepared and code == _KEYS_HELD else ()
            bench.stops.append(Stop(right, code, "the second driver, which takes over"))
        first.go_on(hit)
        first.resume()
        bench.fire("woken up")
        code = bench.end(first)
        if held:
            bench.stops.append(Stop((), code, "the first driver, which held the sink"))
        elif step != "apply":
            bench.stops.append(Stop((code or "an error",), code, "the zombie"))
        bench.drain()

    return script


def second_driver(bench: Bench) -> None:
    """A second driver starts while the first one is in the middle of a batch; nobody asked it to take over."""
    bench.send()
    first = bench.start(f"{point_of(bench, 'decide')}:before@batch=1!wait")
    hit = waits(bench, first)
    if hit is None:
        return
    code = bench.must_stop("CHECKPOINT_OWNED", when="the second driver")
    bench.fire("second driver", code=code)
    first.go_on(hit)
    code = bench.end(first)
    bench.stops.append(Stop((), code, "the first driver, which nobody may disturb"))
    bench.drain()
