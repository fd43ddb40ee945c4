"""Pipelines as somebody on call finds them: real checkpoints, ledgers and tables, with an hour of history."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from tests.support.without_spark import deliver

from delivered import Pipeline
from delivered.checkpoint import history
from delivered.checkpoint.history import Run, Sample, State
from delivered.connectors.log import append
from delivered.model.work import BatchReport

CLEAN = """
import pyarrow as pa


def clean(rows):
    numbers = [int(v) if v.isdigit() else 1 / 0 for v in rows.column("value").to_pylist()]
    return pa.record_batch({"key": rows.column("key"), "value": pa.array([b"%d" % n for n in numbers], pa.binary())})
"""


def written(folder: Path, name: str, **more: Any) -> Path:
    """The file of a pipeline from a log of three partitions into SQLite."""
    pipeline = {
        "pipeline": name,
        "guarantee": "exactly_once",
        "checkpoint": str(folder / name / "checkpoint"),
        "source": {"format": "log", "path": str(folder / name / "in"), "startingOffsets": "earliest"},
        "sinks": [{"format": "sqlite", "path": str(folder / name / "out.db"), "table": "rows", "ifNotExists": "true"}],
    } | more
    (folder / name).mkdir(exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(pipeline, sort_keys=False))
    return file


def sent(file: Path, values: Iterable[bytes]) -> None:
    rows = list(values)
    path = Pipeline.from_file(file).sources["source"].options["path"]
    table = pa.table({"key": [b"%d" % n for n in range(len(rows))], "value": rows})
    append(str(path), table, partition_by=3)


def with_dead_letters(folder: Path, name: str, values: Iterable[bytes]) -> Path:
    """Of values that are no numbers. Its transform is in `clean_<name>.py`, which `mended` changes."""
    (folder / f"clean_{name}.py").write_text(CLEAN)
    path = str(folder / name / "dead.db")
    more: dict[str, Any] = {
        "guarantee": "at_least_once",  # two SQLite sinks cannot share a decision
        "transform": {"arrow": f"clean_{name}:clean"},
        "on_bad_row": "dead_letter",
        "dead_letter": {"format": "sqlite", "path": path, "table": "dead", "ifNotExists": "true"},
    }
    file = written(folder, name, **more)
    sent(file, values)
    deliver(Pipeline.from_file(file))
    return file


def an_hour(file: Path, rates: Mapping[str, float], *, now_ms: int, burst: float = 0.0, behind: float = 0.0) -> None:
    """Samples of its lag every five seconds, up to now.

    Args:
        rates: records a second, by partition.
        burst: records that arrived at once, 25 minutes ago. behind: by how many more than are delivered, each second of
            the last three minutes.
    """
    for ago in range(3600, -1, -5):
        at = now_ms - ago * 1000
        wave = 1 + 0.3 * math.sin(ago / 240)
        lag = {p: int(r * (1 + (ago // 5) % 3)) for p, r in rates.items()}
        first = next(iter(lag))
        lag[first] += int(max(0.0, burst * (1 - (1500 - ago) / 420)) if ago <= 1500 else 0)
        lag = {p: n + int(max(0, 180 - ago) * behind / len(lag)) for p, n in lag.items()}
        read = {p: int(r * 5 * wave) for p, r in rates.items()}
        if burst and 1080 <= ago <= 1500:
            read[first] += int(burst / 84)
        history._append(checkpoint(file), history.SAMPLES, Sample(at, "source", lag, read).__dict__)


def batches_of(file: Path, count: int, *, now_ms: int, slow: Mapping[int, float] = {}) -> None:
    """Reports of batches; `slow` take that many seconds."""
    for batch in range(count):
        took = 0.35 + 0.12 * math.sin(batch * 1.7) + 0.08 * (batch % 4)
        steps = {"plan": 0.02, "stage": took * 0.55, "prepare": took * 0.15, "decide": 0.03, "apply": took * 0.2}
        if batch in slow:
            steps["stage"] = slow[batch]
        at = now_ms - (count - batch) * 5_000
        rows = 600 + 37 * (batch % 7)
        history.add(checkpoint(file), BatchReport(batch, at, {"rows": rows}, 3, int(batch == 7), steps, rows * 410))


def run(file: Path, started_ms: int, ended_ms: int | None, batch: int | None, code: str = "", **more: str) -> None:
    history.keep_run(
        checkpoint(file), Run(f"r{started_ms}", "worker-1", os.getpid(), started_ms, ended_ms, batch, code, **more)
    )


def stateful(file: Path, now_ms: int) -> None:
    for ago in range(3600, -1, -60):
        rows = int(42_000 + 9_000 * math.sin(ago / 500))
        state = State(
            now_ms - ago * 1000, 60 - ago // 60, {"0 dedupe": rows}, {"0 dedupe": rows * 210}, {"0 dedupe": 1}
        )
        history._append(checkpoint(file), history.STATES, state.__dict__)


def watermark(file: Path, batch: int, at_ms: int) -> None:
    path = Path(checkpoint(file)) / "offsets" / str(batch)
    lines = path.read_text().splitlines()
    lines[1] = json.dumps({"batchWatermarkMs": at_ms, "batchTimestampMs": at_ms + 60_000, "conf": {}})
    path.write_text("\n".join(lines))


def checkpoint(file: Path) -> str:
    return Pipeline.from_file(file).checkpoint


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def mended(folder: Path, name: str) -> None:
    """The transform of `with_dead_letters` takes what is no number for 0. Its module gets another name: this
    process keeps what it imported."""
    (folder / f"mended_{name}.py").write_text(CLEAN.replace("1 / 0", "0"))
    file = folder / f"{name}.yaml"
    file.write_text(file.read_text().replace(f"clean_{name}:", f"mended_{name}:"))


def deliver_and_end(file: Path) -> None:
    """Deliver what is there, by a driver that has ended afterwards."""
    code = (
        "import sys; from delivered import Pipeline; from tests.support.without_spark import deliver; deliver(Pipeline"
    )
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", f"{code}.from_file(sys.argv[1]))", str(file)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": root}, check=True)


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """What is in this folder can be imported."""
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.resolve()))
