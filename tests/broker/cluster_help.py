"""A pipeline that runs batches in a thread, as one driver, while a test breaks the cluster below it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.broker.sink_help import Rig

from delivered.engine.decide import abort_batch
from delivered.model.errors import DeliveredError
from delivered.model.patience import in_query


class Driver:
    """Plans, writes and commits batch after batch, each from a state of the checkpoint as Spark would have it.

    Attributes:
        done: batches that Spark would have logged.
        ended: the error that would have ended the query.
    """

    def __init__(self, rig: Rig, shards: int = 2, owner: str = "first", start: int = 0) -> None:
        self.rig = rig
        self.done = start
        self.ended: DeliveredError | None = None
        self.slowest_s = 0.0
        self._shards = range(shards)
        self._owner = owner
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        context, deciding = self.rig.context(self._owner), self.rig.context(self._owner)  # as Spark's two processes
        first, messages = True, list[Any]()
        try:
            while not self._stop.is_set():
                started = time.monotonic()
                plan = self.rig.plan(context, self.done, first)
                messages = self.rig.write(plan, self._shards)
                self.rig.commit(deciding, self.done, messages)
                self.slowest_s = max(self.slowest_s, time.monotonic() - started)
                self.done, first = self.done + 1, False
        except DeliveredError as error:
            abort_batch(deciding, messages)
            self.ended = error
        finally:
            for each in (context, deciding):
                each.ledger.close()
                each.committers.close()

    def start(self) -> None:
        self._thread.start()

    def wait_for(self, batches: int, timeout_s: float = 240) -> None:
        """Wait until it has done so many more, or has ended."""
        target, deadline = self.done + batches, time.monotonic() + timeout_s
        while self.done < target and self.ended is None and self._thread.is_alive():
            assert time.monotonic() < deadline, f"batch {self.done} takes too long"
            time.sleep(0.02)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(300)
        assert not self._thread.is_alive(), f"batch {self.done} does not end"


@contextmanager
def running(rig: Rig, **more: Any) -> Iterator[Driver]:
    """A driver in a running query; afterwards it must not have ended, and every row is visible once."""
    in_query()
    driver = Driver(rig, **more)
    start = driver.done
    driver.start()
    try:
        driver.wait_for(3)
        yield driver
        driver.wait_for(3)
    finally:
        driver.stop()
    assert driver.ended is None, driver.ended
    assert rig.visible() == rig.expected(range(start, driver.done)), "rows are lost or doubled"
