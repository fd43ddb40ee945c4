"""By which client Kafka's records travel: what the plan says, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from tests.support.requests import ASKED, TO_KAFKA

from delivered.clients.kafka import record_batch
from delivered.connectors.kafka import CONNECTOR, SINK_SETTINGS, SOURCE_SETTINGS, by_arrow
from delivered.model.capability import Guarantee
from delivered.planner import Plan, SinkFacts, SourceFacts, make_plan, to_json, to_text

AT = {"kafka.bootstrap.servers": "localhost:9092"}
KERBEROS = {"kafka.security.protocol": "SASL_PLAINTEXT", "kafka.sasl.mechanism": "GSSAPI"}
TUNED = {"kafka.socket.nagle.disable": "true"}


def said(options: Mapping[str, str]) -> tuple[str, ...]:
    """The plan's lines for a pipeline from Kafka to Kafka, both with these options."""
    source = CONNECTOR.source({**AT, "subscribe": "orders", **options}).capability()
    sink = CONNECTOR.sink({**AT, "topic": "clean", **options}).capability()
    asked = replace(
        ASKED,
        sources=(SourceFacts("kafka orders", source),),
        sinks=(SinkFacts("clean", "kafka clean", sink),),
    )
    plan = make_plan(asked)
    assert isinstance(plan, Plan)
    assert to_json(plan)["records"] == list(plan.records)
    assert all(line in to_text(plan) for line in plan.records)
    return plan.records


@pytest.mark.parametrize("options", [{}, {"client": "auto"}, {"client": "arrow"}, KERBEROS])
def test_the_plan_says_that_columns_are_encoded_in_c(options: dict[str, str]) -> None:
    assert said(options) == ("kafka orders: Arrow, decoded in C", "kafka clean: Arrow, encoded in C")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"client": "librdkafka"}, "client=librdkafka"),
        (TUNED, "kafka.socket.nagle.disable is a setting of librdkafka"),
    ],
)
def test_the_plan_says_why_it_is_librdkafka(options: dict[str, str], why: str) -> None:
    assert said(options) == tuple(f"{at}: librdkafka, because {why}" for at in ("kafka orders", "kafka clean"))


def test_the_plan_says_that_the_library_in_c_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_batch, "available", lambda: False)
    why = "librdkafka, because the package was built without a C compiler"
    assert said({}) == (f"kafka orders: {why}", f"kafka clean: {why}")


@pytest.mark.parametrize("options", [{}, TUNED, KERBEROS])
@pytest.mark.parametrize(("owner", "known"), [("source", SOURCE_SETTINGS), ("sink", SINK_SETTINGS)])
def test_the_plan_names_the_path_that_tasks_take(options: dict[str, str], owner: str, known: frozenset[str]) -> None:
    client = {name.removeprefix("kafka."): value for name, value in {**AT, **options}.items()}
    for line in said(options):
        assert ("Arrow" in line) == by_arrow(owner, "auto", client, known)


def test_arrow_with_a_setting_that_it_lacks_is_refused_before_the_first_task() -> None:
    """No server is asked: there is none."""
    options = {**AT, **TUNED, "client": "arrow"}
    source = CONNECTOR.source({**options, "subscribe": "orders"}).preflight()
    sink = CONNECTOR.sink({**options, "topic": "clean"}).preflight(Guarantee.EXACTLY_ONCE)
    for finding in (*source, *sink):
        assert finding.refuses
        assert finding.code == "OPTION_CONFLICT"
        assert "kafka.socket.nagle.disable is a setting of librdkafka" in finding.message
        assert "client=auto" in (finding.next_step or "")
    assert len(source) == len(sink) == 1


def test_a_system_with_one_client_gets_no_line() -> None:
    plan = make_plan(replace(ASKED, sinks=(TO_KAFKA,)))
    assert isinstance(plan, Plan)
    assert plan.records == ()
    assert "records" not in to_json(plan)
