"""Rows that cannot be messages are found before they are sent, each by its column. Contacts no broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from delivered.model.capability import Guarantee
from delivered.model.errors import BadRecord
from delivered.model.identity import Scope, Work
from delivered.pipeline.registry import find_sink
from delivered.source import HEADERS

OPTIONS: dict[str, dict[str, str]] = {
    "rabbitmq": {"url": "amqp://localhost"},
    "activemq": {"url": "stomp://localhost:1", "queue": "q", "idHeader": "id", "keyHeader": "k"},
    "pulsar": {"url": "pulsar://localhost:1", "adminUrl": "http://localhost:1", "topic": "t"},
    "rocketmq": {"endpoints": "localhost:1", "topic": "t"},
}


def reasons(system: str, path: Path, rows: dict[str, Any], **more: str) -> list[str | None]:
    sink = find_sink(system, {**OPTIONS[system], "ledger": str(path / "ledger.db"), **more})
    assert sink.capability().validates
    batch = pa.record_batch(rows)
    found = sink.invalid_rows(batch)
    return [None] * batch.num_rows if found is None else found.to_pylist()


def texts(*values: bytes) -> pa.Array:
    """As Spark passes what CAST(X'ff' AS STRING) makes."""
    raw = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())


@pytest.mark.parametrize("system", sorted(OPTIONS))
@pytest.mark.parametrize("kind", ["bytes", "text"])
def test_a_key_that_is_not_utf8(system: str, kind: str, tmp_path: Path) -> None:
    given = (b"k", b"\xff", b"k")
    keys = texts(*given) if kind == "text" else pa.array(given)
    found = reasons(system, tmp_path, {"key": keys, "value": texts(b"\xff", b"v", b"v")})
    assert found[0] is found[2] is None
    assert found[1] is not None
    assert "column 'key'" in found[1]


@pytest.mark.parametrize("system", sorted(OPTIONS))
def test_an_id_that_is_not_there_or_not_utf8(system: str, tmp_path: Path) -> None:
    rows = {"key": ["k"] * 4, "value": [b"v"] * 4, "id": pa.array([b"a", b"\xff", None, b""])}
    found = reasons(system, tmp_path, rows, messageIdColumns="id")
    assert found == [None, *["no message id: 'id' is null, empty or not UTF-8"] * 3]
    found = reasons(system, tmp_path, {"key": ["k"] * 2, "value": [b"v"] * 2, "message_id": texts(b"a", b"\xff")})
    assert found[0] is None
    assert "column 'message_id'" in str(found[1])


@pytest.mark.parametrize("system", sorted(OPTIONS.keys() - {"rocketmq"}))
def test_rows_with_an_empty_id_get_ids_of_their_own(system: str, tmp_path: Path) -> None:
    """As those without one: readers that deduplicate would take all of them for one message."""
    sink: Any = find_sink(system, {**OPTIONS[system], "ledger": str(tmp_path / "ledger.db")})
    rows = pa.record_batch({"key": ["k"] * 2, "value": [b"v"] * 2, "message_id": ["", None]})
    sent = sink._writer(Work(Scope("p", "s", "i"), 0, 0), gives_up=False)._messages(rows)
    places = {
        "rabbitmq": lambda m: m.properties.message_id,
        "activemq": lambda m: m.headers["id"],
        "pulsar": lambda m: m.properties["delivered.id"],
    }
    assert [places[system](m) for m in sent] == ["p.s.i.0.0.0", "p.s.i.0.0.1"]


def times(*numbers: int | None, unit: str = "us") -> pa.Array:
    return pa.array(numbers, pa.int64()).cast(pa.timestamp(unit, "UTC"))


def test_event_times_of_pulsar_are_milliseconds_after_1970(tmp_path: Path) -> None:
    far = (1 << 63) - 1
    given = times(1_700_000_000_123_000, 1_700_000_000_123_456, None, 0, -1_000, far, far // 1_000 * 1_000)
    found = reasons("pulsar", tmp_path, {"value": [b"v"] * 7, "event_time": given})
    assert [r is None for r in found] == [True, False, True, False, False, False, True]
    assert all(r is None or "column 'event_time'" in r for r in found)
    assert str(found[1]).startswith("A row has 2023-11-14T22:13:20.123456 in column"), "and the value"
    assert reasons("pulsar", tmp_path, {"value": [b"v"], "event_time": times(far // 1_000, unit="s")}) == [None]


@pytest.mark.parametrize("kind", ["avro", "json"])
def test_values_that_a_schema_of_pulsar_cannot_hold(kind: str, tmp_path: Path) -> None:
    value = pa.StructArray.from_arrays([pa.array([1.0, float("nan"), 2.0])], names=["n"])
    found = reasons("pulsar", tmp_path, {"value": value}, schema=kind)
    assert [r is None for r in found] == ([True] * 3 if kind == "avro" else [True, False, True])


def test_headers_of_pulsar_are_text_and_named_once(tmp_path: Path) -> None:
    pairs = [
        [("a", b"v")],
        [("a", b"\xff")],
        None,
        [("a", b"1"), ("b", b"1"), ("a", b"1")],
        [(None, b"v")],
        [("", None)],
    ]
    found = reasons("pulsar", tmp_path, {"value": [b"v"] * len(pairs), "headers": pa.array(pairs, HEADERS.type)})
    assert [r is None for r in found] == [True, False, True, False, False, True]
    assert all("column 'headers'" in str(r) for r in found if r is not None)
    assert "two headers named 'a'" in str(found[3])


def test_what_rocketmq_needs(tmp_path: Path) -> None:
    found = reasons("rocketmq", tmp_path, {"value": [b"v", b"", None, b"v"], "key": ["k", "k", "k", "a b"]})
    assert [r is None for r in found] == [True, False, False, False]
    assert [name in str(r) for name, r in zip(("'value'", "'value'", "'key'"), found[1:], strict=True)] == [True] * 3
    rows = {"value": [b"v"] * 2, "message_group": ["g", None]}
    assert "'message_group'" in str(reasons("rocketmq", tmp_path, rows, messageType="FIFO")[1])


def test_the_error_of_a_task_names_the_row(tmp_path: Path) -> None:
    sink = find_sink("rocketmq", {**OPTIONS["rocketmq"], "ledger": str(tmp_path / "ledger.db")})
    writer: Any = sink.writer(Work(Scope("p", "s", "i"), 0, 0), Guarantee.AT_LEAST_ONCE, pa.schema([]))
    writer._connect = lambda: None
    with pytest.raises(BadRecord, match=r"MESSAGE_KEY.*Row 1 of a shard: A row has 'a b' in column 'key'.*Next:"):
        writer.stage(pa.record_batch({"value": [b"v"] * 3, "key": ["k", "a b", "c d"]}))


def test_the_error_of_a_task_is_that_of_its_first_bad_row(tmp_path: Path) -> None:
    """Pulsar's writer converts whole columns first: another row's time fails before this row's key."""
    sink = find_sink("pulsar", {**OPTIONS["pulsar"], "ledger": str(tmp_path / "ledger.db")})
    writer: Any = sink.writer(Work(Scope("p", "s", "i"), 0, 0), Guarantee.AT_LEAST_ONCE, pa.schema([]))
    writer._connect = lambda: None
    with pytest.raises(BadRecord, match=r"NOT_TEXT.*Row 1 of a shard: A row has b'.xff' in column 'key'"):
        writer.stage(
            pa.record_batch({"value": [b"v"] * 3, "key": [b"k", b"\xff", b"k"], "event_time": times(1_000, 1_000, 1)})
        )


@pytest.mark.parametrize(
    ("column", "bad"),
    [
        ("message_id", ["", " ", "a\x01b", "a b\x02c"]),
        ("key", ["", "a\tb", "a\x7f", "a\x9f"]),
        ("tag", [" ", "a|b", "a\x00", "a\x85"]),
        ("message_group", [" ", "a\x01", "a\n"]),
    ],
)
def test_words_that_rocketmq_refuses_or_cuts(column: str, bad: list[str], tmp_path: Path) -> None:
    """Its proxy refuses the batch of such a message, and cuts an id at \\x02."""
    given = ["good", *bad]
    found = reasons("rocketmq", tmp_path, {"value": [b"v"] * len(given), column: given})
    assert found[0] is None
    assert all(f"column '{column}'" in str(reason) for reason in found[1:]), found


def test_ids_with_white_space_or_a_zero_byte_are_sent_to_rocketmq(tmp_path: Path) -> None:
    given = ["a b", "a\nb", "a\x00b", "a\x1b"]
    assert reasons("rocketmq", tmp_path, {"value": [b"v"] * 4, "message_id": given}) == [None] * 4
