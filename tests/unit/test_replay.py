"""Whether a replay is what ran, by the watermarks that Spark logged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from delivered.audit.spark.replay import Script, _differs


def logged(folder: Path, watermarks: Mapping[int, int]) -> str:
    (folder / "offsets").mkdir(parents=True)
    for batch, watermark in watermarks.items():
        (folder / "offsets" / str(batch)).write_text("v1\n" + json.dumps({"batchWatermarkMs": watermark}) + "\n{}")
    return str(folder)


@pytest.mark.parametrize(
    ("ran", "again", "several", "says"),
    [
        pytest.param({7: 0, 8: 5, 9: 9}, {0: 0, 1: 5, 2: 9}, True, "", id="same"),
        pytest.param({7: 0, 8: 5, 9: 5}, {0: 0, 1: 5, 2: 9}, True, "batch 9 ran with the watermark 5 ms", id="other"),
        pytest.param({9: 9}, {0: 0, 1: 5, 2: 9}, True, "no longer keeps the watermarks of 1 of 3", id="gone"),
        pytest.param({9: 5}, {0: 0, 1: 5, 2: 9}, True, "batch 9 ran with the watermark 5 ms", id="gone and other"),
        pytest.param({9: 9}, {0: 0, 1: 5, 2: 9}, False, "", id="gone, and only one"),
        pytest.param({9: 0}, {0: 0, 1: 0, 2: 0}, True, "", id="gone, and never any"),
        pytest.param({7: 0, 8: 5, 9: 9}, {0: 0, 1: 5}, False, "ended before batch 9", id="fewer"),
    ],
)
def test_watermarks_that_differ_or_are_gone_are_a_doubt(
    ran: dict[int, int], again: dict[int, int], several: bool, says: str, tmp_path: Path
) -> None:
    script = Script(
        {}, logged(tmp_path / "ran", ran), {}, [], [7, 8, 9], "append", several_watermarks=several, rejects=False
    )
    found = _differs(script, logged(tmp_path / "again", again))
    assert says in found and bool(found) == bool(says), found
