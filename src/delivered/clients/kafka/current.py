"""Who is in charge now, asked from several brokers.

A broker that was paused, or cut off from the others, answers from before for a moment when it is back: as a coordinator
or a leader that it no longer is. So an answer that would end a transaction counts only if the other brokers still name
the broker that gave it.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from delivered.clients.kafka.answers import NoAnswer, only

FATAL = frozenset({47, 48, 49, 90, 105})
"""Error codes that end a transaction, if they are true: invalid epoch, state, or producer id; fenced; id not found."""
_LOOK_TIMEOUT_S = 5.0


class Cluster(Protocol):
    """What is asked; `protocol.Wire` is one."""

    def ask(self, request: Any, node: int | None = None, timeout_s: float = ...) -> Any: ...

    def nodes(self) -> list[int]: ...

    def known_nodes(self) -> list[int]: ...

    def forget(self, transactional_id: str | None = None) -> None: ...


@dataclass(frozen=True)
class Leader:
    """A partition's leader.

    Attributes:
        epoch: -1: unknown.
        topic_id: None: the brokers are too old.
    """

    node: int
    epoch: int
    topic_id: uuid.UUID | None


def leaders_in(topic: Any) -> Iterator[tuple[int, Leader]]:
    """The leader of each partition, from a topic's metadata; node -1: none."""
    topic_id = getattr(topic, "topic_id", None)
    for part in topic.partitions:
        yield part.partition_index, Leader(part.leader_id, getattr(part, "leader_epoch", -1), topic_id)


class Confirmation:
    """Whether answers of an id's coordinator count. Not thread-safe."""

    def __init__(self, wire: Cluster, transactional_id: str) -> None:
        self._wire = wire
        self._id = transactional_id
        self._confirmed: int | None = None

    def counts(self, node: int, code: int) -> bool:
        """False: ask again. A rejection changes nothing, so that is safe.

        An error that ends a transaction counts if another broker had named this one as the coordinator before it was
        asked.
        """
        if code not in FATAL or node == self._confirmed:
            return True
        self._wire.forget(self._id)
        self._confirmed = node if self._is_coordinator(node) else None
        return False

    def _is_coordinator(self, node: int) -> bool:
        from kafka.protocol.metadata import FindCoordinatorRequest

        def named(other: int) -> int | None:
            request = FindCoordinatorRequest(key=self._id, key_type=1, max_version=3)
            answer = self._wire.ask(request, other, _LOOK_TIMEOUT_S)
            return int(answer.node_id) if answer.error_code == 0 else None

        return _confirmed_by_others(self._wire, node, named)


def is_leader(wire: Cluster, node: int, topic: str, partition: int) -> bool:
    """Whether another broker names this one as the partition's leader; so does a cluster of one broker."""
    from kafka.protocol.metadata import MetadataRequest

    Topic = MetadataRequest.MetadataRequestTopic  # noqa: N806 - a class

    def named(other: int) -> int | None:
        request = MetadataRequest(topics=[Topic(name=topic)], allow_auto_topic_creation=False)
        found = only(wire.ask(request, other, _LOOK_TIMEOUT_S).topics, "topics")
        leaders = (p.leader_id for p in found.partitions if p.partition_index == partition)
        return next((int(leader) for leader in leaders if leader >= 0), None)

    return _confirmed_by_others(wire, node, named)


def _confirmed_by_others(wire: Cluster, node: int, named: Callable[[int], int | None]) -> bool:
    """What the first other broker says that answers. False: none does."""
    try:
        others = [n for n in wire.nodes() if n != node]
    except NoAnswer:
        return False
    for other in random.sample(others, len(others)):
        try:
            found = named(other)
        except NoAnswer:
            continue
        if found is not None:
            return found == node
    return not others


def left_cluster(wire: Cluster, node: int) -> bool:
    """Whether another broker lists the cluster without this one. False also if no other answers."""
    from kafka.protocol.metadata import MetadataRequest

    for other in wire.known_nodes():
        if other == node:
            continue
        try:
            listed = [b.node_id for b in wire.ask(MetadataRequest(topics=[]), other, _LOOK_TIMEOUT_S).brokers]
        except NoAnswer:
            continue
        if listed:
            return node not in listed
    return False


def ask_member(wire: Cluster, node: int, request: Any, deadline: float) -> Any | None:
    """The answer of one broker; None: it is no longer in the cluster.

    Args:
        request: idempotent.
        deadline: of time.monotonic(), for a broker that is in the cluster and does not answer.

    Raises:
        NoAnswer: at the deadline.
    """
    pause = 0.05
    while True:
        try:
            return wire.ask(request, node, _LOOK_TIMEOUT_S)
        except NoAnswer:
            if node not in wire.nodes():
                return None
            if time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)
