"""P28: a coordinator reports a transaction as ended whose markers are not in its partitions."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pytest
from tests.broker.lost_ends import Lose, losing, lost_ends
from tests.broker.sink_help import Rig, prepared, rows, wait_for
from tests.support.servers import Kafka

from delivered.clients.kafka.protocol import Wire
from delivered.clients.kafka.transactions import (
    Transaction,
    TransactionState,
    describe,
    describe_all,
    listed,
    open_in,
    partitions_of,
)
from delivered.connectors.kafka import CONNECTOR, writes
from delivered.connectors.kafka.committer import marker_partition
from delivered.connectors.kafka.topics import STATE_PARTITION, ledger_topic
from delivered.connectors.kafka.writes import Again, LedgerProducer
from delivered.engine.shard import write_shard
from delivered.model.errors import DeliveredError, UsageError
from delivered.model.rows import Rows
from delivered.model.work import Action, Ok, ShardMessage, Unknown

__all__ = ["losing"]

TOPIC, IDS = 2, 5
"""Kinds of resources in ACLs."""


@pytest.fixture
def rig(kafka: Any) -> Rig:
    return Rig(kafka, kafka.topic(2))


def allow(kafka: Any, user: str, granted: Mapping[int, Mapping[str, str]], remove: bool = False) -> None:
    """Add ACLs, or remove them: kind of resource -> prefix of its name -> operations."""
    from confluent_kafka import admin

    wanted = [
        admin.AclBinding(
            {TOPIC: admin.ResourceType.TOPIC, IDS: admin.ResourceType.TRANSACTIONAL_ID}[kind],
            name,
            admin.ResourcePatternType.PREFIXED,
            f"User:{user}",
            "*",
            admin.AclOperation[operation],
            admin.AclPermissionType.ALLOW,
        )
        for kind, names in granted.items()
        for name, operations in names.items()
        for operation in operations.split()
    ]
    client = kafka.admin()
    filters = [
        admin.AclBindingFilter(
            a.restype, a.name, a.resource_pattern_type, a.principal, a.host, a.operation, a.permission_type
        )
        for a in wanted
    ]
    for future in (client.delete_acls(filters) if remove else client.create_acls(wanted)).values():
        future.result(60)


def in_data(rig: Rig) -> Callable[[str, int], bool]:
    return lambda topic, _: topic == rig.topic


def in_decisions(rig: Rig) -> Callable[[str, int], bool]:
    ledger = ledger_topic(rig.scope, None)
    return lambda topic, partition: (topic, partition) == (ledger, STATE_PARTITION)


def end_of(rig: Rig, message: ShardMessage) -> str:
    """The coordinator's word on a shard's transactional id."""
    wire = Wire(rig.sink.options.resolved())
    found = describe(wire, prepared(message).handle["transactional_id"])
    wire.close()
    assert found is not None
    return found.state


def ids_of(rig: Rig) -> dict[str, TransactionState | None]:
    """What the coordinator knows of all the pipeline's ids; an id that is used gets another epoch."""
    wire = Wire({"bootstrap.servers": rig.kafka.bootstrap})
    prefix = f"delivered.{rig.pipeline}."
    found = describe_all(wire, listed(wire, lambda name: name.startswith(prefix), (), float("inf")))
    wire.close()
    assert found
    return found


def shards_of(rig: Rig) -> dict[str, TransactionState | None]:
    return {name: now for name, now in ids_of(rig).items() if ".ledger." not in name}


def open_in_data(rig: Rig, messages: list[ShardMessage]) -> int:
    """Partitions that hold an open transaction of these shards."""
    wire = Wire(rig.sink.options.resolved())
    ids = {Transaction.of(prepared(m)).producer_id for m in messages}
    found, _ = open_in(wire, partitions_of(wire, [rig.topic]), ids, float("inf"))
    wire.close()
    return len(found)


def committed_without_markers(rig: Rig, losing: Lose, context: Any) -> list[ShardMessage]:
    """Batch 0 is visible, and batch 1 is committed, by the word of a coordinator whose connection did not break."""
    rig.run(context, 0, first=True)
    plan = rig.plan(context, 1, first=False)
    with losing(in_data(rig)):
        messages = rig.write(plan)
    rig.commit(context, 1, messages)
    wait_for(lambda: [end_of(rig, m) for m in messages] == ["CompleteCommit"] * 2)
    assert open_in_data(rig, messages) > 0
    assert rig.visible() == rig.expected([0])
    return messages


def test_p28_a_start_makes_a_logged_batch_visible_whose_markers_are_missing(rig: Rig, losing: Lose) -> None:
    committed_without_markers(rig, losing, rig.context())
    again = rig.context("second")
    plan = rig.plan(again, 2)
    assert rig.visible() == rig.expected([0, 1])
    rig.commit(again, 2, rig.write(plan))
    rig.run(again, 3)
    assert rig.visible() == rig.expected(range(4))


def test_p28_a_running_query_looks_once_a_connection_broke(rig: Rig, losing: Lose) -> None:
    context = rig.context()
    committed_without_markers(rig, losing, context)
    context.committers.close()
    rig.plan(context, 2, first=False)
    assert rig.visible() == rig.expected([0, 1])


def test_p28_a_decided_batch_is_confirmed_before_it_may_be_logged_if_its_coordinator_is_new(
    rig: Rig, losing: Lose
) -> None:
    context = rig.context()
    plan = rig.plan(context, 0)
    with losing(in_data(rig)):
        messages = rig.write(plan)
    context.committers.close()
    rig.commit(context, 0, messages)
    assert rig.visible() == rig.expected([0])


def test_p28_aborted_rows_do_not_return_with_the_next_commit_of_their_producer(rig: Rig, losing: Lose) -> None:
    plan = rig.plan(rig.context(), 0)
    with losing(in_data(rig)):
        messages = rig.write(plan)
    again = rig.context("second")
    plan = rig.plan(again, 0)
    assert open_in_data(rig, messages) == 0
    rig.commit(again, 0, rig.write(plan))
    rig.run(again, 1)
    rig.run(again, 2)
    assert rig.visible() == rig.expected(range(3))


def test_p28_an_expired_promise_is_not_torn_by_committing_where_its_abort_is_missing(rig: Rig, losing: Lose) -> None:
    context = rig.context()
    plan = rig.plan(context, 0)
    with losing(in_data(rig)):
        messages = rig.write(plan)
    assert context.committers.abort(prepared(messages[1])) == Ok(None)  # as the broker does on a time-out
    with pytest.raises(DeliveredError, match="PROMISE_EXPIRED"):
        rig.commit(context, 0, messages)
    again = rig.context("second")
    plan = rig.plan(again, 0)
    assert set(plan.rewrite) == {1}
    rig.commit(again, 0, rig.write(plan))
    assert rig.visible() == rig.expected([0])


@pytest.mark.parametrize("client", ["arrow", "librdkafka"])
def test_p28_a_task_refuses_an_id_whose_last_transaction_is_open_in_a_partition(
    rig: Rig, losing: Lose, client: str
) -> None:
    context = rig.context()
    rig.plan(context, 0)
    with losing(in_data(rig)):
        [message] = rig.write(rig.bare_plan(0), [0], attempt=1)
    assert context.committers.abort(prepared(message)) == Ok(None)
    rig.options["client"] = client
    with pytest.raises(DeliveredError, match="TRANSACTION_HANGING"):
        rig.write(rig.bare_plan(2), [0], attempt=1)
    rig.write(rig.bare_plan(2), [0], attempt=0)
    rig.plan(rig.context("second"), 0)
    rig.write(rig.bare_plan(2), [0], attempt=1)


@pytest.mark.parametrize("prefix", ["", "__"])
def test_p28_rows_that_name_their_topics(kafka: Any, losing: Lose, prefix: str) -> None:
    class Named(Rig):
        @property
        def sink(self) -> Any:
            return CONNECTOR.sink({"kafka.bootstrap.servers": self.kafka.bootstrap})

    rig = Named(kafka, kafka.topic(2, name=f"{prefix}{uuid.uuid4().hex}"))
    plan = rig.plan(rig.context(), 0)
    batch = rows([b"a", b"b"])
    batch = batch.append_column("topic", pa.array([rig.topic] * 2))
    with losing(in_data(rig)):
        message = write_shard(rig.sinks, plan, 0, 0, iter([Rows(batch)]), batch.schema)
    assert open_in_data(rig, [message]) > 0
    rig.plan(rig.context("second"), 0)
    assert open_in_data(rig, [message]) == 0
    assert rig.visible() == []


def test_p28_the_marker_of_an_expired_promise_is_looked_up_behind_its_lost_abort(rig: Rig, losing: Lose) -> None:
    context = rig.context()
    plan = rig.plan(context, 0)
    marker = ledger_topic(rig.scope, None), marker_partition(rig.scope)
    with losing(lambda topic, partition: (topic, partition) == marker):
        messages = rig.write(plan)
    assert context.committers.abort(prepared(messages[0])) == Ok(None)  # as the broker does on a time-out
    assert not context.committers.was_committed(rig.work(0, 0), prepared(messages[0]))


# -- the ledger's own transactions -----------------------------------------------------------------------------------


def decided_without_marker(rig: Rig, losing: Lose, context: Any) -> None:
    rig.run(context, 0, first=True)
    messages = rig.write(rig.plan(context, 1, first=False))
    with losing(in_decisions(rig)):
        rig.commit(context, 1, messages)


def test_p28_a_decision_that_was_acknowledged_does_not_vanish(rig: Rig, losing: Lose) -> None:
    decided_without_marker(rig, losing, rig.context())
    again = rig.context("second")
    assert rig.plan(again, 1).action is Action.SKIP
    rig.run(again, 2)
    assert rig.visible() == rig.expected(range(3))


def test_p28_a_running_query_reads_on_behind_its_own_decision(
    rig: Rig, losing: Lose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "HIDDEN_S", 0.0)
    context = rig.context()
    decided_without_marker(rig, losing, context)
    rig.run(context, 2)
    assert rig.visible() == rig.expected(range(3))


@pytest.mark.usefixtures("losing")
@pytest.mark.parametrize("read", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_p28_a_seal_that_was_acknowledged_does_not_vanish(
    rig: Rig, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.context()
    real = LedgerProducer.add
    with monkeypatch.context() as patch:  # its coordinator hears of another partition
        patch.setattr(LedgerProducer, "add", lambda self, _, deadline: real(self, {STATE_PARTITION: ()}, deadline))
        assert rig.ledger().add_seal("sink", 0, "first") == Ok(None)
    if read:
        assert rig.ledger().last_seal("sink") == "first"
    assert rig.ledger().add_seal("sink", 1, "second") == Ok(None)
    assert list(rig.ledger().seals("sink")) == ["first", "second"]


def test_p28_a_decision_that_was_aborted_does_not_return_with_the_next_one(
    rig: Rig, losing: Lose, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = rig.context()
    rig.run(context, 0, first=True)
    messages = rig.write(rig.plan(context, 1, first=False))
    died = Unknown("the driver died"), Again.NO
    with losing(in_decisions(rig)), monkeypatch.context() as patch:
        patch.setattr(LedgerProducer, "commit", lambda _: died)
        patch.setattr("delivered.engine.decide._fence_and_look", lambda *_: Unknown("the driver died"))
        with pytest.raises(DeliveredError, match="DECISION_UNKNOWN"):
            rig.commit(context, 1, messages)
    again = rig.context("second")
    assert rig.plan(again, 1).action is Action.WRITE
    rig.commit(again, 1, rig.write(rig.plan(again, 1)))
    assert rig.plan(rig.context("third"), 1).action is Action.SKIP
    assert [d.owner for d in rig.ledger().history()] == ["first", "second"]
    assert rig.visible() == rig.expected([0, 1])


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_p28_what_hangs_is_listed_and_ended_only_as_it_was(rig: Rig, losing: Lose) -> None:
    messages = committed_without_markers(rig, losing, rig.context())
    committer = rig.committer()
    found = committer.open_transactions()
    assert [(t.state, t.committed) for t in found] == [("Hanging", True)] * len(found)  # type: ignore[attr-defined]
    assert {t.transactional_id for t in found} <= {prepared(m).handle["transactional_id"] for m in messages}
    with pytest.raises(UsageError, match="TRANSACTION_ENDED"):
        committer.end_by_id(found[0].transactional_id, commit=False)
    for t in found:
        assert committer.end_by_id(t.transactional_id, commit=True) == Ok(None)
    assert committer.open_transactions() == []
    assert rig.visible() == rig.expected([0, 1])


def test_p28_undisturbed_batches_are_not_looked_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    context = rig.context()
    rig.run(context, 0, first=True)
    asked: list[Any] = []
    monkeypatch.setattr("delivered.connectors.kafka.committer.open_in", lambda *a: asked.append(a) or ([], []))
    for batch in range(1, 5):
        rig.run(context, batch)
    assert asked == []
    context.committers.close()
    rig.run(context, 5)
    assert asked


# -- permissions -----------------------------------------------------------------------------------------------------


@pytest.mark.matrix  # a broker with accounts; the tests above do what Alter permits
def test_p28_without_alter_on_the_cluster_the_start_is_refused_with_the_command(
    new_kafka: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka = new_kafka(scram={"alice": "secret"}, properties=dict(Kafka.quick))
    topic = kafka.topic(2)
    allow(
        kafka,
        "alice",
        {TOPIC: {topic: "WRITE READ", "__delivered_": "CREATE READ WRITE"}, IDS: {"delivered.": "WRITE"}},
    )
    login = "org.apache.kafka.common.security.scram.ScramLoginModule required username='alice' password='secret';"
    alice = Rig(
        kafka,
        topic,
        options={
            "kafka.bootstrap.servers": kafka.broker.listeners["SASL_PLAINTEXT"],
            "kafka.security.protocol": "SASL_PLAINTEXT",
            "kafka.sasl.mechanism": "SCRAM-SHA-512",
            "kafka.sasl.jaas.config": login,
        },
    )
    own = Rig(kafka, kafka.topic(2, name=f"{topic}-own"), options=alice.options)
    with lost_ends(kafka, monkeypatch) as losing:
        committed_without_markers(alice, losing, alice.context())
        decided_without_marker(own, losing, own.context())
    # The ledger's own: the owner's record would be committed with it, or, if this driver dies before, aborted with it.
    [deciding] = [(name, now) for name, now in ids_of(own).items() if name.endswith("decide")]
    for ask in (lambda: own.plan(own.context("second"), 1), lambda: own.ledger().look()):
        with pytest.raises(DeliveredError, match=r"TRANSACTION_HANGING.*decide.*Alter on the cluster.*delivered run"):
            ask()
    assert deciding in ids_of(own).items(), "an id was used whose last transaction is open"
    again = Rig(kafka, own.topic, pipeline=own.pipeline)
    assert again.plan(again.context("third"), 1).action is Action.SKIP
    held = shards_of(alice)
    for owner in ("second", "once more"):
        with pytest.raises(DeliveredError, match=r"TRANSACTION_HANGING.*Alter on the cluster.*transactions apply"):
            alice.plan(alice.context(owner), 2)
    assert shards_of(alice) == held, "an id was used whose last transaction is open"
    seen = alice.visible()
    assert seen == alice.expected([0]), "readers see what precedes the hole"
    anonymous = Rig(kafka, topic, pipeline=alice.pipeline)
    anonymous.run(anonymous.context("third"), 2, first=True)
    assert alice.visible() == alice.expected(range(3))
    allow(kafka, "alice", {TOPIC: {topic: "READ"}}, remove=True)
    alice.run(alice.context("fourth"), 3, first=True)  # no transaction is open: the ends of the partitions tell
    messages = alice.write(alice.plan(alice.context("fourth"), 4))
    with pytest.raises(DeliveredError, match=r"TRANSACTIONS_UNREADABLE.*Read on topic"):
        alice.plan(alice.context("fifth"), 4)
    anonymous.run(anonymous.context("sixth"), 4, first=True)
    assert messages
    assert alice.visible() == alice.expected(range(5))
