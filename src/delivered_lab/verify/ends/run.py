"""Cases of both ends: which there are, and how one is run and judged."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from delivered import Guarantee
from delivered_lab.verify.case import Case, Environment, Result, build_result, unknown_on_error
from delivered_lab.verify.ends import consumer, producer
from delivered_lab.verify.ends.end import End
from delivered_lab.verify.evidence import Evidence, History, Seen, fired
from delivered_lab.verify.fixture import empty
from delivered_lab.verify.judge import Judgement, judge
from delivered_lab.verify.services import CONSUMER, PRODUCER
from delivered_lab.verify.systems.base import digest

SYSTEMS = {PRODUCER: producer.SYSTEMS, CONSUMER: consumer.SYSTEMS}
WORKLOAD = "ends"
_CHECKERS = ("lost", "duplicated", "unexpected", "stopped_right")


def cases(service: str, seed: int) -> list[Case]:
    faults = producer.faults if service == PRODUCER else consumer.faults
    return [
        Case(system, Guarantee.EXACTLY_ONCE, WORKLOAD, fault, seed, service)
        for system in SYSTEMS[service]
        for fault in faults(system)
    ]


def run_case(case: Case, environment: Environment) -> Result:
    """Run and judge a case of an end. An error in judging gives unknown, never a pass."""
    started_s = time.monotonic()
    folder = environment.folder / case.name
    empty(folder)
    with History(folder / "history.jsonl") as history, contextlib.ExitStack() as stack:
        end = End(case.sink, digest(f"{case.name}{time.time_ns()}"), folder, environment, history)
        stack.callback(end.close)

        def judged() -> Judgement:
            world = _world(case, end)
            stack.callback(world.close)
            case.fault.script(world)
            world.gather()
            return judge(_evidence(end, case.fault.requires), _CHECKERS)

        judgement = unknown_on_error(folder, judged)
    result = build_result(case, folder, started_s, judgement)
    result.faults = fired(history)
    result.fired, result.final_read = len(result.faults), bool(end.expected)
    result.sent, result.delivered = end.expected.total(), end.found.total()
    if end.stays_down:
        result.lost, result.undelivered = 0, result.lost
    result.save()
    return result


def _world(case: Case, end: End) -> Any:
    if case.service == PRODUCER:
        return producer.Shop(end)
    return consumer.Sagas(end) if case.sink.startswith("saga") else consumer.Inbox(end)


def _evidence(end: End, required: Sequence[str]) -> Evidence:
    return Evidence(
        Guarantee.EXACTLY_ONCE,
        expected=end.expected,
        final=[Seen(effect) for effect in end.found.elements()],
        required=required,
        fired=fired(end.history),
        stops=end.stops,
        stays_down=end.stays_down,
    )
