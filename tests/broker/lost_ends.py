"""A transaction that ends at its coordinator and not in all of its partitions, as a restarted broker leaves it behind.

The partitions are not announced to the coordinator, which then writes no marker into them: they stay open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from delivered.clients.kafka.protocol import NONE
from delivered.clients.kafka.sender import Announced
from delivered.connectors.kafka.writes import LedgerProducer

VERIFICATION = "transaction.partition.verification.enable"


def _verify(kafka: Any, on: bool) -> None:
    """Whether brokers refuse records of a transaction that its coordinator does not know."""
    entry = ConfigEntry(VERIFICATION, str(on).lower(), incremental_operation=AlterConfigOpType.SET)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    for future in admin.incremental_alter_configs(
        [ConfigResource("BROKER", "1", incremental_configs=[entry])]
    ).values():
        future.result(60)


Lose = Callable[[Callable[[str, int], bool]], AbstractContextManager[None]]


@pytest.fixture
def losing(kafka: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lose]:
    with lost_ends(kafka, monkeypatch) as lose:
        yield lose


@contextmanager
def lost_ends(kafka: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lose]:
    """`with losing(lambda topic, partition: ...)`: no end reaches these partitions of transactions written inside."""
    _verify(kafka, False)

    @contextmanager
    def lose(lost: Callable[[str, int], bool]) -> Iterator[None]:
        add, add_ledger = Announced.add, LedgerProducer.add

        def announced(self: Announced, wanted: set[tuple[str, int]]) -> None:
            self.added |= {at for at in wanted if lost(*at)}
            if told := {at for at in wanted if not lost(*at)}:
                add(self, told)

        def ledger(self: LedgerProducer, writes: Any, deadline: float) -> int:
            told = {p: r for p, r in writes.items() if not lost(self._topic, p)}
            return add_ledger(self, told, deadline) if told else NONE

        with monkeypatch.context() as patch:
            patch.setattr(Announced, "add", announced)
            patch.setattr(LedgerProducer, "add", ledger)
            yield

    yield lose
    _verify(kafka, True)
