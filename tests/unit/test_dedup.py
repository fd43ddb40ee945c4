"""Dedup declarations: durations, identity, and how the audit splits a range into the ledger's batches."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.dedup import kept_dedup

import delivered
from delivered.audit.request import RANGES_MAX, BatchRange, split_by_batch
from delivered.checkpoint import sidecar as dedup_kept
from delivered.entry import Pipeline
from delivered.model.capability import IN_TABLE, Dedup
from delivered.model.errors import InvariantBroken, Refused, UsageError
from delivered.pipeline.file import load_text

HOUR = delivered.dedup("key", within="1 hour")


@pytest.mark.parametrize(
    ("text", "ms", "says"),
    [
        ("1 hour", 3_600_000, "1 hour"),
        ("90 seconds", 90_000, "1 minute 30 seconds"),
        ("1 day 12 hours", 129_600_000, "1 day 12 hours"),
        ("2 weeks", 1_209_600_000, "14 days"),
        ("250 milliseconds", 250, "250 milliseconds"),
    ],
)
def test_durations(text: str, ms: int, says: str) -> None:
    made = delivered.dedup("key", within=text)
    assert (made.within_ms, made.within) == (ms, says)


@pytest.mark.parametrize("text", ["", "1", "hour", "0 hours", "1 month", "1 hour or so", "-1 hour"])
def test_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match="DEDUP_WITHIN"):
        delivered.dedup("key", within=text)


@pytest.mark.parametrize(
    ("by", "time", "code"),
    [
        ((), "timestamp", "DEDUP_BY"),
        (("  ",), "timestamp", "DEDUP_BY"),
        (("uuid()",), "timestamp", "DEDUP_CHANGES"),
        (("key",), "current_timestamp()", "DEDUP_CHANGES"),
    ],
)
def test_what_cannot_name_a_record(by: tuple[str, ...], time: str, code: str) -> None:
    with pytest.raises(UsageError, match=code):
        delivered.dedup(*by, within="1 hour", time=time)


TEXT = """\
pipeline: orders
guarantee: exactly_once
checkpoint: /nowhere/checkpoint
source: {format: log, path: /nowhere/log}
dedup: {by: [key], within: 1 hour, late: drop}
sinks: [{format: sqlite, path: /nowhere/x.db, table: orders}]
"""


def test_in_a_file() -> None:
    made = Pipeline.from_parsed(load_text(TEXT), Path())
    assert made.dedup == Dedup(("key",), 3_600_000, "timestamp", drops_late=True)
    made = Pipeline.from_parsed(load_text(TEXT, overrides={"dedup.within": "2 hours"}), Path())
    assert made.dedup is not None
    assert made.dedup.within == "2 hours"
    with pytest.raises(UsageError, match=r"line 5: unknown key 'dedup.withn'; known: by, within, time, late, memory"):
        load_text(TEXT.replace("within", "withn"))
    with pytest.raises(UsageError, match="DEDUP_VALUE"):
        Pipeline.from_parsed(load_text(TEXT), Path()).__class__(
            name="orders",
            guarantee="exactly_once",
            checkpoint="c",
            source=made.sources["source"],
            sinks=[],
            dedup="key",  # type: ignore[arg-type]
        )


def test_the_plan_says_what_is_forgotten_and_is_refused_where_nobody_knows() -> None:
    made = Pipeline.from_parsed(load_text(TEXT), Path())
    assert "2 hours past that first record" in str(made.plan(offline=True))
    for guarantee in delivered.Guarantee:
        made = Pipeline.from_parsed(load_text(TEXT.replace(", late: drop", "")), Path())
        made.guarantee = guarantee
        answer = made.plan(offline=True)
        assert isinstance(answer, delivered.Refusal)
        assert (answer.code, answer.nearest) == ("DEDUP_LATE", None)


def test_what_a_checkpoint_began_with(tmp_path: Path) -> None:
    place = str(tmp_path)
    other = delivered.dedup("key", within="2 hours")
    assert dedup_kept.find_changed_dedup(place, None) is None
    assert dedup_kept.find_changed_dedup(place, HOUR) == "no dedup"
    dedup_kept.keep_dedup(place, HOUR, fresh=True)
    known = delivered.dedup("key", within="60 minutes", late="drop")
    assert dedup_kept.find_changed_dedup(place, known) is None, "what is said of late records changes no state"
    assert dedup_kept.find_changed_dedup(place, other) == "dedup by key within 1 hour of timestamp"
    assert dedup_kept.find_changed_dedup(place, None) is not None
    with pytest.raises(Refused, match="DEDUP_CHANGED"):
        dedup_kept.keep_dedup(place, other, fresh=False)
    # Left behind by a start that failed before its query ran.
    dedup_kept.keep_dedup(place, other, fresh=True)
    assert kept_dedup(place) == other
    dedup_kept.keep_dedup(place, None, fresh=True)
    assert kept_dedup(place) is None
    (tmp_path / dedup_kept.DEDUP_FILE).write_text('{"dedup": {"kind": "table"}}')
    with pytest.raises(InvariantBroken, match="DEDUP_DAMAGED"):
        kept_dedup(place)


def at(offset: int) -> dict[str, int]:
    return {"0": offset}


def test_a_range_is_cut_where_batches_ended() -> None:
    assert split_by_batch(at(0), []) == []
    assert split_by_batch(at(0), [(0, at(5)), (1, at(9))]) == [
        BatchRange(0, 0, at(0), at(5)),
        BatchRange(1, 1, at(5), at(9)),
    ]
    # The ledger has forgotten the first batches, and lacks one.
    found = split_by_batch(at(0), [(7, at(5)), (9, at(9))])
    assert found == [BatchRange(0, 7, at(0), at(5)), BatchRange(8, 9, at(5), at(9))]
    assert all(r.several for r in found)
    many = split_by_batch(at(0), [(n, at(n + 1)) for n in range(3 * RANGES_MAX)])
    assert len(many) <= RANGES_MAX
    assert all(r.several for r in many)
    assert (many[0].start, many[-1].end) == (at(0), at(3 * RANGES_MAX))
    assert all(a.end == b.start for a, b in pairwise(many))


def test_a_table_in_a_file() -> None:
    made = Pipeline.from_parsed(load_text(TEXT.replace("late: drop", "memory: table")), Path())
    assert made.dedup == Dedup(("key",), 3_600_000, "timestamp", kind=IN_TABLE)
    with pytest.raises(UsageError, match="DEDUP_LATE_TABLE"):
        delivered.dedup("key", within="1 hour", late="drop", memory="table")


def test_a_table_is_told_from_state_and_from_a_table_elsewhere(tmp_path: Path) -> None:
    table = delivered.dedup("key", within="1 hour", memory="table")
    dedup_kept.keep_dedup(str(tmp_path), table, fresh=True, sink="orders")
    assert kept_dedup(str(tmp_path)) == table
    assert dedup_kept.find_changed_dedup(str(tmp_path), table, "orders") is None
    assert "sink 'orders'" in str(dedup_kept.find_changed_dedup(str(tmp_path), table, "copies"))
    assert dedup_kept.find_changed_dedup(str(tmp_path), HOUR, "orders") is not None
    assert dedup_kept.find_changed_dedup(str(tmp_path), None, "orders") is not None
