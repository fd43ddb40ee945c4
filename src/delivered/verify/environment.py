"""Where cases run: a folder, servers that are started when the first case needs them, and for each case the source, the
sink and the network that its names ask for."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from delivered import brokers
from delivered.verify.proxy import Fired, Proxy, StreamProxy
from delivered.verify.systems import KAFKA, SINK_KINDS, SOURCE_KINDS, SYSTEMS
from delivered.verify.systems.base import SinkClient, SinkPlace, SourceClient, SourcePlace
from delivered.verify.systems.group import SinkGroup
from delivered.verify.template import Template
from delivered.verify.workloads import Workload

Say = Callable[[str], None]


class Environment:
    """Cases run in it one after the other.

    Args:
        env: of the pipelines' processes.
        sink_options: over those of every sink in the pipeline file; `format` puts another connector in its place.
        template: the user's own pipeline, which every case then runs.
        source_format: another connector in the place of every queue's.
    """

    def __init__(
        self,
        folder: Path,
        say: Say,
        env: dict[str, str] | None = None,
        sink_options: dict[str, Any] | None = None,
        template: Template | None = None,
        source_format: str | None = None,
    ) -> None:
        self.folder = folder
        self.source_format = source_format
        self.template = template
        self.env = dict(env or {})
        if template is not None:
            parts = [str(template.folder), self.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
            self.env["PYTHONPATH"] = os.pathsep.join(p for p in parts if p)
        self.sink_options = sink_options or {}
        self._say = say
        self._servers: dict[str, brokers.Broker] = {}

    def server(self, kind: str) -> brokers.Broker:
        """The one of this environment, started if need be; `kind` as `delivered.brokers` names it."""
        if kind not in self._servers:
            place = self._place(kind)
            shutil.rmtree(place, ignore_errors=True)
            self._say(f"starting {kind}")
            properties = dict(SYSTEMS[kind].properties)
            self._servers[kind] = brokers.start(kind, place, properties=properties, dies_with_parent=True)
        return self._servers[kind]

    def close(self) -> None:
        while self._servers:
            kind, server = self._servers.popitem()
            server.kill()
            shutil.rmtree(self._place(kind), ignore_errors=True)

    def _place(self, kind: str) -> Path:
        return self.folder / ("broker" if kind == KAFKA else kind)


class Endpoints(NamedTuple):
    """Of a case's pipeline.

    Attributes:
        server: that holds the sink, or the source if the sink needs none; None: neither does.
        source_server: that holds the source; None: files of this machine.
        proxy: that the pipeline reaches it through, if it was asked for.
    """

    source: SourceClient
    sink: SinkClient
    server: brokers.Broker | None
    source_server: brokers.Broker | None
    proxy: Proxy[Any] | None


def connect(
    environment: Environment,
    name: str,
    sink: str,
    workload: Workload,
    folder: Path,
    disk: Path,
    stack: contextlib.ExitStack,
    *,
    source: str = "",
    small_disk: bool = False,
    topics: bool = False,
    on_fire: Callable[[Fired], None] | None = None,
) -> Endpoints:
    """Source and sink of a case.

    Args:
        source: empty: what the sink is fed from.
        disk: where checkpoint and files of the sink go; small_disk: it is one of its own, and soon full.
        topics: the source must be one.
        on_fire: what a proxy tells of each request that it hit; None: the pipeline reaches its server directly.
        stack: closes the proxy.
    """
    kind, options = SINK_KINDS[sink], {**workload.sink, **environment.sink_options}
    if not source and (topics or workload.topics > 1):
        source = KAFKA
    source = source or (environment.template.source if environment.template is not None else kind.source)

    def server_of(kind: str | None) -> brokers.Broker | None:
        return None if kind is None else environment.server(kind)

    server = server_of(kind.server)
    proxy: Proxy[Any] | None = None
    if on_fire is not None and server is not None:
        proxy = (SYSTEMS[server.kind].proxy or StreamProxy)(server.bootstrap, on_fire)
        stack.callback(proxy.close)

    def address(of: str | None) -> str | None:
        """The network is that of the server that the whole sink is named after."""
        return proxy.bootstrap if proxy is not None and of == kind.server else None

    def client(member: str) -> SinkClient:
        one = SINK_KINDS[member]
        if one.client is None:
            return SinkGroup({m: client(m) for m in one.members})
        small = disk if small_disk and member == sink else None
        typed, at = environment.template is None, server_of(one.server)
        return one.client(one, SinkPlace(name, at, disk, address(one.server), workload, typed, small, options))

    held = SOURCE_KINDS[source]
    source_server = server_of(held.server)
    # Only a source that is the sink's own, Kafka's, is reached through its proxy.
    through = address(held.server) if source == KAFKA else None
    place = SourcePlace(name, source_server, folder / "log", through, workload.topics, environment.source_format)
    return Endpoints(held.at(place), client(sink), server or source_server, source_server, proxy)


def can_mount() -> bool:
    """Whether this process may mount a small disk."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Any:
    """A disk of its own for a folder, while it lasts."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
