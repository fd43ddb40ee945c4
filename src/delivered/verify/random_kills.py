"""Kills at moments that only the seed knows."""

from __future__ import annotations

import time

from delivered.verify.fixture import Fixture
from delivered.verify.scripts import TRIES_MAX, Script, after
from delivered.verify.services import Run


def random_kills(times: int) -> tuple[Script, tuple[str, ...]]:
    """The tree is killed at moments that only the seed knows, after a batch began.

    A moment is a share of how long the run before worked from its first batch to its end: a fixed number of seconds
    would come too late for one service and always in the first batch for another.
    """

    def script(fixture: Fixture) -> None:
        length_s = _undisturbed_s(fixture, 1 / (2 * times))
        for share in [round(fixture.random.uniform(0, 0.9), 3) for _ in range(times)]:
            for _ in range(TRIES_MAX):
                began_s, run = _begun(fixture, 1 / (3 * times))
                fixture.wait(after(share * length_s), "the moment comes")
                if run.lives:
                    fixture.kill(run)
                    fixture.fire("kill at random", share=share, after_s=round(time.monotonic() - began_s, 3))
                    break
                fixture.end(run)
                length_s = time.monotonic() - began_s  # this one was quicker
        if fixture.left:
            fixture.send()
        fixture.drain()

    return script, ("kill at random",) * times


def _undisturbed_s(fixture: Fixture, share: float) -> float:
    """Send a share of the records and run the pipeline to its end; return how long it worked on them, in seconds."""
    began_s, run = _begun(fixture, share)
    fixture.end(run)
    return time.monotonic() - began_s


def _begun(fixture: Fixture, share: float) -> tuple[float, Run]:
    """Send a share of the records, start the pipeline and wait until it begins a batch; return when, and the run."""
    if fixture.left:
        fixture.send(share)
    planned, logged = len(fixture.batches_planned()), len(fixture.batches_logged())
    run = fixture.start()

    def begun() -> bool:
        # A batch that runs again has its file already: what is logged next shows that work goes on.
        return not run.lives or len(fixture.batches_planned()) > planned or len(fixture.batches_logged()) > logged

    fixture.wait(begun, "a batch begins")
    return time.monotonic(), run
