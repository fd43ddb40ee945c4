"""A pipeline from a replayable source to SQLite, exactly_once, killed at a point and restarted."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from delivered_lab.supervisor import run


def values_over_a_kill(folder: Path, source: Mapping[str, Any], point: str) -> Counter[bytes]:
    """The values in the sink at the end; batches of 1,000, killed in the second."""
    pipeline = {
        "pipeline": "p",
        "guarantee": "exactly_once",
        "checkpoint": str(folder / "checkpoint"),
        "source": {**source, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 1_000},
        "transform": {"select": ["value"]},
        "sinks": [{"format": "sqlite", "path": str(folder / "out.db"), "table": "got"}],
    }
    file = folder / "p.yaml"
    file.write_text(json.dumps(pipeline))
    command = [sys.executable, "-m", "delivered_lab.verify.loop", str(file)]
    done = run(command, f"{point}@batch=1", folder / "hits", timeout_s=60)
    assert (done.exit_code, done.runs, len(done.kills)) == (0, 2, 1)
    with closing(sqlite3.connect(folder / "out.db")) as database:
        return Counter(v for (v,) in database.execute("SELECT value FROM got"))
