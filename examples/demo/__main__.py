"""`python -m examples.demo [--kafka]`: writes build/demo.json and build/demo.html (build/demo-kafka.*)."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from examples.demo.crashes import BATCH_ROWS, CRASHES
from examples.demo.flights import COUNT, ID, flights
from examples.demo.killing import JVM, Life, live_and_die
from examples.demo.results import Result, failures, table, write
from examples.demo.systems import Embedded, Kafka, System
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import delivered
from delivered.audit.report import render

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SQL = "SELECT CAST(key AS STRING) AS key, CAST(value AS STRING) AS value FROM source"
BATCHES = -(-COUNT // BATCH_ROWS)


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--kafka", action="store_true", help="over a real Kafka instead of a local log and SQLite")
    given.add_argument("--out", type=Path, default=Path("build"), help="where results go")
    arguments = given.parse_args()
    name = "demo-kafka" if arguments.kafka else "demo"
    folder = (arguments.out / name).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    system: System = Kafka(folder) if arguments.kafka else Embedded(folder)
    console = Console()
    began = time.monotonic()
    try:
        results = _demo(system, folder, console)
    finally:
        system.close()
    console.print()
    console.print(table(f"{COUNT:,} flights, {system.name}, read back from the sink", results))
    json_file, page_file = arguments.out / f"{name}.json", arguments.out / f"{name}.html"
    write(results, system.name, json_file, page_file)
    console.print(f"{json_file}, {page_file}; {time.monotonic() - began:.0f} s", soft_wrap=True)
    wrong = failures(results)
    for line in wrong:
        console.print(f"[bold red]{line}[/bold red]")
    for result in results:
        if result.row.verdict != "held":
            console.print(render(result.report))
    return 1 if wrong else 0


def _demo(system: System, folder: Path, console: Console) -> list[Result]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def say(text: str) -> None:
            progress.console.print(f"  {text}", soft_wrap=True)

        step = progress.add_task("reading 336,776 flights", total=1)
        events = flights()
        system.load(events, say)
        progress.update(step, completed=1)
        # Side by side: a start is a row of processes that wait for each other, and leaves half of the machine idle.
        with ThreadPoolExecutor(len(CRASHES)) as pool:
            running = {}
            for guarantee, crashes in CRASHES.items():
                pipeline, checkpoint = _pipeline_file(system, guarantee, folder)
                step = progress.add_task(guarantee, total=BATCHES)
                running[guarantee] = pool.submit(_live, progress, step, guarantee, pipeline, crashes, checkpoint)
            lives = {guarantee: life.result() for guarantee, life in running.items()}
        step = progress.add_task("audit: reading source and sinks", total=len(CRASHES))
        spark = _session(folder / "audit.log")

        def audited(guarantee: str) -> Result:
            pipeline = folder / guarantee / "pipeline.yaml"
            result = _audit(spark.newSession(), pipeline, lives[guarantee], say)
            progress.advance(step)
            return result

        with ThreadPoolExecutor(len(CRASHES)) as pool:
            results = list(pool.map(audited, CRASHES))
        spark.stop()
    return results


def _pipeline_file(system: System, guarantee: str, folder: Path) -> tuple[Path, Path]:
    """What a user would write, kept beside the results."""
    own = folder / guarantee
    own.mkdir()
    checkpoint = own / "checkpoint"
    pipeline: dict[str, Any] = {
        "pipeline": "flights-" + guarantee.replace("_", "-"),
        "guarantee": guarantee,
        "checkpoint": str(checkpoint),
        "source": system.source(),
        "transform": {"sql": SQL},
        "sinks": [system.sink(guarantee)],
        "trigger": "available_now",
        "master": "local[2]",
        "spark": JVM,
        "audit": {"id": ID},
    }
    file = own / "pipeline.yaml"
    file.write_text(yaml.safe_dump(pipeline, sort_keys=False), encoding="utf-8")
    return file, checkpoint


def _live(
    progress: Progress, step: Any, guarantee: str, pipeline: Path, crashes: tuple[str, ...], checkpoint: Path
) -> Life:
    said: list[str] = []

    def show(batches: int, hit: list[str]) -> None:
        progress.update(step, completed=batches)
        for where in hit[len(said) :]:
            said.append(where)
            progress.console.print(f"  {guarantee}: [red]SIGKILL[/red] at {where}; starting again", soft_wrap=True)

    return live_and_die(pipeline, crashes, pipeline.parent, checkpoint, show)


def _session(log: Path) -> SparkSession:
    """One session for all audits. What its JVM says goes into a file: it would tear the progress display."""
    from delivered.spark.session import session

    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
            return session(
                "audit",
                master="local[2]",
                conf={"spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "2"},
            )
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _audit(spark: SparkSession, pipeline: Path, life: Life, say: Callable[[str], None]) -> Result:
    made = delivered.Pipeline.from_file(pipeline)
    return Result(made.audit(spark, progress=lambda text: say(f"{made.guarantee}: {text}")), life)


if __name__ == "__main__":
    sys.exit(main())
