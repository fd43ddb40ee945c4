"""How a pipeline stops between two batches: a file tells its source to offer nothing new.

`query.stop()` kills the batch that runs. So the source is drained first: from then on no batch starts, the running one
ends as always, and the query can be stopped while it is idle. The file lies on the driver's machine, where the
source's offsets are asked.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

OPTION = "delivered.drain"
STOP_TIMEOUT_S = 120.0
_POLL_S = 0.05
_IDLE = ("Waiting for data to arrive", "Waiting for next trigger")
"""Spark's words when no batch runs. It drops the first one as soon as it asks a source for offsets."""


def new_drain() -> Path:
    """A path that does not exist yet; `is_drained` once somebody makes it."""
    return Path(tempfile.gettempdir()) / f"delivered-drain-{uuid.uuid4().hex}"


def drain_of(options: Mapping[str, str]) -> str | None:
    return next((v for k, v in options.items() if k.lower() == OPTION), None)


def without_drain(options: Mapping[str, str]) -> dict[str, str]:
    """The options that the connector knows."""
    return {k: v for k, v in options.items() if k.lower() != OPTION}


def is_drained(drain: str | None) -> bool:
    return drain is not None and Path(drain).exists()


def stop_between_batches(
    query: StreamingQuery,
    drain: Path | None,
    timeout_s: float = STOP_TIMEOUT_S,
    waiting: Callable[[], None] | None = None,
) -> bool:
    """Let the running batch finish, then stop the query. Returns whether it was idle when it was stopped.

    Args:
        timeout_s: after so long the query is stopped in mid-batch; recovery finishes or repeats the batch.
        waiting: called about every 50 ms.
    """
    idle = False
    if drain is not None:
        drain.touch()
    try:
        deadline = time.monotonic() + timeout_s
        while query.isActive and not idle and time.monotonic() < deadline:
            idle = query.status["message"] in _IDLE
            if waiting is not None:
                waiting()
            time.sleep(_POLL_S)
        idle = idle or not query.isActive
        query.stop()
    finally:
        if drain is not None:
            drain.unlink(missing_ok=True)
    return idle
