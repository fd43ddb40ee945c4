"""What a server is: its processes, identified by id and start time, so that no other process is touched; its ports; its
state in its data folder; its certificate; and what starting it needs of each kind."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from delivered import DeliveredError
from delivered_lab.brokers.fetch import Say

PORTS_LOW, PORTS_HIGH = 20_000, 32_000
"""Below Linux's ephemeral ports: while a server is down, no outgoing connection can take its port."""

STOP_TIMEOUT_S = 30.0
_PR_SET_PDEATHSIG = 1

_LASTING = ThreadPoolExecutor(1, "delivered-servers")
"""One starter thread for all: a server would end with the thread that started it."""


@dataclass(frozen=True)
class Identity:
    """Identity of a process: ids are reused, an id with its start time is not.

    Attributes:
        started: seconds since 1970, from the system.
    """

    pid: int
    started: float

    def find(self) -> psutil.Process | None:
        """The process, if it is still running."""
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started) > 1.0 or process.status() == psutil.STATUS_ZOMBIE:
                return None
        except psutil.NoSuchProcess:
            return None
        return process


def launch(command: Sequence[str], log: Path, environment: dict[str, str], dies_with_parent: bool) -> Identity:
    """Start a program in a session of its own, with its output appended to `log`."""
    if dies_with_parent:
        # For Linux the starting thread is the parent: this one lives as long as the process.
        return _LASTING.submit(_launch, command, log, environment, True).result()
    return _launch(command, log, environment, False)


def _launch(command: Sequence[str], log: Path, environment: dict[str, str], dies_with_parent: bool) -> Identity:
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=_die_with_parent if dies_with_parent else None,
        )
    return Identity(process.pid, psutil.Process(process.pid).create_time())


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end(identity: Identity, kill: bool = False, ask: signal.Signals = signal.SIGTERM) -> bool:
    """Terminate a process, and kill it if it does not end or if `kill`. Returns whether it was running.

    `kill` includes its child processes, as in a crash of the machine.
    """
    process = identity.find()
    if process is not None:
        with suppress(psutil.NoSuchProcess):
            below = process.children(recursive=True) if kill else []
            process.send_signal(signal.SIGKILL if kill else ask)
            for child in below:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            try:
                process.wait(STOP_TIMEOUT_S)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait(STOP_TIMEOUT_S)
            psutil.wait_procs(below, STOP_TIMEOUT_S)
    with suppress(ChildProcessError):  # if it is our child, it is a zombie until it is waited for
        os.waitpid(identity.pid, os.WNOHANG)
    return process is not None


def telling_lines(output: str) -> str:
    """The end of a program's output on one line, without Java stack frames."""
    lines = [x.strip() for x in output.splitlines() if x.strip() and not x.startswith(("\tat ", "\t..."))]
    return " | ".join(lines[-6:])[-900:] or "nothing"


def free_ports(count: int) -> list[int]:
    """Free ports of 127.0.0.1."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(PORTS_LOW, PORTS_HIGH)  # noqa: S311
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                if port not in found:
                    found.append(port)
    return found


@dataclass(frozen=True)
class State:
    """A server's state in its data folder.

    Attributes:
        listeners: security protocol -> "127.0.0.1:port".
        identity: the last process, running or not; None: never started.
    """

    kind: str
    listeners: dict[str, str]
    settings: dict[str, Any]
    identity: Identity | None = None

    def save(self, folder: Path) -> None:
        fresh = folder / f".state.{os.getpid()}"
        fresh.touch(mode=0o600)  # settings may contain secrets
        fresh.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        fresh.replace(folder / "state.json")

    @classmethod
    def load(cls, folder: Path) -> State | None:
        """None: no server was ever started in this folder."""
        try:
            data = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        identity = Identity(**data["identity"]) if data["identity"] else None
        return cls(data["kind"], data["listeners"], data["settings"], identity)


@dataclass(frozen=True)
class Server:
    """
    Attributes:
        listeners: settings -> names of its listeners, one port each.
        main: the listener without TLS and passwords.
        fetch: downloads it into the cache; None: part of the package or the system.
        hidden: listeners that are not for clients.
        prepare: writes configuration and storage if missing; returns the command to run.
        answers: whether the server accepts requests.
        url: address -> URL for clients.
        takes: which of tls and scram it supports.
        stop: signal that stops it, even with open connections.
        pipeline: a source or sink of a pipeline file, with `{url}` for the address and `{HTTP}` for a listener's.
        first_steps: commands to run after the start, `{url}` likewise.
    """

    listeners: Callable[[Mapping[str, Any]], list[str]]
    main: str
    fetch: Callable[[Say], object] | None
    prepare: Callable[[Path, State, Say], list[str]]
    answers: Callable[[State], bool]
    url: Callable[[str], str]
    hidden: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()
    stop: signal.Signals = signal.SIGTERM
    pipeline: str = ""
    first_steps: tuple[tuple[str, str], ...] = ()


def make_certificate(java_home: Path, folder: Path) -> tuple[Path, str]:
    """A self-signed certificate for 127.0.0.1 and localhost, valid for ten years; created once per folder.

    Clients trust the PEM file ca.pem in the folder.

    Returns:
        The server's key store (PKCS12), and its password.
    """
    store, trusted, password = folder / "server.p12", folder / "ca.pem", _password(folder / "keystore.password")
    if trusted.is_file():
        return store, password
    tool = str(java_home / "bin" / "keytool")
    same = ["-alias", "server", "-keystore", str(store), "-storetype", "PKCS12", "-storepass", password]
    names = ["-dname", "CN=localhost", "-ext", "SAN=dns:localhost,ip:127.0.0.1", "-ext", "BC:critical=ca:true"]
    _run([tool, "-genkeypair", *same, "-keyalg", "RSA", "-keysize", "2048", "-validity", "3650", *names])
    _run([tool, "-exportcert", *same, "-rfc", "-file", str(trusted)])
    return store, password


def _password(file: Path) -> str:
    if not file.is_file():
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(16), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip()[-300:]
        raise DeliveredError(
            "CERTIFICATE_FAILED",
            f"keytool could not create a certificate: {output}",
            next_step="delivered doctor, which checks Java",
        )


def _found() -> dict[str, Server]:
    names = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    modules = [importlib.import_module(f"{__package__}.{name}") for name in names]
    return {m.__name__.rpartition(".")[2]: m.SERVER for m in modules if hasattr(m, "SERVER")}


SERVERS: Mapping[str, Server] = _found()
"""By kind; collected from this folder's modules."""
