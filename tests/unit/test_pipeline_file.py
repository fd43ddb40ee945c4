"""Pipeline files: valid content, precedence, and error messages."""

from __future__ import annotations

import functools
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from delivered.cli.run import FILE, write_example
from delivered.entry import Pipeline
from delivered.model.errors import UsageError
from delivered.pipeline.definition import parse_trigger
from delivered.pipeline.file import SinkEntry, as_text, endpoint_of, load_file, load_text, parse_override, schema
from delivered.pipeline.transform import load_function, transform
from delivered.planner import Trigger

SCHEMA = Path(__file__).parents[2] / "docs" / "pipeline.schema.json"

GOOD = """\
pipeline: orders
guarantee: exactly_once
checkpoint: /data/checkpoints/orders
source: {format: kafka, kafka.bootstrap.servers: "localhost:9092", subscribe: orders, maxOffsetsPerTrigger: 1000}
transform: {sql: "SELECT key, value FROM source"}
sinks:
  - format: kafka
    kafka.bootstrap.servers: "localhost:9092"
    kafka.sasl.password: ${env:KAFKA_PASSWORD}
    topic: orders-clean
"""


def refused(text: str, **overrides: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load_text(text, "orders.yaml", overrides or None)
    return caught.value


def test_a_file_becomes_a_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "orders.yaml"
    path.write_text(GOOD)
    pipeline = Pipeline.from_file(path)
    assert pipeline.name == "orders"
    assert pipeline.sources["source"].options["maxOffsetsPerTrigger"] == "1000"
    assert pipeline.transform.sql == "SELECT key, value FROM source"
    assert pipeline.sinks[0].label == "kafka orders-clean"


def test_a_reference_stays_a_reference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KAFKA_PASSWORD", "hunter2")
    path = tmp_path / "orders.yaml"
    path.write_text(GOOD)
    pipeline = Pipeline.from_file(path)
    assert pipeline.sinks[0].options["kafka.sasl.password"] == "env:KAFKA_PASSWORD"
    assert "hunter2" not in repr(pipeline)


def test_a_secret_in_clear_is_not_shown() -> None:
    pipeline = Pipeline.from_parsed(load_text(GOOD.replace("${env:KAFKA_PASSWORD}", "hunter2")), Path())
    assert pipeline.sinks[0].options["kafka.sasl.password"] == "hunter2"
    assert "hunter2" not in repr(pipeline)


def test_a_reference_in_the_middle_of_a_value_is_refused() -> None:
    error = refused(GOOD.replace('"localhost:9092", subscribe', '"${env:HOST}:9092", subscribe'))
    assert error.code == "DELIVERED_REFERENCE_INVALID"
    assert "line 4" in error.message
    assert "source.kafka.bootstrap.servers" in error.message


@pytest.mark.parametrize(
    ("text", "code", "words", "next_step"),
    [
        (GOOD.replace("guarantee:", "guarante:"), "FILE_INVALID", ["line 2", "'guarante'"], "'guarantee'"),
        (GOOD.replace("exactly_once", "exactly_one"), "FILE_INVALID", ["line 2", "exactly_one", "at_most_once"], None),
        (GOOD.replace("guarantee: exactly_once\n", ""), "FILE_INVALID", ["'guarantee' is missing"], "guarantee"),
        (GOOD.replace("pipeline: orders", "pipeline: my orders"), "FILE_INVALID", ["line 1", "my orders"], None),
        (GOOD.replace("{sql:", "{sqll:"), "FILE_INVALID", ["line 5", "transform.sqll"], "'sql'"),
        (GOOD.replace('{sql: "', '{python: "a:b", sql: "'), "FILE_INVALID", ["line 5", "one of"], None),
        (GOOD + "pipeline: again\n", "FILE_INVALID", ["line 11", "line 1"], None),
        ("pipeline: [orders\n", "FILE_NOT_YAML", ["line"], None),
        ("", "FILE_INVALID", ["empty"], "init"),
        ("- a\n", "FILE_INVALID", ["list"], "init"),
    ],
)
def test_faults_name_line_key_and_way_out(text: str, code: str, words: list[str], next_step: str | None) -> None:
    error = refused(text)
    assert error.code == f"DELIVERED_{code}"
    assert error.exit_code == 2
    for word in [*words, "orders.yaml"]:
        assert word in error.message
    if next_step is not None:
        assert error.next_step is not None
        assert next_step in error.next_step


def test_every_fault_of_a_file_is_told_at_once() -> None:
    message = refused(GOOD.replace("guarantee:", "guarante:").replace("checkpoint:", "chekpoint:")).message
    assert "'guarante'" in message
    assert "'chekpoint'" in message


def test_an_unknown_option_is_refused_with_a_suggestion() -> None:
    spec = load_text(GOOD.replace("maxOffsetsPerTrigger", "maxOffsetPerTrigger"))
    with pytest.raises(UsageError) as caught:
        Pipeline.from_parsed(spec, Path()).plan(offline=True)
    assert caught.value.code == "DELIVERED_OPTION_UNKNOWN"
    assert "maxOffsetsPerTrigger" in str(caught.value.next_step)


def test_an_unknown_format_is_refused_with_a_suggestion() -> None:
    spec = load_text(GOOD.replace("format: kafka, ", "format: kafak, "))
    with pytest.raises(UsageError) as caught:
        Pipeline.from_parsed(spec, Path()).plan(offline=True)
    assert caught.value.code == "DELIVERED_FORMAT_UNKNOWN"
    assert "kafka" in str(caught.value.next_step)


def test_call_stands_above_environment_stands_above_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_text(GOOD).guarantee == "exactly_once"
    assert load_text(GOOD).trigger == "0 seconds"
    monkeypatch.setenv("DELIVERED_GUARANTEE", "at_least_once")
    monkeypatch.setenv("DELIVERED_TRIGGER", "available_now")
    assert load_text(GOOD).guarantee == "at_least_once"
    assert load_text(GOOD).trigger == "available_now"
    assert load_text(GOOD, overrides={"guarantee": "at_most_once"}).guarantee == "at_most_once"


@pytest.mark.parametrize("name", ["DELIVERED_GUARANTE", "delivered_guarantee", "DELIVERED_NEWCHECKPOINT"])
def test_a_misspelt_variable_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELIVERED_DB_PASSWORD", "of somebody")
    load_text(GOOD)
    monkeypatch.setenv(name, "at_least_once")
    with pytest.raises(UsageError, match="ENVIRONMENT_UNKNOWN") as caught:
        load_text(GOOD)
    assert str(caught.value.next_step).endswith(("GUARANTEE", "NEW_CHECKPOINT"))


def test_paths_are_relative_to_the_file() -> None:
    """Also the ledger's and the log's: a receiver may be started in another folder than the pipeline."""
    text = """
pipeline: p
guarantee: at_least_once
checkpoint: c
source: {format: rabbitmq, url: amqp://h, queue: q, log: data/log}
sinks:
  - {format: rabbitmq, url: amqp://h, exchange: e, ledger: ledger.db, name: a}
  - {format: iceberg, warehouse: lake, table: a.b, name: b}
  - {format: iceberg, warehouse: s3://lake, table: a.c, name: c}
"""
    made = Pipeline.from_parsed(load_text(text), Path("/etc/pipelines"))
    assert made.checkpoint == "/etc/pipelines/c"
    assert made.sources["source"].options["log"] == "/etc/pipelines/data/log"
    assert made.sinks[0].options["ledger"] == "/etc/pipelines/ledger.db"
    assert [s.options["warehouse"] for s in made.sinks[1:]] == ["/etc/pipelines/lake", "s3://lake"]


def test_overrides_reach_options() -> None:
    spec = load_text(
        GOOD, overrides=dict([parse_override("source.subscribe=other"), parse_override("sinks.0.topic=t")])
    )
    pipeline = Pipeline.from_parsed(spec, Path())
    assert pipeline.sources["source"].options["subscribe"] == "other"
    assert pipeline.sinks[0].options["topic"] == "t"
    spec = load_text(GOOD, overrides=dict([parse_override("source.SUBSCRIBE=other")]))
    assert Pipeline.from_parsed(spec, Path()).sources["source"].source().capability()
    assert refused(GOOD, **{"sinks.1.topic": "t"}).code == "DELIVERED_OVERRIDE_VALUE"
    with pytest.raises(UsageError):
        parse_override("trigger")


@pytest.mark.parametrize(
    ("given", "kind", "interval"),
    [
        (None, Trigger.PROCESSING_TIME, "0 seconds"),
        ("available_now", Trigger.AVAILABLE_NOW, None),
        ("available-now", Trigger.AVAILABLE_NOW, None),
        ("10 seconds", Trigger.PROCESSING_TIME, "10 seconds"),
        ({"continuous": "1 second"}, Trigger.CONTINUOUS, "1 second"),
        ({"real_time": "1 minute"}, Trigger.REAL_TIME, "1 minute"),
    ],
)
def test_triggers(given: object, kind: Trigger, interval: str | None) -> None:
    found = parse_trigger(given)  # type: ignore[arg-type]
    assert (found.kind, found.interval) == (kind, interval)


@pytest.mark.parametrize(
    ("given", "interval"),
    [
        ("sometimes", "10 seconds"),
        ({"a": "b"}, "10 seconds"),
        ({"processing_time": 10}, "10 seconds"),
        ({}, "10 seconds"),
        ("30 secs", "30 seconds"),
        ("5min", "5 minutes"),
        ("200 ms", "200 milliseconds"),
        ("1.5 minutes", "10 seconds"),
        ("1 month", "10 seconds"),
    ],
)
def test_bad_triggers(given: object, interval: str) -> None:
    """Among them, what only Spark would refuse, after its start."""
    with pytest.raises(UsageError, match=f"TRIGGER_VALUE.*write trigger: {interval};"):
        parse_trigger(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sql", "deterministic", "stateful"),
    [
        ("SELECT value, rand() AS r FROM source", False, False),
        ("SELECT uuid() AS id, value FROM source", False, False),
        ("SELECT key, count(*) FROM source GROUP BY key", None, True),
        ("SELECT key, collect_list(value) FROM source GROUP BY key", False, True),
        ("SELECT key, current_timestamp() AS at FROM source", None, False),
        ("SELECT operand FROM source", None, False),
    ],
)
def test_what_sql_says_of_itself(sql: str, deterministic: bool | None, stateful: bool) -> None:
    facts = transform(sql).facts()
    assert (facts.deterministic, facts.stateful) == (deterministic, stateful)
    assert transform(sql, deterministic=True).facts().deterministic is True


class _Processor:
    def handle(self) -> str:
        return _named()


def _named() -> str:
    return uuid.uuid4().hex


def _by_class(frame: Any) -> Any:
    return frame.groupBy("k").transformWithState(_Processor(), "now string", "append", "none")


def _by_import(frame: Any) -> Any:
    from datetime import UTC
    from datetime import datetime as clock
    from random import randint

    return frame.mapInArrow(lambda rows: (rows, clock.now(UTC), randint(1, 2)), frame.schema)


def _plain(frame: Any) -> Any:
    """Not first() of anything."""
    return frame.where("k > 1").selectExpr("now() AS at")


def _by_text(frame: Any) -> Any:
    return frame.selectExpr("key", "value", "uuid() AS id").where(IS_FIRST).selectExpr(*["key", "id", "rand (3) AS r"])


IS_FIRST = "first_value(value) OVER (ORDER BY key) = value"


@pytest.mark.parametrize(
    ("function", "changing", "stateful"),
    [
        (_by_class, ("uuid.uuid4()",), True),
        (_by_import, ("clock.now()", "randint()"), False),
        (functools.partial(_by_class), ("uuid.uuid4()",), True),
        (_plain, (), False),
        (_by_text, ("uuid()", "first_value()", "rand()"), False),
    ],
)
def test_what_a_python_function_calls(function: Any, changing: tuple[str, ...], stateful: bool) -> None:
    facts = transform(function).facts()
    assert (sorted(facts.changing), facts.stateful) == (sorted(changing), stateful)
    assert facts.deterministic is (False if changing else None)
    assert transform(function, deterministic=True).facts().changing == ()


def test_what_a_function_of_spark_calls() -> None:
    functions = pytest.importorskip("pyspark.sql.functions")
    said = functions.udf(lambda v: v).asNondeterministic()

    def aggregate(frame: Any) -> Any:
        return frame.groupBy("k").agg(functions.first("v"), functions.sum("v"), functions.now(), said("v"))

    assert transform(aggregate).facts().changing == ("functions.first()", "said()")


def test_a_function_of_a_module_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "beside_the_file.py").write_text("def clean(frame):\n    return frame\n")
    assert load_function("beside_the_file:clean", tmp_path)(3) == 3
    for reference in ("beside_the_file", "beside_the_file:missing", "no_such_module_here:clean"):
        with pytest.raises(UsageError):
            load_function(reference, tmp_path)


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path) -> None:
    file, records = write_example(tmp_path / "example")
    assert (file.name, records) == (FILE, 1000)
    pipeline = Pipeline.from_file(file)
    assert pipeline.checkpoint == str(tmp_path / "example" / "checkpoint")
    assert pipeline.sources["source"].options["path"] == str(tmp_path / "example" / "orders-log")
    with pytest.raises(UsageError, match="EXAMPLE_EXISTS"):
        write_example(tmp_path / "example")


def test_secrets_and_certificates_are_next_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are only in the process's folder stay as they are: `spark-submit --files` puts them there."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "here").write_text("secret")
    text = """
pipeline: p
guarantee: at_least_once
checkpoint: c
source: {format: kafka, kafka.bootstrap.servers: "h:9092", subscribe: t, kafka.ssl.ca.location: WHERE}
sinks:
  - {format: rabbitmq, url: amqps://h, exchange: e, password: "file:WHERE", tlsTrustCertsFile: WHERE}
notify: {webhook: "file:WHERE", format: json}
"""

    def found(where: str) -> list[str]:
        made = Pipeline.from_parsed(load_text(text.replace("WHERE", where)), tmp_path / "etc")
        sink, notify = made.sinks[0].options, made.notify
        assert notify is not None and notify.format == "json"
        assert made.sinks[0].written["password"] == f"file:{where}"  # a replay keeps its name in every folder
        return [made.sources["source"].options["kafka.ssl.ca.location"], sink["tlsTrustCertsFile"],
                sink["password"].removeprefix("file:"), notify.url.removeprefix("file:")]  # fmt: skip

    assert set(found("here")) == {str(tmp_path / "etc" / "here")}
    assert set(found("elsewhere")) == {"elsewhere"}
    assert set(found("/etc/hostname")) == {"/etc/hostname"}
    monkeypatch.chdir(tmp_path / "etc")
    assert set(found("here")) == {"here"}


@pytest.mark.parametrize(("system", "name"), [("postgres", "sslrootcert"), ("mysql", "ssl_ca")])
def test_certificates_in_urls_are_next_to_the_file(tmp_path: Path, system: str, name: str) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "ca.pem").write_text("")
    (folder / "system").write_text("")

    def url(value: str) -> str:
        entry = SinkEntry.model_validate({"format": system, "url": f"{system}://h/db?{name}={value}", "dbtable": "t"})
        endpoint = endpoint_of(entry, folder)
        assert endpoint.written.get("url", endpoint.options["url"]) == f"{system}://h/db?{name}={value}"
        return endpoint.options["url"].partition("=")[2]

    assert url("ca.pem&user=me") == f"{tmp_path}/a%20b/ca.pem&user=me"
    for value in ("system", "elsewhere.pem", "/etc/hostname"):
        assert url(value) == value


def test_a_missing_file_is_one_clear_error() -> None:
    with pytest.raises(UsageError, match="FILE_UNREADABLE"):
        load_file("/nowhere/orders.yaml")


def test_the_published_schema_is_up_to_date() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == as_text(), "run: python -m delivered.pipeline.file " + str(SCHEMA)


def test_the_schema_knows_every_option_and_no_other() -> None:
    shapes = {s["title"]: s for s in schema()["$defs"]["SourceEntry"]["oneOf"]}
    assert shapes["kafka"]["additionalProperties"] is False
    assert {"format", "subscribe", "maxOffsetsPerTrigger"} <= set(shapes["kafka"]["properties"])
    assert "^kafka\\." in shapes["kafka"]["patternProperties"]
    assert json.loads(as_text()) == schema()
