"""`delivered transactions`, and the audit's view of the ledger, with prepared transactions of real servers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.sinks import EXACT, Rig
from typer.testing import CliRunner

from delivered.audit.evidence import read_ledger
from delivered.cli.main import app
from delivered.model.errors import LedgerBehind
from delivered.model.fingerprint import Fingerprint
from delivered.model.work import Account, Decision, Ok, Tolerance


@pytest.fixture(params=["postgres", "mysql"])
def rig(request: pytest.FixtureRequest) -> Rig:
    server: Any = request.getfixturevalue(request.param)
    return Rig(server.sink(mechanism="two_phase"))


@pytest.fixture
def file(rig: Rig, tmp_path: Path) -> Path:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "metadata").write_text(json.dumps({"id": rig.incarnation}))
    options = rig.sink.options  # type: ignore[attr-defined]
    sink = {
        "format": rig.sink.capability().system,
        "url": options.url,
        "dbtable": options.table,
        "mechanism": "two_phase",
    }
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "pipeline": rig.pipeline,
                "guarantee": "exactly_once",
                "checkpoint": str(checkpoint),
                "source": {"format": "log", "path": str(tmp_path / "log")},
                "sinks": [sink],
            }
        )
    )
    return file


def call(*arguments: str, output: str = "json") -> tuple[int, str]:
    done = CliRunner().invoke(app, ["transactions", *arguments, "--output", output])
    return done.exit_code, done.output


def listed(file: Path) -> list[dict[str, Any]]:
    code, said = call("list", str(file))
    assert code == 0, said
    found: list[dict[str, Any]] = json.loads(said)
    return found


def test_undecided_is_listed_not_applied_and_aborted(rig: Rig, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.write(rig.plan(rig.context(), 0))
    found = listed(file)
    assert [(t["decided"], t["old"], t["state"]) for t in found] == [(False, False, "Prepared")] * 2
    assert {t["targets"][0] for t in found} == {rig.sink.options.table}  # type: ignore[attr-defined]
    monkeypatch.setattr("delivered.operate.transactions.OPEN_TRANSACTION_OLD_S", 0.0)
    assert all(t["old"] for t in listed(file))
    assert "warning: 2 open for more than" in call("list", str(file), output="text")[1]  # P20
    code, said = call("apply", str(file), found[0]["id"])
    assert code == 2
    assert "DELIVERED_TRANSACTION_UNDECIDED" in said
    code, said = call("abort", str(file), found[0]["id"])
    assert code == 2
    assert "DELIVERED_TRANSACTION_CURRENT" in said, "its driver, this process, may be writing it"
    for one in found:
        assert call("abort", str(file), one["id"], "--force")[0] == 0
    assert listed(file) == []
    assert rig.visible() == Fingerprint()


def test_decided_is_hidden_to_the_audit_not_aborted_and_applied(rig: Rig, file: Path) -> None:
    context = rig.context()
    plan = rig.plan(context, 0)
    prepared = tuple(m.prepared for m in rig.write(plan) if m.prepared is not None)
    total = sum((p.fingerprint for p in prepared), Fingerprint())
    decision = Decision(rig.scope, "first", EXACT, 0, plan.offsets, prepared, {rig.scope.sink: Account(total)}, 1)
    assert context.ledger.decide(decision) == Ok(None)  # and the driver dies before it applies
    account = read_ledger(rig.sink, rig.scope, EXACT)
    assert account.visible is None
    assert len(account.transactions) == 2
    assert "shards [0, 1]" in account.notes[0]
    found = listed(file)
    assert [t["decided"] for t in found] == [True, True]
    code, said = call("abort", str(file), found[0]["id"])
    assert code == 2
    assert "DELIVERED_TRANSACTION_DECIDED" in said
    for one in found:
        code, said = call("apply", str(file), one["id"])
        assert code == 0, said
    assert listed(file) == []
    assert rig.visible() == rig.expected(0)
    assert read_ledger(rig.sink, rig.scope, EXACT).visible == decision


def test_one_that_is_not_open_is_an_error_that_says_where_to_look(file: Path) -> None:
    code, said = call("abort", str(file), "delivered.nobody")
    assert code == 2
    assert "DELIVERED_TRANSACTION_NOT_OPEN" in said


def commit_by_hand(rig: Rig, gid: str) -> None:
    committer = rig.sink.committer(rig.scope)
    assert committer.end_by_id(gid, True) == Ok(None)
    committer.close()


@pytest.mark.parametrize("first", [True, False], ids=["some", "all"])
def test_rows_that_somebody_committed_before_their_decision_are_not_doubled(rig: Rig, file: Path, first: bool) -> None:
    rig.run(0)
    rig.write(rig.plan(rig.context(), 1))  # and the driver dies
    for one in listed(file)[: 1 if first else None]:
        commit_by_hand(rig, one["id"])
    visible = rig.visible()
    with pytest.raises(LedgerBehind, match=r"Batch 1 .* shards \[0") as caught:
        rig.run(1, rig.context("second"))
    assert caught.value.code == "DELIVERED_BATCH_VISIBLE" and "startingOffsets" in (caught.value.next_step or "")
    assert rig.visible() == visible and listed(file) == []
    if not first:
        assert visible == rig.expected(0, 1)
    accepted = replace(rig.context("third"), tolerance=Tolerance(missing_ledger=True))
    rig.run(1, accepted)
    rig.run(2, rig.context("fourth"))
