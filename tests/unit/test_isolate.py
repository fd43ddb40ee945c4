"""A row for which the transform raises is told from the others, and kept with its source record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivered.engine import Sinks
from delivered.engine.shard import build_dead_letters
from delivered.engine.transform import (
    RAW,
    REJECTED,
    decode,
    encode,
    join_rejected,
    pack_rejected,
    run_isolated,
    unpack_rejected,
    with_rejected,
)
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope
from delivered.model.rows import OnBadRow, Origin, Rejection, Rows, reason_of
from delivered.source import COLUMNS

AT = datetime(2026, 1, 2, tzinfo=UTC)


def kafka_rows(*values: bytes) -> Rows:
    rows = [
        {"key": b"k%d" % n, "value": v, "topic": "t", "partition": 1, "offset": 10 + n, "timestamp": AT}
        for n, v in enumerate(values)
    ]
    return Rows(pa.RecordBatch.from_pylist(rows, schema=COLUMNS))


def as_numbers(rows: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array([int(v) for v in rows.column("value").to_pylist()], pa.int64())})


MADE = pa.schema([("n", pa.int64())])


def told(parts: Iterator[Rows]) -> tuple[list[Any], list[dict[str, Any]]]:
    rows: list[Any] = []
    letters: list[dict[str, Any]] = []
    for part in parts:
        rows += part.good.to_pylist()
        letters += build_dead_letters(Scope("p", "s", "i"), part.rejected, 5, 1, 0).to_pylist()
    return rows, letters


def test_a_letter_has_the_source_record_and_the_exception() -> None:
    rows, (letter,) = told(run_isolated(as_numbers, kafka_rows(b"1", b"\xffx", b"3"), MADE))
    assert rows == [{"n": 1}, {"n": 3}]
    assert (letter["sink"], letter["topic"], letter["partition"], letter["offset"]) == ("(transform)", "t", 1, 11)
    assert letter["reason"].startswith("ValueError: invalid literal for int()")
    record = json.loads(letter["record"])
    assert (record["key"], record["value"]) == ("k1", {"base64": "/3g="})
    assert record["timestamp"] == str(AT)


@given(st.lists(st.booleans(), max_size=40))
def test_each_row_once_in_order_and_few_calls(bad: list[bool]) -> None:
    calls = []

    def transform(rows: pa.RecordBatch) -> pa.RecordBatch:
        calls.append(rows.num_rows)
        return as_numbers(rows)

    values = [b"no" if b else b"%d" % n for n, b in enumerate(bad)]
    rows, letters = told(run_isolated(transform, kafka_rows(*values), MADE))
    assert [r["n"] for r in rows] == [n for n, b in enumerate(bad) if not b]
    assert [n["offset"] - 10 for n in letters] == [n for n, b in enumerate(bad) if b]
    assert len(calls) <= max(1, 2 * len(bad))


@pytest.mark.parametrize("error", [ConnectionError("down"), MemoryError(), ImportError("no"), DeliveredError("X", "x")])
def test_what_is_not_a_row_s_fault_fails_the_task(error: Exception) -> None:
    def transform(rows: pa.RecordBatch) -> pa.RecordBatch:
        raise error

    with pytest.raises(type(error)):
        list(run_isolated(transform, kafka_rows(b"1", b"2"), MADE))


def test_a_function_that_fails_for_no_rows_fails_the_task() -> None:
    def transform(rows: pa.RecordBatch) -> pa.RecordBatch:
        raise ValueError("always")

    with pytest.raises(ValueError, match="always"):
        list(run_isolated(transform, kafka_rows(), MADE))


def test_columns_are_as_announced() -> None:
    """Types inferred from a few rows may differ; other columns, and values that do not fit, are the row's error."""

    def transform(rows: pa.RecordBatch) -> pa.RecordBatch:
        texts = [v.decode() for v in rows.column("value").to_pylist()]
        if "other" in texts:
            return pa.record_batch({"m": texts})
        return pa.record_batch({"n": [None if t == "null" else t for t in texts]})

    rows, letters = told(run_isolated(transform, kafka_rows(b"null", b"other", b"x", b"2"), MADE))
    assert rows == [{"n": None}, {"n": 2}]
    assert [n["reason"].partition(":")[0] for n in letters] == ["ValueError", "ArrowInvalid"]


def test_a_type_that_no_rows_show_is_that_of_the_rows() -> None:
    def transform(rows: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"n": [int(v) for v in rows.column("value").to_pylist()]})

    made = transform(kafka_rows().good).schema
    assert made.field("n").type == pa.null()
    rows, letters = told(run_isolated(transform, kafka_rows(b"1", b"x", b"3"), made))
    assert (rows, len(letters)) == ([{"n": 1}, {"n": 3}], 1)


def test_reasons_are_the_same_every_time_and_can_be_stored() -> None:
    assert reason_of(KeyError("id")) == "KeyError: 'id'"
    assert reason_of(ValueError()) == "ValueError"
    assert reason_of(TypeError("<object object at 0x7f12ab34>\nis\0 bad")) == (
        "TypeError: <object object at 0x...> is\\x00 bad"
    )
    assert reason_of(ValueError("\ud800")) == "ValueError: \\ud800"
    assert len(reason_of(ValueError("x" * 9_999))) == 1_000


def test_of_a_decoded_source_the_bytes_are_kept() -> None:
    rows = pa.record_batch({"value": pa.array([{"id": 1}]), "offset": pa.array([3], pa.int64())})
    raw = pa.array([{"key": b"k", "value": b"\0\0\0\0\1x"}], RAW.type)
    batch = pa.RecordBatch.from_arrays([*rows.columns, raw], schema=rows.schema.append(RAW))

    def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert batch.schema == rows.schema
        raise ValueError("no")

    _, (letter,) = told(run_isolated(transform, decode(batch), MADE))
    assert json.loads(letter["record"]) == {"key": "k", "value": "\0\0\0\0\1x"}
    assert (letter["topic"], letter["offset"]) == (None, 3)


def test_a_source_without_keys_and_values() -> None:
    rows = pa.record_batch({"id": [1], "partition": ["Ulm"]})

    def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise ValueError("no")

    _, (letter,) = told(run_isolated(transform, Rows(rows), MADE))
    assert json.loads(letter["record"]) == {"id": 1, "partition": "Ulm"}
    assert letter["partition"] is None


def test_letters_and_rows_pass_through_spark_in_the_same_columns() -> None:
    schema = with_rejected(MADE)
    parts = [encode(p, schema) for p in run_isolated(as_numbers, kafka_rows(b"1", b"x"), MADE)]
    assert {p.schema for p in parts} == {schema}
    assert schema.names == ["n", REJECTED.name]
    rows, letters = told(map(decode, pa.Table.from_batches(parts).combine_chunks().to_batches()))
    assert (rows, len(letters)) == ([{"n": 1}], 1)


def test_a_file_of_an_earlier_release_is_read() -> None:
    """Its tasks may have stored rejected records of a batch that was decided before the upgrade."""
    texts = {n: pa.string() for n in ("reason", "topic", "sink", "more")}
    kinds = {**texts, "partition": pa.int32(), "offset": pa.int64(), "key": pa.binary(), "value": pa.binary()}
    order = ("reason", "topic", "partition", "offset", "key", "value", "sink", "more")
    stored = [
        {"reason": "not JSON", "topic": "t", "partition": 1, "offset": 7, "value": b"[", "more": '{"n": 1}'},
        {"reason": "ValueError", "sink": "(transform)", "more": '{"id": 3}'},
    ]
    column = pa.array(stored, pa.struct([pa.field(n, kinds[n]) for n in order]))
    file = pa.BufferOutputStream()
    with pa.ipc.new_stream(file, pa.schema([pa.field("__delivered_rejected", column.type)])) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([column], names=["__delivered_rejected"]))
    found = unpack_rejected(bytes(file.getvalue()))
    assert found == [
        Rejection(Origin.SOURCE, "not JSON", {"value": b"[", "n": 1}, "t", 1, 7),
        Rejection(Origin.TRANSFORM, "ValueError", {"id": 3}),
    ]
    assert [json.loads(r.text) for r in found] == [{"key": None, "value": "[", "n": 1}, {"id": 3}]
    assert unpack_rejected(join_rejected([pack_rejected(found), pack_rejected(found)])) == [*found, *found]


@pytest.mark.parametrize(("rejects", "decided"), [(False, False), (False, True), (True, False)])
def test_a_checkpoint_is_asked_only_if_it_may_hold_letters(
    rejects: bool, decided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests to an object store in every batch. A batch that an earlier start decided may have some."""
    from delivered.checkpoint import sidecar
    from delivered.model.capability import Guarantee
    from delivered.model.work import Action, BatchPlan
    from delivered.pipeline.batches import Batches
    from delivered.pipeline.spec import PipelineSpec

    asked = []
    monkeypatch.setattr(sidecar, "gather_task_files", lambda *_: asked.append("gather"))
    action = Action.SKIP if decided else Action.WRITE
    plan = BatchPlan(Scope("p", "s", "i"), "owner", Guarantee.EXACTLY_ONCE, 3, "{}", action)
    dead_letter = OnBadRow.DEAD_LETTER
    spec = PipelineSpec("p", Guarantee.EXACTLY_ONCE, on_bad_row=dead_letter, checkpoint="/nowhere", rejects=rejects)
    Batches(spec, Sinks(()), MADE).rejected(plan)
    assert bool(asked) is (rejects or decided)


@pytest.mark.parametrize(("transform", "told"), [("SELECT * FROM source", True), (None, False)])
def test_a_query_that_stopped_at_a_row_of_sql_says_which_form_goes_on(transform: str | None, told: bool) -> None:
    import delivered
    from delivered.cli.run import SparkLog, _own_error

    pipeline = delivered.Pipeline(
        name="p",
        guarantee="at_least_once",
        checkpoint="/nowhere",
        source=delivered.log("/nowhere/log"),
        transform=transform,
        sinks=[delivered.sqlite("/nowhere/x.db", "t")],
        on_bad_row="dead_letter",
        dead_letter=delivered.sqlite("/nowhere/x.db", "letters"),
    )
    error = _own_error("SparkNumberFormatException: [CAST_INVALID_INPUT] Error", SparkLog(None), pipeline)
    assert ("try_cast" in str(error)) is told
