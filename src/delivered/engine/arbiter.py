"""The driver's side of `grants.py`: a process that grants each shard of an at_most_once batch to one attempt.

One process per driver; it ends with the driver's JVM. It keeps its grants in memory, because losing them is safe: a
token that it does not know is refused, and a batch that an earlier driver may have sent is given up, by the record in
the ledger. It outlives the process that plans batches, which Spark ends when it is idle for a minute.

    python -m delivered.engine.arbiter < SETTINGS      prints its port
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from delivered.engine.owner import is_start_of
from delivered.model.limits import CONNECT_TIMEOUT_S, GRANT_WAIT_S
from delivered.model.work import NO, YES

_WATCH_S = 1.0
_REQUEST_BYTES_MAX = 4096
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""An executor whose host died is noticed after 25 s."""


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
    server = await _listening(Server(settings["secret"]), settings["bind"], settings["port"])
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")  # read by the process that started this one
    sys.stdout.flush()
    async with server:
        while _lives(settings["pid"], settings["started_ms"]):
            await asyncio.sleep(_WATCH_S)


async def _listening(server: Server, bind: str, port: int) -> asyncio.Server:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            return await asyncio.start_server(server.serve, bind, port, limit=_REQUEST_BYTES_MAX)
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_WATCH_S)  # a fixed port may still be that of the driver before this one


def _lives(pid: int, started_ms: int) -> bool:
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
