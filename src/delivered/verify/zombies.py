"""F7: two drivers on one checkpoint, one of them paused past every time-out, or uninvited."""

from __future__ import annotations

from delivered.verify.evidence import Stop
from delivered.verify.fixture import Fixture
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

    def script(fixture: Fixture) -> None:
        fixture.send()
        first = fixture.start(f"{point_of(fixture, step)}:before@batch=1!wait")
        hit = waits(fixture, first)
        if hit is None:
            return
        first.pause()
        fixture.fire("paused", processes=len(first.workers()))
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


def second_driver(fixture: Fixture) -> None:
    """A second driver starts while the first one is in the middle of a batch; nobody asked it to take over."""
    fixture.send()
    first = fixture.start(f"{point_of(fixture, 'decide')}:before@batch=1!wait")
    hit = waits(fixture, first)
    if hit is None:
        return
    code = fixture.must_stop("CHECKPOINT_OWNED", when="the second driver")
    fixture.fire("second driver", code=code)
    first.go_on(hit)
    code = fixture.end(first)
    fixture.stops.append(Stop((), code, "the first driver, which nobody may disturb"))
    fixture.drain()
