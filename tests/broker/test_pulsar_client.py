"""Pulsar's transactions through our client, as the brokers' own client sees them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.support.pulsar import FULL, native
from tests.support.pulsar_transactions import Open, cluster, soon
from tests.support.servers import Pulsar

from delivered.clients.pulsar.connection import Cluster, Error, NoAnswer, Rejected, Settings
from delivered.clients.pulsar.producer import COMPRESSIONS, Message, TooLong
from delivered.clients.pulsar.transactions import Coordinators, TransactionId
from delivered.model.options import parse_address
from delivered.model.work import Failed, Ok, Unknown
from delivered_lab.verify.proxy import Command, Fired, NetworkFault, PulsarProxy, Rule


def values(pulsar: Pulsar, topic: str) -> list[bytes]:
    return [m.data() for m in native(pulsar, topic)]


@pytest.mark.parametrize("commit", [True, False])
def test_what_is_sent_is_visible_after_the_commit_and_never_after_an_abort(pulsar: Pulsar, commit: bool) -> None:
    topics = pulsar.topic(), pulsar.topic()
    opened = Open(cluster(pulsar), *topics)
    opened.send(Message(b"a"), Message(b"b"))
    opened.close()
    assert [values(pulsar, t) for t in topics] == [[], []]
    other = Coordinators(cluster(pulsar))  # as another process that was only told the id
    assert other.end(opened.id, commit=commit, deadline=soon()) == Ok(None)
    assert [values(pulsar, t) for t in topics] == [[b"a", b"b"] if commit else []] * 2
    for again in (True, False):
        assert isinstance(other.end(opened.id, commit=again, deadline=soon()), Failed)
    pulsar.send(topics[0], [b"plain"])
    assert values(pulsar, topics[0]) == [*([b"a", b"b"] if commit else []), b"plain"]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_messages_have_what_they_were_given(pulsar: Pulsar, compression: str) -> None:
    topic = pulsar.topic()
    opened = Open(cluster(pulsar), topic, compression=compression)
    given = [
        Message(b"a" * 2_000, "kéy", {"h": "x", "": "empty"}, 1_700_000_000_123),
        Message(b""),
        Message(None, "gone"),
        *(Message(b"%d" % n, str(n % 3)) for n in range(2_500)),
    ]
    opened.send(*given)
    assert opened.coordinators.end(opened.id, commit=True, deadline=soon()) == Ok(None)
    found = native(pulsar, topic)
    assert [None if m.has_null_value() else m.data() for m in found] == [m.value for m in given]
    assert [m.partition_key() or None for m in found] == [m.key for m in given]
    assert found[0].properties() == {"h": "x", "": "empty"}
    assert [m.event_timestamp() for m in found[:2]] == [1_700_000_000_123, 0]
    assert len({(m.message_id().ledger_id(), m.message_id().entry_id()) for m in found}) == 3
    assert [len(p.properties()) for p in found[1:]] == [0] * (len(found) - 1)


def test_a_long_message_is_chunked_or_rejected(pulsar: Pulsar) -> None:
    topic, long = pulsar.topic(), bytes(range(256)) * (12 << 12)  # 12 MiB
    opened = Open(cluster(pulsar), topic, chunks=True)
    opened.send(Message(long, "k", {"h": "x"}), Message(b"short"))
    assert opened.coordinators.end(opened.id, commit=True, deadline=soon()) == Ok(None)
    found = native(pulsar, topic)
    assert [m.data() for m in found] == [long, b"short"]
    assert (found[0].partition_key(), found[0].properties()) == ("k", {"h": "x"})
    opened = Open(cluster(pulsar), topic)
    with pytest.raises(TooLong, match="maxMessageSize"):
        opened.send(Message(bytes(12 << 20)))
    assert opened.coordinators.end(opened.id, commit=False, deadline=soon()) == Ok(None)


def test_a_transaction_that_expired_is_not_found_and_takes_no_more(pulsar: Pulsar) -> None:
    topic = pulsar.topic()
    opened = Open(cluster(pulsar), topic, ttl_s=0.5)
    opened.send(Message(b"a"))
    pulsar.send(topic, [b"plain"])
    deadline = time.monotonic() + 60
    while not (found := values(pulsar, topic)):  # it waits behind the open transaction
        assert time.monotonic() < deadline
    assert found == [b"plain"]
    assert isinstance(opened.coordinators.end(opened.id, commit=True, deadline=soon()), Failed)
    with pytest.raises(Rejected) as raised:
        opened.coordinators.add(opened.id, [f"{FULL}{pulsar.topic()}"], soon())
    assert raised.value.code == Error.TXN_NOT_FOUND


def test_a_time_to_live_of_a_hundred_days_is_accepted(pulsar: Pulsar) -> None:
    topic = pulsar.topic()
    opened = Open(cluster(pulsar), topic, ttl_s=1e7)
    opened.send(Message(b"a"))
    assert values(pulsar, topic) == []
    assert opened.coordinators.end(opened.id, commit=False, deadline=soon()) == Ok(None)


def test_unknown_ids_are_not_found_by_the_coordinator(pulsar: Pulsar) -> None:
    ended = Coordinators(cluster(pulsar)).end_all(
        [TransactionId(0, 1 << 40), TransactionId(0, (1 << 40) + 1)], commit=True, deadline=soon()
    )
    assert [type(outcome) for outcome in ended] == [Failed, Failed]


def test_a_schema_is_registered_and_named_by_each_message(pulsar: Pulsar) -> None:
    topic = pulsar.topic()
    text = '{"type":"record","name":"R","fields":[{"name":"n","type":"long"}]}'
    opened = Open(cluster(pulsar), topic, schema=("AVRO", text))
    opened.send(Message(b"\x02"))
    assert opened.coordinators.end(opened.id, commit=True, deadline=soon()) == Ok(None)
    assert pulsar.admin("GET", f"schemas/public/default/{topic}/schema")["type"] == "AVRO"
    [message] = native(pulsar, topic)
    assert message._message.int_schema_version() == 0
    other = '{"type":"record","name":"R","fields":[{"name":"n","type":"string"}]}'
    with pytest.raises(Rejected) as raised:
        Open(cluster(pulsar), topic, schema=("AVRO", other))
    assert raised.value.code == Error.INCOMPATIBLE_SCHEMA


def test_a_lost_answer_to_an_end_leaves_it_unknown_and_done(pulsar: Pulsar) -> None:
    """Through the verifier's proxy, which each lookup leads back to."""
    fired: list[Fired] = []
    proxy = PulsarProxy(pulsar.broker.url.removeprefix("pulsar://"), fired.append)
    topic = pulsar.topic()
    try:
        opened = Open(Cluster(Settings([parse_address(proxy.bootstrap)])), topic)
        opened.send(Message(b"a"))
        proxy.add(Rule(Command.END_TXN, NetworkFault.LOSE_REPLY, within="delivered"))
        assert isinstance(opened.coordinators.end(opened.id, commit=True, deadline=soon()), Unknown)
        assert [f.rule for f in fired] == ["lose_reply:end_txn of delivered"]
        assert proxy.frames == {"new_txn": 1, "add_partition_to_txn": 1, "send": 1, "end_txn": 1}
        assert values(pulsar, topic) == [b"a"]
        assert isinstance(opened.coordinators.end(opened.id, commit=True, deadline=soon()), Failed)
    finally:
        proxy.close()


@pytest.mark.matrix
def test_a_broker_killed_with_open_transactions(new_pulsar: Callable[..., Pulsar]) -> None:
    """Twenty open ones survive it. An end that was confirmed before the kill is not lost, nor half done."""
    pulsar = new_pulsar(transactionCoordinatorEnabled="true", journalSyncData="false")
    topics = pulsar.topic(), pulsar.topic()
    at = cluster(pulsar)
    opened = [Open(at, *topics) for _ in range(20)]
    for n, one in enumerate(opened):
        one.send(*(Message(b"%d.%d" % (n, i)) for i in range(100)))
    ended = opened[0].coordinators.end_all([o.id for o in opened[:10]], commit=True, deadline=soon())
    assert ended == [Ok(None)] * 10
    pulsar.broker.kill()
    late = opened[10].coordinators.end(opened[10].id, commit=True, deadline=time.monotonic() + 1)
    assert isinstance(late, Unknown)
    pulsar.broker.restart()
    with pytest.raises(NoAnswer):
        opened[11].send(Message(b"never"))
    coordinators = Coordinators(cluster(pulsar))
    for commit, some in ((True, opened[10:15]), (False, opened[15:])):
        for one in some:
            while isinstance(ended_now := coordinators.end(one.id, commit=commit, deadline=soon()), Unknown):
                time.sleep(0.1)  # the coordinator loads
            assert ended_now == Ok(None)
    expected = sorted(b"%d.%d" % (n, i) for n in range(15) for i in range(100))
    for topic in topics:
        assert sorted(values(pulsar, topic)) == expected
