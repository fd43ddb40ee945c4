"""In how many of our files one batch from Kafka into PostgreSQL runs, and how many of our modules it loads.

    python -m tools.happy_path [--lines] [--tighten]

Starts both servers, runs two batches through Spark, exactly once, and traces Spark's Python processes: those of the
driver and of the tasks. Counted are lines of functions that they run in the second batch, when the ledger is claimed
and clients are connected; module-level code counts as loading. The result is stored in build/size.json; `--tighten`
lowers the bounds in ARCHITECTURE.md, `--lines` lists the lines of each file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.kafka_tools import produce
from tests.support.servers import Kafka, Postgres

from tools import size

TRACED = Path(__file__).with_name("traced")
PROCESSES = ("driver", "task")
RECORDS = 100
FILES, MODULES = size.HAPPY_PATH


def job(bootstrap: str, topic: str, url: str, table: str, checkpoint: str) -> None:
    """The pipeline, in a process of its own."""
    import delivered

    spark = delivered.session("happy-path", "local[2]")
    pipeline = delivered.Pipeline(
        name="happy-path",
        guarantee="exactly_once",
        checkpoint=checkpoint,
        source=delivered.kafka(
            bootstrap, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=RECORDS // 2
        ),
        transform="SELECT CAST(key AS STRING) AS id, CAST(value AS STRING) AS payload FROM source",
        sinks=[delivered.postgres(url, dbtable=table)],
        trigger="available_now",
    )
    query = pipeline.start(spark)
    query.awaitTermination()
    spark.stop()


def measure(kafka: Kafka, postgres: Postgres, folder: Path) -> dict[str, Any]:
    """Run a hundred records as two batches.

    Returns:
        files: path below src -> numbers of the lines that ran in the second batch, in driver or task.
        driver, task: which of the files ran there.
        first_batch_only: files that ran in the first batch alone.
        modules: all that either process loaded, as paths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trace, output, checkpoint = folder / "trace", folder / "output", folder / "checkpoint"
    paths = [str(TRACED), str(size.ROOT), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "DELIVERED_TRACED": str(trace),
        "DELIVERED_TRACED_PACKAGE": str(size.SOURCE),
        "DELIVERED_TRACED_COMMIT": str(checkpoint / "commits" / "0"),
    }
    topic, table = kafka.topic(2), postgres.table("id text, payload text")
    produce(kafka.bootstrap, topic, [(b"%d" % i, b"v") for i in range(RECORDS)])
    call = f"from tools.happy_path import job; job{(kafka.bootstrap, topic, postgres.url, table, str(checkpoint))!r}"
    with output.open("wb") as stream:
        done = subprocess.run([sys.executable, "-c", call], env=env, stdout=stream, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"the pipeline failed: {output.read_text(errors='replace')[-4000:]}")
    [(rows,)] = postgres.execute(f"SELECT count(*) FROM {table}")
    if rows != RECORDS:
        raise RuntimeError(f"{rows} of {RECORDS} rows are in the table")
    return read(trace)


def read(trace: Path) -> dict[str, Any]:
    """What a trace says, as `measure` returns it."""
    lines: dict[str, set[int]] = defaultdict(set)
    processes: dict[str, set[str]] = {process: set() for process in PROCESSES}
    first, modules = set(), set()
    for record in trace.read_text().splitlines():
        process, phase, path, line = record.split("\t")
        path = str(Path(path).relative_to(size.SOURCE.parent))
        if line == "loads":  # also in the template and the daemon, from which Spark's processes are forked
            modules |= {path} if process != "application" else set()
        elif process in PROCESSES and phase == "first":
            first.add(path)
        elif process in PROCESSES:
            lines[path].add(int(line))
            processes[process].add(path)
    return {
        "files": {path: sorted(lines[path]) for path in sorted(lines)},
        **{process: sorted(paths) for process, paths in processes.items()},
        "first_batch_only": sorted(first - set(lines)),
        "modules": sorted(modules),
    }


def bounded(found: dict[str, Any]) -> dict[str, int]:
    """What ARCHITECTURE.md bounds of it."""
    return {FILES: len(found["files"]), MODULES: len(found["modules"])}


def table(found: dict[str, Any], lines: bool = False) -> str:
    rows = []
    for path, numbers in found["files"].items():
        where = "+".join(process for process in PROCESSES if path in found[process])
        rows.append(f"{path:<52}{len(numbers):>6}  {where}")
        if lines:
            rows.append(f"  {', '.join(map(str, numbers))}")
    ran = sum(map(len, found["files"].values()))
    unused = [path for path in found["modules"] if path not in {*found["files"], *found["first_batch_only"]}]
    return "\n".join(
        [
            *rows,
            f"{FILES}: {len(found['files'])}, {ran:,} lines run of {_lines(found['files']):,}; in the first batch:",
            *(f"  {path}" for path in found["first_batch_only"]),
            f"{MODULES}: {len(found['modules'])}, {_lines(found['modules']):,} lines; no function of these runs:",
            *(f"  {path}" for path in unused),
        ]
    )


def _lines(paths: Iterable[str]) -> int:
    return sum(len((size.ROOT / "src" / path).read_text().splitlines()) for path in paths)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", action="store_true", help="list the lines of each file")
    parser.add_argument("--tighten", action="store_true", help="lower the bounds of ARCHITECTURE.md to what is there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="happy-path-") as folder:
        place = Path(folder)
        kafka, postgres = Kafka.start(place / "kafka"), Postgres.start(place / "postgres")
        try:
            found = measure(kafka, postgres, place / "job")
        finally:
            postgres.end()
            kafka.end()
    if given.tighten:
        page = size.PAGE.read_text(encoding="utf-8")
        size.PAGE.write_text(size.tightened(page, bounded(found)), encoding="utf-8")
    size.store({"happy_path": found})
    print(table(found, given.lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
