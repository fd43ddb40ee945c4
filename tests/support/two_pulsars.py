"""Two Pulsar brokers of one cluster: a standalone one, which holds ZooKeeper and the bookie, and one that is killed."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers import Pulsar

from delivered_lab.brokers.servers import free_ports

_STANDALONE, _BROKER = "org.apache.pulsar.PulsarStandaloneStarter", "org.apache.pulsar.PulsarBrokerStarter"
_BALANCED = {"loadManagerClassName": "org.apache.pulsar.broker.loadbalance.impl.ModularLoadManagerImpl"}
WAIT_S = 300.0


class TwoPulsars:
    """
    Attributes:
        first: the one that stays.
    """

    def __init__(self, new_pulsar: Callable[..., Pulsar], monkeypatch: pytest.MonkeyPatch) -> None:
        [zookeeper] = free_ports(1)
        place = {"metadataStoreUrl": f"zk:127.0.0.1:{zookeeper}", "zooKeeperSessionTimeoutMillis": "5000"}
        monkeypatch.setenv("PULSAR_STANDALONE_USE_ZOOKEEPER", "1")  # its own metadata store is for one process
        self.first = new_pulsar(**place, **_BALANCED)
        self._command, self._conf = _command(self.first), self.first.broker.folder / "second.conf"
        self._binary, self._http = (f"127.0.0.1:{port}" for port in free_ports(2))
        text = (self.first.broker.folder / "standalone.conf").read_text()
        own = {
            "brokerServicePort": self._binary.rpartition(":")[2],
            "webServicePort": self._http.rpartition(":")[2],
            "configurationMetadataStoreUrl": place["metadataStoreUrl"],
        }
        self._conf.write_text(text + "".join(f"{name}={value}\n" for name, value in own.items()))
        self._process: subprocess.Popen[bytes] | None = None
        self.start_second()

    def start_second(self) -> None:
        command = [*self._command, _BROKER, "--broker-conf", str(self._conf)]
        with (self.first.broker.folder / "second.log").open("ab") as said:
            self._process = subprocess.Popen(command, cwd=self.first.broker.folder, stdout=said, stderr=said)
        self._until(lambda: _asked(self._http, "brokers/health", json_=False) == b"ok")
        self._until(lambda: len(_asked(self._first_http, "brokers/standalone")) == 2)

    def kill_second(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def serving(self, topic: str) -> str:
        """host:port of the broker that serves a topic."""
        found = json.loads(_get(f"http://{self._first_http}/lookup/v2/topic/{topic.replace('://', '/')}"))
        return str(found["brokerUrl"]).removeprefix("pulsar://")

    def share(self, topics: Iterable[str]) -> None:
        """Unload namespaces until both brokers serve some of these topics."""
        topics = [*topics]
        namespaces = {"/".join(t.split("://")[1].split("/")[:2]) for t in topics} | {"public/default"}

        def shared() -> bool:
            if len({self.serving(topic) for topic in topics}) == 2:
                return True
            for namespace in namespaces:
                self.first.admin("PUT", f"namespaces/{namespace}/unload")
            return False

        self._until(shared)

    @property
    def _first_http(self) -> str:
        return self.first.broker.listeners["HTTP"]

    def _until(self, fact: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            with suppress(OSError):
                if fact():
                    return
            assert time.monotonic() < deadline, (self.first.broker.folder / "second.log").read_text()[-4_000:]
            assert self._process is not None
            assert self._process.poll() is None, (self.first.broker.folder / "second.log").read_text()[-4_000:]
            time.sleep(0.1)


@contextmanager
def two_pulsars(new_pulsar: Callable[..., Pulsar], monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoPulsars]:
    both = TwoPulsars(new_pulsar, monkeypatch)
    try:
        yield both
    finally:
        both.kill_second()


def _command(pulsar: Pulsar) -> list[str]:
    """Java and its options, as the server runs."""
    words = Path(f"/proc/{pulsar.broker.pid}/cmdline").read_text().split("\0")
    return words[: words.index(_STANDALONE)]


def _asked(address: str, path: str, json_: bool = True) -> Any:
    said = _get(f"http://{address}/admin/v2/{path}")
    return json.loads(said) if json_ else said.strip()


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return bytes(reply.read())
