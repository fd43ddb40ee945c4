"""Real servers, used by tests through independent clients. `tests/conftest.py` has them as fixtures."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import psutil

from delivered_lab import brokers
from delivered_lab.brokers import postgres as postgres_server
from delivered_lab.brokers import rocketmq as rocketmq_server


class Server:
    """A server of one kind on 127.0.0.1; `broker` can kill and restart it.

    Attributes:
        quick: settings of every server that tests start.
    """

    system: ClassVar[str]
    quick: ClassVar[Mapping[str, str]] = {}
    heap_mb: ClassVar[int] = 384

    def __init__(self, broker: brokers.Broker) -> None:
        self.broker = broker

    @classmethod
    def start(cls, folder: Path, properties: Mapping[str, str] | None = None, **options: Any) -> Self:
        """It dies with this process; options as for `brokers.start`."""
        given = {"heap_mb": cls.heap_mb, **options, "properties": {**cls.quick, **(properties or {})}}
        return cls(brokers.start(cls.system, folder, dies_with_parent=True, **given))

    def close(self) -> None:
        """Give clients back."""

    def end(self) -> None:
        """Nobody needs it or its data any more: a kill is quicker than a stop."""
        self.close()
        self.broker.kill()


@contextlib.contextmanager
def paused(server: Server) -> Iterator[None]:
    """All processes of a server stand still (SIGSTOP)."""
    first = psutil.Process(server.broker.pid)
    processes = [first, *first.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


class Kafka(Server):
    """A real broker and what tests do with it.

    `kafka.bootstrap` is its address, `kafka.topic()` makes a fresh topic, `kafka.broker` can kill and restart it:
    do that only with a broker of your own, from the fixture `new_kafka`.
    """

    system = "kafka"
    # By default, expired transactions are aborted every ten seconds, and topics are compacted every fifteen; each look
    # at hundreds of topics takes a while. Retention goes by the records' timestamps: tests that write old ones would
    # lose them at its next check.
    quick: ClassVar = {
        "log.retention.ms": "-1",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
        "log.cleaner.backoff.ms": "1000",
    }
    _names = itertools.count()

    def __init__(self, broker: brokers.Broker) -> None:
        super().__init__(broker)
        self._admin: Any = None

    @property
    def bootstrap(self) -> str:
        return self.broker.bootstrap

    def topic(self, partitions: int = 4, /, name: str | None = None, **config: Any) -> str:
        """Create a unique topic; `config` as Kafka names it, with `_` for `.`."""
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.admin import NewTopic

        name = name or f"t{next(self._names)}"
        settings = {k.replace("_", "."): str(v) for k, v in config.items()}
        admin = self.admin()
        while True:
            try:
                admin.create_topics([NewTopic(name, partitions, 1, config=settings)])[name].result(120)
                break
            except KafkaException as error:  # a busy machine's broker misses its heartbeat, and is fenced for a while
                if error.args[0].code() != KafkaError.INVALID_REPLICATION_FACTOR:
                    raise
                time.sleep(0.1)
        # The controller has it; the broker learns of it a moment later.
        while (known := admin.list_topics(name, timeout=60).topics[name]).error or len(known.partitions) < partitions:
            time.sleep(0.01)
        return name

    def admin(self) -> Any:
        from confluent_kafka.admin import AdminClient

        if self._admin is None:
            self._admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        return self._admin


class Registry(Server):
    """A schema registry. Subjects are unique by the names of topics."""

    system = "registry"
    heap_mb = 256

    @property
    def url(self) -> str:
        return self.broker.url

    def client(self) -> Any:
        from confluent_kafka.schema_registry import SchemaRegistryClient

        return SchemaRegistryClient({"url": self.url, "cache.latest.ttl.sec": 0})

    def register(self, subject: str, schema: object, kind: str = "AVRO") -> int:
        """The id of a schema, given as text or as JSON."""
        from confluent_kafka.schema_registry import Schema

        text = schema if isinstance(schema, str) else json.dumps(schema)
        return int(self.client().register_schema(subject, Schema(text, kind)))


class KafkaCluster:
    """Brokers 1 and 2. The first one is the controller, too: do not kill it (`three_brokers.py` has others).

    Attributes:
        bootstrap: all addresses.
    """

    def __init__(self, folder: Path) -> None:
        copies = dict.fromkeys(("default", "offsets.topic", "transaction.state.log"), "2")
        common = {f"{name}.replication.factor": n for name, n in copies.items()}
        first = Kafka.start(folder / "1", common)
        self._brokers = [first]
        told = dict(line.split("=", 1) for line in (folder / "1" / "server.properties").read_text().splitlines())
        meta = (folder / "1" / "data" / "meta.properties").read_text().splitlines()
        cluster = next(line for line in meta if line.startswith("cluster.id="))
        (folder / "2" / "data").mkdir(parents=True)
        (folder / "2" / "data" / "meta.properties").write_text(f"version=1\nnode.id=2\n{cluster}\n")
        joins = {"process.roles": "broker", "node.id": "2", **common}
        joins["controller.quorum.voters"] = told["controller.quorum.voters"]
        self._brokers.append(Kafka.start(folder / "2", joins))
        self.bootstrap = ",".join(b.bootstrap for b in self._brokers)
        self._admin = first.admin()  # its client learns of the others

    def admin(self) -> Any:
        return self._admin

    def broker(self, node: int) -> brokers.Broker:
        return self._brokers[node - 1].broker

    def topic(self, *replicas: list[int]) -> str:
        """Create a topic. `replicas`: nodes of each partition, its preferred leader first."""
        from confluent_kafka.admin import NewTopic

        name = f"t{next(Kafka._names)}"
        self._admin.create_topics([NewTopic(name, len(replicas), replica_assignment=list(replicas))])[name].result(120)
        self.wait_for(name, lambda p: len(p.isrs) == len(replicas[p.id]))
        return name

    def wait_for(self, topic: str, condition: Callable[[Any], bool]) -> None:
        """Wait until every partition meets a condition."""
        deadline = time.monotonic() + 60
        while not all(map(condition, self._admin.list_topics(topic, 30).topics[topic].partitions.values())):
            if time.monotonic() > deadline:
                raise TimeoutError(f"partitions of {topic}")
            time.sleep(0.1)

    def elect_preferred(self, topic: str, partition: int) -> None:
        from confluent_kafka import ElectionType, TopicPartition

        self._admin.elect_leaders(ElectionType.PREFERRED, [TopicPartition(topic, partition)]).result(120)

    def stop(self) -> None:
        for broker in reversed(self._brokers):
            broker.end()


class Postgres(Server):
    """A real PostgreSQL and what tests do with it.

    `postgres.url` is its address, `postgres.sink(...)` a sink on a fresh table, `postgres.execute(...)` a client that
    is not ours. `postgres.broker` can kill and restart it: do that only with a server from the fixture `new_postgres`.
    """

    system = "postgres"
    _names = itertools.count()

    @property
    def url(self) -> str:
        return self.broker.url

    def connect(self) -> Any:
        """A client that is not ours."""
        import psycopg

        return psycopg.connect(self.url, autocommit=True)

    def execute(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run one statement by itself, and return its rows, if it has any."""
        with self.connect() as connection:
            cursor = connection.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []

    def unfinished(self) -> list[str]:
        """Transactions that a test left behind: they hold locks, and every new slot waits for them."""
        idle = "backend_xid IS NOT NULL AND state LIKE 'idle in transaction%'"
        found = self.execute(
            "SELECT 'prepared: ' || gid FROM pg_prepared_xacts UNION ALL "
            f"SELECT 'idle: ' || pid || ', after ' || query FROM pg_stat_activity WHERE {idle}"
        )
        return [text for (text,) in found]

    def roll_back_prepared(self) -> None:
        """At the end of a test that leaves promises on purpose."""
        for (gid,) in self.execute("SELECT gid FROM pg_prepared_xacts"):
            self.execute(f"ROLLBACK PREPARED '{gid}'")

    def table(self, columns: str | None = "key bytea, value bytea") -> str:
        """Name of a table nobody else uses; made, unless `columns` is None."""
        name = f"t{next(self._names)}"
        if columns is not None:
            self.execute(f"CREATE TABLE {name} ({columns})")
        return name

    def sink(self, table: str | None = None, **options: str) -> Any:
        from delivered.connectors.postgres import CONNECTOR

        return CONNECTOR.sink({"url": self.url, "dbtable": table or self.table(), **options})


class PostgresPair:
    """A primary, and a standby that streams from it. `url` names both, as libpq wants it."""

    NAME = "standby1"

    def __init__(self, folder: Path, *, synchronous: bool) -> None:
        self._folder = folder
        self.primary = Postgres.start(folder / "1", {"synchronous_standby_names": self.NAME} if synchronous else {})
        self.primary.execute("SELECT pg_create_physical_replication_slot(%s, true)", self.NAME)
        (folder / "2").mkdir()
        copy, own = postgres_server.data_folder(folder / "2"), postgres_server.as_server_user()
        program = postgres_server.programs() / "pg_basebackup"
        command = [*own, str(program), "-D", str(copy), "-d", self.primary.url, "-X", "stream", "-c", "fast"]
        subprocess.run(command, check=True, cwd="/", timeout=120, capture_output=True)
        (copy / "standby.signal").touch()
        host, _, port = self.primary.broker.bootstrap.rpartition(":")
        source = f"host={host} port={port} user=delivered application_name={self.NAME}"
        follows = {"primary_conninfo": source, "primary_slot_name": self.NAME, "wal_retrieve_retry_interval": "200ms"}
        self.standby = Postgres.start(folder / "2", follows)
        self._until("SELECT state = 'streaming' FROM pg_stat_replication WHERE application_name = %s", self.NAME)
        if synchronous:
            self._until("SELECT sync_state = 'sync' FROM pg_stat_replication WHERE application_name = %s", self.NAME)

    @property
    def url(self) -> str:
        hosts = ",".join(s.broker.bootstrap for s in (self.primary, self.standby))
        return f"postgresql://delivered@{hosts}/delivered"

    def set(self, name: str, value: str) -> None:
        """Change a setting of the primary, which a restart forgets."""
        self.primary.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        self.primary.execute("SELECT pg_reload_conf()")

    def catch_up(self) -> None:
        """Wait until the standby has all that the primary has written."""
        self._until("SELECT bool_and(replay_lsn >= pg_current_wal_lsn()) FROM pg_stat_replication")

    def fail_over(self) -> None:
        """Kill the primary, unless it is down, and promote the standby."""
        self.primary.broker.kill()
        assert self.standby.execute("SELECT pg_promote()") == [(True,)]

    def end(self) -> None:
        for server in (self.standby, self.primary):
            server.end()

    def _until(self, question: str, *values: Any) -> None:
        deadline = time.monotonic() + 60
        while self.primary.execute(question, *values) != [(True,)]:
            if time.monotonic() > deadline:
                raise TimeoutError(question)
            time.sleep(0.05)


class Mysql(Server):
    """A real MariaDB, or with `DELIVERED_MYSQL=mysql` MySQL itself, and what tests do with it, as `Postgres`."""

    system = os.environ.get("DELIVERED_MYSQL", "mariadb")
    # The system keeps what a killed server wrote: without power loss, no sync is needed.
    quick: ClassVar = {
        "innodb_flush_method": "nosync",
        **({"debug_no_sync": "1"} if system == "mariadb" else {}),
    }
    _names = itertools.count()

    @property
    def url(self) -> str:
        return self.broker.url

    def connect(self, **given: Any) -> Any:
        """A client that is not ours."""
        import pymysql

        host, _, port = self.broker.bootstrap.rpartition(":")
        defaults = {"user": "delivered", "database": "dev", "autocommit": True, "charset": "utf8mb4"}
        return pymysql.connect(host=host, port=int(port), **{**defaults, **given})

    def execute(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run one statement by itself, and return its rows, if it has any."""
        connection = self.connect()
        try:
            with connection.cursor() as cursor:
                cursor.execute(statement, values or None)
                return list(cursor.fetchall())
        finally:
            connection.close()

    def table(self, columns: str | None = "`key` longblob, value longblob") -> str:
        """Name of a table nobody else uses; made, unless `columns` is None."""
        name = f"t{next(self._names)}"
        if columns is not None:
            self.execute(f"CREATE TABLE {name} ({columns})")
        return name

    def sink(self, table: str | None = None, **options: str) -> Any:
        from delivered.connectors.mysql import CONNECTOR

        return CONNECTOR.sink({"url": self.url, "dbtable": table or self.table(), **options})


class Rabbitmq(Server):
    """A real RabbitMQ and what tests do with it.

    `rabbitmq.url` is its address, `rabbitmq.queue()` makes a fresh queue, `rabbitmq.send(...)` is a client that is not
    ours. `rabbitmq.broker` can kill and restart it: do that only with one from the fixture `new_rabbitmq`.
    """

    system = "rabbitmq"
    mortal = False
    _names = itertools.count()

    @property
    def url(self) -> str:
        return self.broker.url

    def connect(self) -> Any:
        import pika

        return pika.BlockingConnection(pika.URLParameters(self.url))

    def queue(self, kind: str = "quorum", durable: bool = True, **arguments: Any) -> str:
        """A unique queue name. On a server that the test may kill, the queue is on the disk."""
        name = f"q{next(self._names)}"
        given = {"x-queue-type": kind, **{k.replace("_", "-"): v for k, v in arguments.items()}}
        connection = self.connect()
        connection.channel().queue_declare(name, durable=durable, arguments=given)
        connection.close()
        if self.mortal and kind == "quorum":
            self._wait_for_disk(name)
        return name

    def _wait_for_disk(self, queue: str) -> None:
        """RabbitMQ 3.10 writes a quorum queue's name a second after it confirmed the queue. Killed before, it has lost
        the queue's messages, and after a restart it answers no consumer of the queue."""
        [names] = self.broker.folder.glob("data/*/quorum/*/names.dets")
        deadline = time.monotonic() + 60
        while f"%2F_{queue}".encode() not in names.read_bytes():
            assert time.monotonic() < deadline, f"{names} does not hold {queue}"
            time.sleep(0.05)

    def send(self, queue: str, messages: Any) -> None:
        """(id, body) pairs; all are in the queue when this returns."""
        import pika

        connection = self.connect()
        channel = connection.channel()
        given = list(messages)
        for at, (message_id, body) in enumerate(given, 1):
            if at == len(given):  # a confirm for each would cost 5 ms; the last one's says that all before it are in
                channel.confirm_delivery()
            properties = pika.BasicProperties(message_id=message_id, delivery_mode=2, headers={"n": 1, "s": "text"})
            channel.basic_publish("", queue, body, properties)
        connection.close()

    def left(self, queue: str) -> int:
        """Messages that are ready for somebody."""
        return int(self._declared(queue).message_count)

    def consumers(self, queue: str) -> int:
        return int(self._declared(queue).consumer_count)

    def _declared(self, queue: str) -> Any:
        connection = self.connect()
        found = connection.channel().queue_declare(queue, passive=True).method
        connection.close()
        return found


class Pulsar(Server):
    """A real Pulsar and what tests do with it.

    `pulsar.options` are what a source or sink needs, `pulsar.topic()` makes a fresh topic, `pulsar.send(...)` is a
    client that is not ours. `pulsar.broker` can kill and restart it: do that only with one from the fixture
    `new_pulsar`.
    """

    system = "pulsar"
    quick: ClassVar = {
        "journalSyncData": "false",  # no plug is pulled
        "transactionCoordinatorEnabled": "true",
        "managedLedgerCacheEvictionIntervalMs": "1000",  # 10 ms by default: a tenth of its processor time
    }
    heap_mb = 256
    _names = itertools.count()

    def __init__(self, broker: brokers.Broker, token: str | None = None) -> None:
        super().__init__(broker)
        self._token = token
        self._client: Any = None

    @property
    def options(self) -> dict[str, str]:
        return {"url": self.broker.url, "adminUrl": f"http://{self.broker.listeners['HTTP']}"}

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        """One request below /admin/v2/; the answer as JSON, or None."""
        request = urllib.request.Request(
            f"{self.options['adminUrl']}/admin/v2/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"}
            | ({} if self._token is None else {"Authorization": f"Bearer {self._token}"}),
            method=method,
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            said = reply.read()
        return json.loads(said) if said else None

    def topic(self, partitions: int = 0, namespace: str = "public/default") -> str:
        """A unique topic name; short in public/default, else full."""
        name = f"t{next(self._names)}"
        path = f"persistent/{namespace}/{name}"
        self.admin("PUT", f"{path}/partitions", partitions) if partitions else self.admin("PUT", path, {})
        return name if namespace == "public/default" else f"persistent://{namespace}/{name}"

    def namespace(self, **policies: Any) -> str:
        """A fresh namespace with these policies, each as its path below the namespace."""
        name = f"public/n{next(self._names)}"
        self.admin("PUT", f"namespaces/{name}", {})
        for policy, value in policies.items():
            self.admin("POST", f"namespaces/{name}/{policy}", value)
        return name

    def client(self) -> Any:
        import pulsar

        if self._client is None:
            self._client = pulsar.Client(
                self.broker.url,
                authentication=None if self._token is None else pulsar.AuthenticationToken(self._token),
                logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
            )
        return self._client

    def send(self, topic: str, values: Any, batch: int = 0, **settings: Any) -> None:
        """Values, or dicts of what the client's `send` takes; all are in when this returns.

        Args:
            batch: messages in one entry; 0: each has its own.
        """
        import pulsar

        if batch:
            settings |= {
                "batching_enabled": True,
                "batching_max_messages": batch,
                "batching_max_publish_delay_ms": 60_000,
                "batching_max_allowed_size_in_bytes": 10_000_000,
            }
        mode = pulsar.PartitionsRoutingMode.UseSinglePartition
        producer = self.client().create_producer(topic, message_routing_mode=mode, block_if_queue_full=True, **settings)
        failed: list[Any] = []
        for value in values:
            given = value if isinstance(value, dict) else {"content": value}
            producer.send_async(
                callback=lambda result, _: None if result == pulsar.Result.Ok else failed.append(result), **given
            )
        producer.flush()
        producer.close()
        assert not failed, failed

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


class Activemq(Server):
    """A real ActiveMQ Artemis and what tests do with it, as `Rabbitmq`."""

    system = "activemq"
    quick: ClassVar = {"journalDatasync": "false"}  # no plug is pulled
    heap_mb = 256
    _names = itertools.count()

    @property
    def url(self) -> str:
        return self.broker.url

    def connect(self) -> tuple[Any, Any]:
        """A client that is not ours, and a queue into which its frames come: (kind, frame)."""
        import queue

        import stomp

        host, _, port = self.broker.bootstrap.rpartition(":")
        connection = stomp.Connection12([(host, int(port))], auto_decode=False)
        frames: Any = queue.Queue()

        class Listener(stomp.ConnectionListener):
            def on_message(self, frame: Any) -> None:
                frames.put(("message", frame))

            def on_receipt(self, frame: Any) -> None:
                frames.put(("receipt", frame))

            def on_error(self, frame: Any) -> None:
                frames.put(("error", frame))

        connection.set_listener("test", Listener())
        connection.connect(wait=True)
        return connection, frames

    def ask(self, committer: str, operation: str = "", *parameters: Any, attribute: str = "") -> Any:
        """A question to the broker's management."""
        connection, frames = self.connect()
        connection.auto_content_length = False
        replies = f"tests.replies.{next(self._names)}"
        connection.subscribe(replies, "r", headers={"subscription-type": "MULTICAST", "receipt": "r"})
        assert frames.get(timeout=120)[0] == "receipt"
        headers = {"_AMQ_ResourceName": committer, "reply-to": replies}
        headers |= {"_AMQ_Attribute": attribute} if attribute else {"_AMQ_OperationName": operation}
        connection.send("activemq.management", "" if attribute else json.dumps(parameters), headers=headers)
        kind, frame = frames.get(timeout=120)
        connection.disconnect()
        assert kind == "message" and frame.headers["_AMQ_OperationSucceeded"] == "true", frame.body
        return json.loads(frame.body)[0] if frame.body else None

    def queue(self, kind: str = "ANYCAST", durable: bool = True, **settings: Any) -> str:
        """Name of a queue nobody else uses; `settings` of its address, as Artemis names them in JSON."""
        name = f"q{next(self._names)}"
        if settings:
            self.ask("broker", "addAddressSettings", name, json.dumps(settings))
        made = {"name": name, "address": name, "routing-type": kind, "durable": durable, "auto-delete": False}
        self.ask("broker", "createQueue", json.dumps(made))
        return name

    def send(self, queue: str, messages: Any, **headers: str) -> None:
        """(id, body) pairs; all are in the queue when this returns."""
        connection, frames = self.connect()
        given = list(messages)
        for message_id, body in given:
            own = {"persistent": "true", "destination-type": "ANYCAST", "n": "1", **headers}
            if message_id is not None:
                own["id"] = message_id
            connection.send(queue, body, headers=own, receipt="r")
        kinds = [frames.get(timeout=120)[0] for _ in given]
        connection.disconnect()
        assert set(kinds) <= {"receipt"}

    def left(self, queue: str) -> int:
        """Messages that are ready for somebody."""
        return self.kept(queue) - int(self.ask(f"queue.{queue}", attribute="deliveringCount"))

    def kept(self, queue: str) -> int:
        """Messages that the broker holds, those that somebody was handed included."""
        return int(self.ask(f"queue.{queue}", attribute="messageCount"))

    def consumers(self, queue: str) -> int:
        return int(self.ask(f"queue.{queue}", attribute="consumerCount"))


class Rocketmq(Server):
    """A real RocketMQ and what tests do with it.

    `topic()` and `group()` make fresh ones; `send` and `rest` are clients that are not ours.
    """

    system = "rocketmq"
    quick: ClassVar = {
        # Otherwise a killed receiver's messages are not redelivered for ten seconds.
        "proxy.minInvisibleTimeMillsForRecv": "1000",
        # Tests leave half messages behind, and each round of transaction checks would rewrite all of them.
        "transactionCheckInterval": "3600000",
        # 5.5.0 busy-loops forever this long after the last transaction ended (apache/rocketmq issue 10966).
        "transactionOpBatchInterval": "3600000",
        # Each flush compares all of the timer wheel (37 MB): a fifth of its processor time.
        "timerFlushIntervalMs": "600000",
    }
    _names = itertools.count()

    def __init__(self, broker: brokers.Broker) -> None:
        super().__init__(broker)
        self._producers: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return self.broker.url

    def topic(self, kind: str = "NORMAL", queues: int = 4) -> str:
        name = f"t{next(self._names)}"
        rocketmq_server.make_topic(self.broker.listeners["BROKER"], name, kind, queues)
        return name

    def group(self, ordered: bool = False, attempts: int = 16) -> str:
        name = f"g{next(self._names)}"
        rocketmq_server.make_group(self.broker.listeners["BROKER"], name, ordered, attempts)
        return name

    def transactions(self, topic: str, folder: Path) -> dict[str, str]:
        """Options of a sink of transaction messages, with its ledger in this folder."""
        return {
            "endpoints": self.url,
            "nameServers": self.broker.listeners["NAMESRV"],
            "topic": topic,
            "messageType": "transaction",
            "ledger": str(folder / "ledger.db"),
        }

    def configuration(self) -> Any:
        from delivered.connectors.rocketmq.client import library

        client = library()  # keeps the client's log files away from the user's home
        return client.ClientConfiguration(self.url, client.Credentials())

    def producer(self, topic: str) -> Any:
        from rocketmq import Producer

        if topic not in self._producers:
            made = Producer(self.configuration(), [topic])
            made.startup()
            self._producers[topic] = made
        return self._producers[topic]

    def send(self, topic: str, messages: Any, group: str = "", **properties: str) -> None:
        """(id, body) pairs, ids of our choice; all are in the topic when this returns, those of a group in order."""
        configuration, producer = self.configuration(), self.producer(topic)
        from rocketmq.grpc_protocol import Encoding, MessageType, SendMessageRequest

        given, endpoints = list(messages), configuration.rpc_endpoints
        together = 1 if group else 100  # several in one request go into any queue
        for at in range(0, len(given), together):
            request = SendMessageRequest()
            for message_id, body in given[at : at + together]:
                message = request.messages.add(body=body, user_properties=properties)
                message.topic.name = topic
                system = message.system_properties
                system.message_id, system.message_group = message_id, group
                system.message_type = MessageType.FIFO if group else MessageType.NORMAL
                system.body_encoding, system.born_host = Encoding.IDENTITY, "here"
                system.born_timestamp.GetCurrentTime()
            answer = producer.rpc_client.send_message_async(endpoints, request, producer.sign(), timeout=10).result()
            assert answer.status.message == "OK", answer

    def rest(self, topic: str, group: str) -> list[Any]:
        """What the group has not acknowledged and nobody holds, as the library reads it; taken away. Waits 5 s."""
        configuration = self.configuration()
        from rocketmq import FilterExpression, SimpleConsumer

        consumer = SimpleConsumer(configuration, group, {topic: FilterExpression()}, await_duration=5)
        consumer.startup()
        time.sleep(0.2)
        found: list[Any] = []
        while more := consumer.receive(32, 60):
            for message in more:
                consumer.ack(message)
            found += more
        consumer.shutdown()
        return found

    def close(self) -> None:
        for producer in self._producers.values():
            producer.shutdown()
        self._producers.clear()

    def end(self) -> None:
        self.broker.kill()  # its producers' shutdown would wait for it
        self.close()
