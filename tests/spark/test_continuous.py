"""Audits beside a running pipeline: in `delivered run`, and in `delivered audit --follow`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tests.spark.cli_help import WAIT_S, running, until
from tests.spark.log_to_sqlite import produce

import delivered
from delivered.audit.seal import Sealed
from delivered.audit.spark.audit import load_of
from delivered.checkpoint.history import audits
from delivered.engine.context import open_ledger
from delivered.model.identity import Scope
from delivered.operate.continuous import Load
from delivered.operate.status import read_seals
from delivered.pipeline.definition import Definition


def written(folder: Path, **more: object) -> Path:
    """A pipeline from a log to SQLite, as a file; without a transform, audits need no Spark."""
    produce(folder / "in", 0, 40)
    pipeline = {
        "pipeline": "orders", "guarantee": "exactly_once", "checkpoint": "checkpoint", "trigger": "1 second",
        "source": {"format": "log", "path": "in"}, "master": "local[2]",
        "sinks": [{"format": "sqlite", "path": "out.db", "table": "orders"}], **more,
    }  # fmt: skip
    file = folder / "orders.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    return file


def sealed(file: Path) -> Sealed:
    sink = Definition.from_file(file).sinks[0].sink()
    with contextlib.closing(open_ledger(sink, Scope("orders", sink.name, "none"))) as ledger:
        return read_seals(ledger, sink.name)


def records(file: Path) -> int:
    """In all sealed batches, which held."""
    found = sealed(file)
    assert found.verdict in (None, "held") and not found.faults
    return 0 if found.last is None else found.last.total.counts.delivered


@pytest.mark.matrix
def test_a_running_pipeline_seals_what_it_delivers_and_both_stop_together(tmp_path: Path) -> None:
    file = written(tmp_path, audit={"every": "1 s", "share": "100 %"})
    with running("run", str(file), "--output", "json") as process:
        until(lambda: records(file) == 40, process)
        produce(tmp_path / "in", 40, 40)
        until(lambda: records(file) == 80, process)
        produce(tmp_path / "in", 80, 40)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert json.loads(out.splitlines()[-1])["between_batches"] is True
    assert {line["verdict"] for line in audits(str(tmp_path / "checkpoint"))} == {"held"}, "none is half"
    assert [r.state for r in sealed(file).ranges] == ["held"]


def at(offset: int | None) -> Any:
    return None if offset is None else {"orders": {"0": offset}}


@pytest.mark.parametrize(
    ("message", "sources", "expected"),
    [
        ("Processing new data", [(0, 10, 30)], Load(idle=False, behind=True)),
        ("Waiting for data to arrive", [(0, 10, 20)], Load(idle=True, behind=False)),
        ("Waiting for next trigger", [(0, 10, 10), (0, 5, 11)], Load(idle=True, behind=True)),
        ("Waiting for data to arrive", [(None, 10, 20)], Load(idle=True, behind=False)),
        ("Waiting for data to arrive", [(0, 10, None)], Load(idle=True, behind=None)),
    ],
    ids=["more waits", "as much waits", "one of two", "its first batch", "before Spark 4.2"],
)
def test_a_query_is_behind_if_more_waits_than_its_last_batch_took(
    message: str, sources: list[tuple[int | None, int | None, int | None]], expected: Load
) -> None:
    names = ("startOffset", "endOffset", "latestOffset")
    progress = {"sources": [dict(zip(names, map(at, offsets), strict=True)) for offsets in sources]}
    assert load_of(SimpleNamespace(isActive=True, status={"message": message}, lastProgress=progress)) == expected


def test_a_query_without_a_batch_or_that_has_ended_is_not_behind() -> None:
    status = {"message": "Initializing sources"}
    assert load_of(SimpleNamespace(isActive=True, status=status, lastProgress=None)) == Load(idle=False)
    assert load_of(SimpleNamespace(isActive=False)) == Load(idle=True, behind=False)


@pytest.mark.matrix
def test_a_handle_of_a_notebook_audits_until_it_is_stopped(spark: Any, tmp_path: Path) -> None:
    """Beside a query of the same session, whose settings stay as they were."""
    file = written(tmp_path, transform={"sql": "SELECT key, value FROM source"})
    pipeline = delivered.Pipeline.from_file(file)
    query = pipeline.start(spark)
    before = dict(spark.conf.getAll)
    audits_of = pipeline.audit(spark, every="1 s", share="100 %")
    try:
        deadline = time.monotonic() + WAIT_S
        while records(file) < 40:
            assert query.isActive and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        assert audits_of.stop(WAIT_S)
        assert pipeline.stop(query, WAIT_S)
    assert spark.sparkContext.getLocalProperty("spark.scheduler.pool") is None
    assert dict(spark.conf.getAll) == before


@pytest.mark.matrix
def test_two_followers_beside_a_running_pipeline(tmp_path: Path) -> None:
    """One seals, the other continues from there; one that is killed leaves a chain; SIGTERM ends it within seconds."""
    file = written(tmp_path)
    more = ("--every", "1 s", "--share", "100 %")
    with (
        running("run", str(file), "--output", "json") as driver,
        running("audit", "--follow", str(tmp_path), *more, own_group=True) as one,
        running("audit", "--follow", str(file), *more) as two,
    ):
        for sent in range(40, 200, 40):
            until(lambda sent=sent: records(file) == sent, driver)  # type: ignore[misc]
            if sent == 80:
                os.killpg(one.pid, signal.SIGKILL)
            produce(tmp_path / "in", sent, 40)
        until(lambda: records(file) == 200, driver)
        began = time.monotonic()
        two.send_signal(signal.SIGTERM)
        _, said = two.communicate(timeout=WAIT_S)
        print(f"ended in {time.monotonic() - began:.1f} s")
        assert two.returncode == 0 and "Traceback" not in said, said
        assert "orders orders: held" in said
        driver.send_signal(signal.SIGTERM)
        _, err = driver.communicate(timeout=WAIT_S)
        assert driver.returncode == 0, err
    found = sealed(file)
    assert found.last is not None and found.faults == () and [r.state for r in found.ranges] == ["held"]
    assert {line["verdict"] for line in audits(str(tmp_path / "checkpoint"))} == {"held"}
