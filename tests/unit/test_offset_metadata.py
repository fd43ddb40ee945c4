"""Offset metadata in the checkpoint sidecar, while Spark's log has plain offsets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivered.checkpoint.sidecar import METADATA_FILE, OffsetMetadata
from delivered.connectors.kafka import LASTING, METADATA
from delivered.model.errors import InvariantBroken
from delivered.model.limits import OFFSET_METADATA_MAX

IDS, FIRST, FROM = "#topic ids", "#first", "#from"


def opened(location: Path | None, **settings: Any) -> OffsetMetadata:
    return OffsetMetadata(None if location is None else str(location), METADATA, LASTING, **settings)


def at(offset: int, topic: str = "t") -> dict[str, Any]:
    return {topic: {"0": offset}}


def test_a_new_process_knows_what_the_one_before_kept(tmp_path: Path) -> None:
    opened(tmp_path).keep(at(5), {IDS: {"t": "A"}})
    found = opened(tmp_path)
    assert found.joined(at(5)) == {**at(5), IDS: {"t": "A"}}
    assert found.joined(at(7)) == {**at(7), IDS: {"t": "A"}}, "what lasts holds for later offsets"
    assert opened(None).joined(at(5)) == at(5)


def test_nothing_is_written_while_nothing_changes(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    kept.keep(at(5), {IDS: {"t": "A"}})
    (tmp_path / METADATA_FILE).unlink()
    kept.keep(at(6), {IDS: {"t": "A"}}, start=at(5))
    assert not (tmp_path / METADATA_FILE).exists()
    opened(tmp_path, writes=False).keep(at(6), {IDS: {"t": "A"}})
    assert not (tmp_path / METADATA_FILE).exists(), "an audit changes nothing"


def test_what_belongs_to_one_offset_is_not_told_of_another(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    kept.keep(at(5), {IDS: {"t": "A"}})
    kept.keep(at(3), {IDS: {"t": "B"}, FROM: at(0)}, start=at(5))
    again = opened(tmp_path)
    assert again.find(at(3)) == {IDS: {"t": "B"}, FROM: at(0)}
    assert again.find(at(4)) == {IDS: {"t": "B"}}


def test_metadata_of_offsets_that_spark_never_logged_changes_nothing_before_them(tmp_path: Path) -> None:
    """After a crash between sidecar and Spark's log, the query continues from the previous offsets."""
    kept = opened(tmp_path)
    kept.keep(at(0), {IDS: {"t": "A"}})
    assert kept.find(at(5)) == {IDS: {"t": "A"}}
    kept.keep(at(9), {IDS: {"t": "B"}, FROM: at(0)}, start=at(5))
    again = opened(tmp_path)
    assert again.find(at(5)) == {IDS: {"t": "A"}}, "the topic that was made again must be noticed again"
    again.keep(at(2), {IDS: {"t": "C"}, FROM: at(1)}, start=at(5))
    assert opened(tmp_path).find(at(2)) == {IDS: {"t": "C"}, FROM: at(1)}
    assert opened(tmp_path).find(at(5)) == {IDS: {"t": "A"}}


def test_a_checkpoint_put_back_finds_what_held_then(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    kept.keep(at(0), {IDS: {"t": "A"}})
    both = {"t": {"0": 9}, "u": {"0": 1}}
    kept.keep(both, {IDS: {"t": "A", "u": "U"}, FIRST: {"u": {"0": 0}}}, start=at(8))
    assert opened(tmp_path).find(at(4)) == {IDS: {"t": "A"}}
    assert opened(tmp_path).find({"t": {"0": 12}, "u": {"0": 3}}) == {IDS: {"t": "A", "u": "U"}, FIRST: {"u": {"0": 0}}}


def test_offsets_of_an_earlier_version_hold_their_metadata_themselves(tmp_path: Path) -> None:
    old = {**at(5), IDS: {"t": "A"}}
    kept = opened(tmp_path)
    kept.keep(at(5), {IDS: {"t": "B"}})
    assert kept.joined(old) == old
    assert kept.split(old) == (at(5), {IDS: {"t": "A"}})


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    for text in ("", "{", '{"format": 1}', '{"format": 1, "entries": [{"offsets": 5}]}'):
        (tmp_path / METADATA_FILE).parent.mkdir(exist_ok=True)
        (tmp_path / METADATA_FILE).write_text(text)
        with pytest.raises(InvariantBroken, match="OFFSET_METADATA_DAMAGED"):
            opened(tmp_path).find(at(5))


def test_it_is_bounded(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    for n in range(OFFSET_METADATA_MAX + 20):
        kept.keep(at(n), {IDS: {"t": str(n)}})
    assert len(json.loads((tmp_path / METADATA_FILE).read_text())["entries"]) == OFFSET_METADATA_MAX
    assert opened(tmp_path).find(at(OFFSET_METADATA_MAX + 19)) == {IDS: {"t": str(OFFSET_METADATA_MAX + 19)}}


STEPS = st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ABC"), st.booleans(), st.booleans()), max_size=30)


@given(STEPS)
def test_the_offsets_spark_logged_keep_their_metadata_whatever_followed(
    steps: list[tuple[int, str, bool, bool]],
) -> None:
    """Batches that are logged or, after a crash, not: the current position always has its stored metadata."""
    kept = opened(None)
    stands: dict[str, Any] = at(0)
    knows: dict[str, Any] = {}
    for offset, topic_id, jumped, logged in steps:
        metadata = {IDS: {"t": topic_id}, **({FROM: at(offset)} if jumped else {})}
        if at(offset) == stands:
            continue  # Spark runs no batch between equal offsets
        kept.keep(at(offset), metadata, start=stands)
        assert kept.find(at(offset)) == metadata
        assert kept.find(stands) == knows
        if logged:
            stands, knows = at(offset), metadata
