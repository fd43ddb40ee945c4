"""Kafka, with a ledger that takes the decision with the latest time for the newest one."""

from __future__ import annotations

from dataclasses import replace

from delivered.connectors.kafka import CONNECTOR, SinkOptions
from delivered.connectors.kafka.sink import KafkaSink
from delivered.connectors.kafka.store import KafkaStore
from delivered.contract.connector import Factory
from delivered.model.identity import Scope
from delivered.model.work import LedgerState


class ByClock(KafkaStore):
    def read(self) -> LedgerState:
        state = super().read()
        return replace(state, earlier=tuple(sorted(state.earlier, key=lambda d: d.decided_at_ms, reverse=True)))


class ByClockSink(KafkaSink):
    def store(self, scope: Scope) -> ByClock:
        return ByClock(self.options, scope)


ORDERS_BY_CLOCK = replace(CONNECTOR, name="orders_by_clock", sinks=Factory(SinkOptions, "broken_order:ByClockSink"))
