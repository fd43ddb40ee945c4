"""Receivers report themselves next to the log that they fill, so that operators see whether they live.

A receiver that stops as asked removes its report. One that dies leaves it, until another receiver takes its place:
each start removes the report of one that is gone. Proves nothing, and never stops a receiver.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import psutil

from delivered.contract.queue import ReceiverReport
from delivered.engine.owner import new_owner, running
from delivered.model.limits import RECEIVER_SILENT_S
from delivered.source.receive import Counts

_LOG = logging.getLogger(__name__)

MESSAGES = ("received", "entered", "repeated", "quarantined", "acknowledged", "unacknowledged")
_COUNTED = (*MESSAGES, "paused", "reconnected")
_EVERY_S = 2.0
_EVERY_REMOTE_S = 10.0
"""For a log in an object store, where each report is a request."""


def is_gone(report: ReceiverReport) -> bool:
    """Whether a receiver is dead, or has said nothing for `RECEIVER_SILENT_S`: it hangs, or its machine is gone.

    By two machines' clocks, for display: a receiver whose report was removed reports again.
    """
    silent = time.time() - report.at_ms / 1000 > RECEIVER_SILENT_S
    return silent or running(report.owner) is False


class Presence:
    """This process, as a receiver of a log. Used by the thread that receives.

    Args:
        log: path or URL of the log, which exists.
    """

    def __init__(self, log: str, storage: Mapping[str, str]) -> None:
        from delivered.connectors.log import receivers_of

        self._receivers = receivers_of(log, storage)
        self._every_s = _EVERY_S if self._receivers.local else _EVERY_REMOTE_S
        self._report = ReceiverReport(new_owner(psutil.Process()), 0)
        self._due = 0.0

    def join(self) -> None:
        """Report, and take the place of one that is gone."""
        self.tell(Counts())
        with self._tolerant():
            gone = next(filter(is_gone, self._receivers.read()), None)
            if gone is not None:
                self._receivers.remove(gone)

    def tell(self, counts: Counts) -> None:
        """Report, if it is time to."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._every_s
        told = {name: getattr(counts, name) for name in _COUNTED}
        self._report = replace(self._report, at_ms=int(time.time() * 1000), counts=told)
        with self._tolerant():
            self._receivers.write(self._report)

    def leave(self) -> None:
        with self._tolerant():
            self._receivers.remove(self._report)

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            _LOG.debug("receiver %s: its report was not kept: %s", self._report.name, error)
