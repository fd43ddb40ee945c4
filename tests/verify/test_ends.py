"""Both ends: programs that are broken on purpose must be found out, the honest ones not."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.sweeps import sweep

from delivered_lab.verify.case import Environment, Result
from delivered_lab.verify.ends import SYSTEMS, cases, run_case
from delivered_lab.verify.judge import Verdict
from delivered_lab.verify.services import CONSUMER, ENDS, PRODUCER

BROKEN = Path(__file__).parent / "broken"


def run(folder: Path, service: str, system: str, fault: str, variant: str = "") -> Result:
    case = next(c for c in cases(service, 1) if (c.sink, c.fault.name) == (system, fault))
    environment = Environment(folder, print, {"PYTHONPATH": str(BROKEN)}, variant=variant)
    try:
        return run_case(case, environment)
    finally:
        environment.close()


@pytest.mark.parametrize(
    ("service", "system", "fault"),
    sweep(
        [
            (PRODUCER, "outbox-postgres-log", "failed-over-without-slot"),
            (PRODUCER, "outbox-postgres-poll", "late-commit"),
            (PRODUCER, "outbox-sqlite-poll", "relay-killed-after"),
            (CONSUMER, "inbox-rabbitmq-sqlite", "consumer-killed-between"),
            (CONSUMER, "saga-sqlite", "worker-paused"),
        ],
        lambda service, system, fault: fault == "worker-paused",
    ),
)
def test_the_honest_ones_pass(tmp_path: Path, service: str, system: str, fault: str) -> None:
    found = run(tmp_path, service, system, fault)
    assert (found.verdict, found.lost, found.duplicated) == (Verdict.HELD, 0, 0), found.reasons
    assert found.fired


@pytest.mark.parametrize(
    ("service", "system", "fault", "variant", "how"),
    sweep(
        [
            (PRODUCER, "outbox-sqlite-poll", "application-killed", "id_per_try", "duplicated"),
            (PRODUCER, "outbox-sqlite-poll", "application-killed", "other_transaction", "duplicated"),
            (PRODUCER, "outbox-postgres-poll", "late-commit", "polling_by_sequence", "lost"),
            (CONSUMER, "inbox-rabbitmq-sqlite", "consumer-killed-between", "other_transaction", "lost"),
            (CONSUMER, "inbox-rabbitmq-sqlite", "consumer-killed-between", "ack_before_commit", "lost"),
            (CONSUMER, "inbox-rabbitmq-sqlite", "none", "no_inbox", "duplicated"),
            (CONSUMER, "saga-sqlite", "killed-in-each-call", "broken_sagas:log_after_the_step", "unexpected"),
            (CONSUMER, "saga-sqlite", "killed-before-each-call", "broken_sagas:undo_once", "unexpected"),
        ],
        lambda service, system, fault, variant, how: variant == "id_per_try",
    ),
)
def test_broken_ones_are_found_out(
    tmp_path: Path, service: str, system: str, fault: str, variant: str, how: str
) -> None:
    found = run(tmp_path, service, system, fault, variant)
    assert found.verdict == Verdict.BROKEN, found.reasons
    assert any(reason.startswith(how) for reason in found.reasons), found.reasons


def test_every_fault_says_what_must_fire() -> None:
    for service in ENDS:
        found = cases(service, 1)
        assert {c.sink for c in found} == set(SYSTEMS[service])
        assert len({c.key for c in found}) == len(found)
        assert all(c.fault.requires for c in found if c.fault.name != "none")
