"""`delivered transactions` against a real broker: open ones are listed, and ended only as the ledger decided."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.broker.lost_ends import Lose, losing
from tests.broker.sink_help import EXACT, Rig
from typer.testing import CliRunner

from delivered.audit.evidence import read_ledger
from delivered.cli.main import app
from delivered.entry import Pipeline
from delivered.model import step
from delivered.operate.asking import status

__all__ = ["losing"]


class Died(Exception):
    """The driver dies here."""


@pytest.fixture
def rig(kafka: Any) -> Rig:
    return Rig(kafka, kafka.topic(2))


def _file(rig: Rig, folder: Path) -> Path:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "metadata").write_text(json.dumps({"id": rig.incarnation}))
    address = {"format": "kafka", "kafka.bootstrap.servers": rig.kafka.bootstrap}
    file = folder / "pipeline.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "pipeline": rig.pipeline,
                "guarantee": "exactly_once",
                "checkpoint": str(checkpoint),
                "source": {**address, "subscribe": rig.topic},
                "sinks": [{**address, "topic": rig.topic}],
            }
        )
    )
    return file


def _call(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["transactions", *arguments, "--output", "json"])
    return done.exit_code, done.output


def _open(file: Path) -> list[dict[str, Any]]:
    code, said = _call("list", str(file))
    assert code == 0, said
    found: list[dict[str, Any]] = json.loads(said)
    return found


def _none_open(file: Path) -> bool:
    """Whether none is open in the end: for a moment, a coordinator still writes the markers of one that has ended."""
    deadline = time.monotonic() + 30
    while _open(file):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_an_undecided_transaction_is_listed_not_applied_and_aborted(rig: Rig, tmp_path: Path) -> None:
    file = _file(rig, tmp_path)
    context = rig.context()
    rig.write(rig.plan(context, 0), [0])
    (one,) = _open(file)
    assert one["decided"] is False
    code, said = _call("apply", str(file), one["id"])
    assert code == 2
    assert "DELIVERED_TRANSACTION_UNDECIDED" in said
    code, said = _call("abort", str(file), one["id"])
    assert code == 2
    assert "DELIVERED_TRANSACTION_CURRENT" in said, "its driver, this process, may be writing it"
    code, said = _call("abort", str(file), one["id"], "--force")
    assert code == 0, said
    assert _none_open(file)
    assert rig.visible() == []


def test_a_decided_transaction_is_listed_not_aborted_and_applied(rig: Rig, tmp_path: Path) -> None:
    file = _file(rig, tmp_path)
    context = rig.context()
    messages = rig.write(rig.plan(context, 0))

    def die(point: str, _facts: dict[str, Any]) -> None:
        if point == "commit.decide:after":
            raise Died

    step.install(die)
    try:
        with pytest.raises(Died):
            rig.commit(context, 0, messages)
    finally:
        step.install(None)
    listed = _open(file)
    assert [t["decided"] for t in listed] == [True, True]
    code, said = _call("abort", str(file), listed[0]["id"])
    assert code == 2
    assert "DELIVERED_TRANSACTION_DECIDED" in said
    for one in listed:
        code, said = _call("apply", str(file), one["id"])
        assert code == 0, said
    assert _none_open(file)
    assert rig.visible() == rig.expected([0])


def test_p28_one_whose_end_was_lost_is_listed_and_applied(rig: Rig, tmp_path: Path, losing: Lose) -> None:
    file = _file(rig, tmp_path)
    context = rig.context()
    rig.run(context, 0, first=True)
    plan = rig.plan(context, 1, first=False)
    with losing(lambda topic, _: topic == rig.topic):
        messages = rig.write(plan)
    rig.commit(context, 1, messages)
    assert rig.visible() == rig.expected([0])
    listed = _open(file)
    assert listed
    assert {(t["state"], t["decided"], t["hanging"]) for t in listed} == {("Hanging", True, True)}
    assert any("DELIVERED_TRANSACTION_HANGING" in p.code for p in status(Pipeline.from_file(file)).problems)
    audited = read_ledger(rig.sink, rig.scope, EXACT)
    assert any("brokers lost the end" in note for note in audited.notes)
    code, said = _call("abort", str(file), listed[0]["id"])
    assert code == 2
    assert "DELIVERED_TRANSACTION_DECIDED" in said
    for one in listed:
        code, said = _call("apply", str(file), one["id"])
        assert code == 0, said
    assert _none_open(file)
    assert rig.visible() == rig.expected([0, 1])


def test_one_that_is_not_open_is_an_error_that_says_where_to_look(rig: Rig, tmp_path: Path) -> None:
    file = _file(rig, tmp_path)
    rig.run(rig.context(), 0, first=True)
    code, said = _call("abort", str(file), "delivered.nobody")
    assert code == 2
    assert "DELIVERED_TRANSACTION_NOT_OPEN" in said
