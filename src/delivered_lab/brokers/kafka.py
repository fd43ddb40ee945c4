"""Kafka in KRaft mode, broker and controller in one process; topics and records for a first try."""

from __future__ import annotations

import base64
import json
import secrets
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from delivered import DeliveredError, MissingExtra, Unreachable
from delivered.machine import java_home
from delivered_lab.brokers.servers import (
    Say,
    Server,
    State,
    as_lines,
    connected,
    fetch_jars,
    java_command,
    log_level,
    make_certificate,
    run_tool,
    write_private,
)

VERSION = "4.3.0"
ARTIFACTS = [
    ("org.apache.kafka", "kafka_2.13", VERSION),
    # Without a logging backend a server that fails to start logs nothing.
    ("org.slf4j", "slf4j-simple", "1.7.36"),
]
CONTROLLER = "CONTROLLER"
PLAINTEXT = "PLAINTEXT"
_CLEANER_BYTES = 16 << 20


def listeners_wanted(settings: Mapping[str, Any]) -> list[str]:
    """Names of the listeners: PLAINTEXT always; SSL, SASL_PLAINTEXT and SASL_SSL on request."""
    tls, scram = settings["tls"], bool(settings["scram"])
    wanted = ((PLAINTEXT, True), ("SSL", tls), ("SASL_PLAINTEXT", scram), ("SASL_SSL", tls and scram))
    return [*(name for name, chosen in wanted if chosen), CONTROLLER]


def prepare(folder: Path, state: State, say: Say) -> list[str]:
    """Write the configuration, and format the storage if it is new."""
    listeners, scram = state.listeners, state.settings["scram"]
    config = _properties(folder, listeners, bool(scram))
    if "SSL" in listeners:
        config |= _tls_properties(folder)
    config |= state.settings["properties"]
    if config["process.roles"] == "broker":  # it joins another one's cluster
        config["listeners"] = ",".join(f"{x}://{at}" for x, at in listeners.items() if x != CONTROLLER)
    path = folder / "server.properties"
    write_private(path, as_lines(config))
    if not (folder / "data" / "meta.properties").is_file():
        # A cluster id is 16 bytes in base64; the tool would parse a leading "-" as an option.
        cluster = "A" + base64.urlsafe_b64encode(secrets.token_bytes(16)).decode()[1:22]
        arguments = ["format", "-t", cluster, "-c", str(path)]
        for user, password in scram.items():
            arguments += ["--add-scram", f"SCRAM-SHA-512=[name={user},password={password}]"]
        run_tool([*_java(128, say), "kafka.tools.StorageTool", *arguments], "BROKER_START.KAFKA", folder / "data")
    return [*_java(state.settings["heap_mb"], say), "kafka.Kafka", str(path)]


def answers(state: State) -> bool:
    """Whether the broker answers at its PLAINTEXT listener and is registered."""
    client = b"delivered"
    # Metadata, version 1, with an empty list of topics: requests only the brokers.
    body = struct.pack(">hhih", 3, 1, 1, len(client)) + client + struct.pack(">i", 0)
    with suppress(OSError, struct.error), connected(state.listeners[PLAINTEXT]) as peer:
        peer.sendall(struct.pack(">i", len(body)) + body)
        stream = peer.makefile("rb")
        (size,) = struct.unpack(">i", stream.read(4))
        _, brokers = struct.unpack(">ii", stream.read(size)[:8])
        return bool(brokers > 0)
    return False


def fetch(say: Say) -> Path:
    """The folder with the server's JARs, fetched once."""
    return fetch_jars(f"kafka/{VERSION}", ARTIFACTS, say)


def _java(heap_mb: int, say: Say) -> list[str]:
    level = f"-Dorg.slf4j.simpleLogger.defaultLogLevel={log_level()}"
    return java_command(heap_mb, fetch(say), "-XX:+UseG1GC", "-XX:MaxMetaspaceSize=128m", level)


def _properties(folder: Path, listeners: Mapping[str, str], scram: bool) -> dict[str, str]:
    public = [x for x in listeners if x != CONTROLLER]
    config = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{listeners[CONTROLLER]}",
        "controller.listener.names": CONTROLLER,
        "inter.broker.listener.name": PLAINTEXT,
        "listeners": ",".join(f"{x}://{listeners[x]}" for x in listeners),
        "advertised.listeners": ",".join(f"{x}://{listeners[x]}" for x in public),
        "listener.security.protocol.map": ",".join(
            [f"{CONTROLLER}:PLAINTEXT", *(f"{x}:{x}" for x in public)],
        ),
        "log.dirs": str(folder / "data"),
        "auto.create.topics.enable": "false",
        "default.replication.factor": "1",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "8",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        "num.network.threads": "2",
        "num.io.threads": "4",
        # A killed broker can register again only after its old session has expired.
        "broker.heartbeat.interval.ms": "500",
        "broker.session.timeout.ms": "2000",
        "log.cleaner.threads": "1",
        "log.cleaner.dedupe.buffer.size": str(_CLEANER_BYTES),
    }
    if scram:
        config |= {
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }
        module = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        for name in ("sasl_plaintext", "sasl_ssl"):
            if name.upper() in public:
                config[f"listener.name.{name}.scram-sha-512.sasl.jaas.config"] = module
    return config


def _tls_properties(folder: Path) -> dict[str, str]:
    store, password = make_certificate(java_home(), folder)
    return {
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": str(store),
        "ssl.keystore.password": password,
        "ssl.key.password": password,
    }


SERVER = Server(
    listeners=listeners_wanted,
    prepare=prepare,
    answers=answers,
    fetch=fetch,
    url="{}",
    hidden=frozenset({CONTROLLER}),
    takes=frozenset({"tls", "scram"}),
    version=lambda: VERSION,
    pipeline='{{format: kafka, kafka.bootstrap.servers: "{url}", subscribe: orders}}',
    first_steps=(
        ("topics", "delivered brokers topic orders orders-clean"),
        ("records", "delivered brokers produce orders --records 1000"),
        ("look", "delivered brokers read orders"),
    ),
)


# -- topics and records for a first try, with the client of the extra `kafka` ------------------------------------------

_TIMEOUT_S = 30.0
_READ_AT_ONCE = 1_000


def _client() -> Any:
    try:
        import confluent_kafka.admin
    except ImportError:
        raise MissingExtra("kafka") from None
    return confluent_kafka


def _unreachable(bootstrap: str, error: Any) -> Unreachable:
    return Unreachable("KAFKA_UNREACHABLE.BROKERS", bootstrap=bootstrap, error=error.args[0].str())


def make_topics(bootstrap: str, names: Sequence[str], partitions: int) -> list[str]:
    """Create topics; returns the new ones.

    Raises:
        Unreachable: the server does not answer.
        DeliveredError: it rejects a name.
    """
    library = _client()
    admin = library.admin.AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    wanted = [library.admin.NewTopic(n, partitions, 1) for n in dict.fromkeys(names)]
    created = []
    for name, future in admin.create_topics(wanted, request_timeout=_TIMEOUT_S).items():
        try:
            future.result(_TIMEOUT_S)
            created.append(name)
        except library.KafkaException as error:
            if error.args[0].code() == library.KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            if error.args[0].retriable() or error.args[0].code() < 0:
                raise _unreachable(bootstrap, error) from None
            raise DeliveredError("TOPIC.CREATE", name=name, error=error.args[0].str()) from None
    return created


def produce(bootstrap: str, topic: str, records: int) -> None:
    """Send orders as JSON, keyed by customer, and wait until all are acknowledged.

    Raises:
        DeliveredError: the topic does not exist, no answer, or not all were acknowledged.
    """
    library = _client()
    producer = library.Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 0})
    _describe(producer, bootstrap, topic)
    failed: list[str] = []
    on_delivery = lambda error, _: None if error is None else failed.append(error.str())  # noqa: E731
    for i in range(records):
        value = json.dumps({"id": f"order-{i:04}", "amount": (i * 37) % 1000 / 10}).encode()
        while True:
            try:
                producer.produce(topic, key=f"customer-{i % 17}".encode(), value=value, on_delivery=on_delivery)
                break
            except BufferError:
                producer.poll(0.1)
    if left := producer.flush(_TIMEOUT_S) + len(failed):
        raise DeliveredError(
            "PRODUCE",
            unacknowledged=left,
            records=records,
            first_error=failed[0] if failed else "no answer",
            topic=topic,
        )


def _describe(client: Any, bootstrap: str, topic: str) -> Any:
    """Metadata of an existing topic. Raises as `consume`."""
    try:
        metadata = client.list_topics(topic, _TIMEOUT_S).topics[topic]
    except _client().KafkaException as error:
        raise _unreachable(bootstrap, error) from None
    if metadata.error is not None:
        raise DeliveredError("TOPIC.DESCRIBE", topic=topic, bootstrap=bootstrap, error=metadata.error.str())
    return metadata


def consume(bootstrap: str, topic: str) -> Iterator[tuple[int, int, bytes | None, bytes | None]]:
    """Partition, offset, key and value of every record that is visible to a read_committed reader now.

    Raises:
        DeliveredError: the topic does not exist, or no answer.
    """
    library = _client()
    settings: dict[str, Any] = {"group.id": f"delivered-{uuid.uuid4().hex}", "isolation.level": "read_committed"}
    settings |= {"enable.partition.eof": True, "enable.auto.commit": False, "log_level": 0}
    consumer = library.Consumer({"bootstrap.servers": bootstrap, **settings})
    try:
        left = set(_describe(consumer, bootstrap, topic).partitions)
        consumer.assign([library.TopicPartition(topic, p, library.OFFSET_BEGINNING) for p in left])
        while left:
            for message in consumer.consume(_READ_AT_ONCE, _TIMEOUT_S):
                if message.error() is None:
                    yield message.partition(), message.offset(), message.key(), message.value()
                elif message.error().code() == library.KafkaError._PARTITION_EOF:
                    left.discard(message.partition())
    finally:
        consumer.close()
