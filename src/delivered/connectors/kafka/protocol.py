"""Single requests to brokers through kafka-python, each with its own error code.

The driver ends transactions of other processes and writes decisions: there a lost response is an outcome of its own,
which a client that retries by itself would hide. `Wire.patiently` waits for an unavailable broker only if nothing was
sent yet or the request is idempotent.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeVar

from delivered.model.errors import MissingExtra, Unreachable, UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S
from delivered.model.patience import left_s, patience_s, wait_out

NONE = 0
OFFSET_OUT_OF_RANGE = 1
UNKNOWN_TOPIC_OR_PARTITION = 3
LEADER_NOT_AVAILABLE = 5
NOT_LEADER = 6
COORDINATOR_LOADING = 14
COORDINATOR_NOT_AVAILABLE = 15
NOT_COORDINATOR = 16
TOPIC_AUTHORIZATION_FAILED = 29
TOPIC_ALREADY_EXISTS = 36
INVALID_PRODUCER_EPOCH = 47
INVALID_TXN_STATE = 48
INVALID_PRODUCER_ID_MAPPING = 49
CONCURRENT_TRANSACTIONS = 51
OPERATION_NOT_ATTEMPTED = 55
PRODUCER_FENCED = 90
TRANSACTIONAL_ID_NOT_FOUND = 105

COORDINATOR_MOVED = frozenset({COORDINATOR_LOADING, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR})

_SECURITY = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "sasl.kerberos.service.name": "sasl_kerberos_service_name",
    "client.id": "client_id",
}
_TLS = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.ca.pem", "ssl.certificate.pem")


class NoAnswer(Exception):
    """No response to a request; it is unknown whether it took effect."""


class NotSent(NoAnswer):
    """The request was not sent, so it had no effect."""


class NoTopic(NoAnswer):
    """The topic does not exist, or this user may not see it."""


T = TypeVar("T")


def server_name(servers: str) -> str:
    """A cluster's name in messages."""
    return f"Kafka at {servers}"


def _unanswered(error: BaseException) -> bool:
    return isinstance(error, NoAnswer) and not isinstance(error, NoTopic)


def _not_sent(error: BaseException) -> bool:
    return isinstance(error, NotSent)


def name_of(code: int) -> str:
    """Kafka's name of an error code."""
    from kafka import errors

    return str(getattr(errors.for_code(code), "message", code))


class Wire:
    """Open connections to the brokers of one cluster. Thread-safe.

    Args:
        client: librdkafka's settings, secrets resolved.
    """

    def __init__(self, client: Mapping[str, str]) -> None:
        self._settings = _kafka_python(client)
        self._servers = client["bootstrap.servers"]
        self._lock = threading.Lock()
        self._admin: Any = None
        self._refused = False
        self._coordinators: dict[str, int] = {}
        self._leaders: dict[tuple[str, int], int] = {}

    def admin(self) -> Any:
        """kafka-python's admin client.

        Raises:
            Unreachable: no broker answered within 10 s (120 s inside a running query), or they rejected the
                credentials.
        """
        with self._lock:
            if self._admin is None:
                away = lambda error: isinstance(error, Unreachable) and not self._refused  # noqa: E731
                self._admin = wait_out(server_name(self._servers), self._connect, away, patience_s(answered=False))
            return self._admin

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

        return wait_out(server_name(self._servers), once, _unanswered if again else _not_sent, patience_s(True))

    def _connect(self) -> Any:
        try:
            from kafka import KafkaAdminClient, errors
            from kafka.net.compat import KafkaNetClient
        except ImportError:
            raise MissingExtra("kafka") from None
        made: list[Any] = []

        def client(**settings: Any) -> Any:
            made.append(KafkaNetClient(**settings))
            return made[0]

        try:
            return KafkaAdminClient(**self._settings, kafka_client=client)
        except errors.KafkaError as error:
            # The client reports that it could not connect, but not why.
            auth = list(made[0]._manager._auth_failures.values()) if made else []
            self._refused = bool(auth)
            for one in made:
                one.close()
            raise unreachable(self._servers, auth[0] if auth else error) from None

    def ask(self, request: Any, node: int | None = None, timeout_s: float = REQUEST_TIMEOUT_S) -> Any:
        """Send one request to a node (None: any) and return its answer, without retries.

        Raises:
            NotSent: no connection to the node now.
            NoAnswer: the connection broke, or the request timed out.
        """
        from kafka import errors

        manager = self.admin()._manager
        timeout_s, sent = left_s(timeout_s), False

        async def send() -> Any:
            nonlocal sent
            connection = manager.get_connection(manager.least_loaded_node() if node is None else node)
            await manager.wait_for(connection.init_future, left_s(CONNECT_TIMEOUT_S) * 1000)
            sent = True
            return await connection.send_request(request, request_timeout_ms=int(timeout_s * 1000))

        try:
            return manager.run(send)
        except (errors.KafkaError, OSError) as error:
            if isinstance(error, errors.UnknownBrokerIdError):
                self._refresh()
            raise (NoAnswer if sent else NotSent)(f"{type(error).__name__}: {error}") from None

    def nodes(self) -> list[int]:
        """Ids of all brokers in the cluster now."""
        from kafka.protocol.metadata import MetadataRequest

        def ask() -> list[int]:
            found = [b.node_id for b in self.ask(MetadataRequest(topics=[])).brokers]
            if not found:  # a broker that has just started may not know itself yet
                raise NoAnswer("the cluster listed no broker")
            return found

        return self.patiently(ask)

    def coordinator(self, transactional_id: str) -> int:
        """Node of this id's transaction coordinator.

        Raises:
            NotSent: there is none at the moment.
        """
        known = self._coordinators.get(transactional_id)
        if known is not None:
            return known
        from kafka.protocol.metadata import FindCoordinatorRequest

        try:
            answer = self.ask(FindCoordinatorRequest(key=transactional_id, key_type=1, max_version=3))
        except NoAnswer as error:  # so the request itself was not sent
            raise NotSent(str(error)) from None
        if answer.error_code != NONE:
            raise NotSent(f"no coordinator for {transactional_id!r}: {name_of(answer.error_code)}")
        if self.admin()._manager.cluster.broker_metadata(answer.node_id) is None:
            self._refresh()
        self._coordinators[transactional_id] = answer.node_id
        return int(answer.node_id)

    def ask_coordinator(self, transactional_id: str, request: Any, again: bool) -> Any:
        """Ask the id's current coordinator. For `again` see `patiently`."""

        def ask() -> Any:
            node = self.coordinator(transactional_id)
            try:
                answer = self.ask(request, node)
            except NoAnswer:
                self.forget(transactional_id)
                raise
            if getattr(answer, "error_code", NONE) in COORDINATOR_MOVED:
                self.forget(transactional_id)
            return answer

        return self.patiently(ask, again)

    def topic(self, name: str) -> Any:
        """A topic's metadata, including its error code."""
        from kafka.protocol.metadata import MetadataRequest

        Topic = MetadataRequest.MetadataRequestTopic  # noqa: N806 - a class
        [found] = self.ask(MetadataRequest(topics=[Topic(name=name)], allow_auto_topic_creation=False)).topics
        return found

    def topics(self) -> list[str]:
        """Names of all topics that this user may see."""
        from kafka.protocol.metadata import MetadataRequest

        return [t.name for t in self.ask(MetadataRequest(topics=None, allow_auto_topic_creation=False)).topics]

    def leader(self, topic: str, partition: int) -> int:
        """Node that leads a partition. Raises NotSent if there is none now, NoTopic."""
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
        for part in found.partitions:
            if part.leader_id >= 0:
                self._leaders[(topic, part.partition_index)] = part.leader_id
        if (topic, partition) not in self._leaders:
            raise NotSent(f"partition {partition} of {topic!r} has no leader now")
        if self.admin()._manager.cluster.broker_metadata(self._leaders[(topic, partition)]) is None:
            self._refresh()
        return self._leaders[(topic, partition)]

    def forget(self, transactional_id: str | None = None) -> None:
        """Drop cached leaders, and the coordinator of this id."""
        if transactional_id is not None:
            self._coordinators.pop(transactional_id, None)
        self._leaders.clear()

    def _refresh(self) -> None:
        """Refresh the addresses of brokers that joined or moved."""
        manager = self.admin()._manager

        async def refresh() -> Any:
            return await manager.cluster.refresh_metadata()

        from kafka import errors

        try:
            manager.run(refresh)
        except (errors.KafkaError, OSError) as error:
            raise NotSent(f"{type(error).__name__}: {error}") from None

    def close(self) -> None:
        """Close the connections; the next request opens new ones. Idempotent."""
        with self._lock:
            admin, self._admin = self._admin, None
        if admin is not None:
            admin.close()


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


def unreachable(servers: str, error: Exception) -> Unreachable:
    name = type(error).__name__
    if "Authentication" in name or "Authorization" in name or "Sasl" in name:
        return Unreachable(
            "KAFKA_CREDENTIALS",
            f"The brokers at {servers} rejected the credentials: {error}.",
            next_step="check kafka.sasl.* and kafka.ssl.*",
        )
    if _listens(servers):
        return Unreachable(
            "KAFKA_CREDENTIALS",
            f"A server at {servers} closed the connection before its first answer: it expects other credentials or "
            f"another security protocol, its certificate is not trusted here, or it is not a Kafka broker ({error}).",
            next_step="check kafka.security.protocol, kafka.sasl.* and kafka.ssl.*",
        )
    return Unreachable(
        "KAFKA_UNREACHABLE",
        f"No broker at {servers} answered within {CONNECT_TIMEOUT_S:.0f} s.",
        next_step="check kafka.bootstrap.servers and kafka.security.protocol, and that the brokers are running",
    )


def _listens(servers: str) -> bool:
    for server in servers.split(","):
        host, _, port = server.strip().rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1).close()
        except (OSError, ValueError):
            continue
        return True
    return False


def _kafka_python(client: Mapping[str, str]) -> dict[str, Any]:
    """librdkafka's settings translated for kafka-python; those without a counterpart are left out."""
    settings: dict[str, Any] = {
        "bootstrap_servers": [s.strip() for s in client["bootstrap.servers"].split(",") if s.strip()],
        "bootstrap_timeout_ms": int(CONNECT_TIMEOUT_S * 1000),
        "reconnect_backoff_max_ms": 500,
        "max_in_flight_requests_per_connection": 64,
        "client_id": "delivered",
    }
    for theirs, ours in _SECURITY.items():
        if theirs in client:
            settings[ours] = client[theirs]
    if "security_protocol" in settings:
        settings["security_protocol"] = settings["security_protocol"].upper()
    if settings.get("security_protocol", "").endswith("SSL") or any(k in client for k in _TLS):
        settings["ssl_context"] = _tls(client)
    return settings


def _tls(client: Mapping[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(
            cafile=client.get("ssl.ca.location"), cadata=client.get("ssl.ca.pem") or None
        )
        if client.get("ssl.endpoint.identification.algorithm", "https").lower() in ("none", ""):
            context.check_hostname = False
        if client.get("enable.ssl.certificate.verification", "true").lower() == "false":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if "ssl.certificate.location" in client:
            context.load_cert_chain(
                client["ssl.certificate.location"], client.get("ssl.key.location"), client.get("ssl.key.password")
            )
    except (OSError, ssl.SSLError) as error:
        raise UsageError("TLS_FILES", f"The TLS files of kafka.ssl.* cannot be used: {error}.") from None
    return context
