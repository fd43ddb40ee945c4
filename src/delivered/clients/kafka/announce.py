"""Partitions of an open transaction, announced to its coordinator before records are sent to them (decision 056)."""

from __future__ import annotations

import time
from collections.abc import Callable

from delivered.clients.kafka import protocol
from delivered.clients.kafka.channel import Pending
from delivered.clients.kafka.current import Confirmation
from delivered.clients.kafka.login import NoAnswer
from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.sequences import MISSING_S, Verdict, verdict_of
from delivered.clients.kafka.transactions import Transaction
from delivered.model.limits import REQUEST_TIMEOUT_S

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
