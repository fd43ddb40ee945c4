"""Kills at moments that only the seed knows."""

from __future__ import annotations

import time

from delivered.verify.bench import Bench
from delivered.verify.scripts import TRIES_MAX, Script, after
from delivered.verify.services import Run


def random_kills(times: int) -> tuple[Script, tuple[str, ...]]:
    """The tree is killed at moments that only the seed knows, after a batch began.

    A moment is a share of how long the run before worked from its first batch to its end: a fixed number of seconds
    would come too late for one service and always in the first batch for another.
    """

    def script(bench: Bench) -> None:
        length_s = _undisturbed_s(bench, 1 / (2 * times))
        for share in [round(bench.random.uniform(0, 0.9), 3) for _ in range(times)]:
            for _ in range(TRIES_MAX):
                began_s, run = _begun(bench, 1 / (3 * times))
                bench.wait(after(share * length_s), "the moment comes")
                if run.lives:
                    bench.kill(run)
                    bench.fire("kill at random", share=share, after_s=round(time.monotonic() - began_s, 3))
                    break
                bench.end(run)
                length_s = time.monotonic() - began_s  # this one was quicker
        if bench.left:
            bench.send()
        bench.drain()

    return script, ("kill at random",) * times


def _undisturbed_s(bench: Bench, share: float) -> float:
    """Send a share of the records and run the pipeline to its end; return how long it worked on them, in seconds."""
    began_s, run = _begun(bench, share)
    bench.end(run)
    return time.monotonic() - began_s


def _begun(bench: Bench, share: float) -> tuple[float, Run]:
    """Send a share of the records, start the pipeline and wait until it begins a batch; return when, and the run."""
    if bench.left:
        bench.send(share)
    planned, logged = len(bench.batches_planned()), len(bench.batches_logged())
    run = bench.start()

    def begun() -> bool:
        # A batch that runs again has its file already: what is logged next shows that work goes on.
        return not run.lives or len(bench.batches_planned()) > planned or len(bench.batches_logged()) > logged

    bench.wait(begun, "a batch begins")
    return time.monotonic(), run
