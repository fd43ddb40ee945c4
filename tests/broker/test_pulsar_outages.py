"""A broker that is killed, or paused, at each step of exactly-once batches into Pulsar, and of their recovery."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.broker.outage_help import goes_on
from tests.support.pulsar import with_coordinators
from tests.support.servers import Pulsar, paused

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
