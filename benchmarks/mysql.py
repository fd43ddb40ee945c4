"""`python -m benchmarks.mysql`: our engine and sink against plain LOAD DATA and INSERT, in one run, without Spark.

Every case writes the same record batches (1 million rows of 10 columns by default) into a fresh table of the same
server, which shares the machine, from two processes. Cases take turns; compare their ratios, and CPU per row of client
and server together.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

import delivered_lab.brokers
from benchmarks.tables import rows
from delivered.connectors.mysql import CONNECTOR, MysqlOptions
from delivered.connectors.mysql.client import connect
from delivered.connectors.mysql.writer import Loading
from delivered.engine import Sinks
from delivered.model.rows import Rows

parse = MysqlOptions.parse

console = Console()
TASKS, BATCH_ROWS = 2, 32_768
COLUMNS = (
    "id bigint, customer int, name varchar(40), city varchar(40), amount decimal(12,2), price double, paid tinyint(1), "
    "day date, at datetime(6), note text"
)
SERVER = {"innodb_log_file_size": "1G", "innodb_buffer_pool_size": "512M"}


@dataclass(frozen=True)
class Span:
    """Seconds on the clock from `start` to `end`, and of CPU."""

    start: float
    end: float
    cpu: float

    def __add__(self, later: Span) -> Span:
        return Span(self.start, self.end + later.end - later.start, self.cpu + later.cpu)


class Since:
    """The clock of one process; data was made before."""

    def __init__(self) -> None:
        self._start, self._cpu = time.monotonic(), self._used()

    def span(self) -> Span:
        return Span(self._start, time.monotonic(), self._used() - self._cpu)

    @staticmethod
    def _used() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime


def together(spans: Sequence[Span]) -> Span:
    return Span(min(s.start for s in spans), max(s.end for s in spans), sum(s.cpu for s in spans))


def _plain(url: str, table: str, first: int, count: int, local: bool) -> Span:
    """One process: rows into the table in one transaction, no ledger, no fingerprint."""
    data = rows(first, count)
    since = Since()
    options = parse({"url": url, "dbtable": table})
    session = connect(options)
    if not local:
        session.execute("SET GLOBAL local_infile = 0")
    session.execute("START TRANSACTION")
    loading = Loading(session, options, table, ", ".join(f'"{n}"' for n in data.schema.names))
    for batch in data.to_batches(BATCH_ROWS):
        loading.add(batch)
    loading.end()
    session.execute("COMMIT")
    session.execute("SET GLOBAL local_infile = 1")
    session.close()
    return since.span()


def _shard(sink: Any, plan: Any, shard: int, first: int, count: int) -> tuple[Any, Span]:
    from delivered.engine.shard import write_shard

    data = rows(first, count)
    since = Since()
    message = write_shard(Sinks.one(sink), plan, shard, 0, map(Rows, data.to_batches(BATCH_ROWS)), data.schema)
    return message, since.span()


def plain(pool: Any, url: str, table: str, count: int, local: bool) -> Span:
    each = count // TASKS
    return together(pool.starmap(_plain, [(url, table, i * each, each, local) for i in range(TASKS)], chunksize=1))


def engine(pool: Any, url: str, table: str, count: int, mechanism: str) -> Span:
    from delivered.engine.context import Context
    from delivered.engine.decide import commit_batch
    from delivered.engine.recover import plan_batch
    from delivered.model.capability import Guarantee
    from delivered.model.identity import Scope
    from delivered.model.work import CheckpointView, Owner

    sink, each = CONNECTOR.sink({"url": url, "dbtable": table, "mechanism": mechanism}), count // TASKS
    scope = Scope(uuid.uuid4().hex, sink.name, "i")
    context = Context.open(Sinks.one(sink), scope, Guarantee.EXACTLY_ONCE, Owner("o"))
    plan = plan_batch(context, CheckpointView("i", 0, "{}", None), first=True)
    said = pool.starmap(_shard, [(sink, plan, i, i * each, each) for i in range(TASKS)], chunksize=1)
    since = Since()
    commit_batch(context, 0, "{}", [message for message, _ in said])
    context.ledger.close()
    context.committers.close()
    return together([span for _, span in said]) + since.span()


CASES: dict[str, Callable[..., Span]] = {
    "plain LOAD DATA": lambda *given: plain(*given, local=True),
    "plain INSERT of many rows": lambda *given: plain(*given, local=False),
    "engine, two_phase": lambda *given: engine(*given, mechanism="two_phase"),
    "engine, one_transaction": lambda *given: engine(*given, mechanism="one_transaction"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mysql")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/bench-mysql.json"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-mysql-") as folder:
        broker = delivered_lab.brokers.start("mariadb", Path(folder), properties=SERVER, dies_with_parent=True)
        try:
            found = measure(broker.url, broker.pid, given.rows, given.repetitions)
        finally:
            broker.stop()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"rows": given.rows, "cases": found}, indent=1))
    for name, runs in found.items():
        seconds = statistics.median(r["seconds"] for r in runs)
        cpu = statistics.median(r["cpu_seconds"] for r in runs)
        rate, each = given.rows / seconds, 1e6 * cpu / given.rows
        console.print(f"{name}: {seconds:.1f} s, {rate:,.0f} rows/s, {each:.2f} us of CPU per row")


def measure(url: str, server: int, count: int, repeat: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    options = parse({"url": url, "dbtable": "t"})
    process = psutil.Process(server)
    with multiprocessing.get_context("spawn").Pool(TASKS) as pool:
        for repetition in range(repeat + 1):
            for at, (name, case) in enumerate(CASES.items()):
                table = f"t{repetition}_{at}"
                session = connect(options)
                session.execute(f"CREATE TABLE {table} ({COLUMNS})")
                before = sum(process.cpu_times()[:2])
                # The first round warms up, with few rows.
                size = count if repetition else count // 20
                span = case(pool, url, table, size)
                cpu = span.cpu + sum(process.cpu_times()[:2]) - before
                [(there,)] = session.execute(f"SELECT count(*) FROM {table}").fetchall()
                session.execute(f"DROP TABLE {table}")
                session.close()
                if there != size:
                    raise RuntimeError(f"{name}: {there} rows arrived of {size}")
                if repetition:
                    found[name].append({"seconds": span.end - span.start, "cpu_seconds": cpu})
    return found


if __name__ == "__main__":
    main()
