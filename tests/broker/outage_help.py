"""A pipeline into Pulsar to which something happens at each of some steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from tests.broker.send_help import rows
from tests.support.pulsar import native, sink
from tests.support.servers import Pulsar

from delivered.connectors.log import append
from delivered.crash import CRASH, CRASH_DIR
from delivered.model.identity import Scope
from delivered_lab.supervisor import Hit, hits, kill_tree, release

PER_BATCH = 50


def goes_on(
    pulsar: Pulsar,
    tmp_path: Path,
    harm: Callable[[Callable[[], None]], None],
    in_batches: list[str],
    in_recovery: list[str],
) -> None:
    """A pipeline delivers each row once, although `harm` happens at each of these steps; it goes on when told to."""
    topic, count = pulsar.topic(2), PER_BATCH * (len(in_batches) + 3)
    append(str(tmp_path / "log"), pa.Table.from_batches([rows(count)]), partition_by=2)
    file, folder = tmp_path / "p.json", tmp_path / "hits"
    folder.mkdir()
    pipeline = {
        "pipeline": "p",
        "guarantee": "exactly_once",
        "checkpoint": str(tmp_path / "checkpoint"),
        "source": {"format": "log", "path": str(tmp_path / "log"), "maxOffsetsPerTrigger": PER_BATCH},
        "transform": {"select": ["value"]},
        "sinks": [{"format": "pulsar", **pulsar.options, "topic": topic}],
    }
    file.write_text(json.dumps(pipeline))
    waits = [f"{p}@batch={n}!wait" for n, p in enumerate(in_batches)]
    starts = [
        ",".join([*waits, f"commit.decide:after@batch={len(in_batches)}"]),
        ",".join(f"{p}!wait" for p in in_recovery),
    ]
    met: list[str] = []

    def run(crash: str) -> int | None:
        """Exit code; None: it was killed where the points say so."""
        process = subprocess.Popen(
            [sys.executable, "-m", "delivered_lab.verify.loop", str(file), "--takeover"],
            env={**os.environ, CRASH: crash, CRASH_DIR: str(folder)},
            start_new_session=True,
        )
        seen = {path for path, _ in hits(folder)}
        try:
            while process.poll() is None:
                for path, hit in hits(folder):
                    if path not in seen:
                        seen.add(path)
                        met.append(name(hit))
                        if not hit.point.endswith("!wait"):
                            return None
                        harm(lambda: release(path))  # noqa: B023 - called at once
                time.sleep(0.02)
            return process.returncode
        finally:
            kill_tree(process)
            process.wait()

    failed = 0
    while starts:
        code = run(starts[0])
        if code is None or (code == 0 and len(starts) == 1):
            starts.pop(0)
        else:
            failed += 1
            assert failed <= len(in_batches) + len(in_recovery), f"exit code {code}, after {met}"
    assert sorted(met) == sorted([*in_batches, "commit.decide:after", *in_recovery])
    found = Counter(m.data() for n in range(2) for m in native(pulsar, f"{topic}-partition-{n}"))
    assert found == Counter(b"row %d" % n for n in range(count))
    made, metadata = sink(tmp_path, pulsar, topic), json.loads((tmp_path / "checkpoint" / "metadata").read_text())
    assert made.committer(Scope("p", made.name, metadata["id"])).open_transactions() == []


def name(hit: Hit) -> str:
    return hit.point.partition("@")[0].partition("!")[0]
