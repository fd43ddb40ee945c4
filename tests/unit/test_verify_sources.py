"""Sources in the matrix: cases and their names, and what must be in a sink fed by a queue, on handwritten
histories."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from delivered.model.capability import Guarantee
from delivered.model.identity import checked_name
from delivered_lab.verify import systems
from delivered_lab.verify.case import Case, Result, gather
from delivered_lab.verify.evidence import End, Stop
from delivered_lab.verify.faults import source_catalogue
from delivered_lab.verify.fixture import Fixture, Setting
from delivered_lab.verify.judge import Verdict, judge
from delivered_lab.verify.matrix import Choice, Store, cases
from delivered_lab.verify.services import ENGINE
from delivered_lab.verify.systems import PULSAR, RABBITMQ, SINK_KINDS, SOURCE_KINDS, SQLITE, from_address
from delivered_lab.verify.systems.base import Poll, QueueSource, Row, SourceClient, address
from delivered_lab.verify.systems.log import Log
from delivered_lab.verify.systems.pulsar import PulsarSource
from delivered_lab.verify.systems.rabbitmq import RabbitQueue
from delivered_lab.verify.workloads import WORKLOADS


def test_every_source_has_faults_with_every_sink_that_can_give_the_guarantee() -> None:
    for source, kind in SOURCE_KINDS.items():
        for sink, found in SINK_KINDS.items():
            for guarantee in Guarantee:
                faults = source_catalogue(guarantee, sink, source)
                assert bool(faults) == (guarantee in found.guarantees)
                names = [f.name for f in faults]
                assert len(set(names)) == len(names)
                assert all(f.requires for f in faults if f.name != "none")
                assert any("receiver" in n for n in names) == (kind.queue and bool(faults))


def test_a_source_that_is_asked_for_is_a_part_of_the_cell_and_of_its_result(tmp_path: Path) -> None:
    asked = Choice(only=("sqlite/exactly_once/*/none",), service=ENGINE, sources=(PULSAR, RABBITMQ))
    pulsar, rabbitmq = cases(asked)
    assert (pulsar.source, rabbitmq.source) == (PULSAR, RABBITMQ)
    (own,) = (c for c in cases(Choice(only=("sqlite/exactly_once/keyed/none",), service=ENGINE)))
    assert own.source == ""
    assert len({pulsar.key, rabbitmq.key, own.key}) == len({pulsar.name, rabbitmq.name, own.name}) == 3
    store = Store(tmp_path / "v.json")
    found = _result(pulsar)
    found.record([])
    store.add(found)
    assert store.settled(pulsar)
    assert not store.settled(own)


def test_every_cell_has_a_name_of_its_own_that_a_pipeline_can_have() -> None:
    every = [*cases(Choice(service=ENGINE)), *cases(Choice(service=ENGINE, sources=tuple(SOURCE_KINDS)))]
    names = [checked_name("pipeline", c.name) for c in every]
    assert len(set(names)) == len(names)


def test_a_result_that_names_no_source_is_of_the_one_that_the_sink_has() -> None:
    (own,) = cases(Choice(only=("sqlite/exactly_once/keyed/none",), service=ENGINE))
    told = _result(own).to_json()
    del told["source"]
    assert Result.from_json(told).key == own.key


@pytest.mark.parametrize(
    "source",
    [
        Log("/nowhere/log", 2),
        PulsarSource("pulsar://h:1", "http://h:2", "t"),
        RabbitQueue("q", Path("/nowhere/log"), "amqp://guest:guest@h:1/"),
    ],
)
def test_a_producer_elsewhere_fills_the_same_source(source: SourceClient) -> None:
    again = from_address(address(source))
    assert type(again) is type(source)
    assert (address(again), again.options()) == (address(source), source.options())


def test_a_new_system_is_a_module_of_its_folder_and_no_line_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy.py").write_text(
        "from delivered_lab.verify.systems.base import SinkKind, System\n"
        "from delivered_lab.verify.systems.sqlite import SqliteTable\n"
        "SYSTEM = System((SinkKind('toy', 'toy', lambda _, at: SqliteTable(at.disk / 'toy.db')),))\n"
    )
    monkeypatch.setattr(systems, "__path__", [*systems.__path__, str(tmp_path)])
    found = systems.find()
    assert set(found) == {*systems.SYSTEMS, "toy"}
    assert [k.name for k in found["toy"].sinks] == ["toy"]


def test_positions_in_pulsar_are_ordered_as_the_checkpoint_names_them() -> None:
    source = PulsarSource("pulsar://h:1", "http://h:2", "t")
    name = "persistent://public/default/t"

    def end(text: str) -> int:
        return source.offsets({name: {"0": text}, "#positions": 1})["t-partition-0"]

    ends = [end(t) for t in ("-1:-1", "3:-1", "3:0:4", "3:0:5", "3:0", "3:1>7", "7:-1", "7:0:0")]
    assert ends == sorted(set(ends))


class Sent:
    """A queue, and a sink with scripted content."""

    system = "sent"
    batch_atomic = False
    patience_s = 0.0

    def __init__(self, log: Path) -> None:
        self.log = log
        self.rows: list[Row] = []
        self.kept: list[Row] = []

    def create(self) -> None: ...
    def options(self) -> dict[str, Any]:
        return {}

    def send(self, records: Sequence[Any]) -> None: ...
    def offsets(self, logged: Any) -> dict[str, int]:
        return {}

    def arrived(self) -> frozenset[str]:
        return frozenset()

    def left(self) -> int:
        return 0

    def read(self) -> list[Row]:
        return self.rows

    def follow(self, seen: Callable[[Poll], None], stop: threading.Event) -> None:
        seen(Poll(self.rows, snapshot=False))

    def open_transactions(self, pipeline: str) -> list[str]:
        return []

    def remove(self) -> None: ...


@pytest.mark.parametrize(
    ("told", "copies", "broken"),
    [
        (End.OK, 1, None),
        (End.OK, 0, "lost"),
        (End.OK, 2, "duplicated"),
        (End.STARTED, 0, None),
        (End.STARTED, 1, None),
        (End.STARTED, 2, "duplicated"),
        (None, 1, "unexpected"),
    ],
)
def test_what_was_confirmed_is_there_once_and_what_was_not_at_most_once(
    tmp_path: Path, told: End | None, copies: int, broken: str | None
) -> None:
    """The last record has an end of its own; all others were sent, confirmed and delivered."""
    source, sink = Sent(tmp_path / "log"), Sent(tmp_path / "log")
    assert isinstance(source, QueueSource)
    setting = Setting(
        "c", tmp_path, Guarantee.EXACTLY_ONCE, WORKLOADS["unique"], 1, source, sink, tmp_path / "checkpoint"
    )
    fixture = Fixture(setting)
    *others, last = fixture.records
    fixture.history.add("producer", "send", End.OK, {"ids": [r.id for r in others]})
    if told is not None:
        fixture.history.add("producer", "send", told, {"ids": [last.id]})
    there = [*others, *[last] * copies]
    sink.rows = [Row("t", n, r.key, r.value) for n, r in enumerate(there)]
    source.rows = [Row("0", n, r.key, r.value) for n, r in enumerate(dict.fromkeys(there))]
    fixture.stops.append(Stop())
    fixture.reader.start()
    judged = judge(gather(fixture, (), ordered=False))
    fixture.close()
    damaged = {f.checker for f in judged.findings if f.verdict is Verdict.BROKEN}
    wanted = {broken} if broken else set()
    # Records lost from the log, or in it but never sent, also show up there.
    assert damaged - {"source_kept"} == wanted
    assert (judged.verdict is Verdict.BROKEN) == bool(broken)


def _result(case: Case) -> Result:
    names = (case.sink, case.guarantee.value, case.workload, case.fault.name)
    return Result(*names, 1, "held", 0, 0, 0, True, service=case.service, source=case.source)


def test_the_sink_alone_is_named_where_no_source_was_asked_for() -> None:
    result = Result(SQLITE, "exactly_once", "keyed", "none", 1, "held", 0, 0, 0, True)
    assert result.between == SQLITE
    result.source = PULSAR
    assert result.between == "pulsar to sqlite"
