"""Ids that are joined from several values or names: two different ones never make the same id (P33)."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from delivered.kits.queue import identified

VALUES = st.text("a1-#,", max_size=5).filter(bool)
ROWS = st.lists(st.tuples(VALUES, VALUES, VALUES), min_size=2, max_size=40, unique=True)


NUMBERS = st.integers(-12, 12)
MIXED = st.permutations([VALUES, NUMBERS, NUMBERS]).flatmap(
    lambda kinds: st.lists(st.tuples(*kinds), min_size=2, max_size=40, unique=True)
)


def ids(rows: list[tuple[object, ...]], columns: int) -> list[str]:
    names = ["a", "b", "c"][:columns]
    batch = pa.record_batch({n: [row[i] for row in rows] for i, n in enumerate(names)})
    found: list[str] = identified(batch, names).column("message_id").to_pylist()
    return found


@given(ROWS, st.sampled_from([2, 3]))
def test_p33_different_columns_make_different_ids(rows: list[tuple[str, str, str]], columns: int) -> None:
    distinct = sorted({row[:columns] for row in rows})
    assert len({*ids(distinct, columns)}) == len(distinct)


@given(MIXED)
def test_p33_text_among_numbers(rows: list[tuple[object, ...]]) -> None:
    assert len({*ids(rows, 3)}) == len(rows)


def test_unambiguous_ids_are_as_before() -> None:
    assert ids([("orders-clean", 0, 17)], 3) == ["orders-clean-0-17"]
    assert ids([("orders", "0", "17"), ("a-b", "c", "d"), ("a", "b-c", "d")], 3) == [
        "orders-0-17", "a-b-c-d#3,1", "a-b-c-d#1,3",
    ]  # fmt: skip
