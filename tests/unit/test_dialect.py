"""Hints use their reader's notation: that of Spark, or of a pipeline file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from delivered.cli.command import spoken
from delivered.cli.main import app
from delivered.contract.source import Finding
from delivered.model.capability import Commit, Guarantee, SinkCapability, SourceCapability
from delivered.model.errors import Refused, Unreachable, UsageError, conditions
from delivered.model.options import in_file_words, shown, starting_at
from delivered.model.translate import translated
from delivered.planner import CheckpointFacts, Refusal, Request, SinkFacts, SourceFacts, make_plan, to_text


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ('add .option("guarantee", "exactly_once")', "add guarantee: exactly_once"),
        ('once with .option("missingLedger", "accept")', "once with missing_ledger: accept"),
        ('restart with .option("failOnDataLoss", "false")', "restart with failOnDataLoss: false"),
        ('write .option("url", "mysql://h:3306/shop")', 'write url: "mysql://h:3306/shop"'),
        ("""write .option("startingOffsets", '{"0": 12}')""", """write startingOffsets: '{"0": 12}'"""),
        ('df.withColumn("w", col("w").cast("string"))', "write CAST(w AS string) AS w in the transform"),
        ('df.drop("w")', "leave w out in the transform"),
        ('add .option("topic", ...), or a column', "add topic: ..., or a column"),
    ],
)
def test_an_option_as_a_file_has_it(stored: str, read: str) -> None:
    assert in_file_words(stored) == read


def test_offsets_to_be_pasted_are_whole_json() -> None:
    """At any length, through Spark's error text, in both notations and through a plan's line wrapping."""
    offsets = {"orders-clean": {str(p): p * 1_000 for p in range(4_000)}}
    hint = starting_at(json.dumps(offsets) + '\n{"0": 12}')
    error = Refused("CHECKPOINT_NEW", f"It ended at {shown(json.dumps(offsets))}", next_step=hint)
    assert "... (" in error.message
    carried = translated(Exception(f"Traceback\n{error}\n  at org.apache.spark"))
    assert carried is not None
    refusal = Refusal("orders", Guarantee.EXACTLY_ONCE, error.code, error.message, None, hint, False)
    for text in (carried.next_step or "", in_file_words(hint), to_text(spoken(refusal))):
        one, other = re.findall(r"startingOffsets(?:\",|:)\s+'(.*?)'", text)
        assert json.loads(one) == offsets
        assert json.loads(other) == {"0": 12}


def test_every_hint_of_the_product_can_be_read_so() -> None:
    hints = [c.next_step for c in conditions().values() if ".option(" in (c.next_step or "")]
    for hint in hints:
        assert ".option(" not in in_file_words(re.sub(r"\{[^{}]*\}", "x", str(hint))), hint
    assert len(hints) > 30


def test_the_command_line_speaks_of_files(tmp_path: Path) -> None:
    file = tmp_path / "orders.yaml"
    source = {"format": "log", "path": "in"}
    sinks = [{"format": "mysql", "url": "postgresql://x", "dbtable": "t"}]
    given = {"pipeline": "orders", "guarantee": "exactly_once", "checkpoint": "c", "source": source, "sinks": sinks}
    file.write_text(yaml.safe_dump(given))
    said = CliRunner().invoke(app, ["plan", "--offline", str(file)])
    assert said.exit_code == 2
    assert 'Next: write url: "mysql://localhost:3306/shop"' in said.output
    assert spoken(UsageError("X", "x").code) == "DELIVERED_X"


def request(*findings: Finding, commit: Commit = Commit.NONE, **checkpoint: object) -> Request:
    says = dict.fromkeys(("mechanism", "stage", "prepare", "decide", "apply", "send"), "x")
    capability = SinkCapability("rabbitmq", commit=commit, batch_atomic=True, **says)
    sink = SinkFacts("orders", "rabbitmq orders", capability, findings)
    sources = (SourceFacts("log in", SourceCapability("log", replayable=True)),)
    facts = CheckpointFacts("/c", **checkpoint)  # type: ignore[arg-type]
    return Request("orders", Guarantee.EXACTLY_ONCE, sources, (sink,), facts)


def test_a_server_that_is_away_hides_no_weaker_guarantee() -> None:
    away = Finding.refusal(Unreachable("RABBITMQ_UNREACHABLE", "RabbitMQ does not answer."))
    refused = make_plan(request(away))
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.nearest, refused.transient) == (
        "SINK_CANNOT_COMMIT",
        Guarantee.AT_LEAST_ONCE,
        False,
    )
    refused = make_plan(request(away, commit=Commit.TWO_PHASE))
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.nearest, refused.transient) == ("RABBITMQ_UNREACHABLE", None, True)
    assert not Finding.refusal(Unreachable("MYSQL_LOGIN", "no")).transient


def test_plan_tells_a_ledger_that_is_missing_and_a_checkpoint_that_cannot_be_written() -> None:
    refused = make_plan(request(commit=Commit.TWO_PHASE, incarnation="i", newest=3, ledger_missing=True))
    assert isinstance(refused, Refusal)
    assert refused.code == "LEDGER_MISSING"
    assert "missing_ledger: accept" in spoken(refused).way_out
    refused = make_plan(request(commit=Commit.TWO_PHASE, unwritable="/c is a file"))
    assert isinstance(refused, Refusal)
    assert refused.code == "CHECKPOINT_UNWRITABLE"
