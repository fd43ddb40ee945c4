"""Starts the driver's arbiter (`engine/arbiter.py`), and registers each at_most_once batch before its tasks start.

The process that plans a batch may end before the batch does, and another one plan the next batch. They find the arbiter
by a file of the user's own, named after the owner's id.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import IO, cast

from delivered.engine.owner import located
from delivered.model.errors import Unreachable
from delivered.model.identity import Scope
from delivered.model.limits import CONNECT_TIMEOUT_S
from delivered.model.work import PORT, YES, Arbiter, DriverAddress, Owner

_LOOPBACK = ("", "localhost", "127.0.0.1", "::1")
_ALL = "0.0.0.0"  # noqa: S104 - only if Spark binds there


def registered(scope: Scope, owner: Owner, driver: DriverAddress) -> Arbiter:
    """A new plan's arbiter; grants of earlier plans of the pipeline and sink are void from now on.

    Runs on the driver, before the batch may send.
    """
    return _registered(f"{scope.pipeline}/{scope.sink}", owner, driver)


def listening(owner: Owner, driver: DriverAddress) -> Arbiter:
    """The driver's arbiter, started if need be, with a token under which no shard is granted."""
    return replace(_registered("", owner, driver), token="")


def _registered(key: str, owner: Owner, driver: DriverAddress) -> Arbiter:
    file, token = _file(owner), secrets.token_hex(16)
    with contextlib.suppress(OSError, ValueError, KeyError):
        return _plan(json.loads(_own(file)), key, token)
    try:
        found = _start(located(owner), driver, file)
        _keep(file, found)
        return _plan(found, key, token)
    except (OSError, ValueError) as error:
        raise Unreachable(
            "ARBITER_START",
            f"The process that grants tasks the right to send could not be started at {driver.bind or driver.host!r}, "
            f"port {driver.port}: {error}. Nothing was sent.",
            next_step=f"check spark.driver.host, spark.driver.bindAddress and {PORT}, then start again",
        ) from None


def _plan(found: dict[str, str | int], key: str, token: str) -> Arbiter:
    host, port = str(found["host"]), int(found["port"])
    request = json.dumps({"secret": found["secret"], "key": key, "token": token}).encode() + b"\n"
    with socket.create_connection((str(found["local"]), port), CONNECT_TIMEOUT_S) as connection:
        connection.sendall(request)
        if connection.recv(len(YES)) != YES:
            raise ConnectionError("another process answers there")
    return Arbiter(host, port, token)


def _start(owner: Owner, driver: DriverAddress, file: Path) -> dict[str, str | int]:
    host = driver.host or socket.gethostname()
    bind = driver.bind or host
    if bind in _LOOPBACK:
        bind = "127.0.0.1"
    secret = secrets.token_hex(16)
    settings = {
        "secret": secret,
        "bind": bind,
        "port": driver.port,
        "file": str(file),
        "pid": owner.process,
        "started_ms": owner.started_ms,
    }
    started = subprocess.Popen(
        [sys.executable, "-m", "delivered.engine.arbiter"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        start_new_session=True,  # signals to Spark's Python processes are not for it
    )
    with cast("IO[bytes]", started.stdin) as settings_to, cast("IO[bytes]", started.stdout) as port_from:
        settings_to.write(json.dumps(settings).encode() + b"\n")
        settings_to.flush()
        port = port_from.readline()
    if not port.strip():
        raise OSError(f"it ended with exit code {started.wait()}")
    local = "127.0.0.1" if bind == _ALL else bind
    return {"host": host, "local": local, "port": int(port), "secret": secret, "pid": started.pid}


def _file(owner: Owner) -> Path:
    return Path(tempfile.gettempdir()) / f"delivered-arbiter-{owner.id}"


def _own(file: Path) -> str:
    if file.stat().st_uid != os.geteuid():
        raise PermissionError(f"{file} belongs to another user")
    return file.read_text(encoding="utf-8")


def _keep(file: Path, found: dict[str, str | int]) -> None:
    """Two processes that start one at the same time use one each: a plan names its own."""
    handle, name = tempfile.mkstemp(prefix=file.name, dir=file.parent)  # readable by this user only
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        json.dump(found, out)
    Path(name).replace(file)
