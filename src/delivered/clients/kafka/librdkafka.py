"""Records through librdkafka, by confluent-kafka: how its clients are created, read and write where Arrow cannot."""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from delivered.clients.kafka import OAUTHBEARER, mechanism_of, protocol_of, resolved
from delivered.clients.kafka.consumer import Fetched
from delivered.clients.kafka.protocol import Failures, ProducerError, explain, replaces, server_name
from delivered.clients.kafka.record_batch import Headers, Partition, Rows
from delivered.model.errors import BadRecord, UsageError, extra
from delivered.model.limits import SOURCE_QUEUE_KBYTES
from delivered.model.patience import Stall
from delivered.source import HEADERS, TIMESTAMP, columns, header_name, micros

T = TypeVar("T")


class ClientLog:
    """librdkafka's own log, at debug level: it logs every failed connection attempt as an error, many per second."""

    _log = logging.getLogger("delivered.kafka.client")

    def log(self, level: int, message: str, *arguments: object) -> None:
        del level
        self._log.debug(message, *arguments)


def kafka_client() -> Any:
    """The module `confluent_kafka`. Raises MissingExtra: it is not installed."""
    with extra("kafka"):
        import confluent_kafka
    return confluent_kafka


def connect(make: Callable[[dict[str, Any]], T], owner: str, settings: Mapping[str, Any], **callbacks: Any) -> T:
    """Create a client of confluent-kafka.

    Args:
        owner: of the options, for errors.
        settings: librdkafka's names, secrets resolved.

    Raises:
        UsageError: librdkafka rejects a setting or its value.
    """
    try:
        given = {"security.protocol": protocol_of(settings), **_login(settings)}
        return make({**given, "logger": ClientLog(), **callbacks})
    except kafka_client().KafkaException as error:
        raise _config_error(error.args[0].str(), owner, next(iter(settings)) if len(settings) == 1 else None) from None


def _config_error(detail: str, owner: str, name: str | None = None) -> UsageError:
    """librdkafka rejected a setting; `name` if known."""
    found = re.search(r'property:? "([^"]+)"', detail)
    named = name or (found[1] if found else None)
    name = f"'kafka.{named}'" if named else "with the prefix 'kafka.'"
    return UsageError(
        "OPTION_UNKNOWN.LIBRDKAFKA" if found and "No such" in detail else "OPTION_VALUE.LIBRDKAFKA",
        owner=owner,
        name=name,
        detail=detail,
    )


def _login(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Login settings as librdkafka takes them: tokens and trust stores come from our client's code."""
    found = dict(settings)
    if any(name.startswith("ssl.") for name in found):
        found = _trusting(found)
    if mechanism_of(found, "") == "OAUTHBEARER":
        found = {n: v for n, v in found.items() if not n.startswith((OAUTHBEARER, "https."))}
        found["oauth_cb"] = partial(_token, settings)
    return found


def _trusting(found: dict[str, Any]) -> dict[str, Any]:
    from delivered.clients.kafka import sasl  # not loaded without TLS or login

    try:
        if (store := found.pop("ssl.truststore.location", None)) is not None:
            found["ssl.ca.pem"] = sasl.trusted_of_store(store, found.pop("ssl.truststore.password", None))
        found |= {n: sasl.pem(found[n]) for n in ("ssl.ca.pem", "ssl.certificate.pem", "ssl.key.pem") if n in found}
    except (OSError, ValueError) as error:
        raise sasl.unusable(str(error)) from None
    return found


def _token(settings: Mapping[str, Any], _: str) -> tuple[str, float, str, dict[str, str]]:
    from delivered.clients.kafka.sasl import token_for

    token = token_for(settings)
    return token.text, time.time() + token.left_s, "", dict(token.extensions)


# Its producer and its consumer, with the methods of `sender.Sender` and `consumer.Fetcher`.

_POLL_S = 0.005
"""How long a writer sleeps while the queue is full."""
_ROWS_AT_ONCE, _RECORDS_AT_ONCE = 16_384, 2_048
"""Written and read. Records that compress well may be large: each is an object here."""
_UNASSIGNED = -1

_PRODUCER = {
    "client.id": "delivered",
    "linger.ms": "5",
    # Bounds a worker's memory, whatever the batch size.
    "queue.buffering.max.kbytes": "65536",
    "queue.buffering.max.messages": "400000",
    "socket.nagle.disable": "true",
    "reconnect.backoff.ms": "20",
    "retry.backoff.ms": "20",
    "topic.metadata.refresh.fast.interval.ms": "50",
    "topic.metadata.propagation.max.ms": "5000",
}
_CONSUMER = {
    "client.id": "delivered",
    "group.id": "delivered-reader",
    "isolation.level": "read_committed",
    # A slice's end exists already: the broker need not wait for more.
    "fetch.wait.max.ms": "10",
    "fetch.queue.backoff.ms": "2",
    "fetch.error.backoff.ms": "100",
    "queued.min.messages": "1000000",
    "queued.max.messages.kbytes": str(SOURCE_QUEUE_KBYTES),
    "reconnect.backoff.max.ms": "1000",
    "max.poll.interval.ms": "86400000",
}
_CONSUMER_FIXED = {
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "auto.offset.reset": "error",
    "enable.partition.eof": "true",
}
_OUT_OF_RANGE = {"_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"}
_UNKNOWN = {"UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_ID"}
_RETRIABLE = {
    *("_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT", "_NODE_UPDATE", "_WAIT_CACHE"),
    *("NOT_LEADER_FOR_PARTITION", "LEADER_NOT_AVAILABLE", "REPLICA_NOT_AVAILABLE", "KAFKA_STORAGE_ERROR"),
    # Unused: librdkafka requires a group id, but the consumer never joins a group.
    *("GROUP_AUTHORIZATION_FAILED", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR", "COORDINATOR_LOAD_IN_PROGRESS"),
}
"""librdkafka recovers from these by itself."""


class Producer:
    """See `sender.Sender`. Not thread-safe; callbacks run while it is polled.

    Args:
        owner: of the options, for errors.
        config: settings of a producer, by librdkafka's names, secrets resolved.
    """

    def __init__(self, owner: str, config: Mapping[str, str]) -> None:
        self.failures = Failures()
        self._server = server_name(config["bootstrap.servers"])
        self._client: Any = connect(
            kafka_client().Producer,
            owner,
            {**_PRODUCER, **config, "partitioner": "murmur2_random", "delivery.report.only.error": True},
            error_cb=lambda error: self.failures.note(error.name(), error.str()),
            on_delivery=self._undelivered,
        )

    def _undelivered(self, error: Any, message: Any) -> None:
        self.failures.add(error.name(), len(message.value() or b"") + len(message.key() or b""))

    # -- transactions ------------------------------------------------------------------------------------------

    def start(self, timeout_s: float) -> None:
        """Initialise the transactional id, which fences its previous holder."""
        with self._named():
            self._client.init_transactions(timeout_s)

    def begin(self) -> None:
        with self._named():
            self._client.begin_transaction()

    def abort(self, timeout_s: float) -> None:
        """Purge the queue and abort the open transaction."""
        with self._named():
            self._client.purge()
            self._client.poll(0)
            self._client.abort_transaction(timeout_s)

    # -- records -----------------------------------------------------------------------------------------------

    def send(self, rows: Rows) -> None:
        """Produce rows; blocks while the queue is full."""
        nothing = itertools.repeat(None)
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            some = rows.slice(start, _ROWS_AT_ONCE)
            for key, value, headers, partition in zip(
                nothing if some.key is None else some.key.to_pylist(),
                some.value.to_pylist(),
                nothing if some.headers is None else some.headers.to_pylist(),
                itertools.repeat(_UNASSIGNED) if some.partition is None else some.partition.tolist(),
                strict=False,
            ):
                self.send_one(rows.topic, partition, key, value, [(h["key"], h["value"]) for h in headers or ()])
            with self._named():
                self._client.poll(0)

    def send_one(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Headers = ()
    ) -> None:
        """Produce one record; blocks while the queue is full."""
        while True:
            try:
                self._client.produce(topic, value, key, partition, headers=list(headers) or None)
                return
            except BufferError:
                with self._named():
                    self._client.poll(_POLL_S)
            except kafka_client().KafkaException as error:
                self.failures.add(error.args[0].name(), len(key or b"") + len(value or b""))
                return

    def flush(self, timeout_s: float) -> None:
        """Wait until every produced record was acknowledged or is counted in `failures`.

        Raises:
            ProducerError: a fatal error, or records still unacknowledged after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        # Short at first: librdkafka notices an empty queue only when a call ends.
        pauses = itertools.chain(itertools.repeat(0.001, 100), itertools.repeat(0.02))
        with Stall(self._server) as stall, self._named():
            while waiting := self._client.flush(next(pauses)):
                stall.look(waiting)
                if time.monotonic() > deadline:
                    detail = f"{waiting} records were not acknowledged in {timeout_s:.0f} s{self.failures.hint()}"
                    raise ProducerError("_TIMED_OUT", detail)

    def partitions(self, topic: str, timeout_s: float) -> int:
        """Number of partitions. Raises ProducerError: unknown topic, no permission, no answer."""
        with self._named():
            found = self._client.list_topics(topic, timeout_s).topics[topic]
        if found.error is not None:
            raise ProducerError(found.error.name(), found.error.str())
        return len(found.partitions)

    def close(self) -> None:
        """Free the client and leave an open transaction open. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.purge()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the client as ProducerError; a fatal one is raised by whatever polls next."""
        try:
            yield
        except kafka_client().KafkaException as error:
            first = error.args[0]
            if first.fatal():
                self.failures.fatal = first.name()
            raise ProducerError(first.name(), first.str() + self.failures.hint()) from None


def consumer_settings(client: Mapping[str, str]) -> dict[str, str]:
    """The user's settings and ours; secrets are not resolved yet."""
    return {**_CONSUMER, **client, **_CONSUMER_FIXED}


class ConnectionErrors:
    """Remembers why connections fail: librdkafka reports that apart from the requests, which merely time out.

    Attributes:
        refused: a TLS or authentication error, which no retry fixes.
    """

    def __init__(self) -> None:
        self.last = ""
        self.refused: tuple[str, str] | None = None

    def __call__(self, error: Any) -> None:
        self.note(error.name(), error.str())

    def note(self, name: str, detail: str) -> None:
        if replaces(name, self.last):
            self.last = detail
        if name in ("_AUTHENTICATION", "_SSL"):
            self.refused = (name, detail)


class Consumer:
    """See `consumer.Fetcher`. Not thread-safe."""

    def __init__(self, owner: str, client: Mapping[str, str], headers: bool) -> None:
        self._owner, self._servers = owner, client["bootstrap.servers"]
        self._headers = headers
        self._connection = ConnectionErrors()
        self._partition: Partition = ("", -1)
        self._start = -1
        settings = resolved(consumer_settings(client))
        self._client: Any = connect(kafka_client().Consumer, owner, settings, error_cb=self._connection)

    @property
    def _where(self) -> str:
        return f"{self._partition[0]}-{self._partition[1]}"

    def assign(self, partition: Partition, offset: int) -> None:
        self._partition, self._start = partition, offset
        self._client.assign([kafka_client().TopicPartition(*partition, offset)])

    def fetch(self, end: int, timeout_s: float) -> Fetched:
        # Wait for one record, then take what is there: the call would wait for all of a larger number.
        messages = self._client.consume(1, timeout_s)
        if not messages:
            if self._connection.refused:
                raise explain(self._owner, *self._connection.refused, self._where, self._servers)
            return Fetched()
        messages += self._client.consume(_RECORDS_AT_ONCE - 1, 0)
        fetched = Fetched()
        records = []
        for message in messages:
            if message.error() is not None:
                self._event(fetched, message)
            # librdkafka drops records of an earlier assignment; checked again here.
            elif (message.topic(), message.partition()) == self._partition and message.offset() >= self._start:
                records.append(message)
        if records:
            fetched.position = max(fetched.position, records[-1].offset() + 1)
            if below := [m for m in records if m.offset() < end]:
                fetched.batch = self._batch(below)
        return fetched

    def _event(self, fetched: Fetched, message: Any) -> None:
        error = message.error()
        name = error.name()
        if name == "_PARTITION_EOF":
            if (message.topic(), message.partition()) == self._partition:
                fetched.position = max(fetched.position, message.offset())
                fetched.end_of_log = True
        elif name in _OUT_OF_RANGE:
            fetched.out_of_range = True
        elif name in _UNKNOWN:
            fetched.unknown = True
        elif name in _RETRIABLE:
            self._connection.last = error.str()
        else:
            raise explain(self._owner, name, error.str(), self._where, self._servers)

    def _batch(self, messages: list[Any]) -> pa.RecordBatch:
        (topic, number), n = self._partition, len(messages)
        stamps = [m.timestamp() for m in messages]
        arrays = [
            pa.array([m.key() for m in messages], pa.binary()),
            pa.array([m.value() for m in messages], pa.binary()),
            pa.repeat(pa.scalar(topic), n),
            pa.repeat(pa.scalar(number, pa.int32()), n),
            pa.array([m.offset() for m in messages], pa.int64()),
            pa.array([micros(ms, 1_000) for _, ms in stamps], TIMESTAMP),
            pa.array([kind - 1 for kind, _ in stamps], pa.int32()),  # librdkafka's enumeration is Spark's plus one
        ]
        if self._headers:
            arrays.append(pa.array([self._headers_of(m) for m in messages], HEADERS.type))
        return pa.RecordBatch.from_arrays(arrays, schema=columns(self._headers))

    def _headers_of(self, message: Any) -> list[dict[str, Any]] | None:
        try:
            return [{"key": header_name(k.encode()), "value": v} for k, v in message.headers() or ()] or None
        except (UnicodeDecodeError, SystemError) as error:
            cause = error if isinstance(error, UnicodeDecodeError) else error.__cause__
            name = cause.object if isinstance(cause, UnicodeDecodeError) else "?"
            raise BadRecord("KAFKA_HEADER_NAME", where=self._where, offset=message.offset(), name=name) from None

    def fetch_position(self) -> int:
        """It also moves over transaction markers; -1: unknown."""
        [at] = self._client.position([kafka_client().TopicPartition(*self._partition)])
        return max(-1, int(at.offset))

    def release(self) -> None:
        self._client.unassign()

    def close(self) -> None:
        self._client.close()
