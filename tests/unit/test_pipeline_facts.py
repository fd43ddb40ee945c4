"""Facts gathered before a start: owner, ledger, checkpoint, first offsets; and parsing of Spark's errors."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.support import decided
from tests.support.decided import checkpoint, decide, pipeline

import delivered
from delivered.checkpoint import sidecar
from delivered.connectors.log.produce import append
from delivered.engine.context import find_living
from delivered.model.capability import Guarantee
from delivered.model.errors import InvariantBroken, LedgerBehind, OutcomeUnknown, Refused, UsageError
from delivered.model.translate import translated
from delivered.model.work import Owner
from delivered.pipeline.facts import check_source_checkpoints, check_start
from delivered.pipeline.spec import Reading
from delivered.pipeline.start import for_start, identities, record_order, record_query
from delivered.planner import Plan, Refusal
from delivered.spark.readers import StreamReader


@pytest.fixture
def neighbour() -> Iterator[psutil.Process]:
    """A live process on this machine that is no relative: its parent has exited (-3: DEVNULL)."""
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0, stdout=-3).pid)"
    read, write = os.pipe()
    told = subprocess.run([sys.executable, "-c", code], stdin=read, stdout=subprocess.PIPE, text=True, check=True)
    yield psutil.Process(int(told.stdout))
    os.close(write)
    os.close(read)


def owner_of(process: psutil.Process, shift_ms: int = 0) -> Owner:
    return Owner("other", socket.gethostname(), process.pid, int(process.create_time() * 1000) + shift_ms)


def code_of(answer: Plan | Refusal) -> str:
    return answer.code if isinstance(answer, Refusal) else "PLAN"


def test_a_living_owner_is_seen(neighbour: psutil.Process) -> None:
    found = find_living(owner_of(neighbour))
    assert found is not None
    assert found.process == neighbour.pid


def test_who_is_no_living_owner(neighbour: psutil.Process) -> None:
    assert find_living(None) is None
    assert find_living(owner_of(psutil.Process())) is None, "this driver itself"
    assert find_living(owner_of(neighbour, shift_ms=60_000)) is None, "another process that got the same id"
    elsewhere = Owner("other", "another-host", neighbour.pid, int(neighbour.create_time() * 1000))
    assert find_living(elsewhere) is None, "nothing is known of another host"
    neighbour.kill()
    neighbour.wait(10)
    assert find_living(Owner("other", socket.gethostname(), neighbour.pid, 1)) is None


def test_a_live_driver_is_refused_unless_taken_over(tmp_path: Path, neighbour: psutil.Process) -> None:
    made = pipeline(tmp_path)
    decide(made, 1, owner_of(neighbour))
    checkpoint(made, 1)
    assert code_of(made.plan()) == "CHECKPOINT_OWNED"
    assert code_of(made.plan(takeover=True)) == "PLAN"


def test_a_ledger_ahead_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    made = pipeline(tmp_path)
    decide(made, 3, Owner("gone"))
    checkpoint(made, 3)
    assert code_of(made.plan()) == "PLAN"
    (Path(made.checkpoint) / "offsets" / "2").unlink()
    answer = made.plan()
    assert code_of(answer) == "LEDGER_AHEAD"
    with pytest.raises(delivered.Refused, match="LEDGER_AHEAD"):
        made.start()


def test_a_ledger_behind_the_checkpoint_is_refused_before_spark_logs_a_batch(tmp_path: Path) -> None:
    made = pipeline(tmp_path)
    decide(made, 1, Owner("gone"))
    checkpoint(made, 2)
    assert code_of(made.plan()) == "PLAN", "batch 1 has not ended"
    (Path(made.checkpoint) / "commits").mkdir()
    (Path(made.checkpoint) / "commits" / "1").write_text("v1\n{}")
    before = {p: p.read_bytes() for p in Path(made.checkpoint).rglob("*") if p.is_file()}
    with pytest.raises(delivered.Refused, match=r"LEDGER_BEHIND.*holds batch 1.*is 0"):
        made.start()
    after = {p: p.read_bytes() for p in Path(made.checkpoint).rglob("*") if p.is_file() and p.name != "runs.json"}
    assert after == before
    assert code_of(pipeline(tmp_path, missing_ledger=True).plan()) == "PLAN"


@pytest.mark.checkpoint(
    "the pipeline's name, over its first batch, decided and not finished", "refused", "`LEDGER_RENAMED`"
)
def test_a_renamed_pipeline_whose_first_batch_is_decided_is_refused(tmp_path: Path) -> None:
    """Regression: only later batches were looked for in other ledgers, and this one was written twice."""
    made = pipeline(tmp_path)
    decide(made, 1, Owner("gone"))
    checkpoint(made, 1)
    made.name = "renamed"
    assert code_of(made.plan()) == "LEDGER_RENAMED"
    spec = replace(made.spec, checkpoint=made.checkpoint)
    with pytest.raises(LedgerBehind, match=r"LEDGER_RENAMED.*'orders'"):
        check_start(spec, spec.open())
    made.missing_ledger = True
    assert code_of(made.plan()) == "PLAN"


def test_the_plan_says_what_the_next_batch_would_refuse(tmp_path: Path) -> None:
    """Regression: `plan` agreed, and `run` stopped in its first batch."""
    weak = pipeline(tmp_path, guarantee="at_least_once")
    decide(weak, 1, Owner("gone"))
    checkpoint(weak, 2)
    assert code_of(weak.plan()) == "PLAN"
    answer = pipeline(tmp_path).plan()
    assert code_of(answer) == "BATCH_BEGUN"
    assert isinstance(answer, Refusal)
    assert answer.nearest is Guarantee.AT_LEAST_ONCE
    newest = Path(weak.checkpoint) / "offsets" / "0"
    (Path(weak.checkpoint) / "offsets" / "1").unlink()
    newest.write_text(newest.read_text().replace('"0": 1', '"0": 2'))
    assert code_of(weak.plan()) == "LEDGER_AHEAD"
    newest.write_text(newest.read_text().replace('"0": 2', '"0": 1'))
    assert code_of(weak.plan()) == "PLAN"
    with closing(sqlite3.connect(tmp_path / "out.db")) as connection:
        connection.execute("DROP TABLE orders")
    answer = weak.plan()
    assert code_of(answer) == "TARGET_CHANGED"
    assert isinstance(answer, Refusal)
    assert answer.nearest is None
    weak.new_target = True
    assert code_of(weak.plan()) == "PLAN"


@pytest.mark.checkpoint("the sink's `mode` or `keyColumns`", "continues", "an audit of the batches before is unknown")
@pytest.mark.parametrize("changed", [False, True])
def test_batches_written_in_another_mode_are_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """Regression: a row that an upsert had replaced counted as lost once the sink appended."""
    monkeypatch.setattr(decided, "offsets_of", lambda _: '{"version": 1, "offsets": {"0": 1}}')
    made, before = pipeline(tmp_path), pipeline(tmp_path)
    before.sinks = (before.sinks[0].with_options(mode="upsert", keyColumns="key"),)
    sidecar.keep_first(made.checkpoint, lambda: {"version": 0, "offsets": {"0": 0}})
    record_query(before if changed else made)
    decide(made, 1, Owner("gone"))
    checkpoint(made, 1)
    with closing(sqlite3.connect(tmp_path / "out.db")) as connection, connection:
        connection.execute("DELETE FROM orders")
    for _ in range(2):
        record_query(made)
    assert sidecar.read_modes(made.checkpoint).changed == ({"orders": (0, "upsert by key")} if changed else {})
    report = made.audit()
    assert report.judged is not changed, report.unknowns
    assert ("in another mode up to batch 0 (upsert by key; now append)" in str(report.unknowns)) is changed


def test_a_new_checkpoint_is_refused_unless_accepted(tmp_path: Path) -> None:
    """P2: batch numbers of a new checkpoint start at 0 and mean other records."""
    decide(pipeline(tmp_path), 2, Owner("gone"))
    assert code_of(pipeline(tmp_path, "other").plan()) == "CHECKPOINT_NEW"
    assert code_of(pipeline(tmp_path, "other", new_checkpoint=True).plan()) == "PLAN"
    assert code_of(pipeline(tmp_path, "other", guarantee="at_least_once").plan()) == "PLAN"


def test_preflight_refuses_a_log_that_is_not_there(tmp_path: Path) -> None:
    made = delivered.Pipeline(
        name="orders",
        guarantee="exactly_once",
        checkpoint=tmp_path / "checkpoint",
        source=delivered.log(str(tmp_path / "nothing")),
        sinks=[delivered.sqlite(str(tmp_path / "out.db"), "orders")],
    )
    answer = made.plan()
    assert isinstance(answer, Refusal)
    assert "nothing" in answer.reason
    assert isinstance(made.plan(offline=True), Plan)


def test_a_start_that_an_earlier_one_recorded_counts_not_the_option(tmp_path: Path) -> None:
    made = pipeline(tmp_path)
    made.sources = {n: e.with_options(startingOffsets='{"7": 0}') for n, e in made.sources.items()}
    with pytest.raises(UsageError, match="PARTITION_UNKNOWN"):
        made.plan()
    (name,) = made.sources
    sidecar.keep_first(str(made.checkpoint), lambda: {"version": 0, "offsets": {"0": 0}}, name)
    assert isinstance(made.plan(), Plan)


@pytest.mark.parametrize("length", [0, 2, 4, 6])
def test_a_log_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path, length: int) -> None:
    made = pipeline(tmp_path)
    checkpoint(made, 1)
    assert isinstance(made.plan(), Plan)
    file = Path(made.checkpoint) / "offsets" / "0"
    file.write_text(file.read_text()[:length])
    with pytest.raises(Refused, match=r"CHECKPOINT_DAMAGED.*not decided"):
        made.plan()


@pytest.mark.parametrize("where", ["option", "conf"])
def test_p18_asynchronous_progress_is_refused(where: str, tmp_path: Path) -> None:
    """P18: idempotence by batch number is void when offsets are logged after the batch."""
    made = pipeline(tmp_path)
    if where == "option":
        made.sinks = (made.sinks[0].with_options(asyncProgressTrackingEnabled="true"),)
    else:
        made.conf = {"spark.sql.streaming.asyncProgressTrackingEnabled": "true"}
    assert code_of(made.plan(offline=True)) == "ASYNC_PROGRESS"


def test_a_cluster_master_refuses_local_files(tmp_path: Path) -> None:
    assert code_of(pipeline(tmp_path, master="spark://host:7077").plan(offline=True)) == "SOURCE_LOCAL"
    assert code_of(pipeline(tmp_path, master="local[2]").plan(offline=True)) == "PLAN"


def test_sources_of_sparks_own_are_judged_by_name(tmp_path: Path) -> None:
    made = pipeline(tmp_path)
    made.sources["source"] = delivered.endpoint("spark:kafka", subscribe="orders")
    assert code_of(made.plan(offline=True)) == "PLAN"
    made.sources["source"] = delivered.endpoint("spark:socket", host="localhost", port=9999)
    answer = made.plan(offline=True)
    assert code_of(answer) == "SOURCE_NOT_REPLAYABLE"
    assert isinstance(answer, Refusal)
    assert answer.nearest is Guarantee.AT_MOST_ONCE


def test_first_offsets_are_kept_once(tmp_path: Path) -> None:
    """With "latest", the position must stay the same when batch 0 is rerun: records in between would be lost."""
    made = pipeline(tmp_path)
    source = made.sources["source"].with_options(startingOffsets="latest").source()
    first = sidecar.keep_first(made.checkpoint, source.driver().initial)
    assert first is not None
    append(str(tmp_path / "in"), pa.table({"value": [b"b"]}), idempotence=("test", 2))
    assert source.driver().initial() != first
    assert sidecar.keep_first(made.checkpoint, source.driver().initial) == first
    assert sidecar.read_first(made.checkpoint) == first
    explicit = made.sources["source"].with_options(startingOffsets=json.dumps(first)).source()
    assert explicit.driver().initial()["offsets"] == first["offsets"]
    assert [p.name for p in (Path(made.checkpoint) / "delivered").iterdir()] == ["source-offsets.json"]


def test_batch_0_begins_where_it_began_if_the_source_knows_the_checkpoint(tmp_path: Path) -> None:
    """A newer "latest" would lose records in between. In the idiom, `start()` passes the checkpoint to the source."""
    made = pipeline(tmp_path)
    source = made.sources["source"].with_options(startingOffsets="latest").source()
    reader = StreamReader(source, Reading(made.checkpoint))
    began = reader.initialOffset()
    append(str(tmp_path / "in"), pa.table({"value": [b"b"]}), idempotence=("test", 2))
    end = reader.latestOffset(began, ReadAllAvailable())
    assert reader.partitions(began, end)
    reader.stop()
    assert sidecar.read_first(made.checkpoint) == began

    again = StreamReader(source, Reading(made.checkpoint))
    assert again.initialOffset() == began != source.driver().initial()
    again.stop()
    elsewhere = StreamReader(source, Reading())
    assert elsewhere.initialOffset() == source.driver().initial(), "nobody told it of a checkpoint"
    elsewhere.stop()


def test_first_offsets_of_sparks_own_source_are_known(tmp_path: Path) -> None:
    file = tmp_path / "c" / "sources" / "0" / "0"
    file.parent.mkdir(parents=True)
    file.write_bytes(b'\0v1\n{"orders":{"0":12}}')
    assert sidecar.read_first(str(tmp_path / "c")) == {"orders": {"0": 12}}
    file.write_bytes(b'\x19{"orders":{"0":12,"1":3}}')
    assert sidecar.read_first(str(tmp_path / "c")) == {"orders": {"0": 12, "1": 3}}, "as Spark 2.1.0 wrote them"
    file.write_bytes(b"of another source")
    assert sidecar.read_first(str(tmp_path / "c")) is None
    file.write_bytes(b'\0v99999\n{"orders":{"0":12}}')
    with pytest.raises(Refused, match=r"SOURCE_OFFSETS_NEWER.*v99999.*here v1 is read"):
        sidecar.read_first(str(tmp_path / "c"))


PULSAR = {"url": "pulsar://127.0.0.1:1", "adminUrl": "http://127.0.0.1:1", "topics": "t"}
OF_SOURCES = {
    "kafka": (delivered.kafka("127.0.0.1:1", subscribe="t"), {"t": {"0": 12}, "#ids": {"t": "a"}}),
    "pulsar": (delivered.endpoint("pulsar", **PULSAR), {"persistent://public/default/t": {"0": "1:2"}}),
    "log": (delivered.log("in"), {"version": 1, "offsets": {"0": 5}, "#log": "a"}),
    "outbox, polled": (delivered.endpoint("outbox", url="sqlite:////o.db", dbtable="o"), {"number": 3, "#id": "a"}),
    "outbox, by log": (
        delivered.endpoint("outbox", url="postgresql://127.0.0.1:1/o", dbtable="o"),
        {"lsn": 9, "number": 3},
    ),
    "rabbitmq_stream": (delivered.endpoint("rabbitmq_stream", url="amqp://127.0.0.1:1", streams="t"), {"t": 12}),
}
"""A source, without a server, and offsets of it."""


@pytest.mark.parametrize("name", OF_SOURCES)
def test_each_source_knows_the_offsets_of_others(name: str) -> None:
    driver = OF_SOURCES[name][0].source().driver()
    for other, (_, offsets) in OF_SOURCES.items():
        if other == name:
            driver.check_offsets(offsets)
            continue
        with pytest.raises(InvariantBroken, match="CHECKPOINT_OFFSETS"):
            driver.check_offsets(offsets)
    driver.close()


@pytest.mark.parametrize(
    ("name", "one", "both"),
    [
        ("kafka", {"t": {"0": 1}}, {"t": {"0": 1, "1": 2}}),
        ("pulsar", {"t": {"-1": "1:2"}}, {"t": {"-1": "1:2"}, "u": {"-1": "1:2"}}),
        ("rabbitmq_stream", {"t": 12}, {"t": 12, "u": 3}),
        ("outbox, by log", {"lsn": 9}, {"lsn": 9, "number": 3}),
    ],
)
def test_a_part_of_a_source_that_was_removed_does_not_return(
    tmp_path: Path, name: str, one: dict[str, object], both: dict[str, object]
) -> None:
    """Regression: it was read from its beginning."""
    driver, removed = OF_SOURCES[name][0].source().driver(), sidecar.RemovedParts(str(tmp_path))
    removed.check(driver, one, both)
    removed.check(driver, both, one)
    if name.startswith("outbox"):
        removed.check(driver, one, both)  # rows from before the slot
        assert not list(tmp_path.iterdir())
    else:
        with pytest.raises(InvariantBroken, match="TOPIC_RETURNED"):
            removed.check(driver, one, both)
    driver.close()


def kafka(topic: str, server: str = "k1:9092", name: str = "delivered_kafka") -> tuple[str, dict[str, str]]:
    return name, {"kafka.bootstrap.servers": server, "subscribe": topic}


def of(name: str, **options: str) -> tuple[str, dict[str, str]]:
    return f"delivered_{name}", options


LOGS = of("log", path="/a"), of("log", path="/b")
TABLES = tuple(of("outbox", url="postgresql://h/shop", dbtable=t, method="order") for t in ("orders", "payments"))
QUEUES = tuple(of("rabbitmq", url="amqp://h", queue="q", log=f"/{log}") for log in "ab")
TOPICS = tuple(of("rocketmq", endpoints="h:8081", topic=t) for t in ("orders", "payments"))
STREAMS = tuple(of("rabbitmq_stream", url="rabbitmq-stream://h", streams=t) for t in ("orders", "payments"))
PULSAR = tuple(of("pulsar", url="pulsar://h", topics=t) for t in ("orders", "payments"))
JMS = tuple(of("activemq", url="stomp://h", queue=t) for t in ("orders", "payments"))
ONE_NAME = kafka("t", "k1:9092"), kafka("t", "k2:9092")


@pytest.mark.parametrize(
    ("before", "now", "code"),
    [
        *((pair, pair[::-1], "MOVED") for pair in (LOGS, TABLES, QUEUES, TOPICS, STREAMS, PULSAR, JMS, ONE_NAME)),
        (LOGS, (of("log", path="/c"), *LOGS), "NUMBER"),
        (LOGS, LOGS[1:], "NUMBER"),
        (LOGS[:1], LOGS, "NUMBER"),
        (LOGS, (LOGS[1], of("log", path="/c")), "MOVED"),
        (LOGS, (LOGS[0], LOGS[0]), "MOVED"),
        ((kafka("a"), kafka("b")), (kafka("b", "new:9092"), kafka("a", "new:9092")), "MOVED"),
        ((kafka("a"), kafka("b")), (kafka("b", name="kafka"), kafka("a")), "MOVED"),
        ((kafka("a"), LOGS[0]), (LOGS[0], kafka("a")), "MOVED"),
        (LOGS, LOGS, None),
        (LOGS, (of("log", PATH="file:/moved/a"), LOGS[1]), None),
        ((kafka("a"), kafka("b")), (kafka("a", "new:9092"), kafka("b", "new:9092")), None),
        ((kafka("a", name="kafka"), kafka("b")), (kafka("a"), kafka("b")), None),
        ((kafka("a"), kafka("b")), (kafka("a,c"), kafka("b")), None),
        ((("rate", {}), ("jdbc-stream", {"url": "postgresql://u:secret@h:x/db"})), LOGS, None),
        (LOGS[:1], LOGS[1:], None),  # landmarks detect another log
    ],
)
def test_sources_without_names_keep_their_order(tmp_path: Path, before: Any, now: Any, code: str | None) -> None:
    """Regression: each was read at the offsets of the other, if they were not past its end."""
    location = str(tmp_path)
    record_order(location, identities(now))
    record_order(location, identities(before))  # no batch so far
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "0").write_text("v1\n{}\n" + "\n".join('{"0": 7}' for _ in before))
    record_order(location, identities(before))
    if code is None:
        record_order(location, identities(now))
    else:
        with pytest.raises(Refused, match=f"SOURCE_ORDER.*{'position' if code else ''}") as refused:
            record_order(location, identities(now))
        assert "secret" not in str(refused.value) and location in str(refused.value)
        if code == "NUMBER":
            record_order(location, identities(now), complete=False)  # over Spark Connect, some are not known
    record_order(location, identities(before) if code else identities(now))
    if len(before) > 1:
        kept = json.loads((tmp_path / sidecar.ORDER_FILE).read_text())
        assert len(kept["sources"]) == 2 and "secret" not in str(kept)
    (tmp_path / "offsets" / "1").write_text("v2\n{}\norders:{}\npayments:{}")
    record_order(location, identities(now))


@pytest.mark.checkpoint("the system that the source reads, or an outbox's method", "refused", "`CHECKPOINT_OFFSETS`")
@pytest.mark.parametrize("logged", ['{"t": {"0": 12}}', "12", '{"t": 12}'])
@pytest.mark.parametrize("batches", [0, 1])
def test_a_source_of_another_kind_is_refused(tmp_path: Path, batches: int, logged: str) -> None:
    """The batch in flight was decided empty, and the next one began at the earliest record."""
    made = pipeline(tmp_path)
    checkpoint(made, batches)
    offsets = json.loads(logged)
    if batches:
        (Path(made.checkpoint) / "offsets" / "0").write_text(f"v1\n{{}}\n{logged}")
    elif isinstance(offsets, dict):
        sidecar.keep_first(made.checkpoint, lambda: offsets)
    else:
        return
    assert code_of(made.plan()) == "CHECKPOINT_OFFSETS"
    if isinstance(offsets, dict):
        source = made.sources["source"].source()
        for reads in (StreamReader.latestOffset, StreamReader.partitions):
            reader = StreamReader(source, Reading(made.checkpoint))
            with pytest.raises(InvariantBroken, match="CHECKPOINT_OFFSETS"):
                reads(reader, offsets, ReadAllAvailable() if reads is StreamReader.latestOffset else offsets)
            reader.stop()


def test_a_checkpoint_with_batches_is_given_no_start(tmp_path: Path) -> None:
    """Regression: a Pipeline on a checkpoint of the idiom stored the current "latest" as its start."""
    made = pipeline(tmp_path)
    (Path(made.checkpoint) / "offsets").mkdir(parents=True)
    (Path(made.checkpoint) / "offsets" / "0").write_text("v1\n{}\n{}")
    assert sidecar.keep_first(made.checkpoint, made.sources["source"].source().driver().initial) is None
    assert sidecar.read_first(made.checkpoint) is None


@pytest.mark.parametrize(
    ("checkpoints", "own", "condition"),
    [
        (["/c", "/c"], "/c", "SHARED"),
        (["/c", "file:///c/"], None, "SHARED"),
        (["/c"], "/other", "OTHER"),
        (["/c"], "file:/c", None),
        (["s3a://b/c"], "s3://b/c/", None),
        (["/c", None], "/c", None),
        (["/c"], None, None),
    ],
)
def test_a_source_is_alone_in_the_checkpoint_that_it_was_given(
    checkpoints: list[str | None], own: str | None, condition: str | None
) -> None:
    """Another one would begin at its first offsets."""
    given = [{"path": str(n), **({"checkpointLocation": c} if c else {})} for n, c in enumerate(checkpoints)]
    sources = [("delivered_log", options) for options in (*given, given[0])]  # a frame that is read twice
    if condition is None:
        check_source_checkpoints(sources, own)
        return
    with pytest.raises(delivered.UsageError) as error:
        check_source_checkpoints([*sources, ("kafka", {"checkpointLocation": "/x"})], own)
    assert (error.value.code, error.value.condition) == ("DELIVERED_SOURCE_CHECKPOINT", condition)


def test_damaged_first_offsets_stop_the_start(tmp_path: Path) -> None:
    made = pipeline(tmp_path)
    assert sidecar.read_first(made.checkpoint) is None
    file = Path(made.checkpoint) / sidecar.FIRST_FILE
    file.parent.mkdir(parents=True)
    file.write_text('{"offs')
    with pytest.raises(InvariantBroken, match="SOURCE_OFFSETS_DAMAGED"):
        sidecar.keep_first(made.checkpoint, made.sources["source"].source().driver().initial)


def test_an_error_of_ours_is_found_in_the_text_of_spark() -> None:
    text = (
        "[STREAM_FAILED] Query terminated with exception: ...\n  File x.py, line 3\n"
        "delivered.model.errors.LedgerAhead: [DELIVERED_LEDGER_AHEAD] The ledger holds batch 7. Next: restore the "
        "newest checkpoint\n\tat org.apache.spark.Foo\n"
    )
    found = translated(RuntimeError(text))
    assert found is not None
    assert (found.code, found.message, found.next_step, found.exit_code) == (
        "DELIVERED_LEDGER_AHEAD",
        "The ledger holds batch 7.",
        "restore the newest checkpoint",
        1,
    )
    assert isinstance(translated(RuntimeError("x [DELIVERED_DECISION_UNKNOWN] Nobody knows.\n")), OutcomeUnknown)
    assert translated(RuntimeError("[STREAM_FAILED] no error of ours")) is None


def test_a_start_without_a_registry_keeps_what_an_unfinished_batch_was_planned_with(tmp_path: Path) -> None:
    made = pipeline(tmp_path)
    checkpoint(made, 1)
    sidecar.keep_read_schemas(made.checkpoint, {"source": {"value": 1}})
    assert for_start(made) == made.sources
    assert sidecar.read_schemas(made.checkpoint) == {"source": {"value": 1}}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("spark.sql.shufle.partitions", "spark.sql.shuffle.partitions"),
        ("spark.executor.memroy", "spark.executor.memory"),
        ("spark.sql.streaming.stateStore.providerclass", "spark.sql.streaming.stateStore.providerClass"),
        ("spark.SQL.Shuffle.partitions", "spark.sql.shuffle.partitions"),
        ("Spark.sql.shuffle.partitions", "spark.sql.shuffle.partitions"),
        ("spark.sql.shuffle.partitions", None),
        ("spark.sql.catalog.lake.uri", None),
        ("spark.delivered.arbiter.port", None),
    ],
)
def test_a_misspelt_setting_of_spark_is_told(tmp_path: Path, name: str, near: str | None) -> None:
    """Spark takes any name, and ignores those that it does not know."""
    append(str(tmp_path / "in"), pa.table({"key": [b"k"], "value": [b"v"]}))
    given = delivered.Pipeline(
        name="p",
        guarantee="exactly_once",
        checkpoint=tmp_path / "checkpoint",
        source=delivered.log(str(tmp_path / "in")),
        sinks=[delivered.sqlite(str(tmp_path / "out.db"), "t", ifNotExists="true")],
        conf={name: "1"},
    )
    plan = given.plan()
    assert isinstance(plan, Plan), plan
    told = [w for w in plan.warnings if "SETTING_UNKNOWN" in w]
    assert len(told) == (near is not None)
    assert all(repr(name) in w and repr(near) in w for w in told)
