"""Scripts about tasks: one fails and is run again, one is run twice at a time, and records that no attempt takes."""

from __future__ import annotations

from delivered.verify.bench import HIT_TIMEOUT_S, Bench
from delivered.verify.cluster import Cluster
from delivered.verify.evidence import Stop
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

    def script(bench: Bench) -> None:
        bench.send()
        run = bench.start(",".join(failing))
        while (found := run.wait_hit(HIT_TIMEOUT_S)) is not None:
            bench.fire(f"task failed@{found[1].point.partition('@')[0]}", facts=dict(found[1].facts))
        bench.stops.append(Stop((), bench.end(run), "the run whose task failed"))
        bench.drain()

    return script, tuple(f"task failed@{p}" for p in points)


def speculation(point: str) -> Script:
    """An attempt stands still until a second one of the same task, on another host, has brought the batch to its end;
    then the first one goes on."""

    def script(bench: Bench) -> None:
        bench.send()
        crash = f"{point}@shard=0@attempt=0!wait"
        before = dict(bench.extra)
        with Cluster(bench.folder) as cluster:
            hits = bench.folder / f"run{len(bench.runs) + 1}.hits"
            bench.extra |= {"master": cluster.url, "spark": {**_SPECULATION, **cluster.conf(crash, hits)}}
            run = bench.start(crash)
            found = run.wait_hit(HIT_TIMEOUT_S)
            if found is not None:
                bench.wait(lambda: bool(bench.batches_logged()) or not run.lives, "a second attempt ends the batch")
                if run.lives:
                    bench.fire("a speculative attempt won", first=dict(found[1].facts))
                run.go_on(found[0])
            bench.stops.append(Stop((), bench.end(run), "the run with two attempts of a task"))
        bench.extra = before
        bench.drain()

    return script


def poison(bench: Bench) -> None:
    """The transform fails at a record, every time; then it is mended, and everything else must come out."""
    bench.send()
    for _ in range(2):
        # The transform's own error; a query of Spark's ends with its code for what is nobody's but the user's.
        code = bench.must_stop("?", "QUERY_FAILED", when="a record that the transform cannot take")
        if code is not None and POISON in last_words(bench.runs[-1]):
            bench.fire("poison met")
    bench.arrow = _MENDED
    bench.drain()


def oversized(bench: Bench) -> None:
    """A record is above the client's limit, every time; then the limit is raised, and it must come out too."""
    bench.send()
    for _ in range(2):
        code = bench.must_stop("RECORD_TOO_LARGE", when="a record that is too large")
        if code is not None:
            bench.fire("record too large", code=code)
    bench.extra["sink"] = {"kafka.message.max.bytes": "2097152"}
    bench.drain()


def oversized_given_up(bench: Bench) -> None:
    """Under at_most_once a record that the sink does not take is given up, and counted; the others go on."""
    bench.send()
    bench.drain()
    bench.audit()
    counts = (bench.audited or {}).get("counts", {})
    if counts.get("given_up"):
        bench.fire("record too large", **counts)
