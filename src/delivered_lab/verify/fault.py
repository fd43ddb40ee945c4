"""What a fault is, the failure points, and what a fault may need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from delivered.model.guarantee import Guarantee
from delivered_lab.verify.scripts import Script

PLACES = {
    "none": "an undisturbed run",
    "F1": "the producer crashes",
    "F2": "the network between sink and server drops, delays, repeats",
    "F3": "the server crashes after it stored and before it answered",
    "F4": "out of memory, disk full",
    "F5": "the network between server and reader drops and delays",
    "F6a": "the consumer crashes before processing",
    "F6b": "the consumer crashes after processing, before recording",
    "F6c": "the consumer crashes after recording, before acknowledging",
    "F7": "zombies: paused beyond every time-out, two drivers",
    "F8": "state is restored from a copy or modified",
}
EXACTLY, AT_LEAST, AT_MOST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE

PROXY, BROKER, MOUNT, CLUSTER, TOPICS, LOOP = "proxy", "broker", "mount", "cluster", "topics", "loop"


@dataclass(frozen=True)
class Fault:
    """
    Attributes:
        place: one of `PLACES`.
        requires: names that must fire, each as often as it is listed.
        parts: those of `requires` by failure point, if the case passes several; `place` is then one of them.
        workload: the one that this fault needs; None: the case's.
        extra: more keys of the pipeline file.
        needs: PROXY: the pipeline reaches its sink's server through one; BROKER: a server that may be killed; MOUNT: a
            small disk of its own; CLUSTER: a Spark with executors on several hosts; TOPICS: a source that reads topics;
            LOOP: the loop without Spark, which numbers tasks as the fault wants.
        keeps_order: whether effects of a key must still be in order.
        quick: part of the quick subset; soak: part of the soak only.
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
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
