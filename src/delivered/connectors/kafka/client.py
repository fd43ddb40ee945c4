"""The driver's questions to Kafka: which partitions there are, where they begin and end, and telling a group."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from delivered.connectors.kafka.client_options import resolved
from delivered.connectors.kafka.offsets import EARLIEST, LATEST, Partition, Place, Timestamp
from delivered.connectors.kafka.options import OWNER, SourceOptions
from delivered.model.errors import DeliveredError, MissingExtra, Unreachable, UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, SOURCE_PATIENCE_S

log = logging.getLogger("delivered.kafka")


class ClientLog:
    """What librdkafka says by itself, for debugging only: it calls every try to connect an error, many a second."""

    _log = logging.getLogger("delivered.kafka.client")

    def log(self, level: int, message: str, *arguments: object) -> None:
        del level
        self._log.debug(message, *arguments)


_RETRY_PAUSE_S = 0.2
_INTERNAL = re.compile(r"__consumer_offsets|__transaction_state|__share_group_state|__delivered_.*")
_RETRIABLE = {
    "_TRANSPORT",
    "_TIMED_OUT",
    "_ALL_BROKERS_DOWN",
    "_WAIT_COORD",
    "_RESOLVE",
    "_TIMED_OUT_QUEUE",
    "LEADER_NOT_AVAILABLE",
    "NOT_LEADER_FOR_PARTITION",
    "COORDINATOR_LOAD_IN_PROGRESS",
    "COORDINATOR_NOT_AVAILABLE",
    "NOT_COORDINATOR",
    "REQUEST_TIMED_OUT",
    "BROKER_NOT_AVAILABLE",
    "REPLICA_NOT_AVAILABLE",
    "NETWORK_EXCEPTION",
    "KAFKA_STORAGE_ERROR",
    "FENCED_LEADER_EPOCH",
    "UNKNOWN_LEADER_EPOCH",
    "OFFSET_NOT_AVAILABLE",
    "_NO_OFFSET",
}
T = TypeVar("T")


def kafka_client() -> Any:
    """The module `confluent_kafka`.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import confluent_kafka
    except ImportError:
        raise MissingExtra("kafka") from None
    return confluent_kafka


def connect(make: Callable[[dict[str, Any]], T], settings: Mapping[str, str], **more: Any) -> T:
    """Make a client of confluent-kafka.

    Args:
        settings: as `client_options` gives them; secrets are followed here.
        more: settings that are no text: callbacks.

    Raises:
        UsageError: librdkafka knows no such setting, or not this value.
    """
    ck = kafka_client()
    try:
        return make({**resolved(settings), "logger": ClientLog(), **more})
    except ck.KafkaException as error:
        raise config_error(error.args[0].str()) from None


def config_error(said: str, owner: str = OWNER, name: str | None = None) -> UsageError:
    """librdkafka refused a setting; `name` if it is known."""
    found = re.search(r'property: "([^"]+)"', said)
    named = name or (found[1] if found else None)
    name = f"'kafka.{named}'" if named else "with the prefix 'kafka.'"
    return UsageError(
        "OPTION_UNKNOWN" if found and "No such" in said else "OPTION_VALUE",
        f"{owner}: librdkafka refuses the option {name}: {said}.",
        next_step="see librdkafka's CONFIGURATION.md for the names and values it knows",
    )


def explain(name: str, said: str, what: str, servers: str) -> DeliveredError:
    """An error of librdkafka as one of ours.

    Args:
        name: of the code: "UNKNOWN_TOPIC_OR_PART".
        what: the topic, partition or group that was asked for.
    """
    if name in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "UNKNOWN_TOPIC_ID"):
        return UsageError(
            "TOPIC_MISSING",
            f"{OWNER}: there is no topic or partition {what!r} at {servers}.",
            next_step="make the topic, or correct its name",
        )
    if name in ("TOPIC_EXCEPTION", "INVALID_TOPIC_EXCEPTION"):
        return UsageError(
            "TOPIC_INVALID",
            f"{OWNER}: {servers} says that {what!r} cannot be a topic: up to 249 letters, digits, '.', '_' and '-'.",
            next_step="correct the name of the topic",
        )
    if "AUTHORIZATION_FAILED" in name:
        return UsageError(
            "NOT_PERMITTED",
            f"{OWNER}: {servers} does not permit to read {what!r} ({name}).",
            next_step="ask for the permissions Describe and Read on the topic (and Read on the group)",
        )
    if name in ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "_SSL"):
        return Unreachable(
            "CREDENTIALS_REFUSED",
            f"{OWNER}: {servers} and this client did not agree on TLS or credentials: {said}",
            next_step="check kafka.security.protocol, kafka.sasl.* and kafka.ssl.*",
        )
    return Unreachable(
        "KAFKA_UNREACHABLE",
        f"{OWNER}: {servers} did not answer about {what!r} ({name}): {said}",
        next_step="check kafka.bootstrap.servers, and that the brokers run and can be reached from here",
    )


def says_more(name: str, known: str) -> bool:
    """Whether an error of the client is to replace what it said before: that all brokers are down follows what says
    why ("Connection refused"), and must not hide it."""
    return name != "_ALL_BROKERS_DOWN" or not known


class Trouble:
    """Remembers why connections fail: librdkafka tells it beside the requests, which merely time out.

    Attributes:
        refused: what is wrong with TLS or credentials, which no waiting mends.
    """

    def __init__(self) -> None:
        self.last = ""
        self.refused: tuple[str, str] | None = None

    def __call__(self, error: Any) -> None:
        self.note(error.name(), error.str())

    def note(self, name: str, said: str) -> None:
        if says_more(name, self.last):
            self.last = said
        if name in ("_AUTHENTICATION", "_SSL"):
            self.refused = (name, said)

    def forget(self) -> None:
        self.last, self.refused = "", None


class KafkaDriverClient:
    """Connections of the driver. Used by one thread at a time; made when first needed."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._trouble = Trouble()
        self._admin: Any = None
        self._committer: Any = None
        self._answered = False

    def partitions(self) -> tuple[dict[Partition, None], dict[str, str]]:
        """Partitions to read now, in order, and topic -> id.

        Raises:
            UsageError: a topic that was named does not exist, or may not be read. (Topics that a pattern matches may
                come and go.)
        """
        options = self._options
        if options.pattern is not None:
            names = self._matching(re.compile(options.pattern))
        elif options.topics is not None:
            names = list(options.topics)
        else:
            names = sorted({t for t, _ in options.partitions or ()})
        found: dict[Partition, None] = {}
        ids: dict[str, str] = {}
        for topic, description in self._describe(names):
            if description is None or (options.pattern is not None and description.is_internal):
                continue
            ids[topic] = str(description.topic_id)
            found.update(dict.fromkeys((topic, p) for p in sorted(p.id for p in description.partitions)))
        if options.partitions is not None:
            for topic, number in options.partitions:
                if topic in ids and (topic, number) not in found:
                    raise explain("_UNKNOWN_PARTITION", "", f"{topic}-{number}", options.servers)
            found = {p: None for p in options.partitions if p in found}
        return found, ids

    def _matching(self, pattern: re.Pattern[str]) -> list[str]:
        def ask(timeout_s: float) -> list[str]:
            listed = self._connected().list_topics(timeout=timeout_s).topics
            return sorted(t for t in listed if pattern.search(t) and not _INTERNAL.fullmatch(t))

        return self._patiently(ask, self._options.what)

    def _describe(self, names: list[str], missing_is_an_error: bool = False) -> list[tuple[str, Any]]:
        """Topic and description; None for a topic that is gone, when topics are found by a pattern."""
        tolerant = self._options.pattern is not None and not missing_is_an_error
        if not names:
            return []
        ck = kafka_client()

        def ask(timeout_s: float) -> list[tuple[str, Any]]:
            futures = self._connected().describe_topics(ck.TopicCollection(names), request_timeout=timeout_s)
            told: list[tuple[str, Any]] = []
            for name in names:
                try:
                    told.append((name, futures[name].result(timeout_s + 1)))
                except ck.KafkaException as error:
                    code = error.args[0].name()
                    if code in _RETRIABLE:
                        raise
                    if code == "UNKNOWN_TOPIC_OR_PART" and tolerant:
                        told.append((name, None))
                        continue
                    raise explain(code, error.args[0].str(), name, self._options.servers) from None
            return told

        return self._patiently(ask, ",".join(names))

    def offsets(self, wanted: Mapping[Partition, Place]) -> dict[Partition, int | None]:
        """Offsets of places. `LATEST` is the last stable offset, unless uncommitted records are read too.

        Returns None for a time after the last record.
        """
        found: dict[Partition, int | None] = {}
        ask: dict[Partition, Place] = {}
        for partition, place in wanted.items():
            if isinstance(place, int) and place >= 0:
                found[partition] = place
            else:
                ask[partition] = place
        if ask:
            found.update(self._patiently(lambda timeout_s: self._list(ask, timeout_s), self._options.what))
        return {p: found[p] for p in wanted}

    def _list(self, ask: Mapping[Partition, Place], timeout_s: float) -> dict[Partition, int | None]:
        ck = kafka_client()
        from confluent_kafka import admin

        OffsetSpec: Any = admin.OffsetSpec  # type: ignore[attr-defined]  # noqa: N806
        specs = {EARLIEST: OffsetSpec.earliest(), LATEST: OffsetSpec.latest()}
        level = ck.IsolationLevel.READ_COMMITTED if self._options.committed_only else ck.IsolationLevel.READ_UNCOMMITTED
        futures = self._connected().list_offsets(
            {
                ck.TopicPartition(t, n): OffsetSpec.for_timestamp(v.ms) if isinstance(v, Timestamp) else specs[v]
                for (t, n), v in ask.items()
            },
            isolation_level=level,
            request_timeout=timeout_s,
        )
        told: dict[Partition, int | None] = {}
        for asked, future in futures.items():
            partition = (asked.topic, asked.partition)
            try:
                offset = future.result(timeout_s + 1).offset
            except ck.KafkaException as error:
                code = error.args[0].name()
                if code in _RETRIABLE:
                    raise
                where = f"{asked.topic}-{asked.partition}"
                raise explain(code, error.args[0].str(), where, self._options.servers) from None
            told[partition] = offset if offset >= 0 else None
        return told

    def bounds(self, partition: Partition) -> tuple[int, int]:
        """First offset and end of one partition. (0, 0): Kafka says that there is no such partition."""
        try:
            self._describe([partition[0]], missing_is_an_error=True)
            low = self.offsets({partition: EARLIEST})[partition]
            high = self.offsets({partition: LATEST})[partition]
        except UsageError as error:
            if error.code == "DELIVERED_TOPIC_MISSING":
                return 0, 0
            raise
        return low or 0, high or 0

    def group_members(self, group: str) -> int:
        """How many consumers are in a group now."""
        ck = kafka_client()

        def ask(timeout_s: float) -> int:
            future = self._connected().describe_consumer_groups([group], request_timeout=timeout_s)[group]
            try:
                return len(future.result(timeout_s + 1).members)
            except ck.KafkaException as error:
                code = error.args[0].name()
                if code in _RETRIABLE:
                    raise
                if code == "GROUP_ID_NOT_FOUND":
                    return 0
                raise explain(code, error.args[0].str(), group, self._options.servers) from None

        return self._patiently(ask, group)

    def commit(self, group: str, at: Mapping[Partition, int]) -> None:
        """Tell a group how far the pipeline is. Raises Unreachable or UsageError if it cannot be told."""
        if not at:
            return
        ck = kafka_client()
        if self._committer is None:
            settings = {**self._options.client, "group.id": group, "enable.auto.commit": "false"}
            self._committer = connect(ck.Consumer, settings, error_cb=self._trouble)

        def ask(_: float) -> None:
            told = self._committer.commit(
                offsets=[ck.TopicPartition(t, n, o) for (t, n), o in at.items()], asynchronous=False
            )
            for one in told or ():
                if one.error is not None:
                    raise ck.KafkaException(one.error)

        self._patiently(ask, f"group {group}", patience_s=CONNECT_TIMEOUT_S)

    def close(self) -> None:
        """May be called again."""
        committer, self._committer, self._admin = self._committer, None, None
        if committer is not None:
            with suppress(RuntimeError):  # closed already
                committer.close()

    def _connected(self) -> Any:
        if self._admin is None:
            kafka_client()
            from confluent_kafka.admin import AdminClient

            mine = {k: v for k, v in self._options.client.items() if k not in _CONSUMER_ONLY}
            self._admin = connect(AdminClient, mine, error_cb=self._trouble)
        return self._admin

    def _patiently(self, ask: Callable[[float], T], what: str, patience_s: float | None = None) -> T:
        """Ask until there is an answer. A server that never answered gets ten seconds; one that did may restart."""
        ck = kafka_client()
        patience = patience_s or (SOURCE_PATIENCE_S if self._answered else CONNECT_TIMEOUT_S)
        deadline = time.monotonic() + patience
        while True:
            left = max(0.5, deadline - time.monotonic())
            try:
                answer = ask(min(left, REQUEST_TIMEOUT_S))
            except (ck.KafkaException, TimeoutError) as error:
                first = error.args[0] if error.args else None
                name, said = (first.name(), first.str()) if isinstance(first, ck.KafkaError) else ("_TIMED_OUT", "")
                if self._admin is not None:
                    self._admin.poll(0)  # what the connections say comes through here
                if self._trouble.refused and not self._answered:
                    raise explain(*self._trouble.refused, what, self._options.servers) from None
                if name not in _RETRIABLE or time.monotonic() + _RETRY_PAUSE_S >= deadline:
                    raise explain(name, self._trouble.last or said, what, self._options.servers) from None
                log.info("asking Kafka again", extra={"about": what, "code": name})
                time.sleep(_RETRY_PAUSE_S)
            else:
                self._answered = True
                self._trouble.forget()
                return answer


def joined(partitions: Iterable[Partition]) -> str:
    """Some partitions for a message."""
    names = [f"{t}-{n}" for t, n in sorted(partitions)]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


_CONSUMER_ONLY = {"group.id", "isolation.level", "fetch.wait.max.ms", "fetch.min.bytes", "fetch.max.bytes"}
"""An admin client would warn about these."""
