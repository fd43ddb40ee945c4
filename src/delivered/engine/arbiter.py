"""What `may_send` of shard.py asks: a process that grants each shard of an at_most_once batch to one attempt.

One process per driver; it ends with the driver's JVM. It keeps its grants in memory, because losing them is safe: a
token that it does not know is refused, and a batch that an earlier driver may have sent is given up, by the record in
the ledger. It outlives the process that plans batches, which Spark ends when it is idle for a minute. Each such process
registers its batches before their tasks start, and finds the arbiter by a file of the user's own, named after the
owner's id.

    python -m delivered.engine.arbiter < SETTINGS      prints its port
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, cast

import psutil

from delivered.engine.context import is_start_of, locate
from delivered.model.errors import Unreachable
from delivered.model.identity import Scope
from delivered.model.limits import CONNECT_TIMEOUT_S, GRANT_WAIT_S
from delivered.model.work import NO, YES, Arbiter, DriverAddress, Owner

_LOOPBACK = ("", "localhost", "127.0.0.1", "::1")
_ALL = "0.0.0.0"  # noqa: S104 - only if Spark binds there
_WATCH_S = 1.0
_REQUEST_BYTES_MAX = 4096
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""An executor whose host died is noticed after 25 s."""


def register_plan(scope: Scope, owner: Owner, driver: DriverAddress) -> Arbiter:
    """A new plan's arbiter; grants of earlier plans of the pipeline and sink are void from now on.

    Runs on the driver, before the batch may send.
    """
    return _register(f"{scope.pipeline}/{scope.sink}", owner, driver)


def ensure_listening(owner: Owner, driver: DriverAddress) -> Arbiter:
    """The driver's arbiter, started if need be, with a token under which no shard is granted."""
    return replace(_register("", owner, driver), token="")


def _register(key: str, owner: Owner, driver: DriverAddress) -> Arbiter:
    file, token = _file_of(owner), secrets.token_hex(16)
    with contextlib.suppress(OSError, ValueError, KeyError):
        return _plan(json.loads(_read_own(file)), key, token)
    try:
        found = _start(locate(owner), driver, file)
        _store(file, found)
        return _plan(found, key, token)
    except (OSError, ValueError) as error:
        raise Unreachable("ARBITER_START", host=driver.bind or driver.host, port=driver.port, error=error) from None


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


def _file_of(owner: Owner) -> Path:
    return Path(tempfile.gettempdir()) / f"delivered-arbiter-{owner.id}"


def _read_own(file: Path) -> str:
    if file.stat().st_uid != os.geteuid():
        raise PermissionError(f"{file} belongs to another user")
    return file.read_text(encoding="utf-8")


def _store(file: Path, found: dict[str, str | int]) -> None:
    """Two processes that start one at the same time use one each: a plan names its own."""
    handle, name = tempfile.mkstemp(prefix=file.name, dir=file.parent)  # readable by this user only
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        json.dump(found, out)
    Path(name).replace(file)


@dataclass
class Grant:
    """
    Attributes:
        attempt: the one that may send.
        open: its connections.
        ended: set while it has none.
    """

    attempt: str
    open: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Grants:
    """Grants of the newest plan of each pipeline and sink."""

    def __init__(self) -> None:
        self._token_of: dict[str, str] = {}
        self._granted: dict[str, dict[int, Grant]] = {}

    def plan(self, key: str, token: str) -> None:
        """Grant shards under this token from now on, and none under an earlier one of the key."""
        self._granted.pop(self._token_of.get(key, ""), None)
        self._token_of[key] = token
        self._granted[token] = {}

    def ask(self, token: str, shard: int, attempt: str) -> Grant | None:
        """The grant of a shard, made for this attempt if it is the first to ask; None: the token is void."""
        granted = self._granted.get(token)
        return None if granted is None else granted.setdefault(shard, Grant(attempt))


class Server:
    def __init__(self, secret: str) -> None:
        self._secret = secret
        self._grants = Grants()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: one request, then open until the client closes it."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, asyncio.IncompleteReadError):
            _keep_alive(writer.get_extra_info("socket"))
            await self._answer(json.loads(await reader.readline()), reader, writer)
        writer.close()

    async def _answer(self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if "secret" in asked:
            if hmac.compare_digest(asked["secret"], self._secret):
                self._grants.plan(asked["key"], asked["token"])
                writer.write(YES)
                await writer.drain()
            return
        grant = self._grants.ask(asked["token"], int(asked["shard"]), asked["attempt"])
        if grant is None or grant.attempt != asked["attempt"]:
            if grant is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(grant.ended.wait(), GRANT_WAIT_S)
            writer.write(NO)
            await writer.drain()
            return
        grant.open += 1
        grant.ended.clear()
        try:
            writer.write(YES)
            await writer.drain()
            await reader.read()  # until the attempt's end
        finally:
            grant.open -= 1
            if not grant.open:
                grant.ended.set()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _run(settings: dict[str, Any]) -> None:
    server = await _listen(Server(settings["secret"]), settings["bind"], settings["port"])
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")  # read by the process that started this one
    sys.stdout.flush()
    async with server:
        while _is_alive(settings["pid"], settings["started_ms"]):
            await asyncio.sleep(_WATCH_S)


async def _listen(server: Server, bind: str, port: int) -> asyncio.Server:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            return await asyncio.start_server(server.serve, bind, port, limit=_REQUEST_BYTES_MAX)
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_WATCH_S)  # a fixed port may still be that of the driver before this one


def _is_alive(pid: int, started_ms: int) -> bool:
    try:
        process = psutil.Process(pid)
        return is_start_of(process, started_ms) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    sys.stdin.close()
    try:
        asyncio.run(_run(settings))
    finally:
        Path(settings["file"]).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
