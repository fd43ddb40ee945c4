"""Isolates servers that listen on every address, in a network namespace of their own.

    python -P enclosed.py plan.json

Its ports on 127.0.0.1 are opened first, outside; a socket stays in its namespace. Then this process moves into a new
namespace, starts the servers there, and forwards connections. Needs no root where users may create namespaces.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from delivered import DeliveredError

_NEW_USER, _NEW_NET = 0x1000_0000, 0x4000_0000
_SET_DEATH_SIGNAL, _GET_DEATH_SIGNAL = 1, 2
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1
_WAIT_S = 60.0
_POLL_S = 0.05
_STOP_S = 20.0
_CHUNK = 1 << 16
_OURSELVES = [sys.executable, "-P", str(Path(__file__).resolve())]
"""Not as a module: that would import all servers. -P: this folder has files with the names of libraries."""


@dataclass(frozen=True)
class Enclosed:
    """
    Attributes:
        commands: servers, in start order.
        waits: for each, the port that must listen before the next is started; None: no wait.
        ports: of 127.0.0.1, the same outside and inside.
        environment: additional variables.
    """

    commands: list[list[str]]
    waits: list[int | None]
    ports: list[int]
    environment: dict[str, str]

    def command(self, folder: Path) -> list[str]:
        """The command that runs them. Raises DeliveredError if no namespace can be created."""
        _check()
        plan = folder / "enclosed.json"
        plan.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return [*_OURSELVES, str(plan)]


def _check() -> None:
    tried = subprocess.run(_OURSELVES, capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode != 0:
        raise DeliveredError("NAMESPACE_REFUSED", stderr=tried.stderr.strip()[-300:])


def enclose() -> None:
    """Move this process, which must have one thread, into a network namespace that has only a loopback.

    Raises:
        OSError: not permitted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    dies = ctypes.c_int(0)
    libc.prctl(_GET_DEATH_SIGNAL, ctypes.byref(dies))
    parent = os.getppid()
    if libc.unshare(_NEW_NET) != 0:
        if libc.unshare(_NEW_USER | _NEW_NET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"unshare: {os.strerror(code)}")
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path(f"/proc/self/{file}").write_text(text, encoding="ascii")
    if dies.value:  # the kernel resets it when credentials change
        libc.prctl(_SET_DEATH_SIGNAL, dies.value)
        if os.getppid() != parent:
            os.kill(os.getpid(), dies.value)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(asks, _GET_FLAGS, request))
        fcntl.ioctl(asks, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


def _start(plan: Enclosed) -> list[subprocess.Popen[bytes]]:
    running: list[subprocess.Popen[bytes]] = []
    for command, port in zip(plan.commands, plan.waits, strict=True):
        environment = {**os.environ, **plan.environment}
        running.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, preexec_fn=_with_us))
        deadline = time.monotonic() + _WAIT_S
        while port is not None and not _listens(port):
            if running[-1].poll() is not None or time.monotonic() > deadline:
                return running
            time.sleep(_POLL_S)
    return running


def _with_us() -> None:
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


async def _serve(doors: dict[int, socket.socket], running: list[subprocess.Popen[bytes]]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    open_now = [await asyncio.start_server(_door(port), sock=door) for port, door in doors.items()]
    while not stop.is_set() and all(p.poll() is None for p in running):
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.2)
    for door in open_now:
        door.close()


def _door(port: int) -> Any:
    async def handed_on(from_reader: asyncio.StreamReader, from_writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            from_writer.close()
            return
        await asyncio.gather(_copy(from_reader, to_writer), _copy(to_reader, from_writer))

    return handed_on


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
    writer.close()


def _end(running: list[subprocess.Popen[bytes]]) -> None:
    """Stop servers in reverse start order."""
    for process in reversed(running):
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(arguments: list[str]) -> int:
    """Run a plan until a server ends or on SIGTERM; without a plan, only check that a namespace can be created."""
    if not arguments:
        try:
            enclose()
        except OSError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        return 0
    plan = Enclosed(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    doors: dict[int, socket.socket] = {}
    for port in plan.ports:
        try:
            doors[port] = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            sys.stderr.write(f"port {port}: {error.strerror}\n")  # if in use, the caller tries another
            return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # until there is something to stop
    enclose()
    running = _start(plan)
    try:
        asyncio.run(_serve(doors, running))
    finally:
        _end(running)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
