"""Settings that divide a batch into shards: those of an unfinished batch stay, others follow the session."""

from __future__ import annotations

from pathlib import Path

import pytest

from delivered.checkpoint import sidecar
from delivered.model.errors import InvariantBroken

TWO, SIX = {"spark.sql.leafNodeDefaultParallelism": "2"}, {"spark.sql.leafNodeDefaultParallelism": "6"}


def logged(checkpoint: Path, *, offsets: int, commits: int) -> None:
    for name, count in (("offsets", offsets), ("commits", commits)):
        (checkpoint / name).mkdir(parents=True, exist_ok=True)
        for batch in range(count):
            (checkpoint / name / str(batch)).write_text("v1\n{}")
    (checkpoint / "metadata").write_text('{"id":"inc-1"}')


def test_a_start_over_an_unfinished_batch_takes_the_settings_it_was_started_with(tmp_path: Path) -> None:
    checkpoint = tmp_path / "c"
    assert sidecar.keep_shards(str(checkpoint), SIX) == SIX, "a new checkpoint"
    logged(checkpoint, offsets=1, commits=0)
    assert sidecar.keep_shards(str(checkpoint), TWO) == SIX
    assert sidecar.keep_shards(str(checkpoint), TWO) == SIX, "and so does the next start"
    logged(checkpoint, offsets=1, commits=1)
    assert sidecar.keep_shards(str(checkpoint), TWO) == TWO
    logged(checkpoint, offsets=2, commits=1)
    assert sidecar.keep_shards(str(checkpoint), SIX) == TWO


def test_a_checkpoint_of_an_earlier_release_has_none(tmp_path: Path) -> None:
    logged(tmp_path, offsets=1, commits=0)
    assert sidecar.keep_shards(str(tmp_path), TWO) == TWO


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    sidecar.keep_shards(str(tmp_path), TWO)
    (tmp_path / sidecar.SHARDS_FILE).write_text("{")
    with pytest.raises(InvariantBroken, match=r"SHARDS_DAMAGED.*shards\.json"):
        sidecar.keep_shards(str(tmp_path), TWO)
