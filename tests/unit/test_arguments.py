"""Public functions name an argument of a wrong type, and what to write, before anything else happens."""

from __future__ import annotations

import datetime as dt
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import delivered
from delivered import UsageError
from delivered.connectors.log import append
from delivered.patterns import inbox, outbox
from delivered.patterns.saga import Log, Saga, Step, run

SOURCE = delivered.log("records")
PIPELINE: dict[str, Any] = {
    "name": "p",
    "guarantee": "exactly_once",
    "checkpoint": "/tmp/cp",
    "source": SOURCE,
    "sinks": [delivered.sqlite("a.db", "t")],
}
SAGA = Saga("s", [Step("one", str, undo=str)])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("audit", "id"),
        ("batch_s_max", "60"),
        ("batch_s_max", True),
        ("conf", [("spark.ui.enabled", "false")]),
        ("master", 2),
        ("notify", "env:URL"),
        ("lineage", None),
        ("lost_records", 0),
        ("repeated_batch", 0),
        ("master", 0),
        ("master", False),
        ("master", b""),
        ("master", []),
        ("missing_ledger", "false"),
        ("new_checkpoint", "false"),
        ("new_target", ""),
        ("on_bad_row", None),
        ("output_mode", None),
    ],
)
def test_a_pipeline(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"ARGUMENT_TYPE\] delivered.Pipeline: {name} is .* Next: write .*{name}="):
        delivered.Pipeline(**{**PIPELINE, name: value})


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: delivered.endpoint(5), "format"),
        (lambda: delivered.endpoint("kafka", name=5), "name"),
        (lambda: delivered.endpoint("kafka", select=5), "select"),
        (lambda: delivered.endpoint("kafka", select=["id", 5]), "select"),
        (lambda: delivered.endpoint("kafka", where=True), "where"),
        (lambda: delivered.endpoint("kafka", audit="id"), "audit"),
        (lambda: delivered.endpoint("kafka", audit=0), "audit"),
        (lambda: delivered.delta(None), "path"),
        (lambda: delivered.files(0), "path"),
        (lambda: delivered.iceberg(False), "table"),
        (lambda: delivered.kafka(0), "bootstrap"),
        (lambda: delivered.log(None), "path"),
        (lambda: delivered.mysql("mysql://db/shop", []), "dbtable"),
        (lambda: delivered.postgres(0, "orders"), "url"),
        (lambda: delivered.sqlite(b"", "orders"), "path"),
        (lambda: delivered.transform("SELECT 1", deterministic=0), "deterministic"),
        (lambda: delivered.transform("SELECT 1", stateful="no"), "stateful"),
        (lambda: delivered.arrow("module:function"), "function"),
        (lambda: delivered.arrow(select="id"), "select"),
        (lambda: delivered.dedup("key", within=60), "within"),
        (lambda: delivered.dedup("key", within="1 hour", time=None), "time"),
        (lambda: delivered.dedup("key", within="1 hour", time="at", late=False), "late"),
        (lambda: delivered.dedup("key", within="1 hour", time="at", memory=0), "memory"),
        (lambda: delivered.session(conf=[]), "conf"),
        (lambda: delivered.session(master=0), "master"),
        (lambda: delivered.receive(SOURCE, idle_s=False), "idle_s"),
        (lambda: delivered.receive(SOURCE, report=0), "report"),
        (lambda: delivered.receive(SOURCE, stop=False), "stop"),
        (lambda: append("log", pa.table({"value": ["one"]}), storage=0), "storage"),
        (lambda: outbox.ddl("sqlite", layout=0), "layout"),
        (lambda: Log(0), "where"),
        (lambda: Step("one", str, undo=False), "undo"),
        (lambda: Step("one", None, undo=str), "do"),
        (lambda: Step("one", str, undo=str, timeout_s="60"), "timeout_s"),
        (lambda: run(Log("sqlite:///sagas.db"), SAGA, ids="order-1"), "ids"),
        (lambda: delivered.receive("pipeline.yaml"), "source"),
        (lambda: delivered.receive(SOURCE, processes="2"), "processes"),
        (lambda: delivered.audit_chain(delivered.Pipeline(**PIPELINE)), "pipelines"),
        (lambda: delivered.audit_chain(["one.yaml", "two.yaml"]), "pipelines"),
        (lambda: Saga("s", Step("one", str, undo=str)), "steps"),
        (lambda: Saga("s", ["one"]), "steps"),
        (lambda: run(SAGA), "where"),
        (lambda: run(Log("sqlite:///sagas.db"), "s"), "saga"),
        (lambda: run(Log("sqlite:///sagas.db"), SAGA, threads="2"), "threads"),
        (lambda: run(Log("sqlite:///sagas.db"), SAGA, threads=0), "threads"),
        (lambda: inbox.clean(sqlite3.connect(":memory:"), ttl=30), "ttl"),
        (lambda: inbox.consume(sqlite3.connect(":memory:"), "id", consumer="c").__enter__(), "delivery"),
    ],
)
def test_a_function(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(UsageError, match=rf"ARGUMENT_TYPE\].*: {name} is .* Next: write "):
        call()


@pytest.mark.parametrize("sinks", [b"", {}, "sqlite"])
def test_sinks(sinks: Any) -> None:
    with pytest.raises(UsageError, match=r"ENDPOINT_VALUE.* must be a list of endpoints"):
        delivered.Pipeline(**{**PIPELINE, "sinks": sinks})


def test_selected_columns() -> None:
    with pytest.raises(UsageError, match="SELECT_VALUE"):
        delivered.endpoint("kafka", select=b"")


@pytest.mark.parametrize("records", [[(b"key", b"value")], {"value": [b"one"]}, "one", 5, None])
def test_records_of_a_log(records: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"table_or_batches is .* Next: write .*pa\.table"):
        append(str(tmp_path / "log"), records)


def test_a_table_by_its_name() -> None:
    with pytest.raises(UsageError, match="TABLE_NAME"):
        inbox.clean(sqlite3.connect(":memory:"), ttl=dt.timedelta(days=1), table=None)  # type: ignore[arg-type]
