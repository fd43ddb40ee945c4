"""Dead letters: a rejected row is in the dead-letter sink if and only if its batch counts, despite crashes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from tests.crash.letter_sim import EXACTLY, LEAST, MOST, NTH_MAX, LetterSim
from tests.crash.sim import Crash, codes, points
from tests.support.sweeps import occurrences, sweep

from delivered.contract.sink import DEAD_LETTERS
from delivered.engine import Columns, Member, shard
from delivered.model.capability import Commit, Guarantee
from delivered.model.identity import Scope
from delivered.model.rows import OnBadRow, Rows, from_json_texts


def crashed(
    guarantee: Guarantee, how: str, commits: tuple[Commit, ...], nth_max: int, expired: bool = False
) -> Iterator[LetterSim]:
    for point in points():
        for nth in range(1, nth_max + 1):
            sim = LetterSim(guarantee, crashes=(Crash(point, nth, how),), commits=commits, expire_on_start=expired)
            sim.run()
            if not sim.crashes[0].hit:
                break
            yield sim


@occurrences(NTH_MAX)
@pytest.mark.parametrize("how", ["kill", "tree", "fail"])
@pytest.mark.parametrize(
    ("guarantee", "last"),
    sweep(
        [
            (EXACTLY, Commit.TWO_PHASE),
            (EXACTLY, Commit.ONE_TRANSACTION),
            (LEAST, Commit.TWO_PHASE),
            (MOST, Commit.TWO_PHASE),
        ],
        lambda guarantee, last: guarantee is EXACTLY,
    ),
)
def test_one_crash_at_every_point(guarantee: Guarantee, how: str, last: Commit, nth_max: int) -> None:
    sims = list(crashed(guarantee, how, (Commit.TWO_PHASE, last), nth_max))
    assert len({s.crashes[0].point for s in sims}) >= 15
    assert [(s.crashes, w) for s in sims for w in s.verdict()] == []


@occurrences(NTH_MAX)
def test_dead_letters_alone_are_written_again(nth_max: int) -> None:
    """Only the dead-letter sink's participant expired: its rows are derived from the other sinks' again."""
    for sim in crashed(EXACTLY, "tree", (Commit.TWO_PHASE, Commit.TWO_PHASE), nth_max, expired=True):
        assert sim.verdict() == []


def test_over_state_letters_are_counted_not_compared() -> None:
    """Each contains its row's position in the shard, which depends on the order of rows."""

    def reversed_rows(batch: pa.RecordBatch, run: int) -> pa.RecordBatch:
        return batch.take(list(range(batch.num_rows - 1, -1, -1))) if run > 1 else batch

    def one_more(batch: pa.RecordBatch, run: int) -> pa.RecordBatch:
        values = [b"1-0-long" if run > 1 and v == b"1-0" else v for v in batch.column("value").to_pylist()]
        return pa.record_batch([batch.column("key"), pa.array(values, pa.binary())], schema=batch.schema)

    for change, stops in ((reversed_rows, False), (one_more, True)):
        sim = LetterSim(EXACTLY, crashes=(Crash("log:before", 1, "tree"),))
        sim.keeps_state, sim.change = True, change
        sim.run()
        assert ("REPLAY_DIFFERS" in codes(sim)) is stops


class Refusing:
    """A sink that only says why it cannot hold rows."""

    def __init__(self, reasons: pa.Array) -> None:
        self.invalid_rows: Any = lambda _: reasons
        self.refused_rows: Any = lambda _: None


def test_a_letter_says_who_why_and_where_from() -> None:
    sim = LetterSim(EXACTLY, batches=1).run()
    told = sim.letters()
    assert sorted((t["shard"], t["row"], t["batch"]) for t in told) == [(0, 1, 0), (1, 1, 0)]
    assert {(t["sink"], t["reason"]) for t in told} == {("first", "value longer than 5 bytes")}
    rows = pa.record_batch({"partition": [3, 3], "offset": [7, 8], "value": ["a", "b"]})
    reasons = pa.array([None, "no"])
    rejected = shard.validate(Refusing(reasons), Rows(rows.select(["value"]), (), rows)).rejected
    (letter,) = shard.build_dead_letters(Scope("p", "s", "i"), rejected, 5, 1, 10).to_pylist()
    assert (letter["pipeline"], letter["sink"], letter["incarnation"]) == ("p", "s", "i")
    assert (letter["partition"], letter["offset"], letter["topic"], letter["row"]) == (3, 8, None, 11)
    assert json.loads(letter["record"]) == {"value": "b"}


def test_a_column_that_only_a_sink_calls_offset_is_no_position() -> None:
    rows = pa.record_batch({"amount": [7, 8], "large": [True, True], "topic": ["t", "t"]})
    sink: Any = Refusing(pa.array([None, "no"]))
    for columns, topic in ((rows.select(["amount", "large"]), None), (rows, "t")):
        member = Member("s", sink, Columns((("offset", "amount"),), "large"))
        (rejected,) = shard.validate(sink, member.routed(Rows(columns))).rejected
        assert (rejected.record, rejected.topic, rejected.offset) == ({"offset": 8}, topic, None)


def test_times_beyond_python_s_are_kept_as_numbers() -> None:
    """SQLite and MySQL reject them; `to_pylist` cannot represent them."""
    late = pa.array([0, 10**18], pa.timestamp("us", "UTC"))
    rows = pa.record_batch({"at": late, "day": pa.array([1, 10**7], pa.date32()), "text": ["a", "b"]})
    reasons = pa.array([None, "outside the years 1 to 9999"])
    rejected = shard.validate(Refusing(reasons), Rows(rows)).rejected
    (letter,) = shard.build_dead_letters(Scope("p", "s", "i"), rejected, 0, 0, 0).to_pylist()
    assert json.loads(letter["record"]) == {"at": 10**18, "day": 10**7, "text": "b"}
    assert from_json_texts([letter["record"]], rows.schema).equals(rows.slice(1))


def test_fail_stops_and_nothing_counts() -> None:
    sim = LetterSim(EXACTLY, on_bad_row=OnBadRow.FAIL).run()
    assert "ROW_REFUSED" in codes(sim)
    assert sim.visible() == Counter()
    assert sim.decisions() == []


def test_dropped_rows_are_counted_as_given_up() -> None:
    sim = LetterSim(MOST, on_bad_row=OnBadRow.DROP).run()
    assert sim.problems == []
    long = sum(1 for rows in sim.world.inputs for _, v in rows if v is not None and v.endswith(b"long"))
    assert sim.last().given_up.count == long
    assert sum(sim.visible().values()) == 16 - long


def dead_letters_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shard, "build_dead_letters", lambda *_: pa.RecordBatch.from_pylist([], schema=DEAD_LETTERS))


def dead_letters_not_looked_for_when_alone(patch: pytest.MonkeyPatch) -> None:
    honest = shard._build_shares
    patch.setattr(shard, "_build_shares", lambda s, p, n: [x for x in honest(s, p, n) if x.wanted])


def bad_rows_written_too(patch: pytest.MonkeyPatch) -> None:
    honest = shard.validate
    patch.setattr(shard, "validate", lambda sink, rows: replace(honest(sink, rows), good=rows.good))


@pytest.mark.parametrize(
    "broken",
    [dead_letters_forgotten, dead_letters_not_looked_for_when_alone, bad_rows_written_too],
    ids=lambda f: f.__name__,
)
def test_broken_dead_letters_are_found(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    runs = crashed(EXACTLY, "tree", (Commit.TWO_PHASE, Commit.TWO_PHASE), NTH_MAX, expired=True)
    assert any(sim.verdict() for sim in runs)
