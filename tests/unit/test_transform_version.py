"""Transform versions: fingerprints, their record in decisions, what the audit recomputes."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.requests import ASKED

from delivered.audit.request import find_earlier, parsed, split_by_transform
from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
from delivered.model.limits import TRANSFORM_VERSIONS_BYTES_MAX, TRANSFORM_VERSIONS_KEPT
from delivered.model.rows import OnBadRow
from delivered.model.work import MIXED, Account, Decision, Prepared, TransformVersion, transforms_after
from delivered.pipeline.endpoint import parse_projection
from delivered.pipeline.transform import NO_TRANSFORM, Transform, as_transform, build_version
from delivered.planner import CheckpointFacts, Plan, make_plan

SCOPE = Scope("p", "s", "i")


def version(transform: Transform, **sinks: Any) -> str:
    return build_version(transform, sinks.items(), OnBadRow.FAIL)


def test_another_text_of_sql_is_another_version() -> None:
    a, b = as_transform("SELECT key FROM source"), as_transform("SELECT value FROM source")
    assert version(a) == version(as_transform(" SELECT key FROM source\n"))
    assert len({version(a), version(b), version(NO_TRANSFORM)}) == 3
    some, everything = parse_projection(["key"], None), parse_projection([], None)
    assert version(a, s=some) != version(a) == version(a, s=everything)
    assert build_version(a, [], OnBadRow.DROP) != version(a)


MODULE = """
import json
LIMIT = 5
OTHER = 5
def helper(x):
    return x * LIMIT + OTHER
def clean(frame):
    return frame.filter(helper(len(json.dumps({{}}))) > {bound})
"""


@pytest.mark.parametrize("change", [("{bound}", "7"), ("LIMIT = 5", "LIMIT = 6"), ("x * LIMIT", "x + LIMIT")])
def test_a_function_is_known_by_what_it_and_its_helpers_say(
    change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    for name, text in (("one", MODULE), ("same", MODULE), ("other", MODULE.replace(*change))):
        file = tmp_path / f"t_{name}.py"
        file.write_text(text.replace("{bound}", "3").replace("{{}}", "{}"))
        importlib.invalidate_caches()
        seen.append(version(as_transform(importlib.import_module(f"t_{name}").clean)))
        sys.modules.pop(f"t_{name}")
    assert seen[0] == seen[1] != seen[2]


def test_what_a_function_closes_over_counts_and_circles_end() -> None:
    def make(bound: int) -> Any:
        circle: list[Any] = [bound]
        circle.append(circle)
        return lambda frame: (frame, circle, make)

    assert version(as_transform(make(1))) == version(as_transform(make(1))) != version(as_transform(make(2)))


def test_objects_that_answer_to_any_name_do_no_harm() -> None:
    @functools.wraps(test_another_text_of_sql_is_another_version)
    def wrapped(frame: Any) -> Any:
        return frame, mock.call, mock.MagicMock

    cached = functools.lru_cache(wrapped)
    odd = mock.call
    assert version(as_transform(lambda frame: (frame, odd, cached))) != version(as_transform(wrapped))


def decision(last: Decision | None, transform: str, count: int = 10, offsets: str = "") -> Decision:
    batch = last.batch + 1 if last else 0
    own = Fingerprint(count, count * 17 + batch, count * 31 + batch)
    accounts = {n: Account((last.account(n).total if last else Fingerprint()) + own) for n in (SCOPE.sink, "b")}
    return Decision(
        SCOPE, "owner", Guarantee.EXACTLY_ONCE, batch, offsets or json.dumps({"t": {"0": batch}}),
        (Prepared(0, 0, own, sink=SCOPE.sink), Prepared(0, 0, own, sink="b")),
        accounts, 0,
        transforms=transforms_after(last, transform, batch),
    )  # fmt: skip


def chain(*versions: str) -> list[Decision]:
    made: list[Decision] = []
    for name in versions:
        made.append(decision(made[-1] if made else None, name))
    return made


START = parsed("0")


def test_a_record_without_versions_is_read_and_written_as_before() -> None:
    """Earlier ledgers, and the bare idiom: the text of a decision does not change."""
    last = chain("", "")[-1]
    assert last.transforms == ()
    assert "transforms" not in json.loads(last.to_json())
    assert Decision.from_json(last.to_json()) == last
    (only,) = split_by_transform(last, START)
    assert (only.transform, only.first, only.last, only.start, only.end) == ("", 0, 1, START, parsed(last.offsets))
    assert only.decided.total == last.total


@given(st.lists(st.sampled_from(["", "a", "b"]), min_size=1, max_size=60))
def test_ranges_cover_every_batch_and_every_record(versions: list[str]) -> None:
    """In any ledger: records show the version of every batch whose version is still distinguished."""
    made = [Decision.from_json(d.to_json()) for d in chain(*versions)]
    for d in (made[-1], made[-1].for_sink("b")):
        ranges = split_by_transform(d, START)
        assert ranges[0].first == 0
        assert ranges[-1].last == len(versions) - 1
        assert all(a.last + 1 == b.first and a.end == b.start for a, b in itertools.pairwise(ranges))
        assert sum((r.decided.total for r in ranges), Fingerprint()) == d.total
        for r in ranges:
            if r.transform != MIXED:
                assert set(versions[r.first : r.last + 1]) == {r.transform}
                assert r.end == parsed(made[r.last].offsets)
                own = [made[i].fingerprint for i in range(r.first, r.last + 1)]
                assert r.decided.total == sum(own, Fingerprint())
        assert len(ranges) <= TRANSFORM_VERSIONS_KEPT
    assert made[-1].transform == versions[-1]
    assert made[-1].for_sink("b").for_sink("s") == made[-1]


def test_versions_are_bounded_in_bytes_too() -> None:
    last = None
    for i in range(20):
        last = decision(last, f"v{i}", offsets=json.dumps({"t": {str(p): i for p in range(3_000)}}))
    assert last is not None
    assert len(json.dumps([t.to_json(SCOPE.sink) for t in last.transforms])) <= TRANSFORM_VERSIONS_BYTES_MAX
    assert (last.transforms[0].fingerprint, last.transforms[0].batch, last.transform) == (MIXED, 0, "v19")
    huge = decision(decision(None, "a", offsets='{"t": "' + "x" * TRANSFORM_VERSIONS_BYTES_MAX + '"}'), "b")
    assert huge.transforms == (TransformVersion(MIXED),)


def test_only_batches_of_the_present_version_are_recomputed() -> None:
    ranges = split_by_transform(chain("", "a", "a", "b", "a")[-1], START)
    again, others = find_earlier(ranges, "a")
    assert [(r.first, r.last) for r in again] == [(0, 0), (1, 2), (4, 4)]
    assert others is not None
    assert (others.batches, others.handed.count) == ("3", 10)
    assert find_earlier(ranges, "") == (ranges, None)
    again, others = find_earlier(ranges, "new")
    assert [(r.first, r.last) for r in again] == [(0, 0)]
    assert others is not None
    assert others.batches == "1 to 2, 3, 4"


def test_the_plan_says_that_the_transform_changed() -> None:
    kafka_twice = replace(ASKED, checkpoint=CheckpointFacts("/c", "i", 7, 7, transform_changed=(3, 7)))
    plan = make_plan(kafka_twice)
    assert isinstance(plan, Plan)
    said = " ".join(plan.warnings)
    assert "the transform changed: batches 3 to 7 ran with another version" in said
    assert "from batch 8 on this version runs" in said
    assert "REPLAY_DIFFERS" in said  # a transaction of Kafka expires
    unchanged = make_plan(replace(kafka_twice, checkpoint=CheckpointFacts("/c", "i", 7, 7)))
    assert isinstance(unchanged, Plan)
    assert unchanged.warnings == ()
