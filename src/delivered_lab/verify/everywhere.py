"""One case that passes every failure point: kills and interference one after the other, each in a later batch.

A case of one fault says where a guarantee breaks, and starts its pipeline two to nine times for it. A start of a query
that keeps state takes long: these few starts show that it holds at every failure point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path

from delivered_lab.verify.fault import BROKER, PROXY, Fault
from delivered_lab.verify.fixture import HIT_TIMEOUT_S, Fixture
from delivered_lab.verify.interference import (
    OTHERS,
    hold_lock,
    kill_broker,
    kill_producer,
    read_slowly,
    write_as_others,
)
from delivered_lab.verify.network_faults import DECISION
from delivered_lab.verify.proxy import NetworkFault, Rule
from delivered_lab.verify.proxy_kafka import Api
from delivered_lab.verify.scripts import TRIES_MAX, kill_at, remove_log_entry
from delivered_lab.verify.services import Run
from delivered_lab.verify.systems import KAFKA
from delivered_lab.verify.systems.base import SinkKind
from delivered_lab.verify.two_drivers import start_a_second

Harm = Callable[[Fixture, Run, Path], None]
_MOMENTS = ("before", "after")
_SMALL_BATCHES = {"rows_per_batch": 50}
"""Most starts complete a batch; the last ones must still find some."""
_BEFORE, _RECORDED = ("recover.claim:after", "write.stage:before"), ("log:before", "log:after")
_BETWEEN = ("write.prepare:after", "commit.decide:after", "commit.apply:before")
_STORED, _WORKER, _SENDS = "commit.apply:after", "write.prepare:before", "write.prepare:before"


def everywhere(kind: SinkKind) -> Fault:
    """Under exactly_once, for a sink without two phases, or Kafka."""
    harms = _harms(kind)
    rules = _replies_lost(kind)
    server = kind.server is not None
    parts = {
        "F1": tuple(f"producer killed {m} a send" for m in _MOMENTS),
        "F2": tuple(r.name for r in rules["F2"] for _ in range(r.times)) or harms["F2"][1],
        "F3": ("broker killed",) if server else (f"kill@{_STORED}",),
        "F4": (f"worker killed@{_WORKER}",),
        "F5": tuple(r.name for r in rules["F5"] for _ in range(r.times)) or harms["F5"][1],
        "F6a": tuple(f"kill@{p}" for p in _BEFORE),
        "F6b": tuple(f"kill@{p}" for p in _BETWEEN),
        "F6c": tuple(f"kill@{p}" for p in _RECORDED),
        "F7": harms["F7"][1],
        "F8": ("last commit removed",),
    }

    def script(fixture: Fixture) -> None:
        # A resent payment would be joined twice, rightly; oracles know the source's records, not how often they came.
        kill_producer(fixture, _MOMENTS, portion=20, again=False)
        _survived(fixture, harms)
        if rules["F2"] or rules["F5"]:
            fixture.proxy.add(*(copy(r) for r in (*rules["F2"], *rules["F5"])))
        if server:
            _broker_killed(fixture)
        _worker_killed(fixture)
        for where in (*_BEFORE, *_BETWEEN, *(() if server else (_STORED,)), *_RECORDED):
            _killed(fixture, where)
        remove_log_entry(fixture)
        fixture.drain()
        if fixture.setting.proxy is not None:
            fixture.proxy.clear()

    text = "every failure point in turn: producer, network, server, worker and driver are killed or disturbed"
    fires = tuple(name for names in parts.values() for name in names)
    needs = (BROKER, PROXY) if server else ()
    return Fault("killed-everywhere", "F6b", text, script, fires, extra=_SMALL_BATCHES, needs=needs, parts=parts)


def _harms(kind: SinkKind) -> Mapping[str, tuple[Harm, tuple[str, ...], str]]:
    """Failure point -> what a run survives, the names that fire, and the step before which it happens."""
    found: dict[str, tuple[Harm, tuple[str, ...], str]] = {"F7": (start_a_second, ("second driver",), "commit.decide")}
    if kind.server != KAFKA:
        found["F5"] = (read_slowly, ("reader slow",), "commit.decide")
    if kind.shared:
        found["F2"] = (write_as_others, OTHERS, "commit.apply")
    elif kind.server is None:
        found["F2"] = (hold_lock, ("lock held",), "commit.decide")
    return found


def _replies_lost(kind: SinkKind) -> Mapping[str, tuple[Rule, ...]]:
    """By failure point; none without a proxy."""
    lose = NetworkFault.LOSE_REPLY
    if kind.server == KAFKA:
        apis = (Api.INIT_PRODUCER_ID, Api.ADD_PARTITIONS_TO_TXN, Api.PRODUCE, Api.END_TXN)
        return {"F2": tuple(Rule(a, lose, skip=1) for a in apis), "F5": (Rule(Api.FETCH, lose, skip=3, times=2),)}
    if kind.statements is not None:
        commits = (Rule("COMMIT", lose, text, skip=1) for text in (kind.statements.rows, DECISION))
        return {"F2": tuple(commits), "F5": ()}
    return {"F2": (), "F5": ()}


def _survived(fixture: Fixture, harms: Mapping[str, tuple[Harm, tuple[str, ...], str]]) -> None:
    """One start meets each harm in a batch of its own; it is killed in the batch after them."""
    points = [f"{step}:before@batch={n}!wait" for n, (_, _, step) in enumerate(harms.values(), 1)]
    run = fixture.start(",".join([*points, f"write.stage:before@batch={len(harms) + 1}"]))
    for harm, _, _ in harms.values():
        found = run.wait_hit(HIT_TIMEOUT_S)
        if found is not None:
            harm(fixture, run, found[0])
    _stopped(fixture, run)


def _broker_killed(fixture: Fixture) -> None:
    """The run may survive or fail."""
    run = fixture.start(f"{_SENDS}!wait,log:before")
    found = run.wait_hit(HIT_TIMEOUT_S)
    if found is not None:
        kill_broker(fixture, run, found[0])
    _stopped(fixture, run)


def _worker_killed(fixture: Fixture) -> None:
    for _ in range(TRIES_MAX):
        run = fixture.start(_WORKER)
        found = run.wait_hit(HIT_TIMEOUT_S)
        if found is not None and run.kill_one(found[1].pid):
            fixture.fire(f"worker killed@{_WORKER}", pid=found[1].pid)
            fixture.end(run)
            return
        fixture.end(run)


def _killed(fixture: Fixture, where: str) -> None:
    """Also if starts before fail, as the network loses replies."""
    for _ in range(TRIES_MAX):
        if kill_at(fixture, where):
            return


def _stopped(fixture: Fixture, run: Run) -> None:
    """Kill a run at its next point, unless it ended before."""
    if run.wait_hit(HIT_TIMEOUT_S) is None:
        fixture.end(run)
    else:
        fixture.kill(run)
