"""The one driver that may decide: its id, and the process that shows whether it is alive."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import replace
from functools import cache

import psutil

from delivered.model.work import Owner

_START_TOLERANCE_MS = 2_000


def new_owner(jvm: psutil.Process | None) -> Owner:
    """A new, unique owner.

    Args:
        jvm: of the driver; None: it is remote (Spark Connect), and each of its processes finds it itself.
    """
    owner = Owner(uuid.uuid4().hex)
    return owner if jvm is None else _place(owner, jvm)


def locate(owner: Owner) -> Owner:
    """The same owner, with host and process of its JVM filled in. Runs in a process of the driver."""
    return replace(owner, host=socket.gethostname()) if owner.process else _place(owner, _find_jvm())


def find_living(owner: Owner | None, jvm: psutil.Process | None = None) -> Owner | None:
    """The owner, if it is another live driver on this machine. Drivers on other machines are not visible, but fenced
    by the ledger.

    Args:
        jvm: of the session that will run the pipeline.
    """
    if owner is None or not is_running(owner) or owner.process in _own_processes():
        return None
    return None if jvm is not None and owner.process == jvm.pid else owner


def is_running(owner: Owner | None) -> bool | None:
    """Whether the owner's process lives; None: it was on another machine, or there is none."""
    if owner is None or owner.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(owner.process)
        return is_start_of(process, owner.started_ms) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _place(owner: Owner, process: psutil.Process) -> Owner:
    return replace(owner, host=socket.gethostname(), process=process.pid, started_ms=started_ms(process))


def started_ms(process: psutil.Process) -> int:
    """When a process started; on Linux since the machine's boot: its time since 1970 changes when the clock is set."""
    now = psutil.Process(process.pid)  # an older object keeps the time of a clock that was set since
    return int((now.create_time() - (psutil.boot_time() if psutil.LINUX else 0)) * 1000)


def is_start_of(process: psutil.Process, at_ms: int) -> bool:
    """Whether the process started then, and did not just take over the number of one that did.

    Args:
        at_ms: by `started_ms`; by an earlier release, since 1970.
    """
    known = (started_ms(process), process.create_time() * 1000)
    return any(abs(started - at_ms) < _START_TOLERANCE_MS for started in known)


@cache
def _find_jvm() -> psutil.Process:
    """The JVM that is an ancestor of this worker, else this process. Looked up once: workers that outlive Python's
    daemon have no such ancestor."""
    own = psutil.Process(os.getpid())
    return next((p for p in own.parents() if p.name().startswith("java")), own)


def _own_processes() -> set[int]:
    """This process, the JVM it started, and the JVM that started it (spark-submit)."""
    own = psutil.Process(os.getpid())
    return {own.pid, *(p.pid for p in own.children(recursive=True)), *(p.pid for p in own.parents())}
