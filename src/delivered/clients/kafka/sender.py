"""Produces Arrow columns over the shared connections of the process: encoded as columns, without a client or thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from delivered.clients.kafka import protocol
from delivered.clients.kafka.answers import NoAnswer, NotSent
from delivered.clients.kafka.channel import Pending
from delivered.clients.kafka.current import Confirmation, is_leader
from delivered.clients.kafka.errors import Failures, ProducerError
from delivered.clients.kafka.protocol import NoTopic, Wire, server_name
from delivered.clients.kafka.rows import Headers, Rows
from delivered.clients.kafka.sequences import (
    BATCH_BYTES,
    MISSING_S,
    Batch,
    Encoder,
    PartitionQueue,
    Verdict,
    bytes_of,
    joined,
    verdict_of,
)
from delivered.clients.kafka.transactions import Transaction
from delivered.model.errors import BadRecord
from delivered.model.limits import REQUEST_TIMEOUT_S
from delivered.model.patience import Stall
from delivered.source.columns import HEADERS

# What the senders of one process share.

PARTITIONS_AGE_S_MAX = 300.0


@dataclass
class Cluster:
    """
    Attributes:
        partitions: topic -> partition count, when it was asked for (time.monotonic()).
        throttled: broker -> when to send records to it again: it reads nothing earlier, and a request would time out.
    """

    wire: Wire
    servers: str
    partitions: dict[str, tuple[int, float]] = field(default_factory=dict)
    throttled: dict[int, float] = field(default_factory=dict)

    def count(self, topic: str) -> int:
        """Number of partitions. Raises ProducerError: unknown topic, no permission, no answer."""
        count, at = self.partitions.get(topic, (0, 0.0))
        if count and time.monotonic() - at < PARTITIONS_AGE_S_MAX:
            return count
        try:
            found = self.wire.topic(topic)
        except NoAnswer as error:
            if count:  # brokers are away; the last known count will do
                return count
            raise ProducerError("_TRANSPORT", str(error)) from None
        if found.error_code not in (protocol.NONE, protocol.LEADER_NOT_AVAILABLE):
            name, _ = verdict_of(found.error_code)
            raise ProducerError(name, protocol.name_of(found.error_code))
        count = len(found.partitions)
        self.partitions[topic] = (count, time.monotonic())
        return count

    def outdated(self, topic: str) -> None:
        """Ask again next time; until there is an answer, the last known count stands."""
        count, _ = self.partitions.get(topic, (0, 0.0))
        self.partitions[topic] = (count, float("-inf"))


# Partitions of an open transaction, announced to its coordinator before records are sent to them (decision 056).

_PAUSE_S = 0.05

At = tuple[str, int]
"""Topic and partition."""


class Announced:
    """
    Args:
        failed: called with a partition, the error's name, and whether it ends the transaction; partition None: only
            what is known of a connection.

    Attributes:
        added: partitions in the transaction.
        asked: whether the transaction may be open.
        unknown: a request was not answered, and may still arrive.
    """

    def __init__(self, wire: Wire, held: Transaction, failed: Callable[[At | None, str, bool], None]) -> None:
        self.added: set[At] = set()
        self.asked = self.unknown = False
        self._wire, self._held, self._failed = wire, held, failed
        self._pending: Pending | None = None
        self._node = -1  # that was asked last
        self._confirmation = Confirmation(wire, held.transactional_id)
        self._not_before = self._missing_since = 0.0

    @property
    def waiting(self) -> bool:
        return self._pending is not None

    def add(self, wanted: set[At]) -> None:
        """Announce partitions, unless a response is awaited."""
        from kafka.protocol.producer.transaction import AddPartitionsToTxnRequest

        held = self._held
        if self.waiting or time.monotonic() < self._not_before:
            return
        Topic = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic  # noqa: N806 - a class
        topics = [
            Topic(name=topic, partitions=sorted(p for t, p in wanted if t == topic))
            for topic in sorted({t for t, _ in wanted})
        ]
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=held.transactional_id,
            v3_and_below_producer_id=held.producer_id,
            v3_and_below_producer_epoch=held.epoch,
            v3_and_below_topics=topics,
            max_version=3,
        )
        try:
            self._node = self._wire.coordinator(held.transactional_id)
            self._pending = self._wire.post(request, self._node)
            self.asked = True
        except NoAnswer as error:
            self._retry(str(error))

    def receive(self, wait_s: float) -> bool:
        """Whether the response is here, or none will come."""
        pending = self._pending
        if pending is None:
            return True
        if not pending.ready(wait_s) and time.monotonic() - pending.sent_s < REQUEST_TIMEOUT_S:
            return False
        self._pending = None
        try:
            answer = pending.answer(0)
        except NoAnswer as error:
            self.unknown = True
            self._retry(str(error))  # adding a partition twice is harmless
            return True
        for topic in answer.results_by_topic_v3_and_below:
            for part in topic.results_by_partition:
                self._judge((topic.name, part.partition_index), part.partition_error_code)
        return True

    def _judge(self, at: At, code: int) -> None:
        name, verdict = verdict_of(code)
        match verdict:
            case Verdict.STORED:
                self.added.add(at)
                self._missing_since = 0.0
            case _ if code == protocol.OPERATION_NOT_ATTEMPTED:
                pass
            case Verdict.AGAIN | Verdict.ELSEWHERE | Verdict.MAYBE:
                self._retry(name)
            case Verdict.MISSING:
                now = time.monotonic()
                self._missing_since = self._missing_since or now
                if now - self._missing_since > MISSING_S:
                    self._failed(at, name, False)
                self._retry(name)
            case Verdict.FATAL if not self._confirmation.counts(self._node, code):
                self._retry(name)
            case Verdict.FATAL:
                self._failed(at, name, True)
            case _:
                self._failed(at, name, False)

    def _retry(self, detail: str) -> None:
        self._failed(None, detail, False)
        self._not_before = time.monotonic() + _PAUSE_S
        self._wire.forget(self._held.transactional_id)


# Produces Arrow columns over the shared connections of the process: encoded as columns, without a client or threads.
#
# Whoever sends also reads responses: a `send` that finds too many bytes unanswered waits, and `flush` waits for all.

HELD_BYTES_MAX = 8 << 20
"""Rows held back until they fill batches."""
UNANSWERED_BYTES_MAX = 16 << 20
"""Encoded batches without an acknowledgement. With the rows held, and the requests' own copies: below 64 MB."""
REQUEST_BYTES_MAX = 4 << 20
_PAUSE_S_MAX = 0.05


@dataclass
class _Request:
    pending: Pending
    node: int
    batches: list[tuple[PartitionQueue, Batch]]


class Sender:
    """Sends rows through the brokers' leaders. Not thread-safe.

    Args:
        config: from `producer_config`.
        held: the transaction; or the producer id and epoch of an idempotent sender, without transactional id; None:
            not idempotent: a batch is sent at most once.

    Attributes:
        failures: undelivered records since the last `clear`; counted, not raised.
        used_at: of time.monotonic(), when it was last flushed.
    """

    def __init__(self, cluster: Cluster, config: Mapping[str, str], held: Transaction | None) -> None:
        self.failures = Failures()
        self._cluster, self._wire = cluster, cluster.wire
        self._held = held
        self._transactional = held is not None and held.transactional_id != ""
        self._acks = -1 if config.get("acks", "all") in ("all", "-1") else int(config["acks"])
        self._encoder = Encoder(config, held, self._transactional)
        self._timeout_s = int(config["message.timeout.ms"]) / 1000
        self.used_at = time.monotonic()
        self._rows: dict[str, list[Rows]] = {}
        self._held_bytes = self._unanswered_bytes = 0
        self._queues: dict[tuple[str, int], PartitionQueue] = {}
        self._requests: list[_Request] = []
        self._announced = (
            Announced(self._wire, held, self._announcement_failed) if held and self._transactional else None
        )
        self._fatal: ProducerError | None = None
        self._unknown = False

    # -- records -----------------------------------------------------------------------------------------------

    def send(self, rows: Rows) -> None:
        """Send rows, or hold them until they fill batches; blocks while too much is unanswered."""
        self._raise_fatal()
        if len(rows) == 0:
            return
        self._rows.setdefault(rows.topic, []).append(rows)
        self._held_bytes += bytes_of(rows)
        if self._held_bytes < HELD_BYTES_MAX:
            partitions = self.partitions(rows.topic, REQUEST_TIMEOUT_S)
            if self._held_bytes < partitions * BATCH_BYTES:
                return
        self._encode_held()
        self._pump()
        while self._unanswered_bytes > UNANSWERED_BYTES_MAX:
            self._pump(wait=True)
            self._raise_fatal()

    def send_one(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, headers: Headers = ()
    ) -> None:
        listed = [{"key": k, "value": v} for k, v in headers] or None
        columns = pa.array([key], pa.binary()), pa.array([value], pa.binary()), pa.array([listed], HEADERS.type)
        self.send(Rows(topic, *columns, partition=np.array([partition], np.int32)))

    def flush(self, timeout_s: float) -> None:
        """Wait until every record was acknowledged or is counted in `failures`.

        Raises:
            ProducerError: a fatal error, or records still unacknowledged after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        self._encode_held()
        with Stall(server_name(self._cluster.servers)) as stall:
            self._pump()
            while left := sum(map(len, self._queues.values())):
                self._raise_fatal()
                stall.look(left)
                if time.monotonic() > deadline:
                    waiting = sum(q.records for q in self._queues.values())
                    detail = f"{waiting} records were not acknowledged in {timeout_s:.0f} s{self.failures.hint()}"
                    raise ProducerError("_TIMED_OUT", detail)
                self._pump(wait=True)
        self._raise_fatal()
        self.used_at = time.monotonic()

    def partitions(self, topic: str, timeout_s: float) -> int:  # noqa: ARG002 - requests have their own time-out
        """Number of partitions. Raises ProducerError: unknown topic, no permission, no answer."""
        return self._cluster.count(topic)

    def close(self) -> None:
        """Forget what was not sent, and leave an open transaction open. Connections stay. Idempotent."""
        self._rows.clear()
        for queue in self._queues.values():
            queue.purge()

    # -- transactions ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Nothing is sent: a transaction begins with its first partition."""

    def abort(self, timeout_s: float) -> None:
        """Drop what waits, and abort the open transaction.

        An unanswered request may still arrive. Then the epoch is raised as well, so that brokers reject it.
        """
        from kafka.protocol.producer.transaction import InitProducerIdRequest

        from delivered.clients.kafka.transactions import end_request

        held, deadline = self._held, time.monotonic() + timeout_s
        self.close()
        while self._requests and time.monotonic() < deadline:
            self._receive(wait=True, purged=True)
        announced = self._announced
        if held is None or announced is None or not announced.asked:
            return
        request = end_request(held, commit=False)
        if self._unknown or self._requests or announced.waiting or announced.unknown:
            request = InitProducerIdRequest(
                transactional_id=held.transactional_id,
                transaction_timeout_ms=60_000,
                producer_id=held.producer_id,
                producer_epoch=held.epoch,
                min_version=3,
                max_version=4,
            )
        try:
            self._wire.ask_coordinator(held.transactional_id, request, again=True)
        except NoAnswer as error:
            raise ProducerError("_TIMED_OUT", str(error)) from None

    # -- batches -----------------------------------------------------------------------------------------------

    def _encode_held(self) -> None:
        rows, self._rows, self._held_bytes = self._rows, {}, 0
        for topic, listed in rows.items():
            for one in joined(listed):
                self._encode(topic, self._encoder.within_limit(one, self.failures))

    def _encode(self, topic: str, rows: Rows) -> None:
        deadline = time.monotonic() + self._timeout_s
        for partition, chosen in self._encoder.spread(rows, self.partitions(topic, REQUEST_TIMEOUT_S)):
            queue = self._queue(topic, partition)
            try:
                for batch in self._encoder.encode(rows, chosen, queue.next, deadline):
                    queue.add(batch)
                    self._unanswered_bytes += len(batch.data)
            except BadRecord as error:  # its headers are too large
                self.failures.add("MSG_SIZE_TOO_LARGE", self._encoder.bytes_max)
                self._end_quietly(str(error))
                return

    def _queue(self, topic: str, partition: int) -> PartitionQueue:
        found = self._queues.get((topic, partition))
        if found is None:
            found = self._queues[topic, partition] = PartitionQueue(topic, partition, self._held is not None)
        return found

    # -- requests ----------------------------------------------------------------------------------------------

    def _pump(self, wait: bool = False) -> None:
        """Take responses that are here, and send what may be sent.

        Args:
            wait: briefly, if there is nothing to do.
        """
        announcing = self._announced is not None and self._announced.waiting
        if announcing and self._announced is not None:
            announcing = not self._announced.receive(_PAUSE_S_MAX if wait and not self._requests else 0)
            wait = wait and announcing
        if self._receive(wait and not announcing):
            wait = False
        if self._fatal is None:
            sent = self._dispatch()
            if wait and not sent and not self._requests and not announcing:
                time.sleep(0.005)

    def _receive(self, wait: bool, purged: bool = False) -> bool:
        """Whether a response was taken."""
        left: list[_Request] = []
        taken = False
        for request in self._requests:
            # Responses of one broker arrive in order; wait for the oldest only.
            arrived = request.pending.ready(_PAUSE_S_MAX if wait and not taken and not left else 0.0)
            sent_s = max(request.pending.sent_s, self._cluster.throttled.get(request.node, 0.0))
            if not arrived and time.monotonic() - sent_s < REQUEST_TIMEOUT_S:
                left.append(request)
                continue
            taken = True
            try:
                answer = request.pending.answer(0)
            except NoAnswer as error:
                self._unanswered(request, str(error), purged)
            else:
                self._answered(request, answer)
        self._requests = left
        return taken

    def _unanswered(self, request: _Request, detail: str, purged: bool) -> None:
        self.failures.note("_TRANSPORT", detail)
        self._wire.forget()
        for queue, batch in request.batches:
            self._unknown = True
            if self._held is None:
                self._failed(queue, batch, "_TRANSPORT")
            elif purged:
                self._dropped(queue, batch)
            else:
                queue.put_back(batch, time.monotonic())

    def _answered(self, request: _Request, answer: Any) -> None:
        codes = {(t.name, p.index): p.error_code for t in answer.responses for p in t.partition_responses}
        refresh = False
        if answer.throttle_time_ms:
            self._cluster.throttled[request.node] = time.monotonic() + answer.throttle_time_ms / 1000
        for queue, batch in request.batches:
            at = queue.topic, queue.partition
            name, verdict = verdict_of(codes.get(at, 13))
            if verdict in (Verdict.GAP, Verdict.FATAL) and not is_leader(self._wire, request.node, *at):
                verdict = Verdict.ELSEWHERE
            now = time.monotonic()
            match verdict:
                case Verdict.STORED:
                    self._dropped(queue, batch)
                case Verdict.AGAIN:
                    queue.put_back(batch, now)
                case Verdict.ELSEWHERE:
                    refresh = True
                    queue.put_back(batch, now)
                case Verdict.MAYBE if self._held is not None:
                    queue.put_back(batch, now)
                case Verdict.MISSING:
                    refresh = True
                    batch.missing_since = batch.missing_since or now
                    if now - batch.missing_since < MISSING_S:
                        queue.put_back(batch, now)
                    else:
                        self._failed(queue, batch, name)
                case Verdict.GAP if self._held is not None and not queue.is_first(batch):
                    queue.put_back(batch, now, pause=False)
                case Verdict.GAP | Verdict.FATAL:
                    self._failed(queue, batch, name)
                    self._end(name, f"partition {queue.partition} of {queue.topic!r}")
                case Verdict.TOO_LARGE if batch.records > 1:
                    self._split(queue, batch)
                case _:
                    self._failed(queue, batch, name)
        if refresh:
            self._wire.forget()
            for queue, _ in request.batches:
                self._cluster.outdated(queue.topic)

    def _dispatch(self) -> bool:
        """Whether a request was sent."""
        from kafka.protocol.producer import ProduceRequest

        now, by_node = time.monotonic(), dict[int, list[PartitionQueue]]()
        wanted = set[tuple[str, int]]()
        for at, queue in self._queues.items():
            for batch in queue.expired(now):
                self._unanswered_bytes -= len(batch.data)
                self._count(batch, "_MSG_TIMED_OUT")
            due = queue.due(now)
            if due is None or due > now:
                continue
            if self._announced is not None and at not in self._announced.added:
                wanted.add(at)
                continue
            try:
                node = self._wire.leader(*at)
                if now >= self._cluster.throttled.get(node, now):
                    by_node.setdefault(node, []).append(queue)
            except NoTopic:
                self._reject(queue, "UNKNOWN_TOPIC_OR_PART")
            except NoAnswer as error:
                self.failures.note("_TRANSPORT", str(error))
                queue.put_back(queue.take(), now)
        if wanted and self._announced is not None:
            self._announced.add(wanted)
        Topic, Part = ProduceRequest.TopicProduceData, ProduceRequest.TopicProduceData.PartitionProduceData  # noqa: N806
        sent = False
        for node, queues in by_node.items():
            while queues:
                size, topics = 0, dict[str, list[Any]]()
                batches: list[tuple[PartitionQueue, Batch]] = []
                while queues and (not batches or size < REQUEST_BYTES_MAX):
                    queue = queues.pop(0)
                    batch = queue.take()
                    size += len(batch.data)
                    batches.append((queue, batch))
                    topics.setdefault(queue.topic, []).append(Part(index=queue.partition, records=batch.data))
                request = ProduceRequest(
                    transactional_id=self._held.transactional_id if self._held and self._transactional else None,
                    acks=self._acks,
                    timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
                    topic_data=[Topic(name=t, partition_data=p) for t, p in topics.items()],
                    min_version=3,
                    max_version=11,
                )
                try:
                    self._requests.append(_Request(self._wire.post(request, node), node, batches))
                    sent = True
                except NotSent as error:
                    self.failures.note("_TRANSPORT", str(error))
                    self._wire.forget()
                    for queue, batch in batches:
                        queue.put_back(batch, time.monotonic())
        return sent

    # -- outcomes ----------------------------------------------------------------------------------------------

    def _dropped(self, queue: PartitionQueue, batch: Batch) -> None:
        queue.drop(batch)
        self._unanswered_bytes -= len(batch.data)

    def _failed(self, queue: PartitionQueue, batch: Batch, name: str) -> None:
        self._dropped(queue, batch)
        self._count(batch, name)

    def _count(self, batch: Batch, name: str) -> None:
        for _ in range(batch.records):
            self.failures.add(name, batch.largest or len(batch.data))
        if self._held is not None:
            self._end_quietly(name)  # what follows would leave a gap

    def _announcement_failed(self, at: tuple[str, int] | None, name: str, fatal: bool) -> None:
        if fatal:
            self._end(name, f"the coordinator rejected partition {at}")
        elif at is None:
            self.failures.note("_TRANSPORT", name)
        elif at in self._queues:
            self._reject(self._queues[at], name)

    def _reject(self, queue: PartitionQueue, name: str) -> None:
        for batch in queue.purge():
            self._unanswered_bytes -= len(batch.data)
            self._count(batch, name)

    def _end_quietly(self, name: str) -> None:
        """Send nothing more: what waits is counted as failed."""
        for queue in self._queues.values():
            for batch in queue.purge():
                self._unanswered_bytes -= len(batch.data)
                for _ in range(batch.records):
                    self.failures.add("_PURGE_QUEUE", len(batch.data))
        self.failures.fatal = self.failures.fatal or name

    def _end(self, name: str, detail: str) -> None:
        self._fatal = self._fatal or ProducerError(name, detail + self.failures.hint())
        self._end_quietly(name)

    def _raise_fatal(self) -> None:
        if self._fatal is not None:
            raise self._fatal

    def _split(self, queue: PartitionQueue, batch: Batch) -> None:
        """The topic's limit is lower: send the records in smaller batches."""
        parts = self._encoder.halves(batch, (queue.topic, queue.partition))
        self._unanswered_bytes += sum(len(p.data) for p in parts) - len(batch.data)
        queue.replace(batch, parts)
