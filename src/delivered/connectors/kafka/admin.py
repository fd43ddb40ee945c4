"""The driver's Kafka client: lists partitions, looks up offsets, commits offsets to a consumer group."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from delivered.clients.kafka.errors import ConnectionErrors, explain
from delivered.clients.kafka.librdkafka import connect, kafka_client
from delivered.clients.kafka.protocol import server_name
from delivered.clients.kafka.rows import Partition
from delivered.clients.kafka.settings import resolved
from delivered.connectors.kafka.offsets import EARLIEST, LATEST, Place, Timestamp
from delivered.connectors.kafka.options import OWNER, SourceOptions
from delivered.connectors.kafka.sink_options import is_internal
from delivered.model.errors import UsageError
from delivered.model.limits import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S
from delivered.model.patience import patience_s, wait_out

log = logging.getLogger("delivered.kafka")


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
    "_NOENT",  # "No leaders found": none of the requested partitions has a leader now
}
T = TypeVar("T")


class KafkaDriverClient:
    """The driver's connections, opened on first use. Not thread-safe."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._connection = ConnectionErrors()
        self._admin: Any = None
        self._committer: Any = None
        self._answered = False

    def partitions(self) -> tuple[dict[Partition, None], dict[str, str]]:
        """Partitions to read now, sorted, and topic -> topic id.

        Raises:
            UsageError: a named topic does not exist, or may not be read. (Topics matched by a pattern may come and go.)
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
                    raise explain(OWNER, "_UNKNOWN_PARTITION", "", f"{topic}-{number}", options.servers)
            found = {p: None for p in options.partitions if p in found}
        return found, ids

    def _matching(self, pattern: re.Pattern[str]) -> list[str]:
        def ask(timeout_s: float) -> list[str]:
            listed = self._connected().list_topics(timeout=timeout_s).topics
            return sorted(t for t in listed if pattern.search(t) and not is_internal(t))

        return self._patiently(ask, self._options.what)

    def _describe(self, names: list[str], missing_is_an_error: bool = False) -> list[tuple[str, Any]]:
        """Topic and description; with a pattern, None for a topic that no longer exists."""
        tolerant = self._options.pattern is not None and not missing_is_an_error
        if not names:
            return []
        ck = kafka_client()

        def ask(timeout_s: float) -> list[tuple[str, Any]]:
            futures = self._connected().describe_topics(ck.TopicCollection(names), request_timeout=timeout_s)
            absent = "UNKNOWN_TOPIC_OR_PART" if tolerant else ""
            return [(name, self._result(futures[name], timeout_s, name, absent)) for name in names]

        return self._patiently(ask, ",".join(names))

    def offsets(self, wanted: Mapping[Partition, Place]) -> dict[Partition, int | None]:
        """Resolve places to offsets. `LATEST` is the last stable offset, or the high watermark with read_uncommitted.

        None: no record at or after that time.
        """
        found: dict[Partition, int | None] = {}
        ask: dict[Partition, Place] = {}
        for partition, place in wanted.items():
            if isinstance(place, int) and place >= 0:
                found[partition] = place
            else:
                ask[partition] = place
        if ask:
            listed = self._patiently(lambda timeout_s: self._list(ask, timeout_s), self._options.what)
            found.update({p: offset for p, (offset, _) in listed.items()})
        return {p: found[p] for p in wanted}

    def ends(self, partitions: Iterable[Partition]) -> tuple[dict[Partition, int], dict[Partition, int]]:
        """As `offsets` for `LATEST`, and the epochs of the leaders that answered (none before Kafka 2.1)."""
        ask: dict[Partition, Place] = dict.fromkeys(partitions, LATEST)
        listed = self._patiently(lambda timeout_s: self._list(ask, timeout_s), self._options.what) if ask else {}
        ends = {p: offset or 0 for p, (offset, _) in listed.items()}
        return ends, {p: epoch for p, (_, epoch) in listed.items() if epoch is not None}

    def _list(self, ask: Mapping[Partition, Place], timeout_s: float) -> dict[Partition, tuple[int | None, int | None]]:
        """Offset and leader epoch."""
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
        found: dict[Partition, tuple[int | None, int | None]] = {}
        for asked, future in futures.items():
            result = self._result(future, timeout_s, f"{asked.topic}-{asked.partition}")
            offset = result.offset
            if offset == ck.OFFSET_INVALID:  # some time-outs come back like this
                raise ck.KafkaException(ck.KafkaError(ck.KafkaError._TIMED_OUT))
            found[asked.topic, asked.partition] = (offset if offset >= 0 else None, result.leader_epoch)
        return found

    def bounds(self, partition: Partition) -> tuple[int, int]:
        """First offset and end of one partition; (0, 0) if the partition does not exist."""
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
        """Number of consumers in a group now."""

        def ask(timeout_s: float) -> int:
            future = self._connected().describe_consumer_groups([group], request_timeout=timeout_s)[group]
            found = self._result(future, timeout_s, group, "GROUP_ID_NOT_FOUND")
            return 0 if found is None else len(found.members)

        return self._patiently(ask, group)

    def committed(self, group: str, partitions: list[Partition]) -> dict[Partition, int]:
        """Offsets that a consumer group has committed, of these partitions. Raises Unreachable, UsageError."""
        ck = kafka_client()

        def ask(timeout_s: float) -> dict[Partition, int]:
            wanted = ck.ConsumerGroupTopicPartitions(group, [ck.TopicPartition(*p) for p in partitions])
            futures = self._connected().list_consumer_group_offsets([wanted], request_timeout=timeout_s)
            found = self._result(futures[group], timeout_s, group, "GROUP_ID_NOT_FOUND")
            told = found.topic_partitions if found is not None else ()
            return {(t.topic, t.partition): t.offset for t in told if t.error is None and t.offset >= 0}

        return self._patiently(ask, f"group {group}")

    def commit(self, group: str, at: Mapping[Partition, int]) -> None:
        """Commit offsets to a consumer group. Raises Unreachable, UsageError."""
        if not at:
            return
        ck = kafka_client()
        if self._committer is None:
            settings = {**self._options.client, "group.id": group, "enable.auto.commit": "false"}
            self._committer = connect(ck.Consumer, OWNER, resolved(settings), error_cb=self._connection)

        def ask(_: float) -> None:
            results = self._committer.commit(
                offsets=[ck.TopicPartition(t, n, o) for (t, n), o in at.items()], asynchronous=False
            )
            for one in results or ():
                if one.error is not None:
                    raise ck.KafkaException(one.error)

        self._patiently(ask, f"group {group}", CONNECT_TIMEOUT_S)

    def _result(self, future: Any, timeout_s: float, what: str, absent: str = "") -> Any:
        """A future's result; None for the error `absent`. Raises retriable errors unchanged, others translated."""
        try:
            return future.result(timeout_s + 1)
        except kafka_client().KafkaException as error:
            code = error.args[0].name()
            if code in _RETRIABLE:
                raise
            if code == absent:
                return None
            raise explain(OWNER, code, error.args[0].str(), what, self._options.servers) from None

    def close(self) -> None:
        """Idempotent."""
        committer, self._committer, self._admin = self._committer, None, None
        if committer is not None:
            with suppress(RuntimeError):  # closed already
                committer.close()

    def _connected(self) -> Any:
        if self._admin is None:
            kafka_client()
            from confluent_kafka.admin import AdminClient

            settings = {k: v for k, v in self._options.client.items() if k not in _CONSUMER_ONLY}
            self._admin = connect(AdminClient, OWNER, resolved(settings), error_cb=self._connection)
        return self._admin

    def _patiently(self, ask: Callable[[float], T], what: str, longest_s: float | None = None) -> T:
        """Retry until there is an answer: for 10 s, or for 120 s if the server answered before and may be
        restarting."""
        ck = kafka_client()
        patience = longest_s or patience_s(self._answered)
        # A request to a paused broker may be lost, so the first ones time out sooner.
        timeouts = itertools.chain((4.0, 8.0, 16.0), itertools.repeat(REQUEST_TIMEOUT_S))

        def once() -> T:
            try:
                return ask(min(patience, next(timeouts)))
            except (ck.KafkaException, TimeoutError):
                self._forget_connections()
                raise

        def away(error: BaseException) -> bool:
            if self._connection.refused and not self._answered:
                return False
            return isinstance(error, (ck.KafkaException, TimeoutError)) and _named(error)[0] in _RETRIABLE

        try:
            answer = wait_out(server_name(self._options.servers), once, away, patience)
        except (ck.KafkaException, TimeoutError) as error:
            name, detail = _named(error)
            refused = self._connection.refused if not self._answered else None
            raise explain(
                OWNER, *(refused or (name, self._connection.last or detail)), what, self._options.servers
            ) from None
        self._answered = True
        self._connection.forget()
        return answer

    def _forget_connections(self) -> None:
        """Use a new client: the old one may keep stale leader metadata and never find a leader again."""
        if self._admin is not None:
            self._admin.poll(0)  # delivers its connection errors
        self._admin = None


def _named(error: BaseException) -> tuple[str, str]:
    """Code and text of a librdkafka error; a future's time-out counts as _TIMED_OUT."""
    first: Any = error.args[0] if error.args else None
    return (first.name(), first.str()) if hasattr(first, "name") else ("_TIMED_OUT", "")


def joined(partitions: Iterable[Partition]) -> str:
    """The first five partitions, for messages."""
    names = [f"{t}-{n}" for t, n in sorted(partitions)]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


_CONSUMER_ONLY = {"group.id", "isolation.level", "fetch.wait.max.ms", "fetch.min.bytes", "fetch.max.bytes"}
"""An admin client would warn about these."""
