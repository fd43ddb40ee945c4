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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from delivered import DeliveredError
from delivered.machine import java_home
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


def launch(command: Sequence[str], log: Path, dies_with_parent: bool) -> Identity:
    """Start a program in a session of its own, with its output appended to `log`."""
    if dies_with_parent:
        # For Linux the starting thread is the parent: this one lives as long as the process.
        return _LASTING.submit(_launch, command, log, True).result()
    return _launch(command, log, False)


def _launch(command: Sequence[str], log: Path, dies_with_parent: bool) -> Identity:
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
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
        listeners: security protocol -> "127.0.0.1:port"; the first one has no TLS and no passwords.
        identity: the last process, running or not; None: never started.
    """

    kind: str
    listeners: dict[str, str]
    settings: dict[str, Any]
    identity: Identity | None = None

    @property
    def main(self) -> str:
        """Address of the listener without TLS and passwords."""
        return next(iter(self.listeners.values()))

    def save(self, folder: Path) -> None:
        fresh = folder / f".state.{os.getpid()}"
        write_private(fresh, json.dumps(asdict(self), indent=1))  # settings may contain secrets
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
    """What a kind of server needs.

    Attributes:
        listeners: settings -> names of its listeners, one port each; the first one has no TLS and no passwords.
        prepare: fetches it if missing, writes configuration and storage; returns the command to run. Raises
            DeliveredError: it is not available here, or the download failed.
        answers: whether the server accepts requests.
        fetch: downloads it into the cache; None: part of the package or the system.
        hidden: listeners that are not for clients.
        url: of clients, with `{}` for the address.
        takes: which of tls and scram it supports.
        stop: signal that stops it, even with open connections.
        pipeline: a source or sink of a pipeline file, with `{url}`, and `{HTTP}` for a listener's address.
        first_steps: purpose and command to run after the start, `{url}` likewise.
    """

    listeners: Callable[[Mapping[str, Any]], list[str]]
    prepare: Callable[[Path, State, Say], list[str]]
    answers: Callable[[State], bool]
    fetch: Callable[[Say], object] | None
    url: str
    pipeline: str
    hidden: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()
    stop: signal.Signals = signal.SIGTERM
    first_steps: tuple[tuple[str, str], ...] = ()


@contextmanager
def connected(address: str, timeout_s: float = 2.0) -> Iterator[socket.socket]:
    """A connection for a question to a server that may not answer yet."""
    host, port = split_address(address)
    with socket.create_connection((host, int(port)), timeout_s) as peer:
        peer.settimeout(timeout_s)
        yield peer


def split_address(address: str) -> tuple[str, str]:
    """Host and port."""
    host, _, port = address.rpartition(":")
    return host, port


def java_command(heap_mb: int, jars: Path | None, *options: str) -> list[str]:
    """Java with the JARs of a folder; the main class and its arguments follow."""
    common = (f"-Xmx{heap_mb}m", "-Djava.net.preferIPv4Stack=true", *options)
    return [str(java_home() / "bin" / "java"), *common, *(() if jars is None else ("-cp", str(jars / "*")))]


def open_packages(*packages: str) -> list[str]:
    """Java's own packages that a server's libraries reach into."""
    return [f"--add-opens={package}=ALL-UNNAMED" for package in packages]


def log_level() -> str:
    return os.environ.get("DELIVERED_BROKER_LOG", "warn")


def as_lines(settings: Mapping[str, object], sign: str = "=") -> str:
    return "".join(f"{name}{sign}{value}\n" for name, value in settings.items())


def run_tool(command: Sequence[str], failed: str, folder: Path, **options: Any) -> str:
    """The output of a program that prepares a server.

    Args:
        failed: code and condition of its failure.
        folder: that it writes to.

    Raises:
        DeliveredError: it failed. The message ends with its output.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)
    if done.returncode != 0:
        raise DeliveredError(failed, folder=folder, output=telling_lines(done.stdout + done.stderr))
    return str(done.stdout + done.stderr)


def make_certificate(java_home: Path, folder: Path) -> tuple[Path, str]:
    """A self-signed certificate for 127.0.0.1 and localhost, valid for ten years; created once per folder, by Java's
    keytool. Clients trust the PEM file ca.pem in the folder.

    Returns:
        The server's key store (PKCS12), and its password.
    """
    store, trusted, file = folder / "server.p12", folder / "ca.pem", folder / "keystore.password"
    if not file.is_file():
        write_private(file, secrets.token_hex(16))
    password = file.read_text(encoding="utf-8")
    if trusted.is_file():
        return store, password
    same = ["-alias", "server", "-keystore", str(store), "-storetype", "PKCS12", "-storepass", password]
    names = ["-dname", "CN=localhost", "-ext", "SAN=dns:localhost,ip:127.0.0.1", "-ext", "BC:critical=ca:true"]
    for arguments in (
        ["-genkeypair", *same, "-keyalg", "RSA", "-keysize", "2048", "-validity", "3650", *names],
        ["-exportcert", *same, "-rfc", "-file", str(trusted)],
    ):
        run_tool([str(java_home / "bin" / "keytool"), *arguments], "CERTIFICATE_FAILED", store)
    return store, password


def write_private(file: Path, text: str) -> None:
    """Write a file that only this user may read."""
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")


def _found() -> dict[str, Server]:
    names = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    modules = [importlib.import_module(f"{__package__}.{name}") for name in names]
    return {m.__name__.rpartition(".")[2]: m.SERVER for m in modules if hasattr(m, "SERVER")}


SERVERS: Mapping[str, Server] = _found()
"""By kind; collected from this folder's modules."""
