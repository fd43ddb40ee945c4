"""Real servers for development, demo and tests, on 127.0.0.1 and free ports.

    broker = brokers.start("kafka", Path("build/kafka"))
    broker.bootstrap                 # "127.0.0.1:21877"
    broker.kill(); broker.restart()  # the same data, the same ports
    brokers.status(Path("build/kafka"))
    broker.stop()

A server is identified by process id and start time, kept in the data folder: a process that reuses the id is never
touched.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from delivered import DeliveredError, UsageError
from delivered.machine import cache_folder, java_home
from delivered_lab.brokers.servers import SERVERS, Identity, Say, State, end, free_ports, launch, telling_lines

__all__ = [
    "KINDS", "Broker", "Status", "attach", "cache_folder", "default_folder", "java_home", "prefetch", "require_kind",
    "start", "status", "stop",
]  # fmt: skip

KINDS = tuple(SERVERS)
START_TIMEOUT_S = 90.0
_POLL_S = 0.1
_TRIES = 3


def _silent(_: str) -> None:
    return


@dataclass(frozen=True)
class Status:
    """
    Attributes:
        running: its process is running.
        answering: it also answers requests.
        bootstrap: "127.0.0.1:port"; None: no server was ever started in the folder.
        url: for clients; None as `bootstrap`.
        pipeline: a source or sink of a pipeline file.
        first_steps: purpose -> command to run next.
    """

    kind: str | None
    folder: Path
    running: bool
    answering: bool
    pid: int | None
    bootstrap: str | None
    listeners: Mapping[str, str]
    url: str | None = None
    pipeline: str | None = None
    first_steps: Mapping[str, str] = field(default_factory=dict)


class Broker:
    """A server and its data folder. Another process can get it from the folder: `attach`."""

    def __init__(self, folder: Path, state: State, identity: Identity) -> None:
        self.folder = folder
        self._state = state
        self._identity = identity

    @property
    def kind(self) -> str:
        return self._state.kind

    @property
    def pid(self) -> int:
        """Id of the last started process, running or not."""
        return self._identity.pid

    @property
    def is_running(self) -> bool:
        """Whether its process is there; it may not answer yet."""
        return self._identity.find() is not None

    @property
    def listeners(self) -> dict[str, str]:
        """Security protocol -> "127.0.0.1:port", for clients."""
        hidden = SERVERS[self.kind].hidden
        return {k: v for k, v in self._state.listeners.items() if k not in hidden}

    @property
    def bootstrap(self) -> str:
        """Address of the listener without TLS and passwords. Unchanged by a restart."""
        return self._state.main

    @property
    def url(self) -> str:
        """URL for clients; for Kafka the same as `bootstrap`."""
        return SERVERS[self.kind].url.format(self.bootstrap)

    @property
    def certificate(self) -> Path:
        """PEM file that clients of the TLS listeners trust."""
        return self.folder / "ca.pem"

    def kill(self) -> None:
        """Kill the server (SIGKILL) and wait until it has ended."""
        end(self._identity, kill=True)

    def stop(self) -> None:
        """Stop the server and wait until it has ended. Idempotent."""
        end(self._identity, ask=SERVERS[self.kind].stop)

    def restart(self) -> None:
        """Start the server again with the same data and ports, and wait until it answers. A running server is stopped
        first.
        """
        self.stop()
        self._state, self._identity = _run(self.folder, self._state, _silent)

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def default_folder(kind: str) -> Path:
    """Data folder of a server by default."""
    return cache_folder() / "data" / kind


def require_kind(kind: str) -> None:
    """Raises UsageError: unknown kind of server."""
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError("BROKER_UNKNOWN", kind=kind, known=", ".join(KINDS), hint=hint)


def prefetch(kinds: Sequence[str], say: Say = _silent) -> None:
    """Download servers of these kinds into the cache, in parallel.

    Args:
        kinds: of `KINDS`.
        say: as for `start`; called by several threads.

    Raises:
        UsageError: unknown kind.
        DeliveredError: no Java, or a download failed; the others were completed.
    """
    for kind in kinds:
        require_kind(kind)
    with ThreadPoolExecutor(max(1, len(kinds))) as pool:
        running = [pool.submit(get, say) for k in kinds if (get := SERVERS[k].fetch) is not None]
    for each in running:
        each.result()


def start(
    kind: str,
    folder: Path | str | None = None,
    *,
    tls: bool = False,
    scram: Mapping[str, str] | None = None,
    properties: Mapping[str, str] | None = None,
    heap_mb: int = 384,
    dies_with_parent: bool = False,
    port: int | None = None,
    say: Say = _silent,
) -> Broker:
    """Start a server on 127.0.0.1 and free ports, and wait until it answers.

    A folder used before keeps its data, ports and options; a server already running there is returned unchanged.

    Args:
        kind: one of `KINDS`.
        folder: for data, logs and state; default: `default_folder(kind)`.
        tls: Kafka: also a listener SSL; Pulsar: also PULSAR_SSL and HTTPS. `Broker.certificate` is what clients trust.
        scram: Kafka only: user -> password: also a listener SASL_PLAINTEXT (and SASL_SSL with `tls`) with
            SCRAM-SHA-512. ACLs are enforced then: such a user has no permissions without one; PLAINTEXT clients may do
            everything.
        properties: more lines of the server's configuration, for instance {"transaction.max.timeout.ms": "900000"}.
        heap_mb: Java heap, if it has one.
        port: of its main listener; a stopped server of this folder moves there. None: a free one.
        dies_with_parent: the server ends with the process that started it, even if that is killed (Linux).
        say: called with progress messages.

    Raises:
        UsageError: unknown kind, it does not support `tls` or `scram` here, or it runs on another port.
        DeliveredError: no Java, server not available here, download failed, or it did not start; the message ends with
            its last output.
    """
    require_kind(kind)
    for name, wanted in (("tls", tls), ("scram", bool(scram))):
        if wanted and name not in SERVERS[kind].takes:
            able = ", ".join(k for k, server in SERVERS.items() if name in server.takes)
            raise UsageError("BROKER_OPTION", kind=kind, name=name, kinds=able)
    place = (Path(folder) if folder is not None else default_folder(kind)).resolve()
    place.mkdir(parents=True, exist_ok=True)
    state = State.load(place)
    if state is not None and state.kind != kind:
        raise UsageError("BROKER_FOLDER.OTHER_KIND", place=place, actual=state.kind, kind=kind)
    if state is not None:
        planned = _at(state, port)
        if state.identity is not None and state.identity.find() is not None:
            if planned.listeners != state.listeners:
                raise UsageError("BROKER_PORT", kind=kind, place=place, address=state.main, port=port)
            return Broker(place, state, state.identity)
        return Broker(place, *_run(place, planned, say))
    settings: dict[str, Any] = {
        "scram": dict(scram or {}),
        "tls": tls,
        "properties": dict(properties or {}),
        "heap_mb": heap_mb,
        "dies_with_parent": dies_with_parent,
    }
    for attempt in range(_TRIES):
        names = SERVERS[kind].listeners(settings)
        ports = free_ports(len(names))
        listeners = {n: f"127.0.0.1:{p}" for n, p in zip(names, ports, strict=True)}
        try:
            return Broker(place, *_run(place, _at(State(kind, listeners, settings), port), say))
        except DeliveredError as error:
            # Another program can take a free port before the bind. A requested port would stay in use.
            port_in_use = "address already in use" in error.message.lower()
            if not port_in_use or port is not None or attempt == _TRIES - 1:
                raise
    raise AssertionError("not reached")


def _at(state: State, port: int | None) -> State:
    """The state with its main listener on this port."""
    if port is None:
        return state
    return replace(state, listeners={**state.listeners, next(iter(state.listeners)): f"127.0.0.1:{port}"})


def attach(folder: Path | str) -> Broker:
    """The server of a data folder, running or not. Raises UsageError: no server was ever started there."""
    place = Path(folder).resolve()
    state = State.load(place)
    if state is None or state.identity is None:
        raise UsageError("BROKER_FOLDER.EMPTY", place=place)
    return Broker(place, state, state.identity)


def stop(folder: Path | str) -> bool:
    """Stop the server of `folder`. Returns whether one was running."""
    place = Path(folder).resolve()
    state = State.load(place)
    if state is None or state.identity is None:
        return False
    return end(state.identity, ask=SERVERS[state.kind].stop)


def status(folder: Path | str) -> Status:
    """Status of the server of `folder`. Does not raise if it is down."""
    place = Path(folder).resolve()
    state = State.load(place)
    if state is None:
        return Status(None, place, False, False, None, None, {})
    running = state.identity is not None and state.identity.find() is not None
    server = SERVERS[state.kind]
    bootstrap = state.main
    return Status(
        kind=state.kind,
        folder=place,
        running=running,
        answering=running and server.answers(state),
        pid=state.identity.pid if running and state.identity else None,
        bootstrap=bootstrap,
        listeners={k: v for k, v in state.listeners.items() if k not in server.hidden},
        url=(url := server.url.format(bootstrap)),
        pipeline=server.pipeline.format(url=url, **state.listeners),
        first_steps={what: text.format(url=url) for what, text in server.first_steps},
    )


def _run(folder: Path, state: State, say: Say) -> tuple[State, Identity]:
    server, settings = SERVERS[state.kind], state.settings
    command = server.prepare(folder, state, say)
    log = folder / "server.log"
    seen = log.stat().st_size if log.exists() else 0
    identity = launch(command, log, settings["dies_with_parent"])
    # Passwords are in the formatted storage now; the state only records that there are any.
    kept = {**settings, "scram": dict.fromkeys(settings["scram"], "")}
    started = replace(state, settings=kept, identity=identity)
    started.save(folder)
    say(f"waiting for {state.kind} at {state.main}")
    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.answers(state):
        dead = identity.find() is None
        if dead or time.monotonic() > deadline:
            end(identity, kill=True)
            raise DeliveredError(
                "BROKER_START.NO_ANSWER",
                actual=state.kind,
                problem="ended" if dead else f"did not answer within {START_TIMEOUT_S:.0f} s",
                folder=folder,
                output=telling_lines(log.read_bytes()[seen:].decode(errors="replace")),
                log=log,
            )
        time.sleep(_POLL_S)
    return started, identity
