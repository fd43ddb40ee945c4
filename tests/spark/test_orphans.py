"""Python workers that outlive their daemon belong to this driver, and do not make it refuse to start."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.spark.log_to_sqlite import produce, rows, until

import delivered
from delivered.engine.context import open_shared_ledger
from delivered.model.translate import translated
from delivered.prefork import TASKS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.damages_session


def jvm(spark: SparkSession) -> psutil.Process:
    return psutil.Process(int(spark._jvm.java.lang.ProcessHandle.current().toString()))


def _is_daemon(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and any(a.endswith("spark.daemon") for a in process.cmdline())
    except psutil.NoSuchProcess:
        return False  # a child of the JVM that ended meanwhile


def _runs_tasks(process: psutil.Process | None) -> bool:
    try:
        return process is not None and process.name() == TASKS
    except psutil.NoSuchProcess:
        return False


def kill_daemons(spark: SparkSession) -> list[psutil.Process]:
    """Kill the daemon that forks workers for tasks; return the surviving workers."""
    daemons = [p for p in psutil.Process().children(recursive=True) if _runs_tasks(p) and not _runs_tasks(p.parent())]
    workers = [w for d in daemons for w in d.children()]
    for daemon in daemons:
        os.kill(daemon.pid, signal.SIGKILL)
    assert daemons
    return workers


def copying(folder: Path, name: str) -> delivered.Pipeline:
    return delivered.Pipeline(
        name=name,
        guarantee="exactly_once",
        checkpoint=folder / "checkpoint",
        source=delivered.log(str(folder / "in")),
        sinks=[delivered.sqlite(str(folder / "out.db"), "orders")],
        transform="SELECT key, value FROM source",
    )


def test_a_query_restarts_beside_its_own_orphans(spark: SparkSession, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        produce(folder / "in", 0, 20)
    running = copying(first, "first").start(spark)
    until(lambda: rows(first) == 20 or not running.isActive)
    orphans = kill_daemons(spark)
    assert any(o.is_running() for o in orphans)
    # One that starts now is planned by a worker whose parent is gone.
    other = copying(second, "second")
    query = other.start(spark)
    until(lambda: rows(second) == 20 or not query.isActive)
    query.stop()
    spec = other.spec
    sinks = spec.open()
    ledger = open_shared_ledger(sinks, spec.scope(sinks, str(query.id)))
    owner = ledger.look().owner
    ledger.close()
    assert owner is not None and owner.process == jvm(spark).pid
    produce(second / "in", 20, 20)
    again = other.start(spark)
    until(lambda: rows(second) == 40 or not again.isActive)
    again.stop()
    # And the one that ran when the daemon was killed.
    running.stop()
    produce(first / "in", 20, 20)
    running = copying(first, "first").start(spark)
    until(lambda: rows(first) == 40 or not running.isActive)
    running.stop()
    with sqlite3.connect(f"file:{first / 'out.db'}?mode=ro", uri=True) as connection:
        assert connection.execute("SELECT count(*), count(DISTINCT value) FROM orders").fetchone() == (40, 40)


def test_a_killed_worker_ends_a_query_that_may_be_started_again(spark: SparkSession, tmp_path: Path) -> None:
    """Spark says no more than "no cause message" of it."""
    produce(tmp_path / "in", 0, 20)
    query = copying(tmp_path, "killed").start(spark)
    until(lambda: rows(tmp_path) == 20 or not query.isActive)
    for process in jvm(spark).children():
        with suppress(psutil.NoSuchProcess):  # others come and go
            if process.status() != psutil.STATUS_ZOMBIE and "streaming_source_runner" in " ".join(process.cmdline()):
                for worker in process.children() if _is_daemon(process) else [process]:
                    worker.kill()
    until(lambda: not query.isActive)
    failure = query.exception()
    assert failure is not None
    found = translated(failure)
    assert found is not None, str(failure)
    assert found.code == "DELIVERED_WORKER_DIED"
    assert (found.next_step or "").startswith("restart the pipeline")
    produce(tmp_path / "in", 20, 20)
    query = copying(tmp_path, "killed").start(spark)
    until(lambda: rows(tmp_path) == 40 or not query.isActive)
    query.stop()
    with sqlite3.connect(f"file:{tmp_path / 'out.db'}?mode=ro", uri=True) as connection:
        assert connection.execute("SELECT count(*), count(DISTINCT value) FROM orders").fetchone() == (40, 40)
