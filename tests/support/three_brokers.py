"""Three Kafka brokers that are controllers, too: any one of them may be killed, paused or restarted."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from confluent_kafka import ElectionType, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from kafka.protocol.admin import AlterPartitionReassignmentsRequest
from kafka.protocol.metadata import MetadataRequest
from tests.support.servers import Kafka, KafkaCluster

from delivered.clients.kafka import NoAnswer
from delivered.clients.kafka.protocol import Wire
from delivered_lab import brokers
from delivered_lab.brokers import kafka as server
from delivered_lab.brokers.servers import State, free_ports

NODES = (1, 2, 3)
_SAFE = {"min.insync.replicas": "2"}


class ThreeBrokers(KafkaCluster):
    """
    Attributes:
        bootstrap: all addresses.
    """

    def __init__(self, folder: Path, **properties: str) -> None:
        # As delivered: what nobody asks for has one replica.
        common = {f"{name}.replication.factor": "3" for name in ("offsets.topic", "transaction.state.log")}
        common |= {"transaction.state.log.min.isr": "2"}
        ports, quorum = free_ports(3), free_ports(3)
        common["controller.quorum.voters"] = ",".join(f"{n}@127.0.0.1:{p}" for n, p in zip(NODES, quorum, strict=True))
        common |= properties

        def own(node: int) -> dict[str, str]:
            at = {"PLAINTEXT": ports[node - 1], server.CONTROLLER: quorum[node - 1]}
            return {
                "node.id": str(node),
                "process.roles": "broker,controller",
                "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in at.items()),
                **common,
            }

        first = folder / "1"
        first.mkdir(parents=True)
        listeners = dict.fromkeys(server.listeners_wanted({"tls": False, "scram": {}}), "127.0.0.1:1")
        settings = {"scram": {}, "properties": own(1), "heap_mb": 256}
        server.prepare(first, State("kafka", listeners, settings), lambda _: None)
        meta = (first / "data" / "meta.properties").read_text().splitlines()
        cluster = next(line for line in meta if line.startswith("cluster.id="))
        for node in NODES[1:]:
            data = folder / str(node) / "data"
            data.mkdir(parents=True)
            (data / "meta.properties").write_text(f"version=1\nnode.id={node}\n{cluster}\n")
            shutil.copy(first / "data" / "bootstrap.checkpoint", data)

        def start(node: int) -> Kafka:
            return Kafka.start(folder / str(node), own(node), port=ports[node - 1], heap_mb=256)

        with ThreadPoolExecutor(3) as pool:
            self._brokers = list(pool.map(start, NODES))
        self.bootstrap = ",".join(b.bootstrap for b in self._brokers)
        self._admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        self.wire = Wire({"bootstrap.servers": self.bootstrap})
        self.wait_until(lambda: len(self.wire.nodes()) == 3)

    def wait_until(self, condition: Callable[[], Any], what: str = "the cluster") -> Any:
        """Wait for a fact; an unanswered question is no answer."""
        deadline = time.monotonic() + 120
        while True:
            try:
                if found := condition():
                    return found
            except NoAnswer:
                self.wire.forget()
            if time.monotonic() > deadline:
                raise TimeoutError(what)
            time.sleep(0.05)

    def topic(self, *replicas: list[int], name: str | None = None, config: Mapping[str, str] | None = None) -> str:
        """Create a topic.

        Args:
            replicas: nodes of each partition, its preferred leader first; by default one partition.
            config: by default, two replicas must be in sync.
        """
        placed = list(replicas) or [[1, 2, 3]]
        name = name or f"t{next(Kafka._names)}"
        new = NewTopic(name, len(placed), replica_assignment=placed, config=dict(config or _SAFE))
        self._admin.create_topics([new])[name].result(120)
        self.wait_in_sync(name)
        return name

    # -- what the cluster says -----------------------------------------------------------------------------------

    def leader(self, topic: str, partition: int = 0) -> int:
        """The leader now, asked anew."""

        def ask() -> int | None:
            self.wire.forget()
            return self.wire.leader(topic, partition)

        return int(self.wait_until(ask, f"a leader of {topic}-{partition}"))

    def coordinator(self, transactional_id: str) -> int:
        def ask() -> int | None:
            self.wire.forget(transactional_id)
            return self.wire.coordinator(transactional_id)

        return int(self.wait_until(ask, f"a coordinator of {transactional_id}"))

    def wait_in_sync(self, *topics: str) -> None:
        """Every replica of these topics is in sync, and every broker knows; without arguments, of all topics."""
        named = [MetadataRequest.MetadataRequestTopic(name=name) for name in topics] or None

        def synced() -> bool:
            for node in self.wire.nodes():
                request = MetadataRequest(topics=named, allow_auto_topic_creation=False)
                for found in self.wire.ask(request, node).topics:
                    for part in found.partitions:
                        if part.leader_id < 0 or len(part.isr_nodes) < len(part.replica_nodes):
                            return False
                    if not found.partitions:
                        return False
            return True

        self.wait_until(synced, f"replicas of {topics or 'all topics'} in sync")

    def settings(self, topic: str) -> dict[str, str]:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        return {k: v.value for k, v in self._admin.describe_configs([resource])[resource].result(60).items()}

    def without(self, node: int) -> SimpleNamespace:
        """Addresses of the other brokers, for a client that should not wait for this one."""
        return SimpleNamespace(bootstrap=",".join(self.broker(n).bootstrap for n in NODES if n != node))

    # -- what is done to it --------------------------------------------------------------------------------------

    def pause(self, node: int) -> None:
        os.kill(self.broker(node).pid, signal.SIGSTOP)

    def resume(self, node: int) -> None:
        os.kill(self.broker(node).pid, signal.SIGCONT)

    @contextmanager
    def paused(self, node: int) -> Iterator[None]:
        self.pause(node)
        try:
            yield
        finally:
            self.resume(node)

    @contextmanager
    def killed(self, node: int) -> Iterator[None]:
        self.broker(node).kill()
        try:
            yield
        finally:
            self.broker(node).restart()

    def roll(self, wait: bool = True, nodes: Sequence[int] = NODES) -> None:
        """Restart one broker after the other.

        Args:
            wait: until all replicas are in sync before the next one, as an operator should; else until it answers.
        """
        for node in nodes:
            self.broker(node).restart()
            if wait:
                self.wait_in_sync()

    def elect_all_preferred(self) -> None:
        self._admin.elect_leaders(ElectionType.PREFERRED, None).result(120)

    def elect(self, topic: str, partition: int, unclean: bool = False) -> None:
        kind = ElectionType.UNCLEAN if unclean else ElectionType.PREFERRED
        self._admin.elect_leaders(kind, [TopicPartition(topic, partition)]).result(120)

    def reassign(self, topic: str, partition: int, replicas: Sequence[int]) -> None:
        """Move a partition, and wait until it has moved."""
        Topic = AlterPartitionReassignmentsRequest.ReassignableTopic  # noqa: N806
        part = Topic.ReassignablePartition(partition_index=partition, replicas=list(replicas))
        request = AlterPartitionReassignmentsRequest(
            timeout_ms=60_000, topics=[Topic(name=topic, partitions=[part])], max_version=0
        )
        answer = self.wire.patiently(lambda: self.wire.ask(request))
        assert answer.error_code == 0, answer
        self.wait_until(
            lambda: next(
                p.replica_nodes == list(replicas)
                for p in self.wire.topic(topic).partitions
                if p.partition_index == partition
            ),
            f"{topic}-{partition} on {replicas}",
        )

    def repair(self) -> None:
        """All brokers run, and all replicas are in sync."""
        for node in NODES:
            self.resume_if_running(node)
        self.wait_in_sync()

    def resume_if_running(self, node: int) -> None:
        status = brokers.status(self.broker(node).folder)
        if status.running:
            self.resume(node)
        else:
            self.broker(node).restart()

    def stop(self) -> None:
        self.wire.close()
        super().stop()
