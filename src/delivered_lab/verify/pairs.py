"""Scripts for faults of pairs: driver and server die together, hosts whose clocks differ, a stage that runs again, a
source that lost its end."""

from __future__ import annotations

import json

from delivered_lab.verify.evidence import Stop
from delivered_lab.verify.fixture import HIT_TIMEOUT_S, Fixture
from delivered_lab.verify.scripts import RETRIES, Scripted, after, kill_at, must_go_through, point_of
from delivered_lab.verify.services import STAGE_RERUNS, VerifierError, last_words
from delivered_lab.verify.systems.base import LosesEnd

BACK_FIRST_S = 3.0
"""The pipeline starts at most so long after the server is back: within it, the server finishes what it had open."""
HOUR_S = 3_600


def killed_together(*points: str) -> Scripted:
    """At each point driver and server are killed; the server is back first, by a seeded time; then the pipeline
    starts."""

    def script(fixture: Fixture) -> None:
        fixture.send()
        for where in points:
            run = fixture.start(where)
            if run.wait_hit(HIT_TIMEOUT_S) is None:
                fixture.end(run)
                continue
            pid = fixture.broker.pid
            fixture.broker.kill()
            fixture.kill(run)
            fixture.broker.restart()
            first_s = round(fixture.random.uniform(0, BACK_FIRST_S), 2)
            fixture.wait(after(first_s), "the server is back first")
            fixture.fire(f"driver and server killed@{where}", server=pid, back_first_s=first_s)
        fixture.drain()

    return script, tuple(f"driver and server killed@{p}" for p in points)


CLOCKS = ("a clock an hour ahead", "a clock that is right", "a clock an hour behind")


def clocks_differ(fixture: Fixture) -> None:
    """Three checkpoints follow each other, each on a host whose clock is earlier by an hour. The second one dies after
    a decision: the third must finish it, though by the clocks it is older than the first one's."""
    decide = point_of(fixture, "decide")
    fixture.send(0.3)
    fixture.clock_s = HOUR_S
    must_go_through(fixture, "on a host whose clock is an hour ahead")
    _clock_read(fixture, CLOCKS[0])
    _next_checkpoint(fixture)
    fixture.send(0.3)
    fixture.clock_s = 0
    if kill_at(fixture, f"{decide}:after"):
        fixture.fire(CLOCKS[1])
    _next_checkpoint(fixture)
    fixture.send()
    fixture.clock_s = -HOUR_S
    fixture.drain()
    _clock_read(fixture, CLOCKS[2])


def _clock_read(fixture: Fixture, name: str) -> None:
    """Recorded only if the commit engine really read that clock."""
    if fixture.clock_read(fixture.runs[-1]).exists():
        fixture.fire(name, seconds=fixture.clock_s)


def _next_checkpoint(fixture: Fixture) -> None:
    """A new checkpoint that starts where this one's last planned batch ended."""
    newest = fixture.batches_planned()[-1]
    offsets = (fixture.checkpoint / "offsets" / str(newest)).read_text(encoding="utf-8").splitlines()[2]
    fixture.checkpoint.rename(fixture.checkpoint.with_name(f"{fixture.checkpoint.name}.{len(fixture.runs)}"))
    fixture.extra["source"] = {"startingOffsets": json.dumps(json.loads(offsets))}
    fixture.extra["pipeline"] = {"new_checkpoint": "accept"}


STAGE_RERUN = {**RETRIES, "spark": {STAGE_RERUNS: "true"}}
"""More keys of a pipeline file: a failed task runs again in a new attempt of its stage, and is numbered 0 again."""


def stage_rerun(*points: str) -> Scripted:
    """At each point a task fails, and runs again under the number of its first attempt."""
    failing = ",".join(f"{p}!raise" for p in points)

    def script(fixture: Fixture) -> None:
        fixture.send()
        run = fixture.start(failing)
        while (found := run.wait_hit(HIT_TIMEOUT_S)) is not None:
            fixture.fire(f"stage rerun@{found[1].point.partition('!')[0]}", facts=dict(found[1].facts))
        code = fixture.end(run)
        fixture.stops.append(Stop((), code, f"the run whose stage ran again: {last_words(run)}" if code else ""))
        fixture.drain()

    return script, tuple(f"stage rerun@{p}" for p in points)


LOST_END = ("the source lost its end", "its log grew past the position")


def source_lost_end(fixture: Fixture) -> None:
    """The source loses records that were delivered, and takes new ones, which now have their offsets: whoever goes on
    at the old position never reads them. Each start must say so."""
    source = fixture.setting.source
    if not isinstance(source, LosesEnd):
        raise VerifierError("SOURCE_CANNOT", f"The source of case {fixture.setting.name} cannot lose its end.")
    for share in (0.2, 0.1):  # in two record batches of each partition
        fixture.send(share)
    must_go_through(fixture, "the first part")
    before, server = source.read(), fixture.source_broker
    server.kill()
    partition, end = source.lose_end(server.folder)
    server.restart()
    fixture.lost += [r for r in before if r.partition == partition and r.position >= end]
    if fixture.lost:
        fixture.fire(LOST_END[0], partition=partition, end=end, records=len(fixture.lost))
    fixture.send()
    if sum(r.partition == partition for r in source.read()) > end + len(fixture.lost):
        fixture.fire(LOST_END[1])
    fixture.stays_down = True
    for _ in range(2):
        fixture.must_stop("DATA_LOST", when="the log that lost its end")
