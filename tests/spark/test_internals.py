"""Each internal of Spark that we touch, on the installed Spark. A failure names what a release changed, and what fails
without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow as pa
import pyspark
import pytest
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql.datasource import DataSource, DataSourceStreamWriter, WriterCommitMessage

import delivered
from delivered.checkpoint import read_logged, read_view
from delivered.connectors.log import append
from delivered.model.errors import UsageError
from delivered.model.translate import translated
from delivered.spark import internals
from delivered.spark.internals import ELSEWHERE, INTERNALS, SINCE, Setting
from delivered.spark.settings import with_setting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass
class Seen:
    """What a query showed.

    Attributes:
        ancestors: of a Python worker.
    """

    query: Any
    checkpoint: Path
    reports: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[str | None] = field(default_factory=list)
    tasks: list[tuple[str | None, str | None]] = field(default_factory=list)
    ancestors: list[str] = field(default_factory=list)
    statuses: set[str] = field(default_factory=set)


def in_task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from pyspark import TaskContext

    from delivered.spark.writers import running_batch

    for _ in batches:
        pass
    query, batch = running_batch(TaskContext.get())  # type: ignore[arg-type]
    above = [p.name() for p in psutil.Process().parents()]
    yield pa.record_batch({"query": [query], "batch": [batch], "above": [above]})


@pytest.fixture(scope="module")
def seen(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """A query over a source of ours, with a `foreachBatch`."""
    folder = tmp_path_factory.mktemp("internals")
    append(str(folder / "log"), pa.table({"value": pa.array([b"1"], pa.binary())}))
    found: list[Seen] = []
    started = threading.Event()

    def look(df: DataFrame, _: int) -> None:
        started.wait()
        (seen,) = found
        seen.checkpoints.append(internals.query_checkpoint(df))
        for row in df.mapInArrow(in_task, "query string, batch string, above array<string>").collect():
            seen.tasks.append((row.query, row.batch))
            seen.ancestors = list(row.above)

    stream = spark.readStream.format("delivered_log").option("path", str(folder / "log")).load()
    writer = stream.writeStream.foreachBatch(look).option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.start()
    found.append(Seen(query, folder / "checkpoint"))
    started.set()
    try:
        query.processAllAvailable()
        seen = found[0]
        while not seen.statuses & set(internals.IDLE):
            assert query.isActive, query.exception()
            seen.statuses.add(query.status["message"])
            if len(seen.statuses) > 20:
                break
        seen.reports = [dict(r) for r in internals.recent_reports(query)]
        yield seen
    finally:
        query.stop()


def is_in(spark: SparkSession, name: str) -> bool:
    """Whether this version has an internal that older ones lack."""
    return tuple(map(int, spark.version.split(".")[:2])) >= tuple(map(int, SINCE.get(name, "4.0").split(".")))


def settings(spark: SparkSession, _: Seen) -> None:
    entries = spark._jvm.org.apache.spark.internal.config.ConfigEntry  # type: ignore[union-attr]
    expected = [s for s in Setting if s not in SINCE or is_in(spark, s)]
    assert [s.value for s in expected if entries.findEntry(s.value) is None] == []


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(Exception) as failed:
        call()
    return str(failed.value)


def format_not_found(spark: SparkSession, _: Seen) -> None:
    plain = spark._jsparkSession.newSession()  # type: ignore[attr-defined]
    text = error_of(lambda: plain.read().format("delivered_log").load())
    found = internals.FORMAT_NOT_FOUND.search(text)
    assert found is not None and found[1] == "delivered_log", text


def output_mode_refused(spark: SparkSession, seen: Seen) -> None:
    counted = spark.readStream.format("rate").load().groupBy("value").count()
    writer = counted.writeStream.format("noop").outputMode("append")
    text = error_of(lambda: writer.option("checkpointLocation", f"{seen.checkpoint}-refused").start())
    assert internals.OUTPUT_MODE_REFUSED.search(text), text


def source_read_twice(spark: SparkSession, seen: Seen) -> None:
    from delivered.spark.settings import with_setting

    with with_setting(spark, Setting.SOURCES_BY_NAME, "true"), with_setting(spark, Setting.OFFSET_LOG_FORMAT, "2"):
        one = spark.readStream.name("orders").format("rate").load()
        writer = one.union(one).writeStream.format("noop")
        text = error_of(lambda: writer.option("checkpointLocation", f"{seen.checkpoint}-twice").start())
    found = internals.SOURCE_READ_TWICE.search(text)
    assert found is not None and found[1] == "orders", text


def sql_errors(spark: SparkSession, _: Seen) -> None:
    found = []
    for sql in ("SELECT\n  idd FROM range(1)", "SELECT 1 FRO range(1)"):
        try:
            spark.sql(sql)
        except (AnalysisException, ParseException) as error:
            found.append(internals.sql_error(error))
    unknown, wrong = found
    assert unknown.place is not None and (unknown.place[0], unknown.suggested) == (2, "id"), unknown
    assert wrong.place is not None and wrong.place[0] == 1 and wrong.text, wrong


def event_time(spark: SparkSession, _: Seen) -> None:
    frame = spark.readStream.format("rate").load().withWatermark("timestamp", "1 minute")
    assert internals.EVENT_TIME in frame.schema["timestamp"].metadata


def window_end(spark: SparkSession, _: Seen) -> None:
    from pyspark.sql import functions as F  # noqa: N812

    rate = spark.readStream.format("rate").load().withWatermark("timestamp", "1 minute")
    frame = rate.groupBy(F.window("timestamp", "1 minute")).count().selectExpr("window.end AS until", "count")
    assert internals.WINDOW_END.findall(internals.logical_plan(frame).splitlines()[0]) == ["until"]


def connects(spark: SparkSession, _: Seen) -> None:
    assert not internals.is_connect(spark)
    assert not hasattr(import_module("pyspark.sql.connect.session").SparkSession, "_jvm")


def jvm(spark: SparkSession, _: Seen) -> None:
    process = internals.jvm_of(spark)
    assert process is not None and process.name().startswith("java")
    assert psutil.Process(internals.started_jvm(spark).pid) in (process, *process.parents())


def hadoop(spark: SparkSession, _: Seen) -> None:
    assert internals.hadoop_settings(spark, "/c") == {"fs.defaultFS": "file:///"}
    with with_setting(spark, "fs.s3a.access.key", "of-this-session"):
        found = internals.hadoop_settings(spark, "s3a://lake/c")
    assert found["fs.s3a.access.key"] == "of-this-session" and "fs.s3a.connection.ssl.enabled" in found


def accumulator_server(spark: SparkSession, _: Seen) -> None:
    server = spark.sparkContext._accumulatorServer
    assert callable(server.handle_error)
    before = server.handle_error
    internals.hide_lost_accumulators(spark)
    assert server.handle_error("request", "address") is None
    server.handle_error = before


def active_session(spark: SparkSession) -> Any:
    return spark._jvm.org.apache.spark.sql.classic.SparkSession.getActiveSession().get()  # type: ignore[union-attr]


def made_active(spark: SparkSession, _: Seen) -> None:
    other = spark.newSession()
    with internals.active(other):
        assert active_session(spark).equals(other._jsparkSession)
    internals.make_active(spark)
    assert active_session(spark).equals(spark._jsparkSession)


def sessions_of_holders(spark: SparkSession, _: Seen) -> None:
    frame = spark.range(1)
    for holder in (spark.read, spark.readStream, frame.write, spark):
        assert hasattr(internals.session_of(holder), "dataSource"), holder
    assert internals.session_of(connect_writer()) is CONNECTED


def schemas(spark: SparkSession, _: Seen) -> None:
    columns = internals.to_arrow(spark.sql("SELECT 1 AS a, current_timestamp() AS at").schema)
    assert columns.field("at").type == pa.timestamp("us", "UTC")
    assert internals.from_arrow(columns)["a"].dataType.simpleString() == "int"


def pickled(_: SparkSession, __: Seen) -> None:
    local = type("Local", (), {"owner": "me"})
    code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).owner)"
    ran = [sys.executable, "-c", code, internals.dumps(local).hex()]
    assert subprocess.run(ran, capture_output=True, text=True, check=True).stdout == "me\n"
    assert internals.loads(internals.dumps(lambda: 7))() == 7


def modules_by_value(_: SparkSession, seen: Seen) -> None:
    name = "module_of_a_user"
    (seen.checkpoint.parent / f"{name}.py").write_text("def answer(): return 7")
    sys.path.insert(0, str(seen.checkpoint.parent))
    try:
        module = import_module(name)
    finally:
        sys.path.pop(0)
    internals.pickle_by_value(module)
    code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1]))())"
    ran = [sys.executable, "-c", code, internals.dumps(module.answer).hex()]
    assert subprocess.run(ran, capture_output=True, text=True, check=True).stdout == "7\n"


def no_executors(spark: SparkSession, _: Seen) -> None:
    assert internals.executors(spark) == 0


def stops(spark: SparkSession, _: Seen) -> None:
    context: Any = spark.sparkContext._jsc.sc()  # type: ignore[union-attr]
    assert "stop" in {m.getName() for m in context.getClass().getMethods()}


def worker_modules(_: SparkSession, __: Seen) -> None:
    for module in internals.WORKER_MODULES:
        import_module(module)


def daemon(_: SparkSession, seen: Seen) -> None:
    assert callable(import_module("pyspark.daemon").manager)
    assert "tasks" in seen.ancestors  # forked by our server, as the session's daemon


def batch_of_a_task(_: SparkSession, seen: Seen) -> None:
    assert seen.tasks == [(str(seen.query.id), "0")]


def logical(spark: SparkSession, _: Seen) -> None:
    frame = spark.range(9).where("id > 3")
    assert internals.logical_plan(frame).splitlines()[0].startswith("Filter")
    assert callable(import_module("pyspark.sql.connect.dataframe").DataFrame._explain_string)


def physical(spark: SparkSession, _: Seen) -> None:
    assert "Range (0, 9" in internals.physical_plan(spark.range(9))


def deterministic(spark: SparkSession, _: Seen) -> None:
    assert internals.is_deterministic(spark.range(9))
    assert not internals.is_deterministic(spark.range(9).selectExpr("rand()"))


def frame_classes(spark: SparkSession, _: Seen) -> None:
    assert isinstance(spark.range(1), internals.frame_class(connect=False))
    assert callable(internals.frame_class(connect=True).explain)  # type: ignore[attr-defined]


def sources_by_name(spark: SparkSession, _: Seen) -> None:
    from delivered.spark.settings import with_setting

    with with_setting(spark, Setting.SOURCES_BY_NAME, "true"):
        frame = spark.readStream.name("orders").format("rate").load()
        assert internals.named_sources(frame.select("value")) == {"orders"}


def analysed(spark: SparkSession, _: Seen) -> None:
    internals.analyse(spark.range(1))
    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("spark-common-utils_*.jar")
    assert INTERNALS["analyse"][0] in json.loads(zipfile.ZipFile(jar).read("error/error-conditions.json"))


def flows(spark: SparkSession, _: Seen) -> None:
    from pyspark.sql.connect.proto import PipelineAnalysisContext

    assert not internals._defines_flow(spark.range(1))
    assert "flow_name" in PipelineAnalysisContext.DESCRIPTOR.fields_by_name


def checkpoint_of_a_query(spark: SparkSession, seen: Seen) -> None:
    assert [str(c).removeprefix("file:") for c in seen.checkpoints] == [str(seen.checkpoint)]
    assert internals.query_checkpoint(spark.range(1)) is None


def reports(_: SparkSession, seen: Seen) -> None:
    assert seen.reports[0]["batchId"] >= seen.reports[-1]["batchId"] == 0
    assert {"timestamp", "stateOperators", "sources"} <= seen.reports[0].keys()


def python_stream(_: SparkSession, seen: Seen) -> None:
    assert seen.reports[0]["sources"][0]["description"].startswith(internals.PYTHON_STREAM)


def idle(_: SparkSession, seen: Seen) -> None:
    assert seen.statuses & set(internals.IDLE)


class Connected:
    """Stands for a session of Spark Connect, which a writer only keeps."""

    readStream = None  # noqa: N815


CONNECTED: Any = Connected()


def connect_writer() -> Any:
    plans = import_module("pyspark.sql.connect.plan")
    read = plans.DataSource(format="delivered_log", options={"path": "in"}, is_streaming=True)
    writers = import_module("pyspark.sql.connect.streaming.readwriter")
    return writers.DataStreamWriter(plans.Filter(read, _column()), CONNECTED)


def _column() -> Any:
    return import_module("pyspark.sql.connect.functions").lit(True)


def foreach_batch(spark: SparkSession, _: Seen) -> None:
    writer = spark.readStream.format("rate").load().writeStream.foreachBatch(lambda _, __: None)
    assert internals.stream_write(writer).format == internals.FOREACH_BATCH


def writes(spark: SparkSession, _: Seen) -> None:
    frame = spark.readStream.format("rate").load()
    writer = frame.writeStream.format("delivered_sqlite").option("Path", "x").queryName("q").outputMode("update")
    write = internals.stream_write(writer)
    assert (write.format, write.output_mode.lower()) == ("delivered_sqlite", "update")
    assert {k.lower(): v for k, v in write.options.items()} == {"path": "x", "queryname": "q"}
    assert [f["name"] for f in json.loads(write.columns())["fields"]] == ["timestamp", "value"]
    remote = internals.stream_write(connect_writer().format("delivered_sqlite").option("Path", "x").queryName("q"))
    assert (remote.format, dict(remote.options)) == ("delivered_sqlite", {"Path": "x", "queryName": "q"})


def log_stream(spark: SparkSession, seen: Seen) -> Any:
    return spark.readStream.format("delivered_log").option("path", str(seen.checkpoint.parent / "log")).load()


def sources(spark: SparkSession, seen: Seen) -> None:
    ((name, options),) = internals.stream_sources(log_stream(spark, seen).where("offset > 0").writeStream)
    assert (name, options["path"]) == ("delivered_log", str(seen.checkpoint.parent / "log"))
    assert internals.stream_sources(connect_writer()) == [("delivered_log", {"path": "in"})]


def options_of_sources(spark: SparkSession, seen: Seen) -> None:
    frame = log_stream(spark, seen)
    first, second, remote = frame.where("offset > 0").writeStream, frame.writeStream, connect_writer()
    for writer in (first, remote):
        internals.set_source_option(writer, "checkpointLocation", "/c")
    ((_, options),) = internals.stream_sources(remote)
    assert options == {"path": "in", "checkpointLocation": "/c"}
    plans = [w._jwrite.getClass().getDeclaredField("ds") for w in (first, second)]  # type: ignore[attr-defined]
    texts = []
    for writer, held in zip((first, second), plans, strict=True):
        held.setAccessible(True)
        plan = held.get(writer._jwrite).queryExecution().analyzed()  # type: ignore[attr-defined]
        (leaf,) = (plan.collectLeaves().apply(i) for i in range(plan.collectLeaves().size()))
        texts.append(dict(leaf.extraOptions()))
    assert texts[0]["checkpointlocation"] == "/c" and "checkpointlocation" not in texts[1]


def classes(spark: SparkSession, _: Seen) -> None:
    found = internals.session_classes(spark)
    assert isinstance(spark, found.session) and isinstance(spark.range(1), found.frame)
    assert isinstance(spark.read, found.reader) and isinstance(spark.range(1).write, found.writer)
    assert isinstance(spark.readStream, found.stream_reader)
    names = {e.__name__ for e in found.errors}
    assert "CapturedException" in names
    remote = vars(import_module("pyspark.errors.exceptions.connect"))["SparkConnectGrpcException"]
    assert "__str__" in vars(remote)
    assert isinstance(log_progress(), found.progress)


def log_progress() -> Any:
    return import_module("pyspark.sql.streaming.listener").StreamingQueryProgress.__new__(
        import_module("pyspark.sql.streaming.listener").StreamingQueryProgress
    )


def formats_of_readers(_: SparkSession, __: Seen) -> None:
    for name in ("readwriter.DataFrameReader", "streaming.readwriter.DataStreamReader"):
        module, _, kind = name.rpartition(".")
        reader = getattr(import_module(f"pyspark.sql.connect.{module}"), kind)(CONNECTED)
        assert internals.format_of_reader(reader) == ""
        assert internals.format_of_reader(reader.format("delivered_log")) == "delivered_log"


def accumulators(_: SparkSession, __: Seen) -> None:
    client = import_module("pyspark.sql.connect.client").SparkConnectClient
    assert callable(client.execute_command_as_iterator) and callable(client._execute_and_fetch_as_iterator)
    assert "_execute_and_fetch_as_iterator" in client.execute_command_as_iterator.__code__.co_names or hasattr(
        client.execute_command_as_iterator, "__wrapped__"
    )
    assert hasattr(import_module("pyspark.sql.connect.client.core"), "PlanObservedMetrics")


WATCHED: dict[str, Callable[[SparkSession, Seen], None]] = {
    "Setting": settings,
    "FORMAT_NOT_FOUND": format_not_found,
    "SOURCE_READ_TWICE": source_read_twice,
    "OUTPUT_MODE_REFUSED": output_mode_refused,
    "PYTHON_STREAM": python_stream,
    "EVENT_TIME": event_time,
    "WINDOW_END": window_end,
    "IDLE": idle,
    "FOREACH_BATCH": foreach_batch,
    "WORKER_MODULES": worker_modules,
    "is_connect": connects,
    "jvm_of": jvm,
    "started_jvm": jvm,
    "hadoop_settings": hadoop,
    "hide_lost_accumulators": accumulator_server,
    "executors": no_executors,
    "stop_context": stops,
    "make_active": made_active,
    "session_of": sessions_of_holders,
    "to_arrow": schemas,
    "from_arrow": schemas,
    "dumps": pickled,
    "pickle_by_value": modules_by_value,
    "run_daemon": daemon,
    "QUERY_ID": batch_of_a_task,
    "BATCH_ID": batch_of_a_task,
    "frame_class": frame_classes,
    "logical_plan": logical,
    "physical_plan": physical,
    "is_deterministic": deterministic,
    "named_sources": sources_by_name,
    "sql_error": sql_errors,
    "analyse": analysed,
    "_defines_flow": flows,
    "query_checkpoint": checkpoint_of_a_query,
    "recent_reports": reports,
    "stream_write": writes,
    "stream_sources": sources,
    "set_source_option": options_of_sources,
    "session_classes": classes,
    "format_of_reader": formats_of_readers,
    "without_accumulators": accumulators,
}


def test_every_internal_is_watched() -> None:
    assert set(WATCHED) == set(INTERNALS)
    assert set(WATCHED_ELSEWHERE) == set(ELSEWHERE)
    assert set(SINCE) <= {*INTERNALS, *Setting}
    root = Path(delivered.__file__).parent
    assert [f for f in ELSEWHERE if not (root / f).is_file()] == []


@pytest.mark.parametrize("name", WATCHED)
def test_spark_is_as_we_take_it_for(name: str, spark: SparkSession, seen: Seen) -> None:
    """Fails: this Spark changed something that `spark/internals.py` uses."""
    names, without = INTERNALS[name]
    if not is_in(spark, name):
        pytest.skip(f"Spark {spark.version} lacks it: since {SINCE[name]}")
    try:
        WATCHED[name](spark, seen)
    except Exception as error:
        raise AssertionError(
            f"spark/internals.py, {name}: Spark {spark.version} has no {names} as before, so {without}: {error!r}"
        ) from error


def checkpoint_files(_: SparkSession, seen: Seen) -> None:
    view = read_view(str(seen.checkpoint))
    assert (view.incarnation, view.batch, view.logged) == (str(seen.query.id), 0, 0)
    assert json.loads(view.offsets)
    assert read_logged(str(seen.checkpoint)) == (str(seen.query.id), 0)
    headers = [(seen.checkpoint / kind / "0").read_text().splitlines()[0] for kind in ("offsets", "commits")]
    assert headers == ["v1", "v1"]


def children_of_the_jvm(spark: SparkSession, _: Seen) -> None:
    process = internals.jvm_of(spark)
    assert process is not None
    assert any(p.name().startswith("python") for p in process.children(recursive=True))


def errors_of_workers(spark: SparkSession, _: Seen) -> None:
    def fail(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        raise UsageError("OPTION_VALUE", "The value is 7.", next_step="write 8")

    with pytest.raises(Exception) as failed:
        spark.range(1).mapInArrow(fail, "id bigint").collect()
    found = translated(failed.value)
    assert found is not None and str(found) == "[DELIVERED_OPTION_VALUE] The value is 7. Next: write 8"


def processes_of_a_writer(spark: SparkSession, seen: Seen) -> None:
    """A stream's writer: options, and who pickles it. Each line of the file is one event."""
    folder = seen.checkpoint.parent
    events = folder / "events"

    class Writer(DataSourceStreamWriter):
        def __getstate__(self) -> dict[str, Any]:
            say("pickled")
            return {}

        def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
            rows = sum(1 for _ in iterator)
            say("wrote", rows)
            return WriterCommitMessage()

        def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
            say("committed", batchId)

    def say(*event: object) -> None:
        with events.open("a") as out:
            out.write(json.dumps([os.getpid(), *event]) + "\n")

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "watched"

        def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
            say("options", dict(self.options))
            return Writer()

    spark.dataSource.register(Source)
    writer = log_stream(spark, seen).writeStream.format("watched").queryName("named")
    query = writer.option("checkpointLocation", str(folder / "watched")).trigger(availableNow=True).start()
    query.awaitTermination()
    assert query.exception() is None
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    by_kind: dict[str, list[list[Any]]] = {}
    for process, kind, *rest in lines:
        by_kind.setdefault(kind, []).append([process, *rest])
    for _, options in by_kind["options"]:
        assert options["queryname"] == "named" and options["checkpointlocation"] == str(folder / "watched")
    planned, committed = {p for (p,) in by_kind["pickled"]}, {p for p, _ in by_kind["committed"]}
    kinds = [kind for _, kind, *_ in lines]
    assert len(planned) == 1 and planned.isdisjoint(committed), lines
    assert kinds.index("pickled") < kinds.index("wrote") < kinds.index("committed"), lines


WATCHED_ELSEWHERE: dict[str, Callable[[SparkSession, Seen], None]] = {
    "checkpoint/__init__.py": checkpoint_files,
    "engine/context.py": children_of_the_jvm,
    "model/translate.py": errors_of_workers,
    "pipeline/spec.py": processes_of_a_writer,
    "prefork/__init__.py": daemon,
    "spark/writers.py": processes_of_a_writer,
}


@pytest.mark.parametrize("name", WATCHED_ELSEWHERE)
def test_spark_is_as_other_rooms_take_it_for(name: str, spark: SparkSession, seen: Seen) -> None:
    """Fails: this Spark changed something that a room without Spark relies on."""
    try:
        WATCHED_ELSEWHERE[name](spark, seen)
    except Exception as error:
        raise AssertionError(f"{name}: Spark {spark.version} is not as before: {ELSEWHERE[name]}: {error!r}") from error
