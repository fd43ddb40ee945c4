"""Single requests to brokers, each with its own error code.

The driver ends transactions of other processes and writes decisions: there a lost response is an outcome of its own,
which a client that retries by itself would hide. `Wire.patiently` waits for an unavailable broker only if nothing was
sent yet or the request is idempotent.
"""

from __future__ import annotations

import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from delivered.clients.kafka import PORT, NoAnswer, NotSent, Rejected
from delivered.clients.kafka.channel import Channel, Pending, only, security, unreachable
from delivered.model.errors import DeliveredError, MissingExtra, Unreachable, UsageError, did_you_mean
from delivered.model.limits import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S
from delivered.model.options import parse_addresses
from delivered.model.patience import call_kind, left_s, patience_s, wait_out

NONE = 0
OFFSET_OUT_OF_RANGE = 1
UNKNOWN_TOPIC_OR_PARTITION = 3
LEADER_NOT_AVAILABLE = 5
NOT_LEADER = 6
COORDINATOR_LOADING, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR = 14, 15, 16
TOPIC_AUTHORIZATION_FAILED = 29
TOPIC_ALREADY_EXISTS = 36
INVALID_REPLICATION_FACTOR = 38
INVALID_PRODUCER_EPOCH = 47
INVALID_TXN_STATE = 48
INVALID_PRODUCER_ID_MAPPING = 49
CONCURRENT_TRANSACTIONS = 51
OPERATION_NOT_ATTEMPTED = 55
PRODUCER_FENCED = 90
TRANSACTIONAL_ID_NOT_FOUND = 105

COORDINATOR_MOVED = frozenset({COORDINATOR_LOADING, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR})
LEADER_MOVED = frozenset({LEADER_NOT_AVAILABLE, NOT_LEADER, 7, 8, 9, 13, 56, 74, 75, 76, 78, 100, 103})
"""Or its broker starts; to be asked again."""


class NoTopic(NoAnswer):
    """The topic does not exist, or this user may not see it."""


T = TypeVar("T")


def server_name(servers: str) -> str:
    """A cluster's name in messages."""
    return f"Kafka at {servers}"


def _away(error: BaseException) -> bool:
    return isinstance(error, NoAnswer) and not isinstance(error, Rejected)


def _unanswered(error: BaseException) -> bool:
    return isinstance(error, NoAnswer) and not isinstance(error, NoTopic)


def _not_sent(error: BaseException) -> bool:
    return isinstance(error, NotSent)


def name_of(code: int) -> str:
    """Kafka's name of an error code."""
    from kafka import errors

    return str(getattr(errors.for_code(code), "message", code))


def error_code_of(answer: Any) -> int:
    return int(getattr(answer, "error_code", NONE))


class Wire:
    """Connections to the brokers of one cluster, one to each, opened on demand; a forked process opens its own.
    Thread-safe.

    Args:
        client: librdkafka's settings, secrets resolved.

    Attributes:
        coordinators: known coordinators of transactional ids.
        disturbed: counts unanswered requests, and leaders and coordinators that moved.
    """

    def __init__(self, client: Mapping[str, str]) -> None:
        self._security = security(client)
        try:
            import kafka as _  # noqa: F401
        except ImportError:
            raise MissingExtra("kafka") from None
        self._servers = client["bootstrap.servers"]
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._answered = False
        self._channels: dict[int | None, Channel] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self.coordinators: dict[str, int] = {}
        self.disturbed = 0
        self._leaders: dict[tuple[str, int], Leader] = {}
        self._epochs: dict[tuple[str, int, uuid.UUID | None], int] = {}

    def channel(self, node: int | None = None) -> Channel:
        """An open connection to a broker (None: any).

        Raises:
            NotSent: no connection to the node now.
            Unreachable: no broker answered, within 10 s (120 s inside a running query; `asking_once`: at the first
                try), or they rejected the credentials.
        """
        if self._pid != os.getpid():
            self._pid, self._channels, self._lock = os.getpid(), {}, threading.RLock()
        if node is None:
            for open_one in list(self._channels.values()):
                if open_one.usable():
                    return open_one
        elif (known := self._channels.get(node)) is not None and known.usable():
            return known
        with self._lock:
            try:
                if not self._addresses:
                    self._first_contact()
                if node is None:
                    return self._any()
                if node not in self._addresses:
                    self._learn(self._any())
                    if node not in self._addresses:
                        raise NotSent(f"broker {node} is not in the cluster now")
                return self._open(node)
            except Rejected as error:
                raise self._unreachable(error) from None

    def _first_contact(self) -> None:
        if self._answered:  # the caller knows how long to wait for brokers that were there
            self._bootstrap()
            return
        try:
            if longest_s := patience_s(answered=False):
                wait_out(server_name(self._servers), self._bootstrap, _away, longest_s)
            else:
                self._bootstrap()
        except NoAnswer as error:
            raise self._unreachable(error) from None
        self._answered = True

    def _unreachable(self, error: NoAnswer) -> Unreachable:
        return unreachable(self._servers, error, tls=self._security.trust is not None)

    def _open(self, node: int) -> Channel:
        known = self._channels.get(node)
        if known is None or not known.usable():
            known = Channel(*self._addresses[node], self._security, left_s(CONNECT_TIMEOUT_S))
            self._channels[node] = known
        return known

    def _bootstrap(self) -> None:
        """Learn the brokers' addresses from a bootstrap server."""
        servers = parse_addresses(self._servers, port=PORT)
        random.shuffle(servers)
        for left, address in enumerate(servers, 1 - len(servers)):
            try:
                made = Channel(*address, self._security, left_s(CONNECT_TIMEOUT_S))
                self._learn(made)
                self._channels[next((n for n, a in self._addresses.items() if a == address), None)] = made
            except NoAnswer:
                if left == 0:
                    raise
            else:
                return

    def _any(self) -> Channel:
        """A connection to whichever broker accepts one."""
        last: NoAnswer = NotSent("no broker is known")
        for node in random.sample(sorted(self._addresses), len(self._addresses)):
            try:
                return self._open(node)
            except Rejected:
                raise
            except NoAnswer as error:
                last = error
        # Perhaps the brokers have moved: start from the bootstrap servers.
        self._addresses.clear()
        raise last

    def patiently(self, ask: Callable[[], T], again: bool = True) -> T:
        """Retry until there is an answer, across a restart of the brokers.

        Args:
            ask: one request, including the lookup of its broker.
            again: also retry a request that was sent but not answered; else only one that was not sent.

        Raises:
            NoAnswer: still none after 120 s; or, unless `again`, the outcome is unknown.
        """

        def once() -> T:
            try:
                return ask()
            except NoAnswer:
                self.forget()
                raise

        away = _unanswered if again else _not_sent
        return wait_out(server_name(self._servers), once, away, patience_s(True), call_kind(ask))

    def post(self, request: Any, node: int | None = None) -> Pending:
        """Send one request to a node (None: any), without waiting for its answer.

        Raises NotSent: no connection to the node now.
        """
        pending = self.channel(node).post(request, left_s(REQUEST_TIMEOUT_S))
        if node is not None:
            pending.left_cluster = partial(left_cluster, self, node)
        return pending

    def ask(self, request: Any, node: int | None = None, timeout_s: float = REQUEST_TIMEOUT_S) -> Any:
        """Send one request to a node (None: any) and return its answer, without retries.

        Raises:
            NotSent: no connection to the node now.
            NoAnswer: the connection broke, the request timed out, or the broker left the cluster.
        """
        return self.post(request, node).answer(left_s(timeout_s))

    def known_nodes(self) -> list[int]:
        """Ids of the brokers whose addresses are known. Asks none."""
        return list(self._addresses)

    def nodes(self) -> list[int]:
        """Ids of all brokers in the cluster now."""
        from kafka.protocol.metadata import MetadataRequest

        def ask() -> list[int]:
            found = [b.node_id for b in self._metadata(MetadataRequest(topics=[])).brokers]
            if not found:  # a broker that has just started may not know itself yet
                raise NoAnswer("the cluster listed no broker")
            return found

        return self.patiently(ask)

    def coordinator(self, transactional_id: str) -> int:
        """Node of this id's transaction coordinator. Raises NotSent: there is none at the moment."""
        known = self.coordinators.get(transactional_id)
        if known is not None:
            return known
        node = self.coordinators[transactional_id] = self._coordinator(transactional_id, key_type=1)
        return node

    def group_coordinator(self, group: str) -> int:
        """Node of a consumer group's coordinator. Raises NotSent: there is none at the moment."""
        return self._coordinator(group, key_type=0)

    def _coordinator(self, key: str, key_type: int) -> int:
        from kafka.protocol.metadata import FindCoordinatorRequest

        try:
            request = FindCoordinatorRequest(key=key, key_type=key_type, max_version=3)
            answer = self.ask(request, timeout_s=CONNECT_TIMEOUT_S)
        except NoAnswer as error:  # so the request itself was not sent
            raise NotSent(str(error)) from None
        if answer.error_code != NONE:
            raise NotSent(f"no coordinator for {key!r}: {name_of(answer.error_code)}")
        self._addresses[answer.node_id] = (answer.host, answer.port)
        return int(answer.node_id)

    def find_coordinators(self, transactional_ids: Collection[str]) -> None:
        """Look up the coordinators of many ids in one request, where brokers support that (Kafka 3.0)."""
        from kafka.protocol.metadata import FindCoordinatorRequest

        unknown = [i for i in transactional_ids if i not in self.coordinators]
        if len(unknown) < 2:
            return
        request = FindCoordinatorRequest(key_type=1, coordinator_keys=unknown, min_version=4, max_version=4)
        try:
            answer = self.ask(request)
        except NoAnswer:
            return  # they are looked up one by one
        for row in answer.coordinators:
            if row.error_code == NONE:
                self._addresses[row.node_id] = (row.host, row.port)
                self.coordinators[row.key] = row.node_id

    def ask_coordinator(
        self, transactional_id: str, request: Any, again: bool, code_of: Callable[[Any], int] = error_code_of
    ) -> Any:
        """Ask the id's current coordinator. For `again` see `patiently`. `code_of`: an answer's error code."""
        confirmation = Confirmation(self, transactional_id)

        def ask() -> Any:
            node = self.coordinator(transactional_id)
            try:
                answer = self.ask(request, node)
            except NoAnswer:
                self.forget(transactional_id)
                raise
            code = code_of(answer)
            if code in COORDINATOR_MOVED:
                self.forget(transactional_id)
            if not confirmation.counts(node, code):
                raise NotSent(f"broker {node}, perhaps no longer the coordinator: {name_of(code)}")
            return answer

        return self.patiently(ask, again)

    def topic(self, name: str) -> Any:
        """A topic's metadata, including its error code."""
        from kafka.protocol.metadata import MetadataRequest

        Topic = MetadataRequest.MetadataRequestTopic  # noqa: N806 - a class
        request = MetadataRequest(topics=[Topic(name=name)], allow_auto_topic_creation=False)
        return only(self._metadata(request).topics, "topics")

    def topics(self) -> list[str]:
        """Names of all topics that this user may see."""
        from kafka.protocol.metadata import MetadataRequest

        return [t.name for t in self._metadata(MetadataRequest(topics=None, allow_auto_topic_creation=False)).topics]

    def _metadata(self, request: Any) -> Any:
        answer = self.ask(request, timeout_s=CONNECT_TIMEOUT_S)
        if answer.brokers:
            self._addresses = {b.node_id: (b.host, b.port) for b in answer.brokers}
        return answer

    def leader(self, topic: str, partition: int) -> int:
        """Node that leads a partition. Raises NotSent if there is none now, NoTopic."""
        return self.led(topic, partition).node

    def led(self, topic: str, partition: int) -> Leader:
        """A partition's leader. Raises NotSent if there is none now, NoTopic."""
        known = self._leaders.get((topic, partition))
        if known is not None:
            return known
        try:
            found = self.topic(topic)
        except NoAnswer as error:  # so the request itself was not sent
            raise NotSent(str(error)) from None
        if found.error_code == UNKNOWN_TOPIC_OR_PARTITION:
            raise NoTopic(f"there is no topic {topic!r}")
        if found.error_code not in (NONE, LEADER_NOT_AVAILABLE):
            raise NotSent(f"topic {topic!r}: {name_of(found.error_code)}")
        self.learn_leaders(found)
        if (topic, partition) not in self._leaders:
            raise NotSent(f"partition {partition} of {topic!r} has no leader now")
        return self._leaders[(topic, partition)]

    def learn_leaders(self, topic: Any) -> None:
        """From the topic's metadata."""
        for number, leader in leaders_in(topic):
            at = (topic.name, number, leader.topic_id)
            # A broker that was paused or cut off still reports an earlier leader.
            if leader.node >= 0 and leader.epoch >= self._epochs.get(at, -1):
                self._epochs[at] = leader.epoch
                self._leaders[(topic.name, number)] = leader

    def forget(self, transactional_id: str | None = None) -> None:
        """Drop cached leaders, and the coordinator of this id."""
        if transactional_id is not None:
            self.coordinators.pop(transactional_id, None)
        self._leaders.clear()
        self.disturbed += 1

    def _learn(self, channel: Channel) -> None:
        """Ask for the addresses of all brokers."""
        from kafka.protocol.metadata import MetadataRequest

        try:
            answer = channel.post(MetadataRequest(topics=[])).answer(left_s(CONNECT_TIMEOUT_S))
        except NoAnswer as error:
            raise NotSent(str(error)) from None
        if not answer.brokers:  # one that has just started may not know itself yet
            raise NotSent("the cluster listed no broker")
        self._addresses = {b.node_id: (b.host, b.port) for b in answer.brokers}

    def close(self) -> None:
        """Close the connections; the next request opens new ones. Idempotent."""
        with self._lock:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()


def retried(ask: Callable[[], Any], again: Set[int], deadline: float, pause_s: float = 0.005) -> Any:
    """Repeat an idempotent request while its answer's `error_code` is in `again`.

    Args:
        ask: waits for an unavailable broker itself (`Wire.patiently`).
        deadline: of time.monotonic().
    """
    while True:
        answer = ask()
        if answer.error_code not in again or time.monotonic() > deadline:
            return answer
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.5)


# Who is in charge now, asked from several brokers.
#
# A broker that was paused, or cut off from the others, answers from before for a moment when it is back: as a
# coordinator or a leader that it no longer is. So an answer that would end a transaction counts only if the other
# brokers still name the broker that gave it.

FATAL = frozenset({47, 48, 49, 90, 105})
"""Error codes that end a transaction, if they are true: invalid epoch, state, or producer id; fenced; id not found."""
_LOOK_TIMEOUT_S = 5.0


class Cluster(Protocol):
    """What is asked; `Wire` is one."""

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


# Errors by the names of Kafka and librdkafka: in words, and those of a producer.


def explain(owner: str, name: str, detail: str, what: str, servers: str, known: Collection[str] = ()) -> DeliveredError:
    """An error of a broker or of librdkafka, in words.

    Args:
        owner: of the options: "delivered_kafka source".
        name: of the error, as Kafka or librdkafka has it: "UNKNOWN_TOPIC_OR_PART".
        what: the requested topic, partition or group.
        known: topics that there are.
    """
    if name in (
        "UNKNOWN_TOPIC_OR_PART",
        "UNKNOWN_TOPIC_OR_PARTITION",
        "_UNKNOWN_TOPIC",
        "_UNKNOWN_PARTITION",
        "UNKNOWN_TOPIC_ID",
    ):
        near = did_you_mean(what, known)
        return UsageError("TOPIC_MISSING.KAFKA_READ", owner=owner, topic=what, servers=servers, hint=near)
    if name in ("TOPIC_EXCEPTION", "INVALID_TOPIC_EXCEPTION", "INVALID_TOPIC"):
        return UsageError("TOPIC_INVALID.BROKER", owner=owner, servers=servers, topic=what)
    if "AUTHORIZATION_FAILED" in name:
        return UsageError("NOT_PERMITTED.KAFKA_READ", owner=owner, what=what, servers=servers, name=name)
    if name in ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "_SSL"):
        return Unreachable("CREDENTIALS_REFUSED", owner=owner, servers=servers, detail=detail)
    return Unreachable("KAFKA_UNREACHABLE.REQUEST", owner=owner, servers=servers, what=what, name=name, detail=detail)


def replaces(name: str, known: str) -> bool:
    """Whether an error replaces the last one: "all brokers down" must not hide its cause ("Connection refused")."""
    return name != "_ALL_BROKERS_DOWN" or not known


class ProducerError(Exception):
    """A client error. `name` is librdkafka's, without the prefix.

    Attributes:
        away: no broker answered.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason
        self.fenced = name in ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")
        self.topic_unknown = name in ("_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_OR_PART")
        self.away = name in ("_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "LEADER_NOT_AVAILABLE")
        self.no_permission = name in ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED") or name in _NO_PERMISSION


_NO_PERMISSION = {f"{what}_AUTHORIZATION_FAILED" for what in ("TOPIC", "TRANSACTIONAL_ID", "CLUSTER")}
_CONSEQUENCES = frozenset({"_PURGE_QUEUE", "_PURGE_INFLIGHT"})
"""Errors of records that the client dropped because another record failed."""


@dataclass
class Failures:
    """Undelivered records: how many, and the error of the first one that failed by itself.

    Attributes:
        largest: key and value of the largest, in bytes.
        last_error: the client's last connection error, with its cause.
        fatal: name of the error after which the client stopped sending; later records just fail with "_FATAL".
    """

    count: int = 0
    name: str = ""
    largest: int = 0
    last_error: str = ""
    fatal: str = ""
    by_name: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, size: int) -> None:
        if self.count == 0 or self.name in _CONSEQUENCES:
            self.name = name
        self.count += 1
        self.largest = max(self.largest, size)
        self.by_name[name] = self.by_name.get(name, 0) + 1

    def note(self, name: str, detail: str) -> None:
        """Keep a connection error of the client."""
        if replaces(name, self.last_error):
            self.last_error = f"{name}: {detail}"

    def hint(self) -> str:
        return f" (last error: {self.last_error})" if self.last_error else ""

    def clear(self) -> None:
        self.count, self.name, self.largest, self.by_name = 0, "", 0, {}
