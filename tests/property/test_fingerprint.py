"""Equal multisets of records give equal fingerprints; different ones give different fingerprints.

All tests run twice: with the C library, and with numpy.
"""

from __future__ import annotations

import datetime as dt
import decimal
import os
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivered.model import fingerprint as hashing
from delivered.model.fingerprint import Fingerprint, fingerprint, record_hashes, seed_of

SEED = seed_of("orders", "sink")
ROWS = pa.schema([("key", pa.binary()), ("value", pa.binary())])
values = st.one_of(st.none(), st.binary(max_size=40), st.binary(min_size=8, max_size=8), st.just(b"x" * 5000))
rows = st.lists(st.tuples(values, values), max_size=12)


@pytest.fixture(scope="module", autouse=True, params=["C", "numpy"])
def computed_by(request: pytest.FixtureRequest) -> Iterator[str]:
    by = str(request.param)
    if by == "C" and hashing.library() is None:
        compiler = os.environ.get("CC", "cc")
        assert shutil.which(compiler) is None, f"there is {compiler}, but no {hashing.LIBRARY}: run `make setup`"
        pytest.skip("no compiler here")
    with pytest.MonkeyPatch.context() as patch:
        if by == "numpy":
            patch.setattr(hashing, "library", lambda: None)
        yield by


def batch(given_rows: list[tuple[bytes | None, bytes | None]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"key": k, "value": v} for k, v in given_rows], schema=ROWS)


def of(given_rows: list[tuple[bytes | None, bytes | None]]) -> Fingerprint:
    return fingerprint(batch(given_rows), SEED)


@given(rows, st.randoms(use_true_random=False))
def test_order_does_not_count(some: Any, dice: Any) -> None:
    other = list(some)
    dice.shuffle(other)
    assert of(some) == of(other)


@given(rows, st.integers(0, 12))
def test_slices_add_up(some: Any, at: int) -> None:
    whole = batch(some)
    parts = [whole.slice(0, at), whole.slice(at)]
    assert sum((fingerprint(p, SEED) for p in parts), Fingerprint()) == fingerprint(whole, SEED)


@given(rows, rows)
def test_other_multisets_differ(one: Any, two: Any) -> None:
    assert (of(one) == of(two)) == (sorted(one, key=repr) == sorted(two, key=repr))


@given(rows.filter(bool), values, values)
def test_a_doubled_pair_does_not_cancel(some: Any, key: Any, value: Any) -> None:
    """Why not XOR: it would make these three equal."""
    row = (key, value)
    assert len({of(some), of([*some, row, row]), of([*some, row, row, row, row])}) == 3
    assert of([row]) != of([row, row, row])


@given(rows, rows)
def test_sum_and_difference(one: Any, two: Any) -> None:
    assert of(one) + of(two) == of(one + two)
    assert of(one + two) - of(two) == of(one)


@given(rows)
def test_text_reads_back(some: Any) -> None:
    assert Fingerprint.parse(str(of(some))) == of(some)


@given(st.integers(-5, 2**40), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_any_text_reads_back(count: int, low: int, high: int) -> None:
    assert Fingerprint.parse(str(Fingerprint(count, low, high))) == Fingerprint(count, low, high)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=20))
def test_equal_and_mixed_widths_agree(some: list[bytes]) -> None:
    """A value's hash does not depend on the length of its neighbours."""
    together = record_hashes(pa.record_batch([pa.array(some, pa.binary())], names=["v"]), SEED)
    alone = [record_hashes(pa.record_batch([pa.array([v], pa.binary())], names=["v"]), SEED)[0] for v in some]
    assert together.tolist() == alone


def test_what_a_ledger_holds_reads_the_same() -> None:
    """Ledgers keep fingerprints for years: these were computed by the first version."""
    texts = ["", "a", "seven77", "eight888", "nine99999", "x" * 63, "y" * 64, "z" * 65, "long" * 1500, None]
    numbers = range(len(texts))
    midnight = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    columns = {
        "mixed": (pa.array(texts), "d2768b392b1ee97420f24e6ee478bf25"),
        "same": (pa.array([f"{i:011d}" for i in numbers]), "a1e27dfa24a96919ec3757cb951964ed"),
        "whole": (pa.array([i * 7919 - 3 for i in numbers], pa.int32()), "0a42b8b33b79a4d17119ccbf0d083a37"),
        "float": (pa.array([*(i / 3 for i in range(9)), float("nan")]), "5a96b8f496405eb52bd1df14aeb8f67e"),
        "flag": (pa.array([i % 3 == 0 for i in numbers]), "6d94d109db6b59dc62e06603d1e2a230"),
        "money": (
            pa.array([decimal.Decimal(i * 31 - 5).scaleb(-2) for i in numbers], pa.decimal128(12, 2)),
            "b5f84b0c47405ac6ba20268d9fee84b6",
        ),
        "at": (
            pa.array([midnight + dt.timedelta(hours=i) for i in numbers], pa.timestamp("us", "UTC")),
            "68a3dad2e4c0a8830226da598d7a032c",
        ),
        "list": (pa.array([list(range(i)) for i in numbers]), "ccc510bcdf581f904a795a9c45304bd6"),
        "struct": (pa.array([{"a": i, "b": str(i)} for i in numbers]), "955bcb7e5f979490ccc8c162db3f2997"),
    }
    for array, known in columns.values():
        assert str(fingerprint(pa.record_batch([array], names=["v"]), seed_of("p", "s"))) == f"10:{known}"


@given(
    rows, st.lists(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)), min_size=12, max_size=12), st.integers(0, 3)
)
def test_the_library_and_numpy_agree(some: Any, numbers: Any, start: int) -> None:
    whole = batch(some).append_column("n", pa.array(numbers[: len(some)], pa.int64())).slice(start)
    by_default = record_hashes(whole, SEED).tolist(), fingerprint(whole, SEED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "library", lambda: None)
        assert by_default == (record_hashes(whole, SEED).tolist(), fingerprint(whole, SEED))


def test_null_is_not_empty() -> None:
    assert len({of([(None, b"v")]), of([(b"", b"v")]), of([(b"\0", b"v")])}) == 3


def test_columns_do_not_swap_and_do_not_run_together() -> None:
    assert of([(b"a", b"b")]) != of([(b"b", b"a")])
    assert of([(b"ab", b"c")]) != of([(b"a", b"bc")])


def test_key_matters() -> None:
    assert fingerprint(batch([(b"a", b"b")]), 1) != fingerprint(batch([(b"a", b"b")]), 2)


def test_two_columns_of_one_name() -> None:
    made = [pa.record_batch([pa.array([x]), pa.array([7])], names=["a", "a"]) for x in (1, 2)]
    assert fingerprint(made[0], SEED) != fingerprint(made[1], SEED)
    with pytest.raises(KeyError):
        fingerprint(made[0], SEED, ["b"])


UTC = dt.UTC
DAY, NOON = dt.date(2024, 2, 29), dt.datetime(2024, 2, 29, 12, 0, 1, 5, UTC)
TYPES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.null(), [None]),
    (pa.bool_(), [True, False]),
    *[(t, [0, 1, 100]) for t in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32())],
    (pa.int64(), [-1, 2**63 - 1, -(2**63)]),
    (pa.uint64(), [0, 2**63, 2**64 - 1]),
    (pa.float16(), [1.5, -2.0]),
    (pa.float32(), [1.5, -2.0, 1e30]),
    (pa.float64(), [1.5, -2.0, 1e300]),
    (pa.decimal128(38, 2), [decimal.Decimal("1.00"), decimal.Decimal("-1.00"), decimal.Decimal(10**35)]),
    (pa.string(), ["", "a", "é", "long" * 2000]),
    (pa.large_string(), ["", "a", "é"]),
    (pa.string_view(), ["", "a", "more than twelve bytes"]),
    (pa.binary(), [b"", b"a", b"\0"]),
    (pa.large_binary(), [b"", b"a", b"\0"]),
    (pa.binary_view(), [b"", b"a", b"more than twelve bytes"]),
    (pa.binary(3), [b"abc", b"abd"]),
    (pa.date32(), [DAY, dt.date(1970, 1, 1)]),
    (pa.date64(), [DAY, dt.date(1970, 1, 1)]),
    (pa.time32("ms"), [dt.time(1), dt.time(2)]),
    (pa.time64("us"), [dt.time(1), dt.time(2)]),
    (
        pa.timestamp("s"),
        [NOON.replace(tzinfo=None, microsecond=0), NOON.replace(tzinfo=None, microsecond=0, year=1972)],
    ),
    (pa.timestamp("us", tz="UTC"), [NOON, NOON + dt.timedelta(microseconds=1)]),
    (pa.duration("us"), [dt.timedelta(1), dt.timedelta(-1)]),
    (pa.dictionary(pa.int32(), pa.string()), ["a", "b", "a"]),
    (pa.run_end_encoded(pa.int32(), pa.int64()), [1, 1, 2]),
    (pa.list_(pa.int64()), [[], [1], [1, 2], [2, 1], [None], [1, None]]),
    (pa.large_list(pa.string()), [[], ["a"], ["a", "b"], [""]]),
    (pa.list_(pa.int64(), 2), [[1, 2], [2, 1]]),
    (pa.list_view(pa.int64()), [[], [1], [2, 1]]),
    (pa.list_(pa.list_(pa.int64())), [[], [[]], [[1], []], [[], [1]], [[1]]]),
    (
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        [{"a": 1, "b": "x"}, {"a": None, "b": "x"}, {"a": 1, "b": None}],
    ),
    (pa.map_(pa.string(), pa.int64()), [[], [("a", 1)], [("a", None)], [("a", 1), ("b", 2)]]),
    (
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        [[], [{"key": "h", "value": None}], [{"key": "h", "value": b""}]],
    ),
    (pa.list_(pa.decimal128(5, 1)), [[], [decimal.Decimal("1.5")]]),
]


def column(kind: pa.DataType, given_values: list[Any]) -> pa.Array:
    if pa.types.is_run_end_encoded(kind):
        return pa.compute.run_end_encode(pa.array(given_values, kind.value_type), kind.run_end_type)
    if pa.types.is_float16(kind):  # pyarrow before 21 only accepts numpy's
        return pa.array([None if v is None else np.float16(v) for v in given_values], kind)
    return pa.array(given_values, kind)


@pytest.mark.parametrize(("kind", "some"), TYPES, ids=[str(k) for k, _ in TYPES])
def test_every_arrow_type(kind: pa.DataType, some: list[Any]) -> None:
    """Slices with an offset, nulls anywhere, different values: different hashes; equal values: equal ones."""
    listed = [None, *some, None, *reversed(some), None]
    whole = pa.record_batch([column(kind, listed)], names=["v"])
    hashes = record_hashes(whole, SEED).tolist()
    for i in range(len(listed)):
        assert record_hashes(whole.slice(i, 1), SEED).tolist() == hashes[i : i + 1]
        assert record_hashes(whole.slice(i), SEED).tolist() == hashes[i:]
        assert record_hashes(pa.record_batch([column(kind, [listed[i]])], names=["v"]), SEED).tolist() == [hashes[i]]
    distinct = {repr(v): h for v, h in zip(listed, hashes, strict=True)}
    assert len(set(distinct.values())) == len(distinct)
    assert fingerprint(whole.slice(0, 0), SEED) == Fingerprint()


@pytest.mark.parametrize(
    ("one", "two", "some"),
    [
        (pa.string(), pa.large_string(), ["a", None, ""]),
        (pa.string(), pa.binary(), ["a", None, ""]),
        (pa.string(), pa.dictionary(pa.int8(), pa.string()), ["a", None, "a"]),
        (pa.int32(), pa.int64(), [1, None, -1]),
        (pa.float32(), pa.float64(), [0.5, None, -0.0]),
        (pa.list_(pa.int64()), pa.large_list(pa.int64()), [[1], None, []]),
    ],
    ids=str,
)
def test_layout_of_a_type_does_not_count(one: pa.DataType, two: pa.DataType, some: list[Any]) -> None:
    made = [fingerprint(pa.record_batch([pa.array(some, t)], names=["v"]), SEED) for t in (one, two)]
    assert made[0] == made[1]


@pytest.mark.parametrize(("kind", "some"), TYPES, ids=[str(k) for k, _ in TYPES])
def test_the_library_and_numpy_agree_on_every_type(kind: pa.DataType, some: list[Any]) -> None:
    whole = pa.record_batch([column(kind, [None, *some, None]), column(kind, [*some, None, None])], names=["v", "w"])
    by_default = record_hashes(whole, SEED).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "library", lambda: None)
        assert by_default == record_hashes(whole, SEED).tolist()


def test_nothing_but_nulls() -> None:
    for kind, _ in TYPES:
        one, three = (record_hashes(pa.record_batch([pa.nulls(n, kind)], names=["v"]), SEED).tolist() for n in (1, 3))
        assert three == one * 3


def test_one_nan_and_one_zero() -> None:
    nans = pa.array([float("nan"), -float("nan"), 0.0, -0.0])
    hashes = record_hashes(pa.record_batch([nans], names=["v"]), SEED).tolist()
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3]


def test_a_type_without_canonical_bytes_is_named() -> None:
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    with pytest.raises(TypeError, match="union"):
        fingerprint(pa.record_batch([union], names=["v"]), SEED)


headers = st.lists(st.tuples(st.text(max_size=3), st.one_of(st.none(), st.binary(max_size=4))), max_size=3)


@given(st.lists(st.one_of(st.none(), headers), max_size=6), st.integers(0, 6), st.integers(0, 6))
def test_nested_slices_add_up(some: Any, start: int, length: int) -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    listed = [None if v is None else [{"key": k, "value": b} for k, b in v] for v in some]
    whole = pa.record_batch([pa.array(listed, kind)], names=["h"])
    part = listed[start : start + length]
    made = pa.record_batch([pa.array(part, kind)], names=["h"])
    assert fingerprint(whole.slice(start, length), SEED) == fingerprint(made, SEED)
