"""Real servers: a decided batch whose prepared rows are gone, and whose source has fewer records since."""

from __future__ import annotations

import time
from dataclasses import replace

import pyarrow as pa
import pytest
from tests.support.sinks import SCHEMA, SINKS, Rig, offsets

from delivered.engine import decide
from delivered.engine.context import Context
from delivered.engine.decide import LOST, commit_batch
from delivered.engine.shard import fingerprint_seed, write_shard
from delivered.model.errors import ReplayDiffers
from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.rows import Rows
from delivered.model.work import Decision, Ok, Tolerance

GONE = 20


def run(rig: Rig, context: Context, shards: list[pa.RecordBatch]) -> Decision | None:
    plan = rig.plan(context, 0)
    messages = [write_shard(rig.sinks, plan, i, 0, iter([Rows(rows)]), SCHEMA) for i, rows in enumerate(shards)]
    return commit_batch(context, 0, offsets(0), messages)


@pytest.mark.parametrize("name", ["kafka", "postgres-two-phase"])
def test_what_is_left_is_written_and_the_rest_given_up(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(SINKS[name](request))
    shards = [rig.rows(0, 0), rig.rows(0, 1)]
    with monkeypatch.context() as killed:
        killed.setattr(decide, "_apply", lambda *_: None)
        decision = run(rig, rig.context(), shards)
    assert decision is not None
    committer = rig.context().committers
    for prepared in decision.participants:  # as if they had timed out
        assert committer.abort(prepared) == Ok(None)
    left = [shards[0].slice(GONE), shards[1]]
    with pytest.raises(ReplayDiffers, match=f"reran without {GONE} of them") as refused:
        run(rig, rig.context("second"), left)
    assert refused.value.code.endswith("REPLAY_RECORDS_MISSING")
    accepted = replace(rig.context("third"), tolerance=Tolerance(lost_records=True))
    revised = run(rig, accepted, left)
    assert revised is not None
    assert (revised.revision, revised.given_up.count, revised.participants[0].given_up) == (1, GONE, {LOST: GONE})
    seed = fingerprint_seed(rig.scope)
    expected = sum((fingerprint(rig.sink.records(rows), seed) for rows in left), Fingerprint())
    deadline = time.monotonic() + 120
    while rig.visible() != expected and time.monotonic() < deadline:
        pass
    assert rig.visible() == expected == revised.total
    assert rig.context("fourth").ledger.look().last == revised
