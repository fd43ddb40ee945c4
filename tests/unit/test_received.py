"""Queues as sources, without a server: options, the plan's text, refusals."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.support.journal import messages, open_log

import delivered
from delivered.connectors.log import table
from delivered.connectors.log.table import Receivers
from delivered.contract.source import Entered
from delivered.model.errors import Unreachable, UsageError
from delivered.model.work import Ok
from delivered.pipeline.receive import receive_one
from delivered.pipeline.registry import find_received, find_source
from delivered.planner import Plan, Refusal
from delivered.receiver import ReceiveOptions

URL = "amqp://app@broker:5672/"


def source(log: Path | str = "/data/log", **options: Any) -> delivered.Endpoint:
    return delivered.endpoint("rabbitmq", url=URL, queue="orders", log=str(log), **options)


def plan(guarantee: str, **options: Any) -> Plan | Refusal:
    return delivered.Pipeline(
        name="orders",
        guarantee=guarantee,
        checkpoint="/nowhere",
        source=source(**options),
        sinks=[delivered.sqlite("/nowhere/x.db", "orders")],
    ).plan(offline=True)


def test_the_plan_says_what_it_rests_on() -> None:
    text = str(plan("exactly_once", dedupWindow=200_000))
    assert "orders: exactly_once by" in text
    assert "rabbitmq" in text
    for words in (
        "`delivered receive` is running",
        "redelivered after more than 200,000 others counts as a new one",
        "up to 26 MB",
        "publisher confirms",
    ):
        assert words in text


def test_the_plan_says_how_long_ids_are_kept_and_warns_when_the_rate_makes_that_short(tmp_path: Path) -> None:
    """At 100 messages a second, 30 minutes are 180,000 messages: RabbitMQ's consumer_timeout."""
    text = str(plan("exactly_once", dedupFor="10 minutes"))
    assert "after more than 1,000,000 others and 10 minutes counts as a new one" in " ".join(text.split())
    journal = open_log(tmp_path / "log")
    for n in range(4):
        journal.append(messages(*(f"{n}-{i}" for i in range(500))))
    for version, path in enumerate(sorted((tmp_path / "log" / "_delta_log").glob("*.json"))):
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        for action in actions:
            if "add" in action:
                action["add"]["modificationTime"] = 1_700_000_000_000 + 5_000 * version
        path.write_text("\n".join(map(json.dumps, actions)))

    def warnings(**options: Any) -> list[str]:
        return [f.message for f in source(tmp_path / "log", **options).source().preflight()]

    (warning,) = warnings(dedupWindow=1000)
    assert warning.startswith("100 messages a second")
    assert "keeps their ids for 10 s" in warning
    assert "after 1,800 s" in warning
    assert len(warnings(dedupWindow=179_000)) == 1
    assert warnings(dedupWindow=181_000) == []
    assert len(warnings(dedupWindow=1000, dedupFor="29 minutes")) == 1
    assert warnings(dedupWindow=1000, dedupFor="30 minutes") == []
    assert warnings(dedupWindow=1000, messageId="none") == [], "there is no window"


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_most_once"])
def test_without_ids_what_cannot_be_had_is_refused(guarantee: str) -> None:
    refused = plan(guarantee, messageId="none")
    assert isinstance(refused, Refusal)
    assert "DELIVERED_SOURCE_REPEATS" in str(refused)
    assert "messageId=none" in str(refused)
    assert isinstance(plan("at_least_once", messageId="none"), Plan)


def activemq(guarantee: str, **options: Any) -> Plan | Refusal:
    given = {"url": "stomp://broker", "queue": "orders", "log": "/data/log", **options}
    return delivered.Pipeline(
        name="orders",
        guarantee=guarantee,
        checkpoint="/nowhere",
        source=delivered.endpoint("activemq", **given),
        sinks=[delivered.sqlite("/nowhere/x.db", "orders")],
    ).plan(offline=True)


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_most_once"])
def test_without_the_header_for_ids_the_refusal_names_it(guarantee: str) -> None:
    refused = activemq(guarantee)
    assert isinstance(refused, Refusal)
    assert "DELIVERED_SOURCE_REPEATS" in str(refused)
    assert "idHeader" in str(refused)
    assert isinstance(activemq("at_least_once"), Plan)
    assert not find_received("activemq", {"url": "stomp://x", "queue": "q", "log": "/x"}).options.ids_required
    text = str(activemq(guarantee, idHeader="id"))
    assert "orders: " + guarantee in text
    assert "resend a message with the same id" in text


def test_what_the_broker_drops_by_itself_stands_in_the_plan_of_a_sink() -> None:
    def said(**options: Any) -> str:
        sink = delivered.endpoint("activemq", url="stomp://x", queue="q", ledger="/nowhere/l.db", **options)
        made = delivered.Pipeline(
            name="orders",
            guarantee="at_least_once",
            checkpoint="/nowhere",
            source=delivered.log("/nowhere/log"),
            sinks=[sink],
        )
        return " ".join(str(made.plan(offline=True)).split())

    assert "id-cache-size, 20,000" in said()
    assert "id-cache-size" not in said(idHeader="id")


def test_a_log_that_is_not_there_says_to_start_the_receiver(tmp_path: Path) -> None:
    (finding,) = source(tmp_path / "none").source().preflight()
    assert finding.code == "LOG_MISSING"
    assert finding.refuses
    assert "delivered receive" in str(finding.next_step)


def test_options_of_the_log_reach_it() -> None:
    made = find_received("rabbitmq", source(maxOffsetsPerTrigger=7, includeHeaders="true", reader="me").options)
    assert made.rows_per_batch_max == 7
    assert "headers" in made.schema().names
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize("value", ["quarantine", "set_aside"])  # the latter is its name in earlier versions
def test_bad_messages_are_quarantined_by_both_names(value: str) -> None:
    assert ReceiveOptions.read("delivered.rabbitmq", {"log": "/data/log", "badMessages": value}).quarantine


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dedupWindow": 0}, "must be from 1"),
        ({"prefetch": 70_000}, "from 1 to 65535"),
        ({"messageId": "sometimes"}, "required, none"),
        ({"url": "http://x/"}, "amqp://user@host"),
        ({"url": "amqp://app:secret@x/"}, "contains a password"),
        ({"reader": "a/b"}, "letters, digits"),
        ({"quque": "x"}, "has no option 'quque'"),
    ],
)
def test_bad_options_are_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        find_source("rabbitmq", source().with_options(**{k: str(v) for k, v in options.items()}).options)
    assert "secret@" not in str(caught.value)


def test_what_needs_no_receiver_says_so() -> None:
    with pytest.raises(UsageError, match="needs no receiver"):
        delivered.receive(delivered.log("/data/log"))
    with pytest.raises(UsageError, match="from 1 to 64"):
        delivered.receive(source(), processes=0)


def test_a_log_receives_from_one_queue(tmp_path: Path) -> None:
    """Regression: a message of another queue with a known id was acknowledged, and not in the log."""
    journal, queue = open_log(tmp_path / "log"), "rabbitmq %2F/orders"
    journal.append(messages("1", "2"))
    assert Receivers(str(tmp_path / "log"), {}).queue(queue) == queue
    assert open_log(tmp_path / "log").append(messages("1", "3")) == Ok(Entered(1, 1))
    options = {"url": "amqp://127.0.0.1:1/", "queue": "payments", "log": str(tmp_path / "log")}
    with pytest.raises(
        UsageError, match=r"LOG_OF_ANOTHER_QUEUE.*of rabbitmq %2F/orders. A message of rabbitmq %2F/pay"
    ):
        receive_one("rabbitmq", options, 0, lambda: True)
    with pytest.raises(UsageError, match="A message of rabbitmq shop/orders with"):
        receive_one("rabbitmq", {**options, "url": "amqp://127.0.0.1:1/shop", "queue": "orders"}, 0, lambda: True)
    with pytest.raises(Unreachable):
        receive_one("rabbitmq", {**options, "queue": "orders"}, 0, lambda: True)
    (tmp_path / "log" / "_queue" / "queue.json").unlink()
    with pytest.raises(Unreachable):
        receive_one("rabbitmq", options, 0, lambda: True)
    assert Receivers(str(tmp_path / "log"), {}).queue(queue) == "rabbitmq %2F/payments"


def test_the_first_of_two_receivers_names_the_queue_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: both of two that started at the same moment filled the log."""
    open_log(tmp_path / "log")
    receivers, put, answers = Receivers(str(tmp_path / "log"), {}), table.put, list[str]()

    def second(*arguments: Any) -> None:
        monkeypatch.setattr(table, "put", put)
        answers.append(receivers.queue("second"))
        put(*arguments)

    monkeypatch.setattr(table, "put", second)
    assert [receivers.queue("first"), *answers, receivers.queue("third")] == ["second"] * 3
    assert [p.name for p in (tmp_path / "log" / "_queue").iterdir()] == ["queue.json"]
    (tmp_path / "log" / "_queue" / "queue.json").write_text("")  # a power failure
    assert [receivers.queue("first"), receivers.queue("second")] == ["first"] * 2


def test_groups_of_a_topic_receive_the_same_messages() -> None:
    def scope(**more: str) -> str:
        given = {"endpoints": "h:8081", "topic": "orders", "group": "a", "log": "/x", **more}
        return find_received("rocketmq", given).queue.id_scope

    assert scope() == scope(group="b") == "orders"
    assert scope(namespace="shop") == "shop/orders"
