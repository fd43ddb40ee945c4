"""The spec passed through Spark: from a definition or options of the idiom, to the option and back."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, replace
from pathlib import Path

import pytest
from tests.support.interpreter import fresh

import delivered
from delivered.connectors.memory import CONNECTOR
from delivered.connectors.memory.world import ROWS
from delivered.engine.sinks import Columns, Sinks
from delivered.model.bad_row import OnBadRow
from delivered.model.errors import Refused, UsageError
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope
from delivered.model.work import Action, BatchPlan, Owner, Tolerance
from delivered.pipeline.spec import OPTION, VERSION, PipelineSpec, Reading, SinkSpec, StartCheck, idiom_option

FULL = PipelineSpec(
    pipeline="orders",
    guarantee=Guarantee.EXACTLY_ONCE,
    sinks=(
        SinkSpec("kafka", {"topic": "t"}, "events", Columns((("k", "key"),), "keep")),
        SinkSpec("sqlite", {"path": "out.db", "table": "t"}),
    ),
    dead_letter=SinkSpec("sqlite", {"path": "bad.db", "table": "t"}, "bad"),
    on_bad_row=OnBadRow.DEAD_LETTER,
    checkpoint="/c",
    tolerance=Tolerance(True, True, True, True, True),
    transform="abc",
    direct=b"\0\xff",
    drain="/tmp/d",
    start="1",
    batch=7,
    one_of_each=True,
    source="orders",
    until={"orders": {"0": 7}},
    rejects=True,
    raw=True,
)
BY_OTHERS = {"owner": Owner("driver-1"), "run_id": None, "check": None}
"""Fields that the option does not contain."""


def test_every_field_travels() -> None:
    default = PipelineSpec("other", Guarantee.AT_LEAST_ONCE)
    same = [f.name for f in fields(FULL) if getattr(FULL, f.name) == getattr(default, f.name)]
    assert same == ["run_id", "owner", "driver", "check"], "a new field needs a value here"
    found = PipelineSpec.parse("sinks", {OPTION: FULL.to_option(), "checkpointLocation": "/c"}, Owner("driver-1"))
    assert found == replace(FULL, **BY_OTHERS)  # type: ignore[arg-type]


def test_the_idiom_gives_the_same_value(tmp_path: Path) -> None:
    made = delivered.Pipeline(
        name="orders",
        guarantee="exactly_once",
        checkpoint=tmp_path,
        source=delivered.log("in"),
        sinks=[delivered.sqlite("out.db", "t", name="large")],
        new_checkpoint=True,
    )
    options = {"path": "out.db", "table": "t", "sink": "large", "guarantee": "exactly_once", "pipeline": "orders"}
    options |= {"checkpointlocation": str(tmp_path), "newcheckpoint": "accept", OPTION: idiom_option(start="7")}
    found = PipelineSpec.parse("sqlite", options)
    assert found == replace(made.spec, transform="", start="7")


def test_a_question_is_no_write() -> None:
    asked = StartCheck({"type": "struct", "fields": []}, "append")
    options = {"guarantee": "at_least_once", "pipeline": "p", OPTION: idiom_option(check=asked)}
    assert PipelineSpec.parse("sqlite", options).check == asked


def test_a_source_learns_what_concerns_it() -> None:
    reading, rest = Reading.parse({"path": "in", OPTION: FULL.to_option()})
    until = {"orders": {"0": 7}}
    assert (reading, rest) == (
        Reading("/c", "/tmp/d", True, "orders", until, "orders", start="1", rejects=True, raw=True),
        {"path": "in"},
    )
    assert Reading.parse({"path": "in", "checkpointlocation": "/c"}) == (Reading("/c"), {"path": "in"})


@pytest.mark.parametrize(
    ("system", "options", "code"),
    [
        ("sqlite", {OPTION: FULL.to_option(), "path": "x"}, "SINKS_OPTION"),
        ("sqlite", {OPTION: json.dumps({"version": VERSION + 1, "pipeline": "p"})}, "SPEC_VERSION"),
        ("sqlite", {"path": "x"}, "GUARANTEE_MISSING"),
        ("sqlite", {"guarantee": "exactly_once"}, "PIPELINE_UNNAMED"),
        (
            "sqlite",
            {OPTION: FULL.to_option(), "asyncProgressTrackingEnabled": "true"},
            "ASYNC_PROGRESS",
        ),
    ],
)
def test_what_cannot_be_parsed_is_refused(system: str, options: dict[str, str], code: str) -> None:
    with pytest.raises((UsageError, Refused), match=code):
        PipelineSpec.parse(system, options)


def test_a_task_loads_neither_the_spec_nor_the_drivers_half_of_the_engine() -> None:
    from delivered.spark.writers import StreamWriter

    writer = StreamWriter(FULL, Sinks.one(CONNECTOR.sink({"world": "thin"})), ROWS)
    writer._plan = BatchPlan(Scope("p", "s", "i"), "o", Guarantee.EXACTLY_ONCE, 0, "{}", Action.WRITE)
    code = "import pickle, sys; assert pickle.loads(bytes.fromhex(sys.argv[1]))._spec is None"
    loaded = fresh(code, pickle.dumps(writer))
    ours = {m.removeprefix("delivered.") for m in loaded if m.startswith("delivered.")}
    assert {m.split(".")[0] for m in ours} == {"model", "contract", "engine", "connectors", "spark"}
    assert {m for m in ours if m.startswith("engine.")} == {
        "engine.shard",
        "engine.sinks",
        "engine.dead_letters",
        "engine.in_band",
        "engine.grants",
    }
    assert {m for m in ours if m.startswith("spark.")} == {"spark.writers", "spark.recovery", "spark.task"}
    assert loaded.isdisjoint({"pydantic", "yaml", "typer", "rich"})
