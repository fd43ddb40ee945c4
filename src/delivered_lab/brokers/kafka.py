"""Kafka in KRaft mode, broker and controller in one process; topics and records for a first try."""

from __future__ import annotations

import base64
import json
import os
import secrets
import socket
import struct
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from delivered import DeliveredError, MissingExtra, Unreachable
from delivered.machine import java_home
from delivered_lab.brokers.fetch import Say, fetch_jars
from delivered_lab.brokers.servers import Server, State, make_certificate, telling_lines

VERSION = "4.3.0"
ARTIFACTS = [
    ("org.apache.kafka", "kafka_2.13", VERSION),
    # Without a logging backend a server that fails to start logs nothing.
    ("org.slf4j", "slf4j-simple", "1.7.36"),
]
CONTROLLER = "CONTROLLER"
PLAINTEXT = "PLAINTEXT"
_CLEANER_BYTES = 16 << 20


def listeners_wanted(tls: bool, scram: bool) -> list[str]:
    """Names of the listeners: PLAINTEXT always; SSL, SASL_PLAINTEXT and SASL_SSL on request."""
    names = [PLAINTEXT]
    if tls:
        names.append("SSL")
    if scram:
        names.append("SASL_PLAINTEXT")
    if tls and scram:
        names.append("SASL_SSL")
    return [*names, CONTROLLER]


def prepare(
    home: Path,
    folder: Path,
    listeners: Mapping[str, str],
    scram: Mapping[str, str],
    properties: Mapping[str, str],
    say: Say,
) -> None:
    """Write the configuration, and format the storage if it is new."""
    config = _properties(folder, listeners, bool(scram))
    if "SSL" in listeners:
        config |= _tls_properties(home, folder)
    config |= properties
    if config["process.roles"] == "broker":  # it joins another one's cluster
        config["listeners"] = ",".join(f"{x}://{at}" for x, at in listeners.items() if x != CONTROLLER)
    path = folder / "server.properties"
    text = "".join(f"{k}={v}\n" for k, v in config.items())
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    if (folder / "data" / "meta.properties").is_file():
        return
    # A cluster id is 16 bytes in base64; the tool would parse a leading "-" as an option.
    cluster = "A" + base64.urlsafe_b64encode(secrets.token_bytes(16)).decode()[1:22]
    arguments = ["format", "-t", cluster, "-c", str(path)]
    for user, password in scram.items():
        arguments += ["--add-scram", f"SCRAM-SHA-512=[name={user},password={password}]"]
    command = [*_java(home, 128, say), "kafka.tools.StorageTool", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        output = telling_lines(done.stdout + done.stderr)
        raise DeliveredError(
            "BROKER_START",
            f"Kafka could not format its storage in {folder / 'data'}. Output: {output}",
            next_step="delivered brokers stop kafka, remove the folder, start again",
        )


def command(home: Path, folder: Path, heap_mb: int, say: Say) -> list[str]:
    """The command that runs the server."""
    return [*_java(home, heap_mb, say), "kafka.Kafka", str(folder / "server.properties")]


def answers(address: str, timeout_s: float = 2.0) -> bool:
    """Whether the broker at `address` (a PLAINTEXT listener) answers and is registered."""
    host, _, port = address.rpartition(":")
    client = b"delivered"
    # Metadata, version 1, with an empty list of topics: requests only the brokers.
    body = struct.pack(">hhih", 3, 1, 1, len(client)) + client + struct.pack(">i", 0)
    with suppress(OSError, struct.error), socket.create_connection((host, int(port)), timeout_s) as peer:
        peer.settimeout(timeout_s)
        peer.sendall(struct.pack(">i", len(body)) + body)
        stream = peer.makefile("rb")
        (size,) = struct.unpack(">i", stream.read(4))
        _, brokers = struct.unpack(">ii", stream.read(size)[:8])
        return bool(brokers > 0)
    return False


def fetch(java: Path, say: Say) -> Path:
    """The folder with the server's JARs, fetched once."""
    return fetch_jars(f"kafka/{VERSION}", ARTIFACTS, java, say)


def _java(home: Path, heap_mb: int, say: Say) -> list[str]:
    java = home / "bin" / "java"
    jars = fetch(java, say)
    level = os.environ.get("DELIVERED_BROKER_LOG", "warn")
    return [
        str(java),
        f"-Xmx{heap_mb}m",
        "-XX:+UseG1GC",
        "-XX:MaxMetaspaceSize=128m",
        "-Djava.net.preferIPv4Stack=true",
        f"-Dorg.slf4j.simpleLogger.defaultLogLevel={level}",
        "-cp",
        str(jars / "*"),
    ]


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


def _tls_properties(home: Path, folder: Path) -> dict[str, str]:
    store, password = make_certificate(home, folder)
    return {
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": str(store),
        "ssl.keystore.password": password,
        "ssl.key.password": password,
    }


def _prepared(folder: Path, state: State, say: Say) -> list[str]:
    home, settings = java_home(), state.settings
    prepare(home, folder, state.listeners, settings["scram"], settings["properties"], say)
    return command(home, folder, settings["heap_mb"], say)


SERVER = Server(
    listeners=lambda settings: listeners_wanted(settings["tls"], bool(settings["scram"])),
    main=PLAINTEXT,
    hidden=frozenset({CONTROLLER}),
    fetch=lambda say: fetch(java_home() / "bin" / "java", say),
    prepare=_prepared,
    answers=lambda state: answers(state.listeners[PLAINTEXT]),
    url=str,
    takes=frozenset({"tls", "scram"}),
    pipeline='{{format: kafka, kafka.bootstrap.servers: "{url}", subscribe: orders}}',
    first_steps=(
        ("topics", "delivered brokers topic orders orders-clean"),
        ("records", "delivered brokers produce orders --records 1000"),
        ("look", "delivered brokers read orders"),
    ),
)


_TIMEOUT_S = 30.0
_READ_AT_ONCE = 1_000


def _client() -> Any:
    try:
        import confluent_kafka.admin
    except ImportError:
        raise MissingExtra("kafka") from None
    return confluent_kafka


def make_topics(bootstrap: str, names: Sequence[str], partitions: int) -> list[str]:
    """Create topics; returns the new ones.

    Raises:
        Unreachable: the server does not answer.
        DeliveredError: it rejects a name.
    """
    library = _client()
    admin = library.admin.AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    wanted = [library.admin.NewTopic(n, partitions, 1) for n in dict.fromkeys(names)]
    made = []
    for name, future in admin.create_topics(wanted, request_timeout=_TIMEOUT_S).items():
        try:
            future.result(_TIMEOUT_S)
            made.append(name)
        except library.KafkaException as error:
            if error.args[0].code() == library.KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            if error.args[0].retriable() or error.args[0].code() < 0:
                raise Unreachable(
                    "KAFKA_UNREACHABLE",
                    f"Kafka at {bootstrap} does not answer: {error.args[0].str()}",
                    next_step="delivered brokers start kafka",
                ) from None
            raise DeliveredError(
                "TOPIC",
                f"The topic {name!r} was not created: {error.args[0].str()}",
                next_step="delivered brokers topic NAME, with letters, digits, '.', '_' and '-'",
            ) from None
    return made


def produce(bootstrap: str, topic: str, records: int) -> None:
    """Send orders as JSON, keyed by customer, and wait until all are acknowledged.

    Raises:
        DeliveredError: not all were acknowledged.
    """
    library = _client()
    producer = library.Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "log_level": 0})
    failed: list[str] = []

    def on_delivery(error: Any, _: Any) -> None:
        if error is not None:
            failed.append(error.str())

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
            f"{left} of {records} records were not acknowledged: {failed[0] if failed else 'no answer'}.",
            next_step=f"delivered brokers status kafka; delivered brokers topic {topic}",
        )


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
        try:
            found = consumer.list_topics(topic, _TIMEOUT_S).topics[topic]
        except library.KafkaException as error:
            raise Unreachable(
                "KAFKA_UNREACHABLE",
                f"Kafka at {bootstrap} does not answer: {error.args[0].str()}",
                next_step="delivered brokers start kafka",
            ) from None
        if found.error is not None:
            raise DeliveredError(
                "TOPIC", f"{topic!r} at {bootstrap}: {found.error.str()}", f"delivered brokers topic {topic}"
            )
        left = set(found.partitions)
        consumer.assign([library.TopicPartition(topic, p, library.OFFSET_BEGINNING) for p in left])
        while left:
            for message in consumer.consume(_READ_AT_ONCE, _TIMEOUT_S):
                if message.error() is None:
                    yield message.partition(), message.offset(), message.key(), message.value()
                elif message.error().code() == library.KafkaError._PARTITION_EOF:
                    left.discard(message.partition())
    finally:
        consumer.close()
