"""`delivered evidence` and `delivered evidence check`, of a real ledger with seals made by hand."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import Result
from tests.support.decided import checkpoint, decide, pipeline
from tests.support.seals import add_seals, chain, linked
from typer.testing import CliRunner

import delivered
from delivered.audit.evidence import Verdict
from delivered.cli.main import app
from delivered.engine.context import _place
from delivered.model.identity import Scope
from delivered.model.work import Owner

YAML = """
pipeline: orders
guarantee: exactly_once
checkpoint: {folder}/checkpoint
source: {{format: log, path: {folder}/in, storage.aws_secret_access_key: hunter2}}
sinks: [{{format: sqlite, path: {folder}/out.db, table: orders}}]
"""


def seal(made: delivered.Pipeline, count: int, first: int = 0) -> None:
    """Seals with broken number 1 and an hour between two."""
    seals = chain(count, Scope(made.name, made.sink_names[0], "incarnation-1"))
    seals = [replace(s, sealed_at_ms=(s.number + 1) * 3_600_000) for s in seals]
    if count > 1:
        seals[1] = replace(seals[1], verdict=Verdict.BROKEN, breaches=("1 records are lost",))
    add_seals(made, linked(seals)[first:])


@pytest.fixture
def made(tmp_path: Path) -> delivered.Pipeline:
    """Its driver, this process, is alive."""
    made = pipeline(tmp_path)
    decide(made, 3, _place(Owner("owner"), psutil.Process()))
    checkpoint(made, 3)
    (tmp_path / "orders.yaml").write_text(YAML.format(folder=tmp_path))
    return made


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["evidence", *map(str, args)])


def written(tmp_path: Path, *args: object) -> Path:
    file = tmp_path / "evidence.json"
    result = run(tmp_path / "orders.yaml", "--out", file, *args)
    assert result.exit_code == 0, result.output
    return file


def checked(*args: object) -> tuple[int, dict[str, Any]]:
    result = run("check", *args, "--recompute", "none", "--output", "json")
    return result.exit_code, json.loads(result.stdout)


def test_seals_are_written_with_what_they_are_about(tmp_path: Path, made: delivered.Pipeline) -> None:
    seal(made, 3)
    data = json.loads(written(tmp_path).read_text())
    (sink,) = data["sinks"]
    assert (sink["sink"], sink["first"], sink["last"], len(sink["seals"])) == (made.sink_names[0], 0, 2, 3)
    assert (sink["format"], sink["options"]["table"]) == ("sqlite", "orders")
    assert sink["target"]
    # As for anyone who asks while its driver runs.
    assert data["plan"]["refused"] is False
    assert data["plan"]["mechanism"]
    (source,) = data["sources"]
    assert json.loads(source["position"])["version"] == 1
    assert data["versions"]["delivered"]
    assert list(tmp_path.glob("*.partial")) == []


def test_no_secret_is_written(tmp_path: Path, made: delivered.Pipeline) -> None:
    seal(made, 1)
    text = written(tmp_path).read_text()
    assert "storage.aws_secret_access_key" in text
    assert "hunter2" not in text


def test_without_out_it_is_the_output(tmp_path: Path, made: delivered.Pipeline) -> None:
    seal(made, 2)
    file = tmp_path / "evidence.json"
    file.write_text(run(tmp_path / "orders.yaml").stdout)
    assert checked(file)[0] == 0


def test_a_file_is_checked(tmp_path: Path, made: delivered.Pipeline) -> None:
    seal(made, 3)
    file = written(tmp_path)
    code, found = checked(file)
    assert (code, found["intact"], found["faults"]) == (0, True, [])
    ranges = found["sinks"][made.sink_names[0]]["ranges"]
    assert [(r["state"], r["batches"]) for r in ranges] == [
        ("held", [0, 9]),
        ("broken", [10, 19]),
        ("held", [20, 29]),
    ]
    shown = run("check", file).stdout
    assert "orders: intact" in shown
    assert "batches 10 to 19: broken, 10 records by the ledger" in shown
    file.write_text(file.read_text().replace("records are lost", "records are late"))
    code, found = checked(file)
    assert code == 1
    assert "seal 1 was changed: its sha256 is another one" in [f["text"] for f in found["faults"]]


@pytest.mark.parametrize("edit", [('\\"format\\":1', '\\"format\\":9'), ('\\"pipeline\\":\\"o', '\\"pipeline\\":\\"}')])
def test_a_byte_that_makes_a_seal_unreadable(tmp_path: Path, made: delivered.Pipeline, edit: tuple[str, str]) -> None:
    seal(made, 3)
    file = written(tmp_path)
    file.write_text(file.read_text().replace(*edit, 1))
    code, found = checked(file)
    assert (code, found["intact"]) == (1, False)
    assert "the seal at place 0 cannot be read" in found["faults"][1]["text"]


def test_a_range(tmp_path: Path, made: delivered.Pipeline) -> None:
    seal(made, 3)
    name = made.sink_names[0]
    for args in (("--from", "10", "--to", "19"), ("--from", "1970-01-01T02:00", "--to", "1970-01-01T02:30")):
        (sink,) = json.loads(written(tmp_path, *args, "--sink", name).read_text())["sinks"]
        assert (sink["first"], sink["last"], sink["newest"]["number"]) == (1, 1, 2)
        assert checked(tmp_path / "evidence.json")[0] == 0
    result = run(tmp_path / "orders.yaml", "--from", "30")
    assert result.exit_code == 2
    assert "DELIVERED_EVIDENCE_EMPTY" in result.stderr
    assert "up to batch 29" in result.stderr


def test_the_range_that_was_sealed_starts_with_the_first_seal(tmp_path: Path, made: delivered.Pipeline) -> None:
    """Also if all batches were compared again later."""
    scope = Scope(made.name, made.sink_names[0], "incarnation-1")
    first, again = (replace(s, sealed_at_ms=(s.number + 1) * 3_600_000) for s in chain(2, scope))
    add_seals(made, linked([first, replace(again, first=0, start=first.start)]))
    said = run(tmp_path / "orders.yaml", "--from", "30").stderr.replace("\n", " ")
    assert "from 1970-01-01T01:00:00+00:00 to 1970-01-01T02:00:00+00:00, up to batch 19" in said


def test_a_seal_that_was_damaged_in_the_ledger_is_named(tmp_path: Path, made: delivered.Pipeline) -> None:
    seal(made, 3)
    with closing(sqlite3.connect(tmp_path / "out.db")) as connection:
        connection.execute("UPDATE _delivered_seal SET seal = 'junk' WHERE number = 1")
        connection.commit()
    result = run(tmp_path / "orders.yaml")
    assert result.exit_code == 1
    assert "[DELIVERED_AUDIT_SEAL] The chain of seals" in result.stderr


def test_a_pipeline_that_was_never_sealed(tmp_path: Path, made: delivered.Pipeline) -> None:
    result = run(tmp_path / "orders.yaml")
    assert result.exit_code == 2
    assert "delivered audit" in result.stderr


@pytest.mark.parametrize("args", [("--sink", "nobody"), ("--from", "yesterday"), ("--sign", "no-such.pem")])
def test_wrong_requests(tmp_path: Path, made: delivered.Pipeline, args: tuple[str, str]) -> None:
    seal(made, 1)
    assert run(tmp_path / "orders.yaml", *args).exit_code == 2


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, made: delivered.Pipeline) -> None:
    seal(made, 1)
    result = run(tmp_path / "orders.yaml", "--out", tmp_path / "nowhere" / "evidence.json")
    assert result.exit_code == 2
    assert "DELIVERED_EVIDENCE_WRITE" in result.stderr


def test_a_file_is_compared_with_the_ledger(tmp_path: Path, made: delivered.Pipeline) -> None:
    seal(made, 2)
    file, yaml = written(tmp_path), tmp_path / "orders.yaml"
    name = made.sink_names[0]
    assert checked(file, yaml) == (0, {**checked(file)[1], "says": [f"{name}: the ledger has the same seals 0 to 1"]})
    seal(made, 4, first=2)
    assert checked(file, yaml)[1]["says"][1] == f"{name}: the ledger has 2 newer ones, up to seal 3"
    other = tmp_path / "other.yaml"
    other.write_text(yaml.read_text().replace("pipeline: orders", "pipeline: invoices"))
    assert run("check", file, other).exit_code == 2


def test_it_is_said_if_none_of_the_batches_was_compared(tmp_path: Path, made: delivered.Pipeline) -> None:
    seal(made, 2)
    file, yaml = written(tmp_path), tmp_path / "orders.yaml"
    result = run("check", file, yaml, "--recompute", "900-999")
    assert (result.exit_code, "orders: nothing was compared" in result.stdout) == (0, True), result.output
    alone = run("check", file, "--recompute", "0-9")
    assert (alone.exit_code, "DELIVERED_EVIDENCE_ALONE" in alone.stderr) == (2, True), alone.output
    for text in ("19-10", "some", "1-2-3"):
        assert "DELIVERED_EVIDENCE_BATCHES" in run("check", file, yaml, "--recompute", text).stderr


def test_a_ledger_that_was_restored_is_found(tmp_path: Path, made: delivered.Pipeline) -> None:
    seal(made, 3)
    file, yaml = written(tmp_path), tmp_path / "orders.yaml"
    with closing(sqlite3.connect(tmp_path / "out.db")) as connection:
        connection.execute("DELETE FROM _delivered_seal WHERE number = 2")
        connection.commit()
    code, found = checked(file, yaml)
    assert code == 1
    assert [f["kind"] for f in found["faults"]] == ["ledger"]
    assert "the ledger ends with seal 1, the file with 2" in found["faults"][0]["text"]


def test_a_signed_file(tmp_path: Path, made: delivered.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    openssl = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(tmp_path / "key.pem")]
    subprocess.run(openssl, check=True, capture_output=True)
    subprocess.run(
        ["openssl", "pkey", "-in", tmp_path / "key.pem", "-pubout", "-out", tmp_path / "key.pub"], check=True
    )
    seal(made, 2)
    file = written(tmp_path, "--sign", tmp_path / "key.pem")
    assert checked(file, "--key", tmp_path / "key.pub")[1]["says"] == ["the signature is of that key"]
    assert checked(file)[1]["says"] == ["the file is signed, which was not checked: pass --key"]
    monkeypatch.setenv("EVIDENCE_KEY", (tmp_path / "key.pem").read_text())
    signed = file.read_text()
    assert json.loads(written(tmp_path, "--sign", "env:EVIDENCE_KEY").read_text())["signature"]["key_sha256"] in signed
    code, found = checked(written(tmp_path), "--key", f"file:{tmp_path / 'key.pub'}")
    assert (code, found["faults"][0]["kind"]) == (1, "not signed")


_WITHOUT_SPARK = """
import sys
sys.modules.update(dict.fromkeys(("pyspark", "py4j")))
from delivered.cli.main import app
app(sys.argv[1:])
"""


def test_neither_writing_nor_checking_needs_pyspark(tmp_path: Path, made: delivered.Pipeline) -> None:
    seal(made, 2)
    file, yaml = str(tmp_path / "evidence.json"), str(tmp_path / "orders.yaml")
    for args in (["evidence", yaml, "--out", file], ["evidence", "check", file, yaml, "--recompute", "none"]):
        run = subprocess.run([sys.executable, "-c", _WITHOUT_SPARK, *args], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
    assert "intact" in run.stdout
