"""RocketMQ without a server: options, columns, receipts, the plan's text."""

from __future__ import annotations

import gzip
import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import delivered
from delivered.connectors.rocketmq import RocketmqOptions, RocketmqSinkOptions
from delivered.connectors.rocketmq.client import library
from delivered.connectors.rocketmq.publish import (
    BATCH_BYTES_MAX,
    BATCH_MAX,
    HalfMessage,
    HalfMessages,
    Message,
    batches,
    packed,
    unpacked,
)
from delivered.connectors.rocketmq.queue import content, forgetful, renewed
from delivered.connectors.rocketmq.remoting import joined, parsed
from delivered.connectors.rocketmq.sink import EndJournal, RocketmqWriter, State
from delivered.model.errors import BadRecord, Refused, UsageError
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope, Work
from delivered.model.limits import DECISION_BYTES_MAX
from delivered.model.work import Prepared, Promise, Unknown
from delivered.pipeline.registry import find_sink
from delivered.planner import Plan, Refusal

parse = RocketmqOptions.parse
parse_sink = RocketmqSinkOptions.parse


def _plain(text: str) -> bool:
    return not {"\x01", "\x02"} & set(text)


SOURCE = {"endpoints": "proxy:8081", "topic": "orders", "group": "lake", "log": "/data/log"}
SINK = {"endpoints": "proxy:8081", "topic": "orders", "ledger": "/nowhere/l.db"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"endpoints": "proxy"}, "host:8081"),
        ({"endpoints": "http://proxy:8081"}, "host:8081"),
        ({"endpoints": "proxy:99999"}, "host:8081"),
        ({"idFrom": "offset"}, "message_id, keys"),
        ({"invisibleSeconds": "0"}, "from 1 to 43200"),
        ({"prefetch": "60000"}, "from 1 to 50000"),
        ({"accessKey": "me"}, "must be set together"),
        ({"tls": "yes"}, "true, false"),
        ({"tlsTrustCertsFile": "/ca.pem"}, "has no effect, because tls is false"),
        ({"gruop": "x"}, "has no option 'gruop'"),
    ],
)
def test_bad_options_are_told(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse({**SOURCE, **options})


def test_options_as_spark_gives_them() -> None:
    found = parse({"ENDPOINTS": "a:1;[::1]:2;", **{k.lower(): v for k, v in SOURCE.items() if k != "endpoints"}})
    assert (found.endpoints, found.group, found.filter, found.by_key) == ("a:1;[::1]:2", "lake", "*", False)
    with pytest.raises(UsageError, match="normal, fifo, delay, transaction"):
        parse_sink({**SINK, "messageType": "xa"})


def plan(guarantee: str, **options: str) -> Plan | Refusal:
    return delivered.Pipeline(
        name="orders",
        guarantee=guarantee,
        checkpoint="/nowhere",
        source=delivered.endpoint("rocketmq", **{**SOURCE, **options}),
        sinks=[delivered.sqlite("/nowhere/x.db", "orders")],
    ).plan(offline=True)


def test_the_plan_says_what_it_rests_on() -> None:
    said = " ".join(str(plan("exactly_once")).split())
    assert "retryMaxTimes" in said
    assert "forked" in said
    assert "one unique key per message" in " ".join(str(plan("exactly_once", idFrom="keys")).split())


def test_exactly_once_into_a_topic_is_refused_with_a_way_out() -> None:
    def into(guarantee: str) -> str:
        made = delivered.Pipeline(
            name="orders",
            guarantee=guarantee,
            checkpoint="/nowhere",
            source=delivered.log("/nowhere/log"),
            sinks=[delivered.endpoint("rocketmq", **SINK)],
        )
        return str(made.plan(offline=True))

    assert "DELIVERED_SINK_CANNOT_COMMIT" in into("exactly_once")
    assert "at_least_once" in into("exactly_once")
    for guarantee in ("at_least_once", "at_most_once"):
        assert f"orders: {guarantee} by" in into(guarantee)


TRANSACTIONS = {**SINK, "messageType": "transaction", "nameServers": "ns1:9876;ns2:9876"}


def test_transactions_want_name_servers_and_no_tls() -> None:
    assert parse_sink(TRANSACTIONS).name_servers == ("ns1:9876", "ns2:9876")
    assert parse_sink(SINK).name_servers == ()
    for options in (
        {**SINK, "messageType": "transaction"},
        {**SINK, "nameServers": "ns1:9876"},
        {**TRANSACTIONS, "messageType": "fifo"},
    ):
        with pytest.raises(UsageError, match="must be set together"):
            parse_sink(options)
    with pytest.raises(UsageError, match="support TLS"):
        parse_sink({**TRANSACTIONS, "tls": "true"})
    with pytest.raises(UsageError, match="'nameServers' has 'ns1'"):
        parse_sink({**TRANSACTIONS, "nameServers": "ns1"})


def test_the_plan_of_transactions_says_what_readers_get() -> None:
    made = delivered.Pipeline(
        name="orders",
        guarantee="exactly_once",
        checkpoint="/nowhere",
        source=delivered.log("/nowhere/log"),
        sinks=[delivered.endpoint("rocketmq", **TRANSACTIONS)],
    ).plan(offline=True)
    assert isinstance(made, Plan)
    said = str(made) + "\n"
    golden = Path(__file__).parent / "golden_rocketmq.txt"
    if os.environ.get("DELIVERED_GOLDEN") == "write":
        golden.write_text(said, encoding="utf-8")
    assert golden.read_text(encoding="utf-8") == said


def test_batches_decided_as_transactions_are_not_passed_over_by_another_type() -> None:
    work = Work(Scope("p", "s", "i"), 3, 1)
    handle = HalfMessages("n", {"b": packed([HalfMessage(1, 2)])}, {"b": {"0": 0}})
    prepared = Prepared.of(work, Fingerprint(1), Promise(handle))
    outcome = find_sink("rocketmq", SINK).committer(work.scope).commit(work, prepared)
    assert isinstance(outcome, Unknown)
    assert "messageType=transaction" in outcome.reason


@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62))))
def test_places_of_half_messages_survive_packing(pairs: list[tuple[int, int]]) -> None:
    half_messages = [HalfMessage(*pair) for pair in pairs]
    assert unpacked(packed(half_messages)) == half_messages


def test_places_take_a_few_bytes_each() -> None:
    """100,000 rows of a batch fit into a decision."""
    steps = random.Random(1)
    place, half_messages = 7_000_000_000, []
    for n in range(100_000):
        place += steps.randint(300, 1_500)
        half_messages.append(HalfMessage(place, 5_000_000 + n))
    assert len(packed(half_messages)) < 0.4 * DECISION_BYTES_MAX


@given(st.dictionaries(st.text(min_size=1).filter(_plain), st.text().filter(_plain)))
def test_properties_survive_the_way_to_a_broker_and_back(properties: dict[str, str]) -> None:
    assert parsed(joined(properties)) == properties


def test_what_is_known_of_ends(tmp_path: Path) -> None:
    """A batch that may be recorded in another file, or nowhere, does not count as new."""
    scope = Scope("p", "s", "i")
    known = EndJournal(str(tmp_path / "l.db"), scope)

    def work(batch: int, shard: int = 0, incarnation: str = "i") -> Work:
        return Work(Scope("p", "s", incarnation), batch, shard)

    assert [known.begin(work(0), "a"), known.begin(work(0), "a")] == [State.NEW, State.STARTED]
    known.end(work(0), "a", [("b", 7)])
    assert known.begin(work(0), "a") is State.ENDED
    assert known.begin(work(0, 1), "b") is State.NEW
    assert known.is_visible(work(0))
    assert not known.is_visible(work(0, 1))
    for batch in range(1, 4):
        name = f"c{batch}"
        assert known.begin(work(batch), name) is State.NEW
        known.end(work(batch), name, [("b", 7 + batch)])
    assert known.is_visible(work(0, 1)), "a later batch was begun"
    assert known.begin(work(1), "c1") is State.STARTED, "forgotten"
    assert known.begin(work(5, incarnation="j"), "d") is State.STARTED, "nobody knows what was before"
    assert known.void(["e", "c3"]) == 1
    assert known.begin(work(4), "e") is State.VOID
    assert known.tops() == {"b": 10}
    assert EndJournal(str(tmp_path / "l.db"), Scope("p", "other", "i")).tops() == {}


def test_a_journal_of_half_messages_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    known, work = EndJournal(str(path), Scope("p", "s", "i")), Work(Scope("p", "s", "i"), 0, 0)
    known.begin(work, "a")
    with closing(sqlite3.connect(path)) as connection:  # as before the journal had a format
        connection.execute("DROP TABLE _delivered_rocketmq_format")
    assert known.begin(work, "a") is State.STARTED
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE _delivered_rocketmq_format SET format = 2")
    for use in (lambda: known.begin(work, "a"), lambda: known.void(["b"]), lambda: known.is_visible(work), known.tops):
        with pytest.raises(Refused, match="FORMAT_NEWER"):
            use()


def test_a_renewed_receipt_begins_at_its_own_message() -> None:
    assert renewed("0 1795304499890 2000 3 0 delivered 1 4 0 0") == "4 1795304499890 2000 3 0 delivered 1 4 0 0"
    for strange in ("", "opaque", "a b c d e f g h", "0 1 2 3 4 5 6 x"):
        assert renewed(strange) == strange


def test_receipts_tell_how_a_broker_notes_what_it_hands_out() -> None:
    assert forgetful("0 1795304499890 2000 3 0 delivered 1 4 0 0")
    for other in ("0 1795304499890 2000 0 0 delivered 1 4 0 0", "0 1 2000 999 0 delivered 1 4 0", "0 1 2 3", "opaque"):
        assert not forgetful(other)


def message(**system: Any) -> Any:
    made = library().of.Message(body=system.pop("body", b"x"))
    made.topic.name = "orders"
    for name, value in system.items():
        if name == "keys":
            made.system_properties.keys.extend(value)
        else:
            setattr(made.system_properties, name, value)
    return made


def test_what_a_message_becomes() -> None:
    of = library().of
    found = content(message(message_id="m", keys=["m", "k1", "k2"], tag="t"), by_key=False)
    assert (found.id, found.key, found.value, found.time_us) == ("m", b"k1 k2", b"x", None)
    assert dict(found.headers)["rocketmq.keys"] == b"k1 k2"
    assert content(message(message_id="m", keys=["k"]), by_key=True).id == "k"
    assert content(message(message_id="m", keys=["k", "l"]), by_key=True).id is None
    assert content(message(message_id="m"), by_key=True).id is None
    packed = message(message_id="m", body=gzip.compress(b"y" * 1_000), body_encoding=of.GZIP)
    assert content(packed, by_key=False).value == b"y" * 1_000


def test_a_body_that_is_not_what_was_sent_is_not_taken() -> None:
    of = library().of
    wrong = message(message_id="m", body=b"x")
    wrong.system_properties.body_digest.type, wrong.system_properties.body_digest.checksum = of.CRC32, "8CDC1684"
    with pytest.raises(ValueError, match="does not match"):
        content(wrong, by_key=False)
    wrong.system_properties.body_digest.checksum = "8CDC1683"
    assert content(wrong, by_key=False).value == b"x"
    with pytest.raises(ValueError, match="truncated"):
        content(message(body=gzip.compress(b"y" * 1_000)[:-9], body_encoding=of.GZIP), by_key=False)
    with pytest.raises(ValueError, match="cannot be decompressed"):
        content(message(body=b"no archive", body_encoding=of.GZIP), by_key=False)


def test_what_goes_into_one_request() -> None:
    def made(count: int, size: int) -> list[Message]:
        return [Message(str(n), b"x" * size, (), "", "", None) for n in range(count)]

    for messages in (made(250, 1), made(9, 100_000), made(3, BATCH_BYTES_MAX), made(0, 1)):
        found = list(batches(messages))
        assert [m for b in found for m in b] == messages
        assert all(0 < len(b) <= BATCH_MAX for b in found)
        assert all(len(b) == 1 or sum(len(m.body) for m in b) <= BATCH_BYTES_MAX for b in found)
    assert len(list(batches(made(250, 1)))) == 3
    assert [len(b) for b in batches(made(5, 1), alone=True)] == [1] * 5


def writer(**options: str) -> RocketmqWriter:
    made: RocketmqSinkOptions = parse_sink({**SINK, **options})
    return RocketmqWriter(made, Work(Scope("p", "s", "i"), 3, 1), gives_up=False)


def test_rows_become_messages_with_ids_that_a_replay_repeats() -> None:
    rows = pa.record_batch({"value": ["a", "b"], "key": [b"k", None], "message_id": ["mine", None], "tag": ["t", None]})
    for _ in range(2):
        assert writer()._messages(rows) == [
            Message("mine", b"a", ("mine", "k"), "t", "", None),
            Message("p.s.i.3.1.1", b"b", ("p.s.i.3.1.1",), "", "", None),
        ]
    at = pa.array([1_700_000_000_123_456], pa.timestamp("us", "UTC"))
    (late,) = writer(messageType="DELAY")._messages(pa.record_batch({"value": ["a"], "delivery_timestamp": at}))
    assert late.deliver_ms == 1_700_000_000_123


@pytest.mark.parametrize(
    ("kind", "rows", "said"),
    [
        ("NORMAL", {"value": [""]}, "without a body"),
        ("NORMAL", {"value": pa.array([None], pa.binary())}, "without a body"),
        ("NORMAL", {"value": ["a"], "key": ["a b"]}, "white space"),
        ("NORMAL", {"value": ["a"], "key": [b"\xff"]}, "not UTF-8"),
        ("FIFO", {"value": ["a"], "message_group": [""]}, "no value in column 'message_group'"),
        (
            "DELAY",
            {"value": ["a"], "delivery_timestamp": pa.array([None], pa.timestamp("us"))},
            "no value in column 'delivery_timestamp'",
        ),
    ],
)
def test_rows_that_no_broker_takes_are_told(kind: str, rows: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRecord, match=said):
        writer(messageType=kind)._messages(pa.record_batch(rows))


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("NORMAL", {"key": pa.binary()}, "writes the columns value"),
        ("NORMAL", {"value": pa.binary(), "message_group": pa.string()}, "messageType=fifo takes message_group"),
        ("FIFO", {"value": pa.binary()}, "message_group, value"),
        ("FIFO", {"value": pa.binary(), "message_group": pa.int64()}, "must be text"),
        ("DELAY", {"value": pa.binary(), "delivery_timestamp": pa.int64()}, "must be a timestamp"),
        ("NORMAL", {"value": pa.int64()}, "text or binary"),
    ],
)
def test_columns_that_do_not_fit_are_told(kind: str, fields: dict[str, pa.DataType], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_sink("rocketmq", {**SINK, "messageType": kind}).check_schema(pa.schema(list(fields.items())))


_TEXT = st.text(max_size=8)


@given(
    st.dictionaries(_TEXT, _TEXT, max_size=3),
    st.lists(_TEXT, max_size=3),
    st.tuples(_TEXT, _TEXT, _TEXT),
    st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31), 2**31 - 1)),
    st.binary(max_size=30),
    st.tuples(st.integers(0, 3), st.integers(0, 3), _TEXT),
    st.booleans(),
)
def test_any_message_is_a_row_or_says_why_not(
    properties: dict[str, str],
    keys: list[str],
    texts: tuple[str, str, str],
    born: tuple[int, int],
    body: bytes,
    coding: tuple[int, int, str],
    by_key: bool,
) -> None:
    message = library().of.Message(body=body, user_properties=properties)
    system = message.system_properties
    system.keys.extend(keys)
    system.message_id, system.tag, system.message_group = texts
    system.born_timestamp.seconds, system.born_timestamp.nanos = born
    system.body_encoding, system.body_digest.type, system.body_digest.checksum = coding
    try:
        found = content(message, by_key)
    except ValueError:
        return
    assert found.id is None or (found.id and "\ufffd" not in found.id)
    assert found.time_us is None or -(2**63) <= found.time_us < 2**63
    assert all(isinstance(value, bytes) for _, value in found.headers)
