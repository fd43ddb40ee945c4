"""Cases of both ends: which there are, and how one is run and judged."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from typing import Any

from delivered import DeliveredError, Guarantee
from delivered_lab.verify.case import Case, Environment, Result, result_of
from delivered_lab.verify.ends import consumer, producer
from delivered_lab.verify.ends.end import End, Trial, digest
from delivered_lab.verify.evidence import Evidence, History, Seen, fired
from delivered_lab.verify.faults import Fault
from delivered_lab.verify.fixture import empty
from delivered_lab.verify.judge import Judgement, Verdict, judge
from delivered_lab.verify.scripts import nothing
from delivered_lab.verify.services import CONSUMER, PRODUCER

SYSTEMS = {PRODUCER: producer.SYSTEMS, CONSUMER: consumer.SYSTEMS}
WORKLOAD = "ends"
_CHECKERS = ("lost", "duplicated", "unexpected", "stopped_right")


def trials(service: str, system: str) -> Iterator[Trial]:
    return producer.trials(system) if service == PRODUCER else consumer.trials(system)


def cases(service: str, seed: int) -> list[Case]:
    return [
        Case(
            system, Guarantee.EXACTLY_ONCE, WORKLOAD, Fault(t.name, t.place, t.text, nothing, t.requires), seed, service
        )
        for system in SYSTEMS[service]
        for t in trials(service, system)
    ]


def run_case(case: Case, environment: Environment) -> Result:
    """Run and judge a case of an end. An error in judging gives unknown, never a pass."""
    began = time.monotonic()
    folder = environment.folder / case.name
    empty(folder)
    trial = next(t for t in trials(case.service, case.sink) if t.name == case.fault.name)
    with History(folder / "history.jsonl") as history:
        end = End(case.sink, digest(f"{case.name}{time.time_ns()}"), folder, environment, history)
        world: Any = None
        try:
            world = _world(case, end)
            trial.script(world)
            world.gather()
            judgement = judge(_evidence(end, trial), _CHECKERS)
        except Exception as error:
            (folder / "judge.log").write_text(traceback.format_exc(), encoding="utf-8")
            text = str(error) if isinstance(error, DeliveredError) else f"{type(error).__name__}: {error}"
            judgement = Judgement(Verdict.UNKNOWN, (), (f"the verifier could not go on: {text}",))
        finally:
            end.close()
            if world is not None:
                world.close()
    result = result_of(case, folder, began, judgement)
    result.faults = fired(history)
    result.fired, result.final_read = len(result.faults), bool(end.expected)
    result.sent, result.delivered = end.expected.total(), end.found.total()
    if end.stays_down:
        result.lost, result.undelivered = 0, result.lost
    (folder / "result.json").write_text(json.dumps(result.to_json(), indent=1), encoding="utf-8")
    return result


def _world(case: Case, end: End) -> Any:
    if case.service == PRODUCER:
        return producer.Shop(end)
    return consumer.Sagas(end) if case.sink.startswith("saga") else consumer.Inbox(end)


def _evidence(end: End, trial: Trial) -> Evidence:
    return Evidence(
        Guarantee.EXACTLY_ONCE,
        expected=end.expected,
        final=[Seen(effect) for effect in end.found.elements()],
        required=trial.requires,
        fired=fired(end.history),
        stops=end.stops,
        stays_down=end.stays_down,
    )
