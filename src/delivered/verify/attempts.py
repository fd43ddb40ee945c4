"""Scripts about tasks: one fails and is run again, one is run twice at a time, and records that no attempt takes."""

from __future__ import annotations

from delivered.verify.cluster import Cluster
from delivered.verify.evidence import Stop
from delivered.verify.fixture import HIT_TIMEOUT_S, Fixture
from delivered.verify.scripts import Script
from delivered.verify.services import last_words
from delivered.verify.transforms import POISON

ATTEMPTS_MAX = 4
RETRIES = {"master": f"local[2,{ATTEMPTS_MAX}]"}
"""More keys of a pipeline file whose tasks may fail three times. A local master gives up at once by default."""
_SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "100ms",
}
_MENDED = "delivered.verify.transforms:drops_poison"


def task_retried(*points: str) -> tuple[Script, tuple[str, ...]]:
    """The first attempt of a task fails at the first point, the second one at the second, and so on."""
    failing = [f"{p}@attempt={n}!raise" for n, p in enumerate(points)]

    def script(fixture: Fixture) -> None:
        fixture.send()
        run = fixture.start(",".join(failing))
        while (found := run.wait_hit(HIT_TIMEOUT_S)) is not None:
            fixture.fire(f"task failed@{found[1].point.partition('@')[0]}", facts=dict(found[1].facts))
        fixture.stops.append(Stop((), fixture.end(run), "the run whose task failed"))
        fixture.drain()

    return script, tuple(f"task failed@{p}" for p in points)


def speculation(point: str) -> Script:
    """An attempt stands still until a second one of the same task, on another host, has brought the batch to its end;
    then the first one goes on."""

    def script(fixture: Fixture) -> None:
        fixture.send()
        crash = f"{point}@shard=0@attempt=0!wait"
        before = dict(fixture.extra)
        with Cluster(fixture.folder) as cluster:
            hits = fixture.folder / f"run{len(fixture.runs) + 1}.hits"
            fixture.extra |= {"master": cluster.url, "spark": {**_SPECULATION, **cluster.conf(crash, hits)}}
            run = fixture.start(crash)
            found = run.wait_hit(HIT_TIMEOUT_S)
            if found is not None:
                fixture.wait(lambda: bool(fixture.batches_logged()) or not run.lives, "a second attempt ends the batch")
                if run.lives:
                    fixture.fire("a speculative attempt won", first=dict(found[1].facts))
                run.go_on(found[0])
            fixture.stops.append(Stop((), fixture.end(run), "the run with two attempts of a task"))
        fixture.extra = before
        fixture.drain()

    return script


def poison(fixture: Fixture) -> None:
    """The transform fails at a record, every time; then it is mended, and everything else must come out."""
    fixture.send()
    for _ in range(2):
        # The transform's own error; a query of Spark's ends with its code for what is nobody's but the user's.
        code = fixture.must_stop("?", "QUERY_FAILED", when="a record that the transform cannot take")
        if code is not None and POISON in last_words(fixture.runs[-1]):
            fixture.fire("poison met")
    fixture.arrow = _MENDED
    fixture.drain()


def oversized(fixture: Fixture) -> None:
    """A record is above the client's limit, every time; then the limit is raised, and it must come out too."""
    fixture.send()
    for _ in range(2):
        code = fixture.must_stop("RECORD_TOO_LARGE", when="a record that is too large")
        if code is not None:
            fixture.fire("record too large", code=code)
    fixture.extra["sink"] = {"kafka.message.max.bytes": "2097152"}
    fixture.drain()


def oversized_given_up(fixture: Fixture) -> None:
    """Under at_most_once a record that the sink does not take is given up, and counted; the others go on."""
    fixture.send()
    fixture.drain()
    fixture.audit()
    counts = (fixture.audited or {}).get("counts", {})
    if counts.get("given_up"):
        fixture.fire("record too large", **counts)
