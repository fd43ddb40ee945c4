"""Seals of a pipeline with several sinks: a chain for each, which goes on where it began when another sink decides."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.memory import CONNECTOR as MEMORY
from tests.support.memory.world import make_world

from delivered.connectors.sqlite import CONNECTOR as SQLITE
from delivered.contract.sink import Sink
from delivered.engine import Sinks
from delivered.engine.context import open_ledger, open_shared_ledger
from delivered.ledger import Ledger
from delivered.model.identity import Scope
from delivered.model.work import Failed, Ok, Owner


def text(sink: str, number: int) -> str:
    return f'{{"sink":"{sink}","number":{number}}}'


@pytest.fixture
def queue() -> Sink:
    make_world("sealed-group")
    sink: Sink = MEMORY.sink({"world": "sealed-group", "commit": "two_phase"})
    return sink


@pytest.fixture
def table(tmp_path: Path) -> Sink:
    sink: Sink = SQLITE.sink({"path": str(tmp_path / "out.db"), "table": "orders"})
    return sink


def opened(incarnation: str, **sinks: Sink) -> Ledger:
    group = Sinks.of([(name, sink, None) for name, sink in sinks.items()])
    return open_shared_ledger(group, Scope("orders", group.decider.name, incarnation))


def test_each_sink_has_a_chain_in_the_deciding_ledger(queue: Sink, table: Sink) -> None:
    ledger = opened("i", queue=queue, table=table)
    ledger.claim(Owner("a"))
    for number in range(2):
        for sink in ("queue", "table"):
            assert ledger.add_seal(sink, number, text(sink, number)) == Ok(None)
    assert isinstance(ledger.add_seal("queue", 0, text("another", 0)), Failed)
    deciding = open_ledger(table, Scope("orders", "table", "i"))
    for sink in ("queue", "table"):
        assert list(deciding.seals(sink)) == list(ledger.seals(sink)) == [text(sink, n) for n in range(2)]


def test_a_chain_goes_on_when_another_sink_decides_and_when_the_first_decides_again(queue: Sink, table: Sink) -> None:
    wanted = {"queue": 0, "table": 0}

    def seal(ledger: Ledger, *sinks: str) -> None:
        for sink in sinks:
            assert ledger.last_seal(sink) == (text(sink, wanted[sink] - 1) if wanted[sink] else None)
            assert ledger.add_seal(sink, wanted[sink], text(sink, wanted[sink])) == Ok(None)
            wanted[sink] += 1
            assert list(ledger.seals(sink)) == [text(sink, n) for n in range(wanted[sink])]

    for round_ in range(2):
        alone = opened(f"alone{round_}", queue=queue)
        alone.claim(Owner(f"a{round_}"))
        seal(alone, "queue")
        both = opened(f"both{round_}", queue=queue, table=table)  # the table decides
        seal(both, "queue", "table")
        both.claim(Owner(f"b{round_}"))
        seal(both, "queue", "table")
        seal(opened(f"later{round_}", queue=queue, table=table), "queue", "table")
    where = [open_ledger(s, Scope("orders", n, "i")) for n, s in (("queue", queue), ("table", table))]
    assert [(len(list(s.seals("queue"))), len(list(s.seals("table")))) for s in where] == [(8, 0), (0, 6)]
