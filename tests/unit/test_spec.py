"""The spec passed through Spark: from a definition or options of the idiom, to the option and back."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.interpreter import fresh
from tests.support.memory import CONNECTOR
from tests.support.memory.world import ROWS

import delivered
from delivered.engine import Columns, Sinks
from delivered.model.capability import Guarantee
from delivered.model.errors import Refused, UsageError
from delivered.model.identity import Scope
from delivered.model.rows import OnBadRow, Rows
from delivered.model.work import Action, BatchPlan, DriverAddress, Owner, Tolerance
from delivered.pipeline.spec import (
    OPTION,
    VERSION,
    Drain,
    Envelope,
    IdiomStart,
    OrderCheck,
    PipelineSpec,
    Reading,
    Sender,
    SinkSpec,
    StartCheck,
)

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
    run_id="r",
    start="1",
    batch=7,
    one_of_each=True,
    rejects=True,
    store={"access_key": "a"},
)
SENDER = Sender(Owner("driver-1"), DriverAddress("h", port=7))
READING = Reading(
    "/c", Drain("/tmp/d"), True, "orders", {"orders": {"0": 7}}, "orders", "1", True, True, True, {"region": "r"}
)
QUESTION = StartCheck({"type": "struct", "fields": []}, "append")


def test_every_field_travels() -> None:
    default = PipelineSpec("other", Guarantee.AT_LEAST_ONCE)
    same = [f.name for f in fields(FULL) if getattr(FULL, f.name) == getattr(default, f.name)]
    assert same == ["sender"], "a new field needs a value here"
    found = PipelineSpec.parse("sinks", {OPTION: FULL.to_option(), "checkpointLocation": "/c"}, SENDER)
    assert found == replace(FULL, sender=SENDER)
    assert [f.name for f in fields(Reading) if getattr(READING, f.name) == getattr(Reading(), f.name)] == []


@pytest.mark.parametrize(
    "content",
    [
        FULL,
        READING,
        QUESTION,
        OrderCheck("/c", [["log a", "log file/a"]]),
        IdiomStart("7"),
        PipelineSpec("p", Guarantee.AT_MOST_ONCE),
    ],
)
def test_an_envelope_is_read_as_it_was_written(
    content: PipelineSpec | Reading | StartCheck | OrderCheck | IdiomStart,
) -> None:
    for option in (OPTION, OPTION.upper()):
        assert Envelope.decode({option: Envelope(content).encode(), "path": "x"}) == content
    assert Envelope.decode({"path": "x"}) is None


def damaged() -> Iterator[tuple[str, object]]:
    sent = json.loads(FULL.to_option())
    yield "no version", {k: v for k, v in sent.items() if k != "version"}
    yield "unknown kind", {**sent, "kind": "other"}
    yield "no content", {**sent, "content": None}
    for name in sent["content"]:
        yield f"no {name}", {**sent, "content": {k: v for k, v in sent["content"].items() if k != name}}
    for name, value in {
        "guarantee": "twice",
        "sinks": 7,
        "batch": "7",
        "direct": "?",
        "one_of_each": 1,
        "start": 7,
    }.items():
        yield f"bad {name}", {**sent, "content": {**sent["content"], name: value}}
    yield "a field of a later release", {**sent, "content": {**sent["content"], "later": 1}}
    yield "no object", [1]


@pytest.mark.parametrize("sent", [pytest.param(json.dumps(v), id=n) for n, v in damaged()] + ["{", ""])
def test_a_damaged_envelope_is_refused(sent: str) -> None:
    with pytest.raises(UsageError, match="SPEC_UNREADABLE"):
        Envelope.decode({OPTION: sent})


def test_a_damaged_envelope_shows_no_password() -> None:
    sent = json.loads(FULL.to_option())
    sent["content"]["sinks"][0]["options"] = "password=hunter2"
    with pytest.raises(UsageError, match=r"a value is str, not Mapping") as refused:
        Envelope.decode({OPTION: json.dumps(sent)})
    assert "hunter2" not in str(refused.value)


def test_an_envelope_of_another_release_is_refused() -> None:
    older = json.dumps({"version": 2, "pipeline": "p", "guarantee": "exactly_once"})
    with pytest.raises(UsageError, match=r"SPEC_VERSION.* version 2; this process reads version 4"):
        Envelope.decode({OPTION: older})


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
    options |= {
        "checkpointlocation": str(tmp_path),
        "newcheckpoint": "accept",
        OPTION: Envelope(IdiomStart("7")).encode(),
    }
    found = PipelineSpec.parse("sqlite", options)
    assert found == replace(made.spec, transform="", start="7")


def test_a_question_is_no_write() -> None:
    options = {"guarantee": "at_least_once", "pipeline": "p", OPTION: Envelope(QUESTION).encode()}
    assert PipelineSpec.parse("sqlite", options).start is None
    assert Envelope.decode(options) == QUESTION


def test_a_source_learns_what_concerns_it() -> None:
    assert Reading.parse({"path": "in", OPTION: Envelope(READING).encode()}) == (READING, {"path": "in"})
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

    writer = StreamWriter(FULL, Sinks.one(CONNECTOR.sink({"world": "thin"})), ROWS, partial(map, Rows))
    writer._plan = BatchPlan(Scope("p", "s", "i"), "o", Guarantee.EXACTLY_ONCE, 0, "{}", Action.WRITE)
    code = "import pickle, sys; assert pickle.loads(bytes.fromhex(sys.argv[1]))._spec is None"
    loaded = fresh(code, pickle.dumps(writer))
    ours = {m.removeprefix("delivered.") for m in loaded if m.startswith("delivered.")}
    assert {m.split(".")[0] for m in ours} == {"model", "contract", "engine", "spark"}
    assert {m for m in ours if m.startswith("engine.")} == {"engine.shard", "engine.transform"}
    edge = {"spark.writers", "spark.internals"}
    assert {m for m in ours if m.startswith("spark.")} == edge
    assert loaded.isdisjoint({"pydantic", "yaml", "typer", "rich"})


def test_a_process_opens_what_a_query_writes_once_per_start_and_schema(tmp_path: Path) -> None:
    from pyspark.sql.types import BinaryType, StringType, StructType

    from delivered.engine.transform import REJECTED, decode
    from delivered.spark.formats import DeliveredDataSource
    from delivered.spark.internals import from_arrow

    class Format(DeliveredDataSource):
        system = "sqlite"
        sender = SENDER

    sink = SinkSpec("sqlite", {"path": str(tmp_path / "out.db"), "table": "t"})
    spec = PipelineSpec("p", Guarantee.EXACTLY_ONCE, (sink,), checkpoint=str(tmp_path), start="1")
    plain, other = StructType().add("id", StringType()), StructType().add("id", BinaryType())
    failing = StructType([*plain.fields, *from_arrow(pa.schema([REJECTED])).fields])

    def writer(start: str = "1", columns: StructType = plain) -> Any:
        return Format({OPTION: replace(spec, start=start).to_option()}).streamWriter(columns, False)

    first = writer()
    assert writer()._sinks is first._sinks
    assert writer("2")._spec.start == "2"
    assert writer(columns=other)._schema != first._schema == writer(columns=failing)._schema
    assert (first._rows.args, writer(columns=failing)._rows.args) == ((Rows,), (decode,))
    with pytest.raises(Refused, match="OUTPUT_MODE"):
        Format({OPTION: spec.to_option()}).streamWriter(plain, True)
