"""Several sinks: valid options, pickling to tasks, ledger records, the audit's view of one sink."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.support.interpreter import fresh
from tests.support.memory import CONNECTOR as MEMORY
from tests.support.memory.world import ROWS, State, make_world, world

import delivered
from delivered.audit.evidence import read_ledger
from delivered.engine import Columns, Sinks
from delivered.engine.context import Context
from delivered.engine.decide import commit_batch
from delivered.engine.recover import plan_batch
from delivered.engine.shard import write_shard
from delivered.engine.transform import REJECTED
from delivered.entry import Pipeline
from delivered.model import step
from delivered.model.capability import Guarantee
from delivered.model.errors import PromiseBroken, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
from delivered.model.rows import Rows
from delivered.model.work import Account, Action, BatchPlan, CheckpointView, Decision, Owner, Prepared
from delivered.pipeline.endpoint import Item, Projection, parse_projection, plan_routes
from delivered.pipeline.spec import OPTION, PipelineSpec
from delivered.planner import Plan, Refusal

FILE = """\
pipeline: orders
guarantee: exactly_once
checkpoint: checkpoint
source: {format: log, path: in}
sinks:
  - {format: kafka, name: events, kafka.bootstrap.servers: "localhost:1", topic: clean, select: [key, value]}
  - {format: sqlite, name: large, path: out.db, table: large, where: "length(value) > 3", audit: {id: id},
     select: ["CAST(key AS STRING) AS id", value]}
"""
EXACTLY = Guarantee.EXACTLY_ONCE


def group(name: str, *commits: str) -> Sinks:
    """Independent sinks, each in its own world."""
    for i in range(len(commits)):
        make_world(f"{name}-{i}")
    sinks = [MEMORY.sink({"world": f"{name}-{i}", "commit": c}) for i, c in enumerate(commits)]
    return Sinks.of([(f"s{i}", s, None) for i, s in enumerate(sinks)])


def context(sink: Sinks, owner: str = "o") -> Context:
    scope = Scope("p", sink.decider.name, "i")
    return Context.open(sink, scope, EXACTLY, Owner(owner))


def run(sink: Sinks, batch: int, on: Context) -> Decision | None:
    plan = plan_batch(on, CheckpointView("i", batch, f"o{batch}", batch - 1 if batch else None), first=True)
    rows = pa.record_batch([[b"k"] * 3, [b"v%d" % i for i in range(3)]], schema=ROWS)
    return commit_batch(on, batch, f"o{batch}", [write_shard(sink, plan, 0, 0, iter([Rows(rows)]), ROWS)])


def test_what_one_sink_promised_goes_back_when_another_cannot() -> None:
    """A failed task never reports what it prepared; if the pipeline stays down, a broker's readers are blocked."""
    sink = group("half", "two_phase", "two_phase")
    on = context(sink)
    plan = plan_batch(on, CheckpointView("i", 0, "o0", None), first=True)

    def rows() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([[b"k"], [b"v"]], schema=ROWS)
        for participant in world("half-1").participants.values():
            participant.state = State.ABORTED

    with pytest.raises(PromiseBroken):
        write_shard(sink, plan, 0, 0, map(Rows, rows()), ROWS)
    assert [p.state for p in world("half-0").participants.values()] == [State.ABORTED]


def test_a_file_names_rows_and_columns_of_each_sink(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(FILE)
    pipeline = Pipeline.from_file(tmp_path / "p.yaml")
    events, large = pipeline.sinks
    assert events.projection.is_plain
    assert large.projection.items == (Item("id", "CAST(key AS STRING)"), Item("value"))
    assert (large.projection.where, dict(large.audit)) == ("length(value) > 3", {"id": "id"})
    assert pipeline.sink_names == ("events", "large")
    plan = pipeline.plan(offline=True)
    assert isinstance(plan, Plan)
    assert "large decides for all" in " ".join(plan.order)
    assert "select" not in large.options


@pytest.mark.parametrize(
    ("select", "where", "code"),
    [
        (["a + b"], None, "SELECT_UNNAMED"),
        (["*"], None, "SELECT_UNNAMED"),
        (["a", "b AS a"], None, "SELECT_NAME_TWICE"),
        ([], "  ", "WHERE_EMPTY"),
    ],
)
def test_a_wrong_projection_is_told(select: list[str], where: str | None, code: str) -> None:
    with pytest.raises(UsageError, match=code):
        parse_projection(select, where)


def test_select_as_text_and_select_of_a_source_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="SELECT_VALUE"):
        delivered.sqlite("out.db", "t", select="key")
    with pytest.raises(UsageError, match="SOURCE_SELECT"):
        delivered.Pipeline(
            name="p", guarantee="exactly_once", checkpoint=tmp_path,
            source=delivered.log("in", select=["key"]), sinks=[delivered.sqlite("out.db", "t")],
        )  # fmt: skip


def test_rand_in_a_where_is_no_deterministic_pipeline(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(FILE.replace("length(value) > 3", "rand() < 0.5"))
    plan = Pipeline.from_file(tmp_path / "p.yaml").plan(offline=True)
    assert isinstance(plan, Plan)
    assert any("not deterministic" in a for a in plan.assumptions)


def test_two_sinks_of_one_name_are_refused_by_the_plan(tmp_path: Path) -> None:
    sinks = [delivered.sqlite(str(tmp_path / f"{n}.db"), "t", name="one") for n in "ab"]
    made = delivered.Pipeline(
        name="p", guarantee="at_least_once", checkpoint=tmp_path / "c", source=delivered.log(str(tmp_path)), sinks=sinks
    )
    plan = made.plan()
    assert isinstance(plan, Refusal)
    assert plan.code == "SINK_NAME_TWICE"


def travelled(pipeline: Pipeline) -> PipelineSpec:
    """What a Spark worker parses from the options set by `start`."""
    routed = zip(pipeline.spec.sinks, (s.projection.route for s in pipeline.sinks), strict=True)
    spec = replace(pipeline.spec, sinks=tuple(replace(s, route=r) for s, r in routed), start="1")
    found = PipelineSpec.parse("kafka", {OPTION: spec.to_option(), "checkpointlocation": spec.checkpoint or ""})
    assert found == spec
    return found


def test_what_travels_in_the_option_is_the_same_group(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        FILE.replace('"CAST(key AS STRING) AS id"', "key").replace('where: "length(value) > 3", ', "")
    )
    pipeline = Pipeline.from_file(tmp_path / "p.yaml")
    spec = travelled(pipeline)
    made = spec.open()
    assert isinstance(made, Sinks)
    assert [m.name for m in made.members] == ["events", "large"]
    assert made.names == {"events", "large"}
    assert made.decider.name == pipeline.spec.scope(made, "i").sink == "large"
    assert pickle.loads(pickle.dumps(made)) == made


def test_a_route_leaves_out_what_is_not_true() -> None:
    rows = pa.record_batch({"a": [1, 2, 3], "b": ["x", "y", "z"], "keep": [True, None, False]})
    assert Columns((("c", "b"),), "keep")(rows).to_pylist() == [{"c": "x"}]
    assert Columns((("c", "b"), ("a", "a")))(rows).num_rows == 3
    with pytest.raises(UsageError, match="SELECT_COLUMN"):
        Columns((("c", "nothing"),))(rows)


BAD_ROWS = "on_bad_row: dead_letter\ndead_letter: {format: sqlite, path: bad.db, table: letters, name: bad}\n"


def test_dead_letters_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        FILE.replace(
            "sqlite, name: large, path: out.db, table",
            'kafka, name: large, kafka.bootstrap.servers: "localhost:1", topic',
        ).replace('"CAST(key AS STRING) AS id"', "key")
        + BAD_ROWS
    )
    pipeline = Pipeline.from_file(tmp_path / "p.yaml")
    assert [e.name for e in pipeline.all_sinks] == ["events", "large", "bad"]
    assert pipeline.sink_names == ("events", "large")
    plan = pipeline.plan(offline=True)
    assert isinstance(plan, Plan)
    assert any("a row that is invalid for events or large goes to bad" in line for line in plan.limits)
    assert "bad decides for all" in " ".join(plan.order)
    group_ = travelled(pipeline).open()
    assert isinstance(group_, Sinks)
    assert group_.decider.name == "bad"
    assert group_.members[-1].dead_letters
    assert group_.members[-1].route is None  # SQLite accepts dead letters as columns


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"on_bad_row": "dead_letter"}, "DEAD_LETTER"),
        ({"dead_letter": delivered.sqlite("a.db", "t")}, "DEAD_LETTER"),
        ({"on_bad_row": "dead_letter", "dead_letter": delivered.sqlite("a.db", "t", where="true")}, "DEAD_LETTER"),
        ({"on_bad_row": "skip"}, "OPTION_VALUE"),
    ],
)
def test_wrong_choices_for_bad_rows_are_told(tmp_path: Path, more: dict[str, Any], code: str) -> None:
    sinks = [delivered.sqlite("out.db", "t")]
    with pytest.raises(UsageError, match=code):
        delivered.Pipeline(
            name="p", guarantee="exactly_once", checkpoint=tmp_path, source=delivered.log("in"), sinks=sinks, **more
        )


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_drop_is_for_at_most_once(tmp_path: Path, guarantee: Guarantee) -> None:
    plan = delivered.Pipeline(
        name="p", guarantee=guarantee, checkpoint=tmp_path, source=delivered.log("in"),
        sinks=[delivered.sqlite("out.db", "t")], on_bad_row="drop",
    ).plan(offline=True)  # fmt: skip
    if guarantee is Guarantee.AT_MOST_ONCE:
        assert isinstance(plan, Plan)
    else:
        assert isinstance(plan, Refusal)
        assert plan.code == "BAD_ROW_DROP"


def test_an_executor_loads_the_group_and_its_connectors_alone() -> None:
    sink = group("executor-group", "two_phase", "one_transaction")
    plan = BatchPlan(Scope("p", sink.decider.name, "i"), "o", EXACTLY, 0, "{}", Action.WRITE)
    code = """
import pickle, sys
sink, plan, schema = (pickle.loads(bytes.fromhex(a)) for a in sys.argv[1:])
from tests.support.memory.world import make_world
from delivered.engine.shard import write_shard
for i in range(2):
    make_world(f"executor-group-{i}")
assert len(write_shard(sink, plan, 0, 0, iter(()), schema).participants) == 2
"""
    loaded = fresh(code, *(pickle.dumps(x) for x in (sink, plan, ROWS)))
    rooms = {m.split(".")[1] for m in loaded if m.startswith("delivered.")}
    assert rooms <= {"model", "contract", "engine", "connectors"}
    assert {m.split(".")[2] for m in loaded if m.startswith("delivered.engine.")} == {"shard"}
    assert loaded.isdisjoint({"pyspark", "confluent_kafka", "kafka", "deltalake", "pydantic", "yaml"})


def test_a_decision_is_the_same_text_for_one_sink_and_keeps_all_for_several() -> None:
    own = Prepared(0, 0, Fingerprint(1, 2, 3), {"id": 1}, sink="a")
    one = Decision(Scope("p", "a", "i"), "o", EXACTLY, 4, "x", (own,), {"a": Account(Fingerprint(9, 9, 9))}, 7)
    assert "others" not in json.loads(one.to_json())
    assert "sink" not in json.loads(one.to_json())["participants"][0]
    account = Account(Fingerprint(5, 5, 5), Fingerprint(1, 0, 0))
    two = replace(one, participants=(own, replace(own, sink="b")), accounts={**one.accounts, "b": account})
    assert Decision.from_json(two.to_json()) == two
    assert two.fingerprint == own.fingerprint
    assert two.to_move == (own,)
    assert replace(two, revision=1).to_move == ()
    told = two.for_sink("b")
    assert (told.scope.sink, told.total, told.account("a").total) == ("b", account.total, one.total)
    assert [p.sink for p in told.participants] == ["a", "b"]
    assert told.for_sink("a") == two
    assert two.projected("b").total == account.total
    assert two.projected("a") == one


@pytest.mark.parametrize("now", [EXACTLY, Guarantee.AT_LEAST_ONCE])
def test_an_audit_reads_each_sink_from_the_one_ledger(now: Guarantee) -> None:
    """Whatever the guarantee is now: a batch is finished under that of its decision."""
    sink = group("audit-group", "two_phase", "two_phase")
    on = context(sink)
    run(sink, 0, on)
    stopped: list[str] = []

    def stop(point: str, facts: dict[str, object]) -> None:
        if point == "commit.apply:before" and facts["batch"] == 1 and facts["sink"] == "s1":
            stopped.append(point)
            raise KeyboardInterrupt

    step.install(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(sink, 1, context(sink))
    finally:
        step.install(None)
    assert stopped
    for member, visible in zip(sink.members, (1, 0), strict=True):
        scope = Scope("p", member.name, "i")
        account = read_ledger(member.sink, scope, now, sink)
        assert any("guarantee has changed: batch 1 was decided under exactly_once" in n for n in account.notes) is (
            now is not EXACTLY
        )
        assert account.history.faults == ()
        assert account.visible is not None
        assert (account.visible.batch, account.visible.scope.sink) == (visible, member.name)
        assert account.visible.total.count == 3 * (visible + 1)


def test_the_columns_of_several_sinks_are_planned_for_one_frame() -> None:
    every, paid = Projection(), parse_projection(["id", "amount * 2 AS double"], "amount > 0")
    planned = plan_routes([every, paid], ["id", "amount"])
    own = "__delivered_sink_1"
    assert planned.where == {own: "amount > 0"}
    assert planned.computed == {f"{own}_double": f"CASE WHEN true AND `{own}` THEN (amount * 2) END"}
    assert planned.columns == ("id", "amount", f"{own}_double", own)
    assert planned.routes == (
        Columns((("id", "id"), ("amount", "amount"))),
        Columns((("id", "id"), ("double", f"{own}_double")), own),
    )


def test_rejected_rows_pass_expressions_by() -> None:
    rejected, more = REJECTED.name, parse_projection(["id + 1 AS id"], None)
    planned = plan_routes([more], ["topic", "id", rejected], keep=["topic", "offset"])
    assert planned.computed == {"__delivered_sink_0_id": f"CASE WHEN {rejected} IS NULL AND true THEN (id + 1) END"}
    assert planned.columns == ("topic", rejected, "__delivered_sink_0_id")
    with pytest.raises(UsageError, match="SELECT_COLUMN"):
        plan_routes([parse_projection(["nowhere"], None)], ["id"])


@pytest.mark.parametrize(
    ("more", "direct"),
    [
        ({}, True),
        ({"transform": delivered.arrow(select=["value"])}, True),
        ({"transform": "SELECT * FROM source"}, False),
        ({"dedup": delivered.dedup("key", within="1 hour")}, False),
        ({"sinks": [delivered.endpoint("sqlite", path="x.db", table="t", select=["value"])]}, False),
        ({"sinks": [delivered.endpoint("sqlite", path=f"{n}.db", table="t", select=["value"]) for n in "xy"]}, True),
        ({"source": delivered.endpoint("spark:rate")}, False),
    ],
)
def test_tasks_read_the_source_themselves_if_spark_has_nothing_to_do(more: dict[str, Any], direct: bool) -> None:
    sinks = [delivered.sqlite("x.db", "t")]
    given: dict[str, Any] = {"source": delivered.log("in"), "sinks": sinks, **more}
    assert Pipeline(name="p", guarantee="at_least_once", checkpoint="c", **given).is_direct is direct
