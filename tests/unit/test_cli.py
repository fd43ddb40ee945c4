"""The command line: results, errors, exit codes. Commands that run Spark: tests/spark/test_cli_run.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from delivered.cli.doctor import Check, Health, show
from delivered.cli.main import app
from delivered.entry import Pipeline
from delivered.model.errors import without_passwords

COMMANDS = [
    ["init"],
    ["plan"],
    ["run"],
    ["adopt"],
    ["audit"],
    ["doctor"],
    ["transactions", "list"],
    ["transactions", "abort"],
    ["transactions", "apply"],
    ["sagas", "create"],
    ["sagas", "run"],
    ["sagas", "list"],
    ["sagas", "retry"],
    ["sagas", "skip"],
    ["sagas", "done"],
    ["sagas", "clean"],
    ["brokers", "start"],
    ["brokers", "fetch"],
    ["brokers", "stop"],
    ["brokers", "status"],
    ["brokers", "topic"],
    ["brokers", "produce"],
    ["brokers", "read"],
]


def call(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def example(tmp_path: Path) -> Path:
    code, out, err = call("init", tmp_path / "example")
    assert (code, err) == (0, "")
    assert "1000 records" in out
    return tmp_path / "example" / "orders.yaml"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_both_outputs(command: list[str]) -> None:
    code, out, _ = call(*command, "--help")
    assert code == 0
    assert "--output" in out


def test_a_closed_stream_is_no_file_that_is_opened_next(tmp_path: Path) -> None:
    """A database would be standard output, and receive what child processes print."""
    code = (
        "import os, subprocess, sys\nfor n in range(3):\n    os.close(n)\nimport delivered.cli.main\n"
        "file = open(sys.argv[1], 'wb', buffering=0)\nsubprocess.run(['echo', 'printed'])\nfile.write(b'data')\n"
        "print('printed', flush=True)\nprint('said', file=sys.stderr, flush=True)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "database")], check=True)
    assert (tmp_path / "database").read_bytes() == b"data"


def test_plan_as_text_and_json(example: Path) -> None:
    code, out, _ = call("plan", example, "--offline")
    assert code == 0
    assert "orders: exactly_once by" in out
    assert "commit.decide" in out
    code, out, _ = call("plan", example, "--offline", "--output", "json")
    assert code == 0
    assert [s["id"] for s in json.loads(out)["steps"]][-1] == "log"


def test_an_audit_of_a_chain_that_is_none_is_refused(example: Path) -> None:
    for arguments, expected in (
        (["audit", example, example], "DELIVERED_AUDIT_FILES"),
        (["audit", "--chain", example], "DELIVERED_CHAIN_SHORT"),
        (["audit", "--chain", example, example], "DELIVERED_CHAIN_LINK"),
        (["audit", "--chain", example, example, "--recompute"], "DELIVERED_CHAIN_OPTION"),
        (["audit", "--chain", example, example, "--from-now"], "DELIVERED_CHAIN_OPTION"),
        (["audit", "--follow", example, "--full"], "DELIVERED_FOLLOW_OPTION"),
        (["audit", "--follow", example, "--share", "10 %"], "DELIVERED_FOLLOW_MISSING"),
        (["audit", example, "--every", "15 min"], "DELIVERED_FOLLOW_MISSING"),
        (["audit", example, "--full", "--since", "3"], "DELIVERED_AUDIT_CONTINUES"),
        (["audit", example, "--since", "-1"], "DELIVERED_AUDIT_CONTINUES"),
        (["audit", example, "--full", "--recompute"], "DELIVERED_AUDIT_CONTINUES"),
    ):
        code, _, err = call(*arguments)
        assert code == 2
        assert expected in err


def test_a_refusal_exits_2_and_says_the_way_out(example: Path) -> None:
    code, out, _ = call("plan", example, "--set", "trigger={real_time: 1 minute}")
    assert code == 2
    assert "DELIVERED_TRIGGER_NOT_MICRO_BATCH" in out
    assert "next step" in out
    code, out, _ = call("plan", example, "--master", "spark://host:7077", "--output", "json")
    assert code == 2
    assert json.loads(out)["code"] == "DELIVERED_SOURCE_LOCAL"


def test_an_option_stands_above_the_environment(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELIVERED_GUARANTEE", "at_least_once")
    assert json.loads(call("plan", example, "--offline", "-o", "json")[1])["guarantee"] == "at_least_once"
    arguments = ("plan", example, "--offline", "-o", "json", "--guarantee", "at_most_once")
    assert json.loads(call(*arguments)[1])["guarantee"] == "at_most_once"


def test_an_error_is_one_message_without_a_traceback(example: Path) -> None:
    code, out, err = call("plan", example, "--set", "source.pathh=/x")
    assert code == 2
    assert out == ""
    assert err.startswith("[DELIVERED_OPTION_UNKNOWN]")
    assert "Next: write 'path'" in err
    assert "Traceback" not in err


def test_an_error_as_json(example: Path) -> None:
    code, out, err = call("plan", example, "--set", "guarantee=twice", "-o", "json")
    assert (code, err) == (2, "")
    assert json.loads(out)["error"]["code"] == "DELIVERED_FILE_INVALID"


def test_run_refuses_before_spark_starts(example: Path) -> None:
    code, out, err = call("run", example, "--set", "source.path=/nowhere/log")
    assert code == 2
    assert "/nowhere/log" in err
    assert out == ""


def test_a_receiver_fills_the_log_that_its_pipeline_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is started: the log's path is relative to the file."""
    (tmp_path / "pipelines").mkdir()
    file = tmp_path / "pipelines" / "orders.yaml"
    file.write_text("""
pipeline: orders
guarantee: at_least_once
checkpoint: checkpoint
source: {format: rabbitmq, url: "amqp://127.0.0.1:1", queue: q, log: queue.log}
sinks: [{format: sqlite, path: orders.db, table: orders}]
""")
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "delivered.cli.main", "receive", "pipelines/orders.yaml", "--no-wait"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 3
    assert f"into {file.parent}/queue.log" in ended.stderr
    assert Pipeline.from_file(file).sources["source"].options["log"] == f"{file.parent}/queue.log"


def test_init_does_not_overwrite(example: Path) -> None:
    code, _, err = call("init", example.parent)
    assert code == 2
    assert "DELIVERED_EXAMPLE_EXISTS" in err


@pytest.mark.parametrize("command", [["list"], ["abort", "x"], ["apply", "x"]], ids=" ".join)
def test_transactions_of_a_sink_without_any(example: Path, command: list[str]) -> None:
    verb, *rest = command
    code, _, err = call("transactions", verb, example, *rest, "--set", "pipeline=renamed")
    assert code == 2
    assert "DELIVERED_NO_TRANSACTIONS" in err
    assert "renamed" in err


def test_doctor_leaves_a_command_to_copy_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = 'pip install "delivered[spark]"'
    show([Check("a long path " + "x" * 100, Health.GOOD, "there"), Check("pyspark", Health.MISSING, "no", command)])
    assert f"Next: {command}" in capsys.readouterr().out


def test_doctor_marks_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    show(
        [Check("Python", Health.GOOD, "3.13"), Check("Java", Health.BAD, "none"), Check("archive", Health.MISSING, "-")]
    )
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ok", "BAD", "--"]


def test_doctor_is_content_here_and_names_what_is_wrong(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    code, out, _ = call("doctor", example)
    assert code == 0, out
    for word in ("Java", "pyspark", "deltalake", "pipeline orders", "127.0.0.1"):
        assert word in out
    monkeypatch.setenv("PYSPARK_PYTHON", "/nowhere/python")
    code, out, _ = call("doctor", "-o", "json")
    assert code == 1
    bad = [c for c in json.loads(out) if c["health"] == "bad"]
    assert [c["check"] for c in bad] == ["PYSPARK_PYTHON"]
    assert bad[0]["next"].startswith("export PYSPARK_PYTHON=")


def test_doctor_names_settings_that_a_cluster_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "# cluster\nspark.master yarn\nspark.python.unix.domain.socket.enabled = false\n"
    )
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    _, out, _ = call("doctor", "-o", "json")
    (found,) = [c for c in json.loads(out) if c["check"] == "Python tasks"]
    assert found["health"] == "missing"
    for setting in (
        "spark.python.unix.domain.socket.enabled=true",
        "spark.python.daemon.module=delivered.spark.daemon",
    ):
        assert setting in found["says"]


def test_brokers_of_an_empty_folder(tmp_path: Path) -> None:
    code, out, _ = call("brokers", "status", "kafka", "--folder", tmp_path)
    assert code == 1
    assert "no server was ever started" in out
    code, out, _ = call("brokers", "stop", "kafka", "--folder", tmp_path, "-o", "json")
    assert (code, json.loads(out)["stopped"]) == (0, False)
    for command in ("start", "stop", "fetch"):
        code, _, err = call("brokers", command, "kafak")
        assert code == 2
        assert "kafka" in err


def test_what_cannot_be_fetched_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELIVERED_CACHE", str(tmp_path))
    (tmp_path / "mariadb").write_text("in the way")
    code, _, err = call("brokers", "fetch", "postgres", "mariadb")
    assert code == 1
    assert "mariadb" in err
    assert [p.name for p in tmp_path.iterdir()] == ["mariadb"]
    assert call("brokers", "fetch", "postgres")[0] == 0


def test_usage_errors_exit_2() -> None:
    assert call("plan")[0] == 2
    assert call("no-such-command")[0] == 2


def test_a_reader_that_closes_early_is_no_error(example: Path) -> None:
    """`delivered plan orders.yaml | head -1`: no traceback, no message."""
    code = "from delivered.cli.main import app; app()"
    writer = subprocess.Popen(
        [sys.executable, "-c", code, "plan", "--offline", str(example)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert writer.stdout is not None
    writer.stdout.close()
    _, err = writer.communicate(timeout=60)
    lines = [line for line in err.decode().splitlines() if "asking" not in line]
    assert lines == []
    assert writer.returncode == 141


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("kafka.sasl.password=hunter2, next", "kafka.sasl.password=*****, next"),
        ('{"kafka.ssl.key.password": "hunter2"}', '{"kafka.ssl.key.password": *****}'),
        ("password='env:KAFKA_PASSWORD'", "password='env:KAFKA_PASSWORD'"),
        ("token: file:/run/token", "token: file:/run/token"),
        ("the password is wrong", "the password is wrong"),
    ],
)
def test_secrets_are_taken_out_of_messages(text: str, shown: str) -> None:
    assert without_passwords(text) == shown
