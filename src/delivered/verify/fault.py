"""What a fault is, the failure points, and what a fault may need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from delivered.model.guarantee import Guarantee
from delivered.verify.scripts import Script

PLACES = {
    "none": "nothing is done",
    "F1": "the producer dies",
    "F2": "the network between sink and server loses, delays, repeats",
    "F3": "the server dies after it stored and before it answered",
    "F4": "memory is gone, the disk is full",
    "F5": "the network between server and reader loses and delays",
    "F6a": "the consumer dies before processing",
    "F6b": "the consumer dies after processing, before recording",
    "F6c": "the consumer dies after recording, before acknowledging",
    "F7": "zombies: paused past every time-out, two drivers",
    "F8": "state is put back or changed",
}
EXACTLY, AT_LEAST, AT_MOST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE

PROXY, BROKER, MOUNT, CLUSTER, TOPICS = "proxy", "broker", "mount", "cluster", "topics"


@dataclass(frozen=True)
class Fault:
    """
    Attributes:
        place: one of `PLACES`.
        requires: names that must fire, each as often as it stands here.
        workload: the one that this fault needs; None: the case's.
        extra: more keys of the pipeline file.
        needs: PROXY: the pipeline reaches its sink's server through one; BROKER: a server that may be killed; MOUNT: a
            small disk of its own; CLUSTER: a Spark with executors on several hosts; TOPICS: a source that reads
            topics.
        keeps_order: whether a key's effects must still come in order.
        quick: part of the quick subset; soak: part of the soak alone.
    """

    name: str
    place: str
    text: str
    script: Script
    requires: tuple[str, ...] = ()
    workload: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    keeps_order: bool = True
    quick: bool = False
    soak: bool = False
