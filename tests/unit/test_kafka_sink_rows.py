"""What the Kafka sink accepts: columns, headers, topics named by rows, and Spark's options."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from delivered.connectors.kafka import CONNECTOR, producer_config
from delivered.connectors.kafka import sink as columns
from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord, UsageError
from delivered.source import HEADER, HEADERS
from delivered.source import columns as of_source

SERVERS = {"kafka.bootstrap.servers": "h:1", "topic": "t"}


def sink(**more: str) -> Any:
    return CONNECTOR.sink({**SERVERS, **{k.replace("__", "."): v for k, v in more.items()}})


def test_a_stream_of_our_own_source_can_be_written_as_it_is() -> None:
    sink().check_schema(of_source(headers=True))
    for own in (pa.field("timestamp", pa.string()), pa.field("offset", pa.int32()), pa.field("amount", pa.int64())):
        with pytest.raises(UsageError, match=f"COLUMN_UNKNOWN.*{own.name}"):
            sink().check_schema(pa.schema([pa.field("value", pa.binary()), own]))


def test_headers_of_a_wrong_type_come_with_a_cast_that_works() -> None:
    for kind in (pa.string(), pa.map_(pa.string(), pa.string())):
        with pytest.raises(UsageError, match=r"COLUMN_TYPE.*named_struct\('key'"):
            sink().check_schema(pa.schema([pa.field("value", pa.binary()), pa.field("headers", kind)]))


@pytest.mark.parametrize("bad", [{"key": None, "value": b"v"}, None])
def test_a_header_without_a_key_names_its_row(bad: Any) -> None:
    good = [{"key": "k", "value": None}]
    headers = pa.array([good, None, [], [*good, bad], good], HEADERS.type)
    batch = pa.record_batch([pa.array([b"v"] * 5), headers], names=["value", "headers"])
    with pytest.raises(BadRecord, match=r"HEADER_UNNAMED.*Row 3 of a batch.*'key': 'k'"):
        columns.headers(batch, 5)
    with pytest.raises(BadRecord, match="Row 1 of a batch"):
        columns.headers(batch.slice(2), 3)
    reasons = sink().invalid_rows(batch)
    assert reasons is not None
    assert reasons.to_pylist() == [None, None, None, "a header without a key", None]
    assert sink().invalid_rows(batch.slice(0, 3)) is None


def test_headers_whose_values_are_all_null_are_not_bad() -> None:
    headers = pa.array(
        [[{"key": "k", "value": None}]], pa.list_(pa.struct([("key", pa.string()), ("value", pa.null())]))
    )
    assert sink().invalid_rows(pa.record_batch([pa.array([b"v"]), headers], names=["value", "headers"])) is None


def test_headers_that_are_right_pass() -> None:
    headers = pa.array([[{"key": "k", "value": b"v"}], [], None], pa.list_(HEADER))
    batch = pa.record_batch([pa.array([b"v"] * 3), headers], names=["value", "headers"])
    assert columns.headers(batch, 3).to_pylist() == [[{"key": "k", "value": b"v"}], None, None]


def test_a_row_that_names_what_cannot_be_a_topic_is_told_by_name() -> None:
    batch = pa.record_batch([pa.array([b"v"] * 3), pa.array(["good", "no topic!", "good"])], names=["value", "topic"])
    with pytest.raises(BadRecord, match=r"TOPIC_INVALID.*Row 1 of a batch has 'no topic!' in the column"):
        columns.topics(batch, None)
    assert columns.topics(batch, "t") is None
    reasons = columns.invalid_rows(batch, None, 10**6)
    assert reasons is not None
    assert reasons.to_pylist() == [None, "not a valid topic name", None]


@pytest.mark.parametrize("internal", ["__delivered_orders", "__transaction_state", "__consumer_offsets", "our-ledger"])
def test_no_row_reaches_an_internal_topic(internal: str) -> None:
    """A row there could forge a decision."""
    batch = pa.record_batch([pa.array([b"v"] * 2), pa.array(["good", internal])], names=["value", "topic"])
    with pytest.raises(BadRecord, match=r"TOPIC_INTERNAL.*Row 1 of a batch"):
        columns.topics(batch, None, "our-ledger")
    reasons = columns.invalid_rows(batch, None, 10**6, False, "our-ledger")
    assert reasons is not None
    assert reasons.to_pylist() == [None, "an internal topic"]
    with pytest.raises(UsageError, match="TOPIC_INTERNAL"):
        CONNECTOR.sink({**SERVERS, "topic": internal, "ledgerTopic": "our-ledger"})


def test_acks_are_told_apart_by_guarantee() -> None:
    for value in ("all", "-1"):
        for guarantee in Guarantee:
            sink(kafka__acks=value).check_guarantee(guarantee)
            assert producer_config(sink(kafka__acks=value).options, guarantee, "id")["acks"] == "all"
    leader = sink(kafka__acks="1")
    leader.check_guarantee(Guarantee.AT_MOST_ONCE)
    assert producer_config(leader.options, Guarantee.AT_MOST_ONCE, None)["acks"] == "1"
    for guarantee in (Guarantee.AT_LEAST_ONCE, Guarantee.EXACTLY_ONCE):
        with pytest.raises(UsageError, match=f"ACKS.*{guarantee.value} cannot hold.*at_most_once"):
            leader.check_guarantee(guarantee)
    with pytest.raises(UsageError, match="lost records cannot be counted"):
        sink(kafka__acks="0")


def test_options_of_sparks_users_are_taken_translated_or_refused_before_a_task() -> None:
    options = sink(kafka__retries="3", kafka__buffer__memory="33554432", kafka__delivery__timeout__ms="5000").options
    assert options.client["queue.buffering.max.kbytes"] == "32768"
    assert "retries" not in options.client
    assert options.client["message.timeout.ms"] == "5000"
    assert producer_config(options, Guarantee.AT_LEAST_ONCE, None)["queue.buffering.max.kbytes"] == "32768"
    for name, value, said in [
        ("kafka.max.block.ms", "5", "kafka.delivery.timeout.ms"),
        ("kafka.key.serializer", "x", "cast the column"),
        ("kafka.retries", "many", "integer"),
        ("kafka.buffer.memory", "much", "integer"),
    ]:
        with pytest.raises(UsageError, match=said):
            CONNECTOR.sink({**SERVERS, name: value})
    value = pa.schema([pa.field("value", pa.binary())])
    with pytest.raises(UsageError, match=r"OPTION_UNKNOWN.*delivered_kafka sink.*'kafka\.lingr\.ms'"):
        sink(kafka__lingr__ms="5").check_schema(value)
    with pytest.raises(UsageError, match=r"OPTION_VALUE.*'kafka\.linger\.ms'"):
        sink(kafka__linger__ms="soon").check_schema(value)
    with pytest.raises(UsageError, match=r"OPTION_UNKNOWN.*delivered_kafka source.*'kafka\.ssl\.protocol'"):
        CONNECTOR.source({"kafka.bootstrap.servers": "h:1", "subscribe": "t", "kafka.ssl.protocol": "x"}).planned()  # type: ignore[attr-defined]
    login = {"kafka__sasl__jaas__config": "env:JAAS", "kafka__sasl__password": "env:P"}
    sink(kafka__security__protocol="SASL_SSL", kafka__sasl__mechanism="PLAIN", **login).check_schema(value)


def test_a_header_a_topic_and_an_id_are_utf8() -> None:
    """Of a header with such a name, librdkafka's consumers crash. Spark makes such texts of CAST(X'ff' AS STRING)."""
    raw = pa.array([b"a", b"\xff", b"b"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    named = pa.StructArray.from_arrays([texts, raw], fields=list(HEADER))
    headers = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), named, type=HEADERS.type)
    for name, column in (("topic", texts), ("message_id", texts), ("headers", headers)):
        batch = pa.record_batch([raw, column], names=["value", name])
        if name == "message_id":
            batch = batch.append_column("topic", pa.array(["t"] * 3))
        reasons = sink().invalid_rows(batch) if name == "headers" else columns.invalid_rows(batch, None, 10**6)
        assert reasons is not None
        assert [r and r.split(":")[0] for r in reasons.to_pylist()] == [None, reasons[1].as_py().split(":")[0], None]
        assert reasons[1].as_py().startswith(f"column '{name}")
        with pytest.raises(BadRecord, match=rf"VALUE_UNSTORABLE.*Row 1 of 3.*column '{name}"):
            columns.topics(batch, None) if name == "topic" else columns.headers(batch, 3)
