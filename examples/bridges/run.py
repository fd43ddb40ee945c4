"""One bridge from its servers to what arrived, with kills in the middle."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from examples.bridges.alive import Alive
from examples.bridges.bridge import Bridge, order_id

from delivered_lab import brokers
from delivered_lab.brokers import Broker

BATCH_ROWS = 500
PORTION = 3_000
"""Orders sent at the start, and again after every kill of the pipeline: each kill meets a pipeline that has work."""
KILLS = (
    "write.prepare:after@batch=1",  # a shard promised to commit, nothing is decided
    "commit.decide:after@batch=3",  # the batch counts, Spark has not heard of it
    "commit.apply:after@batch=5",  # one shard of the batch is in its place, the next is not
)
RECEIVER_KILLS = (
    "receive.persist:before#3!kill",  # messages taken and nowhere written; the other receiver goes on
    "receive.ack:before#45",  # messages in the log, and the queue does not know; all receivers die
)
RANDOM_BATCHES = range(7, 10)
"""In one of them the driver is killed at a random moment, and what it had started is left alone."""
TIMEOUT_S = 400.0
"""Of one bridge; a quiet machine takes a minute and a half."""
_POLL_S = 0.02
_COUNT_EVERY_S = 0.5
_DELIVERED = [sys.executable, "-m", "delivered.cli.main"]
_HERE = Path(__file__).parent
_JVM = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""A JVM that lives for ten seconds starts faster without its optimising compiler."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Arrived:
    """What became of the orders of one bridge, counted with the sink's own client.

    Attributes:
        file: the pipeline's.
        lost: orders that were sent and are not there.
        duplicated: copies beyond the first one.
        strange: ids that nobody sent.
        kills, receiver_kills: where, in their order.
    """

    bridge: str
    file: Path
    sent: int
    delivered: int
    lost: int
    duplicated: int
    strange: int
    kills: tuple[str, ...]
    receiver_kills: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """
    Attributes:
        audit: the verdict of `delivered audit`: "held" is what is hoped for.
        audited: its own counts.
    """

    arrived: Arrived
    audit: str
    audited: Mapping[str, int]

    @property
    def clean(self) -> bool:
        arrived, audited = self.arrived, self.audited
        same = audited["sent"] == audited["delivered"] == arrived.sent
        return same and self.audit == "held" and not (arrived.lost or arrived.duplicated or arrived.strange)


def run(bridge: Bridge, folder: Path, say: Say) -> Result:
    """With servers of its own, that are gone when this returns."""
    with ExitStack() as stack:
        servers = {
            kind: stack.enter_context(brokers.start(kind, folder / kind, dies_with_parent=True, say=say))
            for kind in bridge.servers
        }
        arrived = across(bridge, servers, folder, say)
        say("delivered audit")
        report = _audit(arrived.file)
        return Result(arrived, report["verdict"], report["counts"])


def across(
    bridge: Bridge,
    servers: Mapping[str, Broker],
    folder: Path,
    say: Say,
    *,
    kills: Sequence[str] = KILLS,
    receiver_kills: Sequence[str] = RECEIVER_KILLS,
    random_kill: bool = True,
) -> Arrived:
    """With servers that run.

    Args:
        folder: for the pipeline's file, checkpoint and logs; made if it is missing.

    Raises:
        RuntimeError: a command ended by itself, or a crash point was never met: the numbers would show nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with closing(bridge), ExitStack() as stack:
        file = _pipeline_file(bridge, bridge.open(servers, folder), folder)
        receivers = None
        if bridge.received:
            command = [*_DELIVERED, "receive", str(file), "--processes", "2"]
            receivers = stack.enter_context(_alive(command, receiver_kills, folder / "receivers", say))
            _until(lambda: (folder / "log" / "_delta_log").exists(), "the receivers made their log", receivers)
        pipeline = stack.enter_context(_alive([*_DELIVERED, "run", str(file)], kills, folder / "spark", say))
        sent = _drive(bridge, pipeline, receivers, folder / "checkpoint", random_kill, say)
        pipeline.stop()
        if receivers is not None:
            receivers.stop()
        found = bridge.found()
    wanted = {order_id(n) for n in range(sent)}
    return Arrived(
        bridge=bridge.name,
        file=file,
        sent=sent,
        delivered=sum(found.values()),
        lost=len(wanted - found.keys()),
        duplicated=sum(found[i] - 1 for i in wanted & found.keys()),
        strange=len(found.keys() - wanted),
        kills=tuple(pipeline.kills),
        receiver_kills=tuple(receivers.kills) if receivers is not None else (),
    )


def _drive(
    bridge: Bridge, pipeline: Alive, receivers: Alive | None, checkpoint: Path, random_kill: bool, say: Say
) -> int:
    """Send, kill and wait until all is there, or nothing moves any more. Returns how many orders were sent."""
    batch = random.choice(RANDOM_BATCHES) if random_kill else None
    sent, portions, counted, counted_at = 0, 0, 0, 0.0
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        pipeline.look()
        if receivers is not None:
            receivers.look()
        if portions <= len(pipeline.kills):
            bridge.send(range(sent, sent + PORTION))
            sent, portions = sent + PORTION, portions + 1
            say(f"{sent:,} orders sent")
        if batch is not None and (checkpoint / "offsets" / str(batch)).exists():
            time.sleep(random.uniform(0, 0.3))
            pipeline.kill_alone(f"a random moment, batch {batch} or next")
            batch = None
        done = batch is None and not pipeline.left and (receivers is None or not receivers.left)
        if done and portions > len(pipeline.kills) and time.monotonic() - counted_at > _COUNT_EVERY_S:
            counted = len(bridge.found())
            counted_at = time.monotonic()
            if counted >= sent:
                return sent
        if time.monotonic() > deadline:
            if done:
                return sent  # the result says what is missing
            raise RuntimeError(f"after {TIMEOUT_S:.0f} s crash points were not met; see {pipeline.log}")
        time.sleep(_POLL_S)


def _pipeline_file(bridge: Bridge, here: Mapping[str, Any], folder: Path) -> Path:
    """What a user would write, with the addresses and folders of this run."""
    pipeline = yaml.safe_load((_HERE / f"{bridge.name}.yaml").read_text(encoding="utf-8"))
    pipeline |= {"checkpoint": str(folder / "checkpoint"), "master": "local[2]", "spark": _JVM}
    pipeline["source"]["maxOffsetsPerTrigger"] = BATCH_ROWS
    for dotted, value in here.items():
        place, _, name = dotted.partition(".")
        target = pipeline["sinks"][0] if place == "sink" else pipeline[place]
        target[name] = value
    file = folder / f"{bridge.name}.yaml"
    file.write_text(yaml.safe_dump(pipeline, sort_keys=False), encoding="utf-8")
    return file


@contextmanager
def _alive(command: Sequence[str], crashes: Sequence[str], folder: Path, say: Say) -> Iterator[Alive]:
    made = Alive(command, crashes, folder, say)
    try:
        yield made
    finally:
        made.end()


def _until(fact: Callable[[], bool], what: str, command: Alive) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not fact():
        command.look()
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited in vain until {what}")
        time.sleep(_POLL_S)


def _audit(file: Path) -> dict[str, Any]:
    done = subprocess.run([*_DELIVERED, "audit", str(file), "-o", "json"], capture_output=True, text=True, check=False)
    try:
        said: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"the audit ended with {done.returncode}: {done.stderr[-3_000:]}") from None
    return said
