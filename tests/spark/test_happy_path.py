"""What one batch from Kafka into PostgreSQL runs and loads of ours only shrinks, and is what ARCHITECTURE.md draws."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tools import happy_path, size


@pytest.mark.matrix
def test_files_and_modules_of_a_batch_do_not_grow(kafka: Any, postgres: Any, tmp_path: Path) -> None:
    found = happy_path.measure(kafka, postgres, tmp_path)
    bounds = size.bounds(size.PAGE.read_text(encoding="utf-8"))
    grown = {name: (count, bounds[name]) for name, count in happy_path.bounded(found).items() if count > bounds[name]}
    assert not grown, "each (count, bound of ARCHITECTURE.md)\n" + happy_path.table(found)
    # A trace that misses a process would count too few.
    assert {"delivered/spark/readers.py", "delivered/spark/writers.py"} <= {*found["driver"]} & {*found["task"]}
    assert "delivered/engine/decide.py" in found["driver"]
    assert "delivered/engine/shard.py" in found["task"]
    drawn = size.PAGE.read_text(encoding="utf-8").partition("```")[2].partition("```")[0]
    names = re.findall(r"[\w/<>]+\.py", drawn.replace("<source>", "kafka").replace("<sink>", "postgres"))
    paths = [f"delivered/{name}" for name in names if (size.SOURCE / name).exists()]
    assert len(paths) >= 15
    assert {*paths} - {*found["modules"]} == set(), "drawn, and not loaded"
