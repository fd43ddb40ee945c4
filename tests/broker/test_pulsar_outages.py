"""A broker that is killed, or paused, at each step of exactly-once batches into Pulsar, and of their recovery."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.broker.send_help import rows
from tests.support.pulsar import native, sink, with_coordinators
from tests.support.servers import Pulsar, paused

from delivered.connectors.log import append
from delivered.crash import CRASH, CRASH_DIR
from delivered.model.identity import Scope
from delivered_lab.supervisor import Hit, hits, kill_tree, release

PER_BATCH = 50
WRITING = [f"write.{step}:{moment}" for step in ("stage", "prepare") for moment in ("before", "after")]
DECIDING = [f"{step}:{moment}" for step in ("commit.decide", "commit.apply", "log") for moment in ("before", "after")]
"""Each in a batch of its own. The driver is killed in the next one, which is decided, so recovery applies it."""
RECOVERY = [
    f"recover.{step}:{moment}" for step in ("claim", "apply", "abort_orphans") for moment in ("before", "after")
]
PARTS = {"writing": (WRITING, []), "deciding": (DECIDING, []), "recovery": ([], RECOVERY)}
"""Steps of batches and of the start after them; each part ends within minutes, each step a broker's restart."""
WAIT_S = 300.0
_CLOSE_WAIT = "08"


def until(fact: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def sockets(pulsar: Pulsar) -> Iterator[tuple[str, int]]:
    """State, and bytes that nobody has read, of each connection to the broker."""
    ports = {int(address.rpartition(":")[2]) for address in pulsar.broker.listeners.values()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state, queues = (line.split()[n] for n in (1, 3, 4))
            if int(local.rpartition(":")[2], 16) in ports:
                yield state, int(queues.rpartition(":")[2], 16)


Harm = Callable[[Pulsar, Callable[[], None]], None]


def killed(pulsar: Pulsar, go_on: Callable[[], None]) -> None:
    pulsar.broker.kill()
    go_on()
    pulsar.broker.restart()


def unloaded(pulsar: Pulsar, go_on: Callable[[], None]) -> None:
    """As when topics and coordinators move to another broker: producers are closed, and what is loaded is forgotten."""
    for namespace in ("pulsar/system", "public/default"):
        pulsar.admin("PUT", f"namespaces/{namespace}/unload")
    go_on()


def paused_for_a_moment(pulsar: Pulsar, go_on: Callable[[], None]) -> None:
    """Until it has been asked for something."""
    with paused(pulsar):
        go_on()
        until(lambda: any(unread for _, unread in sockets(pulsar)), "nobody asked the paused broker for anything")


def paused_past_the_timeout(pulsar: Pulsar, go_on: Callable[[], None]) -> None:
    """Until who asked has hung up: the broker does what it was asked for when nobody expects it any more."""
    with paused(pulsar):
        go_on()
        gave_up = lambda: any(state == _CLOSE_WAIT and unread for state, unread in sockets(pulsar))  # noqa: E731
        until(gave_up, "nobody gave the paused broker up")


@pytest.mark.matrix
@pytest.mark.parametrize("harm", [killed, unloaded, paused_for_a_moment, paused_past_the_timeout])
@pytest.mark.parametrize("part", PARTS)
def test_a_broker_that_fails_at_each_step(
    new_pulsar: Callable[..., Pulsar], tmp_path: Path, harm: Harm, part: str
) -> None:
    pulsar = new_pulsar()
    with_coordinators(pulsar, 16)
    goes_on(pulsar, tmp_path, lambda go_on: harm(pulsar, go_on), *PARTS[part])


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
            kill_tree(process.pid)
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
