"""Helpers of tests of sinks without transactions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

import delivered
from delivered.connectors.log import append
from delivered.model.capability import Guarantee
from delivered.model.identity import Scope, Work
from delivered.planner import Plan, Refusal
from delivered_lab.supervisor import run

ROWS = 4_000
SCHEMA = pa.schema([("value", pa.binary())])
POINTS = ("write.send:after", "write.flush:after", "commit.record:before", "log:before")


def rows(count: int, first: int = 0) -> pa.RecordBatch:
    return pa.record_batch([pa.array([b"row %d" % n for n in range(first, first + count)])], schema=SCHEMA)


def writer(made: Any, guarantee: Guarantee = Guarantee.AT_LEAST_ONCE, batch: int = 0) -> Any:
    return made.writer(Work(Scope("p", "s", "i"), batch, 0), guarantee, SCHEMA)


def killed_and_started_again(
    folder: Path,
    sink: dict[str, str],
    guarantee: str,
    point: str,
    taken: Callable[[], Iterable[bytes]],
    transform: dict[str, Any] | None = None,
) -> None:
    """A pipeline from a log of `ROWS` rows in four batches, killed at this point of the second, and restarted.

    Args:
        sink: format and options, without the ledger.
        taken: values of all messages that arrived.
        transform: of the pipeline, instead of the column value; its module is in `folder`.
    """
    append(str(folder / "log"), pa.Table.from_batches([rows(ROWS)]))
    file = folder / "p.yaml"
    pipeline = {
        "pipeline": "p",
        "guarantee": guarantee,
        "checkpoint": str(folder / "checkpoint"),
        "source": {"format": "log", "path": str(folder / "log"), "maxOffsetsPerTrigger": 1_000},
        "transform": transform or {"select": ["value"]},
        "sinks": [{**sink, "ledger": str(folder / "ledger.db")}],
    }
    file.write_text(json.dumps(pipeline))
    command = [sys.executable, "-m", "delivered_lab.verify.loop", str(file)]
    done = run(command, f"{point}@batch=1", folder / "hits", timeout_s=300)
    assert (done.exit_code, done.runs, len(done.kills)) == (0, 2, 1)
    found = Counter(taken())
    if guarantee == "exactly_once":
        assert found == Counter({b"row %d" % n: 1 for n in range(ROWS)})
    elif guarantee == "at_least_once":
        assert set(found) == {b"row %d" % n for n in range(ROWS)}
        # Before the flush, staged rows may have been sent or not.
        twice = {"log:before": {1}, "write.send:after": {1, 2}}.get(point, {2})
        assert max(found.values()) in twice
    else:
        assert max(found.values()) == 1
        told = subprocess.run([*command, "--accounts"], capture_output=True, check=True)
        accounts = json.loads(told.stdout)
        assert ROWS - len(found) <= accounts["given_up"] <= 1_000
        assert (accounts["given_up"] == 0) == (point == "log:before")


def exactly_once_is_refused(folder: Path, name: str, **options: str) -> None:
    """With a way out; the other two guarantees are planned."""

    def plan(guarantee: str) -> Plan | Refusal:
        return delivered.Pipeline(
            name="p",
            guarantee=guarantee,
            checkpoint="/nowhere",
            source=delivered.log("/nowhere/log"),
            sinks=[delivered.endpoint(name, ledger=str(folder / "l.db"), **options)],
        ).plan(offline=True)

    refused = plan("exactly_once")
    assert isinstance(refused, Refusal)
    assert "DELIVERED_SINK_CANNOT_COMMIT" in str(refused)
    assert "at_least_once" in str(refused)
    for guarantee in ("at_least_once", "at_most_once"):
        assert f"p: {guarantee} by" in str(plan(guarantee))
