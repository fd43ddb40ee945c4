"""What `run` needs of each kind of server."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delivered_lab.brokers.fetch import Say
from delivered_lab.brokers.process import State


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


def _found() -> dict[str, Server]:
    names = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
    modules = [importlib.import_module(f"{__package__}.{name}") for name in names]
    return {m.__name__.rpartition(".")[2]: m.SERVER for m in modules if hasattr(m, "SERVER")}


SERVERS: Mapping[str, Server] = _found()
"""By kind; collected from this folder's modules."""
