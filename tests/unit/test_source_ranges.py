"""Admission and splitting of a backlog: laws that hold for every backlog."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from delivered.source import Range, admit, backwards, split

SIZES = st.dictionaries(st.integers(0, 40), st.integers(0, 10**12), max_size=30)
RANGES = st.lists(
    st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)).map(lambda t: Range("p", t[0], t[0] + t[1])), max_size=20
).map(lambda ranges: [Range(i, r.start, r.end) for i, r in enumerate(ranges)])


@given(SIZES, st.none() | st.integers(1, 10**9))
def test_admission(sizes: dict[int, int], limit: int | None) -> None:
    taken = admit(sizes, limit)
    waiting = [k for k, n in sizes.items() if n]
    total = sum(sizes.values())
    assert list(taken) == list(sizes)
    assert all(0 <= taken[k] <= n for k, n in sizes.items())
    # No starvation: each partition with a backlog advances.
    assert all(taken[k] >= 1 for k in waiting)
    assert sum(taken.values()) == (total if limit is None else min(total, max(limit, len(waiting))))
    assert admit(sizes, limit) == taken


@given(SIZES, st.integers(1, 10**6))
def test_admission_is_in_proportion(sizes: dict[int, int], limit: int) -> None:
    taken = admit(sizes, limit)
    ordered = sorted(sizes, key=lambda k: sizes[k])
    for small, large in itertools.pairwise(ordered):
        assert taken[small] <= taken[large] + 1


@given(RANGES, st.none() | st.integers(1, 300))
def test_pieces_cover_their_ranges_without_overlap(ranges: list[Range[int]], pieces_min: int | None) -> None:
    pieces = split(ranges, pieces_min)
    at = 0
    for wanted in (r for r in ranges if r.size):
        mine = [p for p in pieces if p.key == wanted.key]
        assert pieces[at : at + len(mine)] == mine  # in the order of ranges
        at += len(mine)
        assert mine[0].start == wanted.start
        assert mine[-1].end == wanted.end
        assert all(a.end == b.start for a, b in itertools.pairwise(mine))
        assert max(p.size for p in mine) - min(p.size for p in mine) <= 1
    assert at == len(pieces)
    assert all(p.size > 0 for p in pieces)
    total, nonempty = sum(r.size for r in ranges), sum(r.size > 0 for r in ranges)
    assert len(pieces) == max(nonempty, min(pieces_min or 0, total))
    assert split(ranges, pieces_min) == pieces


def test_one_large_range_gets_most_pieces() -> None:
    pieces = split([Range("a", 0, 1000), Range("b", 5, 6)], 5)
    assert [p.key for p in pieces] == ["a"] * 4 + ["b"]


def test_pieces_have_at_most_so_many_offsets() -> None:
    whole = [Range("a", 0, 10), Range("b", 5, 8), Range("c", 3, 3)]
    assert [r.size for r in split(whole, None, 4)] == [3, 3, 4, 3]
    assert [r.size for r in split(whole, 7, 4)] == [1, 2, 1, 2, 2, 2, 3] or len(split(whole, 7, 4)) == 7
    assert split(whole, None, 100) == whole[:2]


def test_a_range_that_ends_before_it_begins_is_named() -> None:
    assert backwards({"orders": {"0": 12, "1": 3}}, {"orders": {"0": 9, "1": 3}}) == "orders 0: from 12 to 9"
    assert backwards({"stream": 4}, {"stream": 3}) == "stream: from 4 to 3"
    assert backwards({"orders": {"0": 12}}, {"orders": {"0": 12, "1": 0}, "new": {"0": 5}}) is None
    assert backwards({"p": "ledger:7"}, {"p": "ledger:3"}) is None
