"""The starts, ends and errors of a pipeline's driver, kept in its checkpoint, wherever that is: the newest ones.

For people on call, never evidence: a driver that is killed leaves a run without an end, and two drivers at once may
lose each other's line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from delivered.checkpoint import folder
from delivered.model.errors import DeliveredError
from delivered.model.work import without_format

log = logging.getLogger(__name__)

FILE = "delivered/runs.json"
RUNS_MAX = 50
_TEXT_LENGTH_MAX = 2_000


@dataclass(frozen=True)
class Run:
    """
    Attributes:
        id: of Spark's run; empty: it ended before there was one.
        started_ms, ended_ms: since 1970; ended_ms None: it runs, or was killed.
        batch: the newest one that Spark had logged when it ended.
        code, message, next_step: of the error that ended it; empty: it was stopped.
    """

    id: str
    host: str
    process: int
    started_ms: int
    ended_ms: int | None = None
    batch: int | None = None
    code: str = ""
    message: str = ""
    next_step: str = ""

    @classmethod
    def new(cls, run_id: str) -> Self:
        return cls(run_id, socket.gethostname(), os.getpid(), _now_ms())

    @property
    def has_failed(self) -> bool:
        return bool(self.code)

    def ended(self, batch: int | None, error: DeliveredError | None) -> Self:
        now = replace(self, ended_ms=_now_ms(), batch=batch)
        if error is None:
            return now
        return replace(
            now,
            code=error.code,
            message=error.message[:_TEXT_LENGTH_MAX],
            next_step=(error.next_step or "")[:_TEXT_LENGTH_MAX],
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


def keep(location: str, run: Run) -> None:
    """Add a run, or replace it by its end. Never raises: a full disk must not end a query, nor hide its error."""
    try:
        others = [r for r in runs(location) if (r.id, r.started_ms) != (run.id, run.started_ms)]
        kept = sorted([*others, run], key=lambda r: r.started_ms)[-RUNS_MAX:]
        folder.write_record(location, FILE, {"runs": [r.to_json() for r in kept]})
    except Exception as error:
        log.debug("the run was not kept: %s", error)


@contextlib.contextmanager
def keeping_failed_start(location: str) -> Iterator[None]:
    """Add a run if the body raises before its query started. A checkpoint that holds nothing of ours stays as it is:
    it may be another connector's."""
    try:
        yield
    except DeliveredError as error:
        with contextlib.suppress(DeliveredError):
            if folder.holds(location, "delivered", ""):
                _, batch = folder.read_logged(location)
                keep(location, Run.new("").ended(batch, error))
        raise


def runs(location: str) -> list[Run]:
    """Oldest first; of a file that cannot be read, none."""
    try:
        text = folder.read(location, FILE)
        found = without_format(json.loads(text), "runs")["runs"] if text is not None else []
        return [Run.from_json(r) for r in found]
    except (DeliveredError, ValueError, KeyError, TypeError) as error:
        log.debug("runs cannot be read: %s", error)
        return []


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
