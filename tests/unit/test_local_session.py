"""Accelerators of a local session's start are optional and never interfere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from delivered.cli import class_archive
from delivered.prefork import worker_python
from delivered.spark.check import advice
from delivered.spark.session import forked_workers, with_archive

_OPTIONS = "spark.driver.extraJavaOptions"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELIVERED_CACHE", str(tmp_path / "cache with a space"))
    monkeypatch.delenv("SPARK_HOME", raising=False)


def _path_of_a_worker(python: str, given: str) -> str:
    code = "import os, sys; sys.stdout.write(os.environ['PYTHONPATH'])"
    done = subprocess.run(
        [python, "-c", code], env={**os.environ, "PYTHONPATH": given}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_workers_read_the_installed_package_and_keep_the_users_path() -> None:
    own = "/opt/env/pyspark"
    zips = f"{own}/python/lib/pyspark.zip:{own}/python/lib/py4j-0.10-src.zip:{own}/jars/spark-core_2.13-4.3.0.jar"
    assert (
        _path_of_a_worker(worker_python(), f"{zips}:/home/me/my lib:/home/me/*.zip") == "/home/me/my lib:/home/me/*.zip"
    )


def test_workers_are_this_interpreter() -> None:
    done = subprocess.run(
        [worker_python(), "-c", "import sys; print(sys.executable, *sys.argv[1:])", "a b", "*"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split(" ", 1) == [sys.executable, "a b *\n"]


def test_a_spark_of_its_own_keeps_its_zip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert worker_python() == sys.executable


def test_a_cache_that_cannot_be_written_costs_time_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DELIVERED_CACHE", str(tmp_path / "file"))
    assert worker_python() == sys.executable
    assert with_archive({"a": "b"}) == {"a": "b"}


def test_the_archive_is_used_only_if_it_is_there() -> None:
    assert with_archive({_OPTIONS: "-Xmx1g"}) == {_OPTIONS: "-Xmx1g"}
    file = class_archive.archive()
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    assert with_archive({_OPTIONS: "-Xmx1g"})[_OPTIONS].startswith(f'-Xmx1g "-XX:SharedArchiveFile={file}"')
    assert "SharedArchiveFile" in with_archive({})[_OPTIONS]


def test_an_archive_that_the_user_names_stays_his() -> None:
    file = class_archive.archive()
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    own = {_OPTIONS: "-XX:SharedArchiveFile=/mine.jsa"}
    assert with_archive(own) == own


def test_only_workers_of_this_interpreter_are_forked_with_our_imports() -> None:
    ours = {"spark.python.daemon.module": "delivered.spark.daemon"}
    assert forked_workers(sys.executable) == forked_workers(worker_python()) == ours
    assert forked_workers("/opt/other/bin/python") == {}


def test_what_a_session_lacks_for_cheap_tasks() -> None:
    both = {"spark.python.unix.domain.socket.enabled": "true", "spark.python.daemon.module": "my.daemon"}
    assert advice(both.get) == {}
    assert set(advice({}.get)) == {"WORKERS_OVER_TCP", "WORKERS_IMPORT"}
    assert set(advice({"spark.python.unix.domain.socket.enabled": "true"}.get)) == {"WORKERS_IMPORT"}
