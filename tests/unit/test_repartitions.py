"""Batches that only repartitioned a query's state are distinguished from batches missing in the ledger."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from delivered.checkpoint import repartitions_before
from delivered.engine.recover import NewBatch, judge
from delivered.model.capability import Guarantee
from delivered.model.errors import LedgerBehind
from delivered.model.identity import Scope
from delivered.model.work import CheckpointView, Decision, LedgerState, Tolerance

SCOPE = Scope("p", "s", "i")


def log(folder: Path, *batches: tuple[int, int, int]) -> str:
    """Args: batches: (offset, timestamp, partitions)."""
    (folder / "offsets").mkdir(exist_ok=True)
    for number, (offset, timestamp, partitions) in enumerate(batches):
        header = {"batchTimestampMs": timestamp, "conf": {"spark.sql.shuffle.partitions": str(partitions)}}
        text = f'v1\n{json.dumps(header)}\n{{"0": {offset}}}'
        (folder / "offsets" / str(number)).write_text(text)
    return str(folder)


def test_a_repartition_has_offsets_and_time_of_the_batch_before(tmp_path: Path) -> None:
    where = log(tmp_path, (10, 1, 2), (20, 2, 2), (20, 2, 4), (20, 2, 5))
    assert [repartitions_before(where, batch) for batch in range(5)] == [0, 0, 0, 1, 2]


@pytest.mark.parametrize(
    "batch", [(20, 3, 4), (30, 2, 4), (20, 2, 2)], ids=["it ran: time", "it read: offsets", "a copy: partitions"]
)
def test_a_batch_that_ran_is_none(batch: tuple[int, int, int], tmp_path: Path) -> None:
    assert repartitions_before(log(tmp_path, (10, 1, 2), (20, 2, 2), batch), 3) == 0


def test_the_ledger_may_lack_them_and_no_other() -> None:
    state = LedgerState(last=Decision(SCOPE, "me", Guarantee.EXACTLY_ONCE, 1, "{}", (), {}, 0))
    view = CheckpointView("i", 4, '{"0": 30}', 3, repartitions=2)
    assert judge(state, view, SCOPE, Guarantee.EXACTLY_ONCE, Tolerance()) == NewBatch()
    for repartitions in (0, 1):
        fewer = replace(view, repartitions=repartitions)
        with pytest.raises(LedgerBehind):
            judge(state, fewer, SCOPE, Guarantee.EXACTLY_ONCE, Tolerance())
