"""Mistakes of a user on the command line: each ends with the documented exit code, a code, and what to do next."""

from __future__ import annotations

import socket
import socketserver
import sqlite3
import sys
import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType, YearMonthIntervalType
from tests.support.decided import checkpoint, decide, pipeline
from typer.testing import CliRunner

import delivered
from delivered.cli.main import app
from delivered.clients.kafka.channel import Channel, Security
from delivered.connectors.log.produce import append
from delivered.model.capability import Guarantee
from delivered.model.errors import UsageError
from delivered.model.work import Owner
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.facts import PROBES
from delivered.planner import Refusal
from delivered.spark.internals import to_arrow

FILE = """\
pipeline: orders
guarantee: exactly_once
checkpoint: {folder}/checkpoint
source: {{format: log, path: {folder}/in}}
transform: {{sql: "SELECT CAST(value AS STRING) AS id FROM source"}}
sinks: [{{format: sqlite, path: {folder}/out.db, table: orders, ifNotExists: false}}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "pyspark.sql", raising=False)  # with a session of other tests
    append(str(tmp_path / "in"), pa.table({"value": [b"a"]}))
    with closing(sqlite3.connect(tmp_path / "out.db")) as connection:
        connection.execute("CREATE TABLE orders (id TEXT)")
        connection.execute(
            "CREATE TABLE strict (n INTEGER PRIMARY KEY, id TEXT, at TEXT NOT NULL, v TEXT NOT NULL DEFAULT '')"
        )
    (tmp_path / "orders.yaml").write_text(FILE.format(folder=tmp_path))
    (tmp_path / "file").touch()
    (tmp_path / "broken.py").write_text("def clean(df)")
    (tmp_path / "utf-16.yaml").write_text(FILE, encoding="utf-16")
    return tmp_path


@dataclass(frozen=True)
class Mistake:
    """
    Attributes:
        args: of the command; FILE and FOLDER stand for the pipeline's.
        change: of the file: what it says, and what it says instead.
        next: part of the next step.
    """

    args: str
    code: str
    next: str
    change: tuple[str, str] = ("", "")
    exit_code: int = 2


MISTAKES = {
    "guarantee": Mistake("plan FILE", "FILE_INVALID", "did you mean exactly_once?", ("exactly_once", "exactly_onse")),
    "guarantee option": Mistake("plan FILE --guarantee atleast_once", "FILE_INVALID", "did you mean at_least_once?"),
    "key": Mistake("plan FILE", "FILE_INVALID", "write 'checkpoint'", ("checkpoint:", "checkpont:")),
    "key of a sink": Mistake("plan FILE", "FILE_INVALID", "write 'pipeline'", ("pipeline:", "name:")),
    "kind of value": Mistake("plan FILE", "FILE_INVALID", "a list", ("sinks: [", "sinks: 7 # [")),
    "one source as several": Mistake("plan FILE", "FILE_INVALID", "write 'source'; or name", ("source:", "sources:")),
    "name of a pipeline": Mistake("plan FILE", "FILE_INVALID", "write pipeline", (": orders", ": my/orders")),
    "tab": Mistake("plan FILE", "FILE_NOT_YAML", "replace the tab in line 2", ("guarantee:", "\tguarantee:")),
    "bracket": Mistake("plan FILE", "FILE_NOT_YAML", "close the { of line 4", ("/in}", "/in")),
    "colon": Mistake("plan FILE", "FILE_NOT_YAML", "quote the value in line 1", ("orders", "orders: all")),
    "no guarantee": Mistake("plan FILE", "FILE_INVALID", "at_least_once or", ("guarantee: exactly_once", "")),
    "trigger": Mistake("plan FILE", "TRIGGER_VALUE", "10 seconds", ("transform:", "trigger: 10 secs\ntransform:")),
    "no unit": Mistake("plan FILE", "FILE_INVALID", "10 seconds", ("transform:", "trigger: 10\ntransform:")),
    "override": Mistake("plan FILE -s sorce.path=/in", "FILE_INVALID", "write 'source'"),
    "format": Mistake("plan FILE", "FORMAT_UNKNOWN", "write 'sqlite'", ("format: sqlite", "format: sqllite")),
    "option": Mistake("plan FILE", "OPTION_UNKNOWN", "write 'table'", ("table:", "tabel:")),
    "table": Mistake("plan FILE", "TABLE_MISSING", "did you mean orders?", ("table: orders", "table: order")),
    "source": Mistake("plan FILE", "LOG_MISSING", "", ("/in}", "/inn}")),
    "column": Mistake("plan FILE", "SQL_INVALID", "did you mean value?", ("CAST(value", "CAST(vale")),
    "keyword": Mistake("plan FILE", "SQL_INVALID", "did you mean SELECT?", ("SELECT", "SELEC")),
    "function": Mistake("plan FILE", "SQL_INVALID", "did you mean upper?", ("CAST(value AS STRING)", "uper(value)")),
    "arguments": Mistake("plan FILE", "SQL_INVALID", "takes 2 arguments", ("CAST(value AS STRING)", "sha2(value)")),
    "setting of librdkafka": Mistake("plan FILE", "OPTION_UNKNOWN", "did you mean kafka.compression.type?", (
        "{format: sqlite, path: FOLDER/out.db, table: orders, ifNotExists: false}",
        "{format: kafka, kafka.bootstrap.servers: '127.0.0.1:CLOSED', topic: orders, kafka.compresion.type: zstd}",
    )),
    "other tool's name": Mistake("plan FILE", "OPTION_UNKNOWN", "write 'path'", ("log, path:", "log, location:")),
    "view": Mistake("plan FILE", "SQL_INVALID", "did you mean source?", ("FROM source", "FROM sources")),
    "type": Mistake("plan FILE", "COLUMN_TYPE", "cast", ("CAST(value AS STRING)", "CAST(value AS BIGINT)")),
    "name of a column": Mistake("plan FILE", "COLUMN_MISSING", "ALTER TABLE", ("AS id", "AS ident")),
    "aggregate": Mistake("plan FILE", "OUTPUT_MODE", "output_mode", ("CAST(value AS STRING)", "max(value)")),
    "secret": Mistake("plan FILE", "SECRET_MISSING", "", (
        "{format: sqlite, path: FOLDER/out.db, table: orders, ifNotExists: false}",
        "{format: postgres, url: 'postgresql://127.0.0.1:CLOSED/shop', dbtable: orders, password: 'env:NO_SUCH'}",
    )),
    "start": Mistake("plan FILE", "PARTITION_UNKNOWN", "", ("/in}", "/in, startingOffsets: '{\"7\": 3}'}")),
    "end": Mistake("plan FILE", "OPTION_CONFLICT", "remove it", ("/in}", "/in, endingOffsets: latest}")),
    "required": Mistake("plan FILE", "COLUMN_REQUIRED", "add them", ("table: orders", "table: strict")),
    "partition": Mistake("plan FILE", "PARTITION_TYPE", "", (
        "{format: sqlite, path: FOLDER/out.db, table: orders, ifNotExists: false}",
        "{format: delta, path: FOLDER/table, partitionBy: day}",
    )),
    "loop": Mistake("plan FILE", "SINK_IS_SOURCE", 'where: "..."', (
        "{format: sqlite, path: FOLDER/out.db, table: orders, ifNotExists: false}", "{format: delta, path: FOLDER/in}",
    )),
    "unique index": Mistake("plan FILE", "KEY_NOT_UNIQUE", 'CREATE UNIQUE INDEX by_key ON orders ("id")', (
        "table: orders", "table: orders, mode: upsert, keyColumns: id",
    )),
    "UTF-16": Mistake("plan FOLDER/utf-16.yaml", "FILE_UNREADABLE", "save it as UTF-8"),
    "unnamed": Mistake("plan FILE", "COLUMN_MISSING", '"upper(topic)" ...;', ("AS id", "AS id, upper(topic)")),
    "webhook": Mistake("plan FILE", "SECRET_MISSING", "", ("sinks:", "notify: {webhook: 'env:NO_SUCH'}\nsinks:")),
    "module": Mistake("plan FILE", "TRANSFORM_MISSING", "correct the module", (
        'sql: "SELECT CAST(value AS STRING) AS id FROM source"', "python: 'broken:clean'",
    )),
    "checkpoint": Mistake("plan FILE --checkpoint FOLDER/file/c", "CHECKPOINT_UNWRITABLE", "a folder"),
    "pseudo file system": Mistake("plan FILE --checkpoint /proc/c", "CHECKPOINT_UNWRITABLE", "a folder"),
    "file": Mistake("plan FOLDER/order.yaml", "FILE_UNREADABLE", "did you mean FOLDER/orders.yaml?"),
    "folder": Mistake("plan FOLDER", "FILE_UNREADABLE", "there is FOLDER/orders.yaml"),
    "not run": Mistake("audit FILE", "CHECKPOINT_MISSING", "delivered run FILE", exit_code=3),
    "no queue": Mistake("receive FILE", "NOT_A_QUEUE", "delivered run"),
    "sink": Mistake("audit FILE --sink order", "AUDIT_SINK", "did you mean orders?"),
    "server": Mistake("brokers start kafak", "BROKER_UNKNOWN", "did you mean kafka?"),
    "code": Mistake("explain TOPIC_MISING", "CODE_UNKNOWN", "delivered explain DELIVERED_TOPIC_MISSING"),
    "page": Mistake("ui FILE --port BUSY", "METRICS_PORT", "--port"),
    "example": Mistake("init FILE", "EXAMPLE_EXISTS", "another-folder"),
    "report": Mistake("report FILE --out FOLDER/no/x.html", "FILE_UNUSABLE", "its folder", exit_code=1),
    "port": Mistake("run FILE --no-wait --metrics-port BUSY", "METRICS_PORT", "another"),
    "two documents": Mistake("plan FILE", "FILE_NOT_YAML", "remove the '---' of line 4", ("source:", "---\nsource:")),
    "dash": Mistake("plan FILE", "FILE_INVALID", "without the dash", ("source: {", "source:\n- {")),
    "bare SQL": Mistake("plan FILE", "FILE_INVALID", "write transform: {sql: ...}", (
        '{sql: "SELECT CAST(value AS STRING) AS id FROM source"}', "SELECT 1",
    )),
    "number": Mistake("plan FILE", "FILE_INVALID", 'write pipeline: "7"', (": orders", ": 7")),
    "key of an audit": Mistake("plan FILE", "FILE_INVALID", "'every'", ("sinks:", "audit: {evry: 1 min}\nsinks:")),
    "time": Mistake("plan FILE", "FILE_INVALID", 'audit.every: "15 min"', ("sinks:", "audit: {every: 15}\nsinks:")),
    "flag": Mistake("plan FILE", "FILE_INVALID", "true or false", ("sinks:", "lineage: 'on'\nsinks:")),
    "settings": Mistake("plan FILE", "FILE_INVALID", "spark.sql.ansi", ("sinks:", "spark: {sql: {ansi: 1}}\nsinks:")),
    "two transforms": Mistake("plan FILE", "FILE_INVALID", "one of sql, python", ("{sql:", "{python: 'a:b', sql:")),
    "no source": Mistake("plan FILE", "FILE_INVALID", "add source: {format: ...}", ("source:", "#")),
    "variable": Mistake("plan FILE", "OPTION_VALUE", "expands $HOME", ("FOLDER/checkpoint", "$HOME/c")),
    "variable of a sink": Mistake("plan FILE", "OPTION_VALUE", "expands $HOME", ("FOLDER/out.db", "$HOME/out.db")),
    "blank": Mistake("plan FILE", "OPTION_VALUE", "path: /data", ("FOLDER/in", "''")),
    "blank checkpoint": Mistake("plan FILE", "CHECKPOINT_MISSING", "checkpoint: ", ("FOLDER/checkpoint", "' '")),
    "reference without a name": Mistake("plan FILE", "SECRET_MISSING", "env:NAME", (
        "{format: sqlite, path: FOLDER/out.db, table: orders, ifNotExists: false}",
        "{format: postgres, url: 'postgresql://127.0.0.1:CLOSED/shop', dbtable: orders, password: 'env:'}",
    )),
    "where": Mistake("plan FILE", "SQL_INVALID", "did you mean id?", ("ifNotExists: false", "where: idd > 1")),
    "select": Mistake("plan FILE", "SQL_INVALID", "mean upper?", ("ifNotExists: false", "select: [uper(id) AS id]")),
    "outer join": Mistake("plan FILE", "SQL_INVALID", "withWatermark", (
        "FROM source", "FROM source LEFT JOIN source b USING (key)",
    )),
    "merge": Mistake("plan FILE", "OUTPUT_MODE", "output_mode", (
        "FROM source", "FROM source UNION SELECT topic FROM source",
    )),
    "checkpoint among data": Mistake("plan FILE", "CHECKPOINT_IS_DATA", "another", ("FOLDER/checkpoint", "FOLDER/in")),
    "no file to watch": Mistake("watch FOLDER/order.yaml", "FILE_UNREADABLE", "did you mean FOLDER/orders.yaml?"),
    "no file of a status": Mistake("status FILE no.yaml", "FILE_UNREADABLE", "delivered init"),
    "no answer": Mistake("plan FILE", "POSTGRES_UNREACHABLE", "check", (
        "{format: sqlite, path: FOLDER/out.db, table: orders, ifNotExists: false}",
        "{format: postgres, url: 'postgresql://127.0.0.1:CLOSED/shop', dbtable: orders}",
    ), exit_code=3),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_says_what_to_do_next(folder: Path, name: str) -> None:
    mistake = MISTAKES[name]
    with socket.socket() as closed, socket.socket() as busy:
        closed.bind(("127.0.0.1", 0))  # not listening
        busy.bind(("127.0.0.1", 0))
        busy.listen(1)
        names = {"FOLDER": str(folder), "CLOSED": str(closed.getsockname()[1]), "BUSY": str(busy.getsockname()[1])}

        def put(text: str) -> str:
            for key, value in {"FILE": str(folder / "orders.yaml"), **names}.items():
                text = text.replace(key, value)
            return text

        file = folder / "orders.yaml"
        before, after = map(put, mistake.change)
        assert before in file.read_text()
        file.write_text(file.read_text().replace(before, after, 1) if before else file.read_text())
        done = CliRunner().invoke(app, [put(word) for word in mistake.args.split()])
    said = " ".join(done.output.split())
    assert f"[DELIVERED_{mistake.code}]" in said, said
    step = said.partition("Next: ")[2] or said.partition("next step ")[2]
    assert step
    assert put(mistake.next) in step
    assert done.exit_code == mistake.exit_code


class _Ssh(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")


@pytest.mark.parametrize("system", ["postgres", "mysql"])
def test_another_server_on_the_port_is_none_that_refuses_the_login(system: str) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Ssh) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"{system.replace('postgres', 'postgresql')}://me@127.0.0.1:{server.server_address[1]}/shop"
        (finding,) = delivered.endpoint(system, url=url, dbtable="orders").sink().preflight(Guarantee.AT_LEAST_ONCE)
        server.shutdown()
    assert finding.code.endswith("_UNREACHABLE"), finding
    assert "port" in str(finding.next_step)


class _Closing(socketserver.BaseRequestHandler):
    calls = 0

    def handle(self) -> None:
        _Closing.calls += 1


def planned(folder: Path, source: Endpoint) -> Refusal:
    answer = delivered.Pipeline(
        name="orders",
        guarantee="exactly_once",
        checkpoint=folder / "checkpoint",
        source=source,
        sinks=[delivered.sqlite(folder / "out.db", table="orders")],
    ).plan()
    assert isinstance(answer, Refusal)
    return answer


def test_a_plan_asks_brokers_that_are_away_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` is the one that waits."""
    tries: list[int] = []

    class Counted(Channel):
        def __init__(self, host: str, port: int, security: Security, timeout_s: float) -> None:
            tries.append(port)
            super().__init__(host, port, security, timeout_s)

    monkeypatch.setattr("delivered.clients.kafka.protocol.Channel", Counted)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # not listening
        port = closed.getsockname()[1]
        refusal = planned(tmp_path, delivered.kafka(f"127.0.0.1:{port}", subscribe="orders"))
    assert (refusal.code, tries) == ("KAFKA_UNREACHABLE", [port])


def test_a_wrong_option_of_a_sink_is_told_before_the_source_is_asked(tmp_path: Path) -> None:
    _Closing.calls = 0
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Closing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        source = delivered.kafka(f"127.0.0.1:{server.server_address[1]}", subscribe="orders")
        pipeline = delivered.Pipeline(
            name="orders",
            guarantee="exactly_once",
            checkpoint=tmp_path / "checkpoint",
            source=source,
            sinks=[delivered.sqlite(tmp_path / "out.db", table="orders", tabel="orders")],
        )
        with pytest.raises(UsageError, match="tabel"):
            pipeline.plan()
        server.shutdown()
    assert _Closing.calls == 0


def test_a_plan_asks_a_database_that_is_away_once(tmp_path: Path) -> None:
    _Closing.calls = 0
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Closing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"postgresql://me@127.0.0.1:{server.server_address[1]}/shop"
        refusal = planned(tmp_path, delivered.endpoint("outbox", url=url, table="outbox"))
        server.shutdown()
    assert refusal.code == "OUTBOX_UNREACHABLE"
    assert _Closing.calls <= 2 + len(PROBES) + 1, "with TLS, and without; then who listens there, once"


@pytest.mark.matrix
def test_a_plan_does_not_wait_long_for_a_silent_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = delivered.kafka(f"127.0.0.1:{silent.getsockname()[1]}", subscribe="orders")
        refusal = planned(tmp_path, source)
    assert refusal.code == "KAFKA_UNREACHABLE"
    assert "no response within 3 s" in str(refusal)


@pytest.mark.parametrize(
    ("argument", "code", "step"),
    [
        ({"checkpoint": None}, "CHECKPOINT_MISSING", "checkpoint: "),
        ({"sinks": delivered.sqlite("out.db", "orders")}, "ENDPOINT_VALUE", "sinks=["),
        ({"sinks": "out.db"}, "ENDPOINT_VALUE", "sinks=["),
        ({"name": None}, "NAME_INVALID", "another name"),
        ({"guarantee": "exactly-once"}, "GUARANTEE_UNKNOWN", 'guarantee="exactly_once"'),
        ({"output_mode": "updat"}, "OPTION_VALUE", 'write output_mode="update"'),
        ({"transform": lambda: None}, "TRANSFORM_VALUE", "def clean(df)"),
    ],
)
def test_a_mistaken_argument_is_told_in_words_of_the_call(
    tmp_path: Path, argument: dict[str, Any], code: str, step: str
) -> None:
    right: dict[str, Any] = {"name": "orders", "guarantee": "exactly_once", "checkpoint": tmp_path}
    ends = {"source": delivered.log(tmp_path / "in"), "sinks": [delivered.sqlite(tmp_path / "out.db", "orders")]}
    with pytest.raises(delivered.UsageError) as error:
        delivered.Pipeline(**{**right, **ends, **argument})
    assert error.value.code == f"DELIVERED_{code}"
    assert step in str(error.value.next_step)


def test_what_is_no_session_or_frame_is_told(tmp_path: Path) -> None:
    for value in (None, "spark", 7):
        with pytest.raises(delivered.UsageError, match=r"SPARK_VALUE.*it must be a SparkSession"):
            delivered.register(value)  # type: ignore[arg-type]
        with pytest.raises(delivered.UsageError, match=r"SPARK_VALUE.*it must be the DataFrame"):
            delivered.write_batch(
                value,  # type: ignore[arg-type]
                0,
                sink=delivered.sqlite(tmp_path / "out.db", "orders"),
                guarantee="exactly_once",
                pipeline="orders",
            )
    append(str(tmp_path / "in"), pa.table({"value": [b"a"]}))
    for call in (pipeline(tmp_path).plan, pipeline(tmp_path).start):
        with pytest.raises(delivered.UsageError, match="SPARK_VALUE"):
            call("spark")  # type: ignore[arg-type]


def test_a_type_that_no_row_brings_to_python_is_named_with_its_column() -> None:
    fields = [StructField("id", LongType()), StructField("age", YearMonthIntervalType())]
    with pytest.raises(delivered.UsageError, match=r"COLUMN_TYPE.*'age' has the type interval year.*cast\('string'\)"):
        to_arrow(StructType(fields))


def test_several_names_may_be_a_list() -> None:
    assert delivered.kafka("host:9092", subscribe=["a", "b"]).options["subscribe"] == "a,b"


def test_a_renamed_pipeline_is_told_its_name(tmp_path: Path) -> None:
    """Never to accept a missing ledger once: its batches would be written twice."""
    made = pipeline(tmp_path)
    decide(made, 2, Owner("ended"))
    checkpoint(made, 2)
    file = tmp_path / "orders.yaml"
    file.write_text(
        f"pipeline: renamed\nguarantee: exactly_once\ncheckpoint: {tmp_path}/checkpoint\n"
        f"source: {{format: log, path: {tmp_path}/in}}\n"
        f"sinks: [{{format: sqlite, path: {tmp_path}/out.db, table: orders}}]\n"
    )
    done = CliRunner().invoke(app, ["plan", str(file)])
    said = " ".join(done.output.split())
    assert done.exit_code == 2
    assert "[DELIVERED_LEDGER_RENAMED]" in said, said
    assert "pipeline: orders" in said
    assert "accept" not in said


@pytest.mark.parametrize(("written", "meant"), [("pln", "plan"), ("dead-leters", "dead-letters")])
def test_a_misspelt_command_is_named(written: str, meant: str) -> None:
    done = CliRunner().invoke(app, [written, "orders.yaml"])
    assert (done.exit_code, f"'{meant}'" in done.output, "'letters'" in done.output) == (2, True, False)


@pytest.mark.parametrize("code", ["SQL_NOT_DETERMINISTIC", "STOPPED_WITH_LAG", "TOPIC_MISSING"])
def test_explain_knows_errors_warnings_and_problems(code: str) -> None:
    done = CliRunner().invoke(app, ["explain", code])
    assert done.exit_code == 0
    assert done.output.startswith(f"DELIVERED_{code}")
    assert not any(line.strip() == "Next:" for line in done.output.splitlines())


def test_a_batch_that_is_not_there_is_told_before_spark_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pyspark.sql", raising=False)
    made = pipeline(tmp_path)
    decide(made, 2, Owner("ended"))
    checkpoint(made, 2)
    file = tmp_path / "orders.yaml"
    file.write_text(FILE.format(folder=tmp_path))
    done = CliRunner().invoke(app, ["audit", str(file), "--since", "99"])
    said = " ".join(done.output.split())
    assert (done.exit_code, "[DELIVERED_AUDIT_CONTINUES] Batch 99 does not exist" in said) == (2, True), said
    assert "starting Spark" not in said
