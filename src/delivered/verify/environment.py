"""Where cases run: a folder, servers that are started when the first case needs them, and for each case the source, the
sink and the network that its names ask for."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from delivered import brokers
from delivered.verify.clients import drains, feeds
from delivered.verify.clients.base import Drain, Feed
from delivered.verify.clients.drains import Place
from delivered.verify.clients.kafka import Topic
from delivered.verify.clients.log import Log
from delivered.verify.clients.sink_group import SinkGroup
from delivered.verify.proxy import Proxy
from delivered.verify.proxy_sql import MysqlProxy, PostgresProxy
from delivered.verify.proxy_stream import StreamProxy
from delivered.verify.sinks import ACTIVEMQ, KAFKA, MYSQL, POSTGRES, PULSAR, ROCKETMQ, SINK_KINDS
from delivered.verify.sources import SOURCE_KINDS
from delivered.verify.template import Template
from delivered.verify.wire import Fired, Wire
from delivered.verify.workloads import Workload

SERVER_PROPERTIES: dict[str, dict[str, str]] = {
    KAFKA: {
        # Expired transactions are looked for every ten seconds by default; a case should not wait for that.
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
        "message.max.bytes": "2097152",
    },
    # What a killed server wrote, the system keeps: no case pulls a plug.
    PULSAR: {"journalSyncData": "false"},
    ACTIVEMQ: {"journalDatasync": "false"},
    ROCKETMQ: {
        # What a killed receiver held should come again before the ten seconds of the default.
        "proxy.minInvisibleTimeMillsForRecv": "1000",
        # Else a broker 5.5.0 turns a core without end after the first transaction; every other case would pay for it.
        "transactionOpBatchInterval": "3600000",
    },
}
_PROXIES: dict[str, Callable[[str, Callable[[Fired], None]], Wire[Any]]] = {
    KAFKA: Proxy,
    POSTGRES: PostgresProxy,
    MYSQL: MysqlProxy,
}

Say = Callable[[str], None]


class Environment:
    """Cases run on it one after the other.

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
            properties = SERVER_PROPERTIES.get(kind, {})
            self._servers[kind] = brokers.start(kind, place, properties=properties, dies_with_parent=True)
        return self._servers[kind]

    def close(self) -> None:
        while self._servers:
            kind, server = self._servers.popitem()
            server.kill()
            shutil.rmtree(self._place(kind), ignore_errors=True)

    def _place(self, kind: str) -> Path:
        return self.folder / ("broker" if kind == KAFKA else kind)


class Ends(NamedTuple):
    """Of a case's pipeline.

    Attributes:
        server: that holds the sink, or the source if the sink needs none; None: neither does.
        source_server: that holds the source; None: files of this machine.
        proxy: that the pipeline reaches it through, if it was asked for.
    """

    feed: Feed
    drain: Drain
    server: brokers.Broker | None
    source_server: brokers.Broker | None
    proxy: Wire[Any] | None


def settle(
    environment: Environment,
    name: str,
    whole: str,
    workload: Workload,
    folder: Path,
    disk: Path,
    stack: contextlib.ExitStack,
    *,
    chosen: str = "",
    small_disk: bool = False,
    topics: bool = False,
    on_fire: Callable[[Fired], None] | None = None,
) -> Ends:
    """Source and sink of a case.

    Args:
        whole: the sink, or several that share every batch.
        chosen: the source; empty: what the sink is fed from.
        disk: where checkpoint and files of the sink go; small_disk: it is one of its own, and soon full.
        topics: the source must be one.
        on_fire: what a proxy tells of each request that it hit; None: the pipeline reaches its server directly.
        stack: closes the proxy.
    """
    kind, options = SINK_KINDS[whole], {**workload.sink, **environment.sink_options}
    source = chosen or (environment.template.source if environment.template is not None else kind.source)
    if not chosen and (topics or workload.topics > 1):
        source = KAFKA
    server = environment.server(kind.server) if kind.server is not None else None
    proxy: Wire[Any] | None = None
    if on_fire is not None and server is not None:
        proxy = _PROXIES.get(server.kind, StreamProxy)(server.bootstrap, on_fire)
        stack.callback(proxy.close)
    held = SOURCE_KINDS[source].server
    source_server = environment.server(held) if held is not None else None
    server = server or source_server
    feed: Feed
    if source_server is None:
        feed = Log(folder / "log")
    elif source == KAFKA:
        given = proxy.bootstrap if proxy is not None and kind.server == KAFKA else source_server.bootstrap
        feed = Topic(source_server.bootstrap, f"{name}-in", given, topics=workload.topics).as_feed()
    else:
        feed = feeds.held_by(source_server, source, name, folder / "log", environment.source_format)

    def drain_of(sink: str) -> Drain:
        """Of a member, too: the network is that of the server that the whole sink is named after."""
        kind = SINK_KINDS[sink]
        given = proxy.bootstrap if proxy is not None and kind.server == SINK_KINDS[whole].server else None
        at = environment.server(kind.server) if kind.server is not None else None
        small = disk if small_disk and sink == whole else None
        return drains.make(kind, Place(name, at, disk, given, workload, environment.template is None, small, options))

    members = kind.members
    drain = SinkGroup({m: drain_of(m) for m in members}) if members else drain_of(whole)
    return Ends(feed, drain, server, source_server, proxy)
