"""Scripts for F7 with two drivers on one checkpoint: one that is paused while another takes over, and one that starts
while another lives."""

from __future__ import annotations

from pathlib import Path

from delivered_lab.verify.evidence import Stop
from delivered_lab.verify.fixture import Fixture
from delivered_lab.verify.scripts import Script, at_point, point_of, waits
from delivered_lab.verify.services import Run

_KEYS_HELD = "LOCK_TIMEOUT"
"""The error of a writer whose keys are locked by another open transaction."""


def zombie(step: str, locked: str | None) -> Script:
    """A driver is paused before a step; another takes over and finishes; then the first one resumes.

    Args:
        locked: the error of other writers while one writer locks the whole sink.

    A paused driver that locks the whole sink cannot be taken over: the second one must report so, and the first must
    succeed. A two-phase upsert locks its keys: the second driver may be rejected because of them, and a start after the
    first one has ended continues. A driver that had already decided can no longer be stopped: it may end either way.
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


def start_a_second(fixture: Fixture, first: Run, hit: Path) -> None:
    """A second driver starts, without a takeover request."""
    code = fixture.must_stop("CHECKPOINT_OWNED", when="the second driver")
    fixture.fire("second driver", code=code)
    first.go_on(hit)


second_driver = at_point(
    lambda fixture: f"{point_of(fixture, 'decide')}:before@batch=1",
    start_a_second,
    must="the first driver, which nobody may disturb",
)
"""A second driver starts, without a takeover request, while the first one is in the middle of a batch."""
