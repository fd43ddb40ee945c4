"""Sources in cases: a queue whose receiver is killed; a broken receiver is detected."""

from __future__ import annotations

from pathlib import Path

import pytest

from delivered.model.capability import Guarantee
from delivered_lab.verify import interference
from delivered_lab.verify.case import Case, Environment, Result, run_case
from delivered_lab.verify.faults import Fault, source_catalogue
from delivered_lab.verify.judge import Verdict
from delivered_lab.verify.services import ENGINE, SPARK
from delivered_lab.verify.systems import PULSAR, RABBITMQ, RABBITMQ_STREAM, SQLITE
from delivered_lab.verify.systems.rabbitmq import RabbitQueue

BROKEN = Path(__file__).parent / "broken"
POINT = "receive.persist:before"


def run(environment: Environment, source: str, fault: str | Fault, service: str = ENGINE) -> Result:
    if isinstance(fault, str):
        fault = next(f for f in source_catalogue(Guarantee.EXACTLY_ONCE, SQLITE, source) if f.name == fault)
    return run_case(Case(SQLITE, Guarantee.EXACTLY_ONCE, "keyed", fault, 1, service, source), environment)


@pytest.mark.matrix
def test_a_receiver_that_acknowledges_before_it_persists_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are killed while holding messages: only the correct one's are redelivered."""
    monkeypatch.setattr(RabbitQueue, "patience_s", 3.0)
    script, requires = interference.receiver_killed(POINT)
    fault = Fault("killed-persisting", "F6c", "killed before it persists", script, requires, keeps_order=False)
    environment = Environment(tmp_path, print, {"PYTHONPATH": str(BROKEN)})
    try:
        right = run(environment, RABBITMQ, fault)
        environment.source_format = "acknowledges_first"
        wrong = run(environment, RABBITMQ, fault)
    finally:
        environment.close()
    assert (right.verdict, right.lost, right.duplicated) == (Verdict.HELD, 0, 0), right.reasons
    assert (right.faults, right.source) == ([f"kill@{POINT}"], RABBITMQ)
    assert wrong.verdict == Verdict.BROKEN, wrong
    assert wrong.lost > 0
    assert any(reason.startswith("lost") for reason in wrong.reasons), wrong.reasons


@pytest.mark.matrix
@pytest.mark.parametrize("source", [PULSAR, RABBITMQ_STREAM, RABBITMQ, "activemq", "rocketmq"])
def test_every_source_through_spark(tmp_path: Path, source: str) -> None:
    environment = Environment(tmp_path, print)
    try:
        found = run(environment, source, "killed-deciding", SPARK)
    finally:
        environment.close()
    assert (found.verdict, found.lost, found.duplicated) == (Verdict.HELD, 0, 0), found.reasons
