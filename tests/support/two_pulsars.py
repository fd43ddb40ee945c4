"""A cluster of Pulsar: two brokers, each a process that may be killed; ZooKeeper and BookKeeper in a third one."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.servers import Pulsar

from delivered_lab.brokers import pulsar as server
from delivered_lab.brokers.servers import Identity, as_lines, end, free_ports, java_command, launch, open_packages
from delivered_lab.verify.services import wait_for

COORDINATORS = 16
_START_S = 240.0
_MANAGER = "org.apache.pulsar.broker.loadbalance.impl.ModularLoadManagerImpl"
_SESSION = "6000"
"""Milliseconds after which a killed broker's topics move to the other one."""


class TwoPulsars(Pulsar):
    """The first broker may be killed; the second one's HTTP service is asked. Attributes: addresses: of both."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        zookeeper, bookkeeper, *ports = free_ports(8)
        self._folder, self._root = folder, server.fetch(lambda _: None)
        self._ports = [(ports[0], ports[1]), (ports[2], ports[3])]
        self._running: dict[str, Identity] = {}
        self.addresses = [("127.0.0.1", number) for number, _ in self._ports]
        url = "pulsar://" + ",".join(f"127.0.0.1:{number}" for number, _ in self._ports)
        super().__init__(SimpleNamespace(url=url, listeners={"HTTP": f"127.0.0.1:{self._ports[1][1]}"}))  # type: ignore[arg-type]
        (folder / "log4j2.properties").write_text(server._LOGGING.replace("{level}", "warn"))
        common = {
            **server._distributed(self._root / "conf" / "standalone.conf"),
            **{k: v for k, v in server._properties({"PULSAR": "h:1", "HTTP": "h:2"}).items() if "Port" not in k},
            "journalSyncData": "false",
        }
        storage = self._file("storage", common | {"brokerServicePort": str(ports[4]), "webServicePort": str(ports[5])})
        self._start(
            "storage",
            *("org.apache.pulsar.PulsarStandaloneStarter", "--config", storage, "--no-broker"),
            *("--no-functions-worker", "--no-stream-storage", "--advertised-address", "127.0.0.1"),
            *("--zookeeper-port", str(zookeeper), "--zookeeper-dir", str(folder / "zookeeper")),
            *("--bookkeeper-port", str(bookkeeper), "--bookkeeper-dir", str(folder / "bookkeeper")),
            environment={"PULSAR_STANDALONE_USE_ZOOKEEPER": "1"},
        )
        wait_for(lambda: _listens(zookeeper) and _listens(bookkeeper), _START_S, "ZooKeeper and BookKeeper start")
        at = f"zk:127.0.0.1:{zookeeper}"
        made = self._start(
            "metadata",
            *("org.apache.pulsar.PulsarClusterMetadataSetup", "--cluster", "c", "--metadata-store", at),
            *("--configuration-metadata-store", at, "--initial-num-transaction-coordinators", str(COORDINATORS)),
            *("--web-service-url", f"http://127.0.0.1:{self._ports[0][1]}"),
            *("--broker-service-url", f"pulsar://127.0.0.1:{self._ports[0][0]}"),
        )
        wait_for(lambda: made.find() is None, _START_S, "metadata of the cluster")
        for number, (binary, http) in enumerate(self._ports):
            own = {"brokerServicePort": str(binary), "webServicePort": str(http), "clusterName": "c"}
            own |= {
                "metadataStoreUrl": at,
                "configurationMetadataStoreUrl": at,
                "transactionCoordinatorEnabled": "true",
            }
            own |= {f"managedLedgerDefault{name}": "1" for name in ("EnsembleSize", "WriteQuorum", "AckQuorum")}
            own |= {
                "loadBalancerEnabled": "true",
                "loadManagerClassName": _MANAGER,
                "loadBalancerAutoBundleSplitEnabled": "false",
            }
            own |= {"loadBalancerSheddingEnabled": "false"}
            own |= {"metadataStoreSessionTimeoutMillis": _SESSION, "zooKeeperSessionTimeoutMillis": _SESSION}
            self._file(f"broker{number}", common | own)
        for number in range(2):
            self.start_broker(number, wait=False)
        for number in range(2):
            self._await(number)

    def kill_broker(self, number: int) -> None:
        end(self._running.pop(f"broker{number}"), kill=True)

    def start_broker(self, number: int, *, wait: bool = True) -> None:
        file = str(self._folder / f"broker{number}.conf")
        self._start(f"broker{number}", "org.apache.pulsar.PulsarBrokerStarter", "--broker-conf", file)
        if wait:
            self._await(number)

    def spread(self) -> None:
        """Have topics and coordinators placed anew: the load balancer uses both brokers."""
        for namespace in ("pulsar/system", "public/default"):
            self.admin("PUT", f"namespaces/{namespace}/unload")

    def end(self) -> None:
        self.close()
        for identity in self._running.values():
            end(identity, kill=True)

    def _await(self, number: int) -> None:
        url = f"http://127.0.0.1:{self._ports[number][1]}/admin/v2/brokers/health"

        def healthy() -> bool:
            assert self._running[f"broker{number}"].find() is not None, "the broker ended"
            with suppress(OSError), urllib.request.urlopen(url, timeout=10) as reply:
                return bool(reply.read().strip() == b"ok")
            return False

        wait_for(healthy, _START_S, f"broker {number} starts")

    def _file(self, name: str, settings: Mapping[str, str]) -> str:
        path = self._folder / f"{name}.conf"
        path.write_text(as_lines(settings))
        return str(path)

    def _start(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Identity:
        command = [
            *("env", *(f"{key}={value}" for key, value in (environment or {}).items())),
            *java_command(
                256,
                self._root / "lib",
                "-XX:MaxDirectMemorySize=256m",
                "-Dio.netty.tryReflectionSetAccessible=true",
                "-Dlog4j2.is.webapp=false",
                f"-Dlog4j.configurationFile={self._folder / 'log4j2.properties'}",
                f"-Dbookkeeper.metadata.bookie.drivers={server._METADATA}BookieDriver",
                f"-Dbookkeeper.metadata.client.drivers={server._METADATA}ClientDriver",
                *open_packages(*server._OPENS),
            ),
            *arguments,
        ]
        self._running[name] = launch(command, self._folder / f"{name}.log", True)
        return self._running[name]


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def serving(of: Any, topics: list[str], deadline: float) -> dict[str, str]:
    """Which broker serves each, by a cluster of our client."""
    return {topic: of.serving(topic, deadline, again=True).name for topic in topics}
