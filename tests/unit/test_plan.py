"""The planner's answers, word for word.

After an intended change: `DELIVERED_GOLDEN=write pytest tests/unit/test_plan.py`.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from docs import support
from tests.support.requests import ASKED, KAFKA, LOG, QUEUE, TO_HTTP, TO_KAFKA, TO_POSTGRES, TO_SQLITE

from delivered.contract.source import Finding
from delivered.model.capability import IN_TABLE, Commit, Dedup, Guarantee
from delivered.model.rows import OnBadRow
from delivered.model.step import StepId
from delivered.model.work import Owner
from delivered.pipeline.facts import alternatives
from delivered.pipeline.registry import connector, find_sink, find_source
from delivered.planner import (
    CheckpointFacts,
    EarlierFacts,
    Execution,
    Plan,
    Refusal,
    Request,
    TransformFacts,
    Trigger,
    make_plan,
    to_json,
    to_text,
)

GOLDEN = Path(__file__).parent / "golden"


TIGHT = replace(
    TO_KAFKA,
    findings=(
        Finding(
            "TRANSACTION_TIMEOUT_TOO_LONG",
            "transactionTimeout is 600 s, and the brokers allow 300 s (transaction.max.timeout.ms).",
            refuses=True,
            next_step='add .option("transactionTimeout", "300"), or raise transaction.max.timeout.ms',
            only=Guarantee.EXACTLY_ONCE,
        ),
    ),
)
USED = CheckpointFacts("/data/checkpoints/orders", incarnation="0f3c", newest=7, ledger_newest=7)

PLANS = {
    "kafka_exactly_once": ASKED,
    "kafka_at_least_once": replace(ASKED, guarantee=Guarantee.AT_LEAST_ONCE),
    "kafka_at_most_once": replace(ASKED, guarantee=Guarantee.AT_MOST_ONCE),
    "sqlite_exactly_once": replace(ASKED, sources=(LOG,), sinks=(TO_SQLITE,)),
    "two_that_prepare": replace(ASKED, sinks=(TO_KAFKA, TO_POSTGRES)),
    "three_with_last_resource": replace(ASKED, sinks=(TO_KAFKA, TO_SQLITE, TO_POSTGRES)),
    "several_at_least_once": replace(ASKED, guarantee=Guarantee.AT_LEAST_ONCE, sinks=(TO_KAFKA, TO_POSTGRES)),
    "several_at_most_once": replace(ASKED, guarantee=Guarantee.AT_MOST_ONCE, sinks=(TO_KAFKA, TO_POSTGRES)),
    "dead_letters": replace(
        ASKED,
        sinks=(TO_KAFKA, replace(TO_POSTGRES, name="refused", label="postgres refused")),
        on_bad_row=OnBadRow.DEAD_LETTER,
        dead_letters="refused",
    ),
    "dead_letters_of_a_function": replace(
        ASKED,
        sinks=(TO_KAFKA, replace(TO_POSTGRES, name="refused", label="postgres refused")),
        on_bad_row=OnBadRow.DEAD_LETTER,
        transform=TransformFacts("arrow", "clean"),
        dead_letters="refused",
    ),
    "dead_letters_of_sql": replace(
        ASKED,
        sinks=(TO_KAFKA, replace(TO_POSTGRES, name="refused", label="postgres refused")),
        on_bad_row=OnBadRow.DEAD_LETTER,
        transform=TransformFacts("sql", "SELECT ..."),
        dead_letters="refused",
    ),
    "dedup": replace(ASKED, dedup=Dedup(("order_id",), 3_600_000, drops_late=True)),
    "dedup_table": replace(
        ASKED,
        sinks=(replace(TO_SQLITE, capability=replace(TO_SQLITE.capability, remembers=True)),),
        dedup=Dedup(("order_id",), 3_600_000, kind=IN_TABLE),
    ),
    "state_nondeterministic": replace(
        ASKED, transform=TransformFacts("sql", "SELECT ...", stateful=True, deterministic=False, changing=("uuid()",))
    ),
    "kafka_nondeterministic": replace(
        ASKED,
        transform=TransformFacts("python", "orders:clean", deterministic=False),
        execution=Execution(batch_s_max=90),
        sources=(replace(KAFKA, findings=(Finding("RETENTION", "Topic orders keeps records for 1 h.", False),)),),
    ),
}

REFUSALS = {
    "refused_not_replayable": replace(ASKED, sources=(QUEUE,)),
    "refused_real_time": replace(ASKED, execution=Execution(Trigger.REAL_TIME)),
    "refused_continuous": replace(ASKED, execution=Execution(Trigger.CONTINUOUS)),
    "refused_async_progress": replace(ASKED, execution=Execution(async_progress=True)),
    "refused_timeout_above_limit": replace(ASKED, sinks=(TIGHT,)),
    "refused_timeout_below_batch": replace(ASKED, execution=Execution(batch_s_max=600)),
    "refused_owner_alive": replace(ASKED, checkpoint=replace(USED, owner=Owner("other", "here", 4711))),
    "refused_ledger_ahead": replace(ASKED, checkpoint=replace(USED, newest=6)),
    "refused_dedup_late": replace(ASKED, dedup=Dedup(("order_id",), 3_600_000)),
    "refused_dedup_changed": replace(
        ASKED,
        dedup=Dedup(("order_id",), 3_600_000, drops_late=True),
        checkpoint=replace(USED, other_dedup="dedup by key within 1 hour of timestamp"),
    ),
    "refused_dedup_table": replace(
        ASKED,
        sinks=(TO_KAFKA, replace(TO_POSTGRES, capability=replace(TO_POSTGRES.capability, remembers=True))),
        dedup=Dedup(("order_id",), 3_600_000, kind=IN_TABLE),
    ),
    "refused_new_checkpoint": replace(
        ASKED,
        checkpoint=CheckpointFacts("/data/checkpoints/new", earlier=EarlierFacts("0f3c", 7, '{"orders":{"0":9}}')),
    ),
    "refused_sink_cannot_commit": replace(ASKED, sinks=(TO_HTTP,)),
    "refused_two_last_resources": replace(
        ASKED, sinks=(TO_SQLITE, TO_KAFKA, replace(TO_SQLITE, name="copies", label="sqlite copies.db copies"))
    ),
    "refused_drop": replace(ASKED, on_bad_row=OnBadRow.DROP),
    "refused_name_twice": replace(ASKED, sinks=(TO_KAFKA, TO_POSTGRES, TO_KAFKA)),
    "refused_one_of_two_cannot_commit": replace(ASKED, sinks=(TO_KAFKA, TO_HTTP)),
    "refused_local_source": replace(ASKED, sources=(LOG,), execution=Execution(cluster=True)),
    "refused_local_sink": replace(ASKED, sinks=(TO_SQLITE,), execution=Execution(cluster=True)),
    "refused_preflight": replace(
        ASKED,
        sources=(
            replace(
                KAFKA, findings=(Finding("TOPIC_MISSING", "There is no topic 'orders'.", True, "create the topic"),)
            ),
        ),
    ),
}


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("DELIVERED_GOLDEN") == "write":
        path.write_text(text + "\n", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text + "\n"


@pytest.mark.parametrize("name", PLANS)
def test_plan(name: str) -> None:
    plan = make_plan(PLANS[name])
    assert isinstance(plan, Plan), plan
    check_golden(name, to_text(plan))


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name: str) -> None:
    """P12: the time-out against the broker's limit, before the start. P18: no guarantee by batch where offsets are
    logged after the batch."""
    refusal = make_plan(REFUSALS[name])
    assert isinstance(refusal, Refusal), refusal
    check_golden(name, to_text(refusal))


def test_every_golden_text_has_its_test() -> None:
    assert {p.stem for p in GOLDEN.glob("*.txt")} == {*PLANS, *REFUSALS}


@pytest.mark.parametrize("name", REFUSALS)
def test_nearest_guarantee_can_really_be_had(name: str) -> None:
    request = REFUSALS[name]
    refusal = make_plan(request)
    assert isinstance(refusal, Refusal)
    for guarantee in Guarantee:
        answer = make_plan(replace(request, guarantee=guarantee))
        if guarantee is refusal.nearest:
            assert isinstance(answer, Plan)
        elif refusal.nearest is None:
            assert isinstance(answer, Refusal)


@pytest.mark.parametrize("name", PLANS)
def test_exactly_one_step_decides(name: str) -> None:
    plan = make_plan(PLANS[name])
    assert isinstance(plan, Plan)
    deciding = [s.id for s in plan.steps if s.decides]
    exactly_once = plan.guarantee is Guarantee.EXACTLY_ONCE
    assert deciding == [StepId.COMMIT_DECIDE if exactly_once else StepId.COMMIT_RECORD]
    assert plan.deciding.id is deciding[0]
    assert all(s.on_crash and s.does for s in plan.steps + plan.recovery)


@pytest.mark.parametrize("request_", [*PLANS.values(), *REFUSALS.values()])
def test_json_says_the_same(request_: Request) -> None:
    answer = make_plan(request_)
    data = json.loads(json.dumps(to_json(answer)))
    assert data["refused"] is isinstance(answer, Refusal)
    if isinstance(answer, Plan):
        assert [s["id"] for s in data["steps"]] == [s.id.value for s in answer.steps]
    else:
        assert data["code"] == answer.error.code
        assert str(answer.error).startswith(f"[{data['code']}]")


@pytest.mark.parametrize(
    "request_",
    [
        replace(ASKED, checkpoint=replace(USED, owner=Owner("other", "here", 4711), takeover=True)),
        replace(ASKED, checkpoint=replace(USED, ledger_newest=6)),
        replace(ASKED, guarantee=Guarantee.AT_MOST_ONCE, sources=(QUEUE,)),
        replace(ASKED, guarantee=Guarantee.AT_LEAST_ONCE, sinks=(TIGHT,)),
        replace(ASKED, guarantee=Guarantee.AT_LEAST_ONCE, execution=Execution(async_progress=True)),
        replace(ASKED, execution=Execution(batch_s_max=599.0)),
    ],
)
def test_not_refused_without_need(request_: Request) -> None:
    assert isinstance(make_plan(request_), Plan)


def test_an_old_checkpoint_without_offsets_and_a_ledger_with_batches_is_refused() -> None:
    refusal = make_plan(replace(ASKED, checkpoint=replace(USED, newest=None)))
    assert isinstance(refusal, Refusal)
    assert refusal.code == "LEDGER_AHEAD"


@pytest.mark.parametrize("system", ["delta", "files", "sqlite", "log", "iceberg", "iceberg, by uri"])
def test_a_file_where_a_folder_belongs_is_named_and_the_other_way_round(system: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if system in ("sqlite", "iceberg, by uri"):
        place.mkdir()
    else:
        place.write_text("a file")
    options = {
        "sqlite": {"path": str(place), "table": "t"},
        "files": {"path": str(place), "fileFormat": "json"},
        "iceberg": {"warehouse": str(place), "table": "a.t"},
        "iceberg, by uri": {"catalog.uri": f"sqlite:///{place}", "table": "a.t"},
    }.get(system, {"path": str(place)})
    system = system.partition(",")[0]
    source = system == "log"
    findings = (
        find_source(system, options).preflight()
        if source
        else find_sink(system, options).preflight(Guarantee.EXACTLY_ONCE)
    )
    assert [(f.code, str(place) in f.message) for f in findings] == [("PATH_KIND", True)]


def test_no_sink_is_refused() -> None:
    refusal = make_plan(replace(ASKED, sinks=()))
    assert isinstance(refusal, Refusal)
    assert refusal.code == "SINKS_NONE"


_OF_TRANSACTIONS = ("transaction", "read_committed", "open, readers", "max_prepared", "some shards", "exactly_once:")


@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE])
@pytest.mark.parametrize("sink", support.SINKS, ids=lambda s: s.label)
def test_a_plan_has_no_bounds_of_other_guarantees(sink: support.Example, guarantee: Guarantee) -> None:
    """And a sink that only sends says what every guarantee assumes of it."""
    plan = support.plan(support.SOURCES[0], sink, guarantee)
    if isinstance(plan, Refusal):
        return
    assert not [line for line in plan.limits if any(word in line for word in _OF_TRANSACTIONS)]
    capability = find_sink(sink.system, sink.options).capability()
    if capability.commit is Commit.NONE:
        assert capability.assumes
        assert set(capability.assumes) <= set(plan.assumptions)
    assert (capability.repeats in plan.limits) is (guarantee is Guarantee.AT_LEAST_ONCE and bool(capability.repeats))


@pytest.mark.parametrize("name", [n for n, r in PLANS.items() if len(r.sinks) > 1])
def test_order_of_several_sinks_is_told(name: str) -> None:
    """P27: which sink decides, and that readers of two sinks do not see a batch at one moment."""
    plan = make_plan(PLANS[name])
    assert isinstance(plan, Plan)
    assert any(PLANS[name].decider.name in line for line in plan.order)
    assert to_json(plan)["order"] == list(plan.order)
    exactly_once = plan.guarantee is Guarantee.EXACTLY_ONCE
    assert any(("after the last commit.apply" if exactly_once else "not atomic") in line for line in plan.limits)
    named = [s.name for s in PLANS[name].sinks]
    stages = [s.does.split(":")[0] for s in plan.steps if s.id in (StepId.WRITE_STAGE, StepId.WRITE_SEND)]
    assert stages == named


@pytest.mark.parametrize("width", [40, 72, 200])
def test_text_keeps_to_the_width(width: int) -> None:
    for request in [*PLANS.values(), *REFUSALS.values()]:
        lines = to_text(make_plan(request), width).splitlines()
        assert all(len(line) <= max(width, 80) for line in lines)


def test_sources_that_keep_what_was_sent_twice_say_so() -> None:
    """Receivers recognise redelivered messages by id; sources read by offset do not."""
    from docs.support import SOURCES

    found = {e.system: find_source(e.system, e.options).capability().sent_twice for e in SOURCES}
    assert {system for system, twice in found.items() if twice} == {"kafka", "pulsar", "rabbitmq_stream"}


def test_refusals_recommend_what_can_be_had() -> None:
    """For every example in the docs: a connector's declaration matches the capabilities of its sinks."""
    for example in support.SINKS:
        able = find_sink(example.system, example.options).capability()
        declared = connector(example.system)
        asked = dict([declared.transactions.split("=")]) if declared.transactions else {}
        always = declared.transactions is not None and asked.items() <= example.options.items()
        assert (able.commit is not Commit.NONE) == always, example.label
        assert able.remembers == declared.key_table, example.label
        assert able.can_disable_retries is (example.system != "saga"), example.label
    assert "rocketmq with messageType=transaction" in alternatives().transactional


@pytest.mark.parametrize(("decided", "warns"), [(6, True), (7, False)])
def test_a_sink_removed_over_an_undecided_batch_is_a_warning(decided: int, warns: bool) -> None:
    """What was prepared there is neither committed nor aborted by anybody."""
    own = ASKED.sinks[0].name
    facts = replace(USED, ledger_newest=decided, unfinished=True, prepared_at=frozenset({own, "totals"}))
    plan = make_plan(replace(ASKED, checkpoint=facts))
    assert isinstance(plan, Plan)
    found = [w for w in plan.warnings if "is removed" in w]
    assert len(found) is int(warns)
    assert all(w.startswith("the sink totals is removed, and batch 7 is not decided") for w in found)
