"""What is done to a source and a sink together: few faults, which say most of a pair.

The sink's own catalogue is run with one source; what changes with the source is what is read again after a death, the
death of the server that holds it, and of the receivers of a queue that queue.
"""

from __future__ import annotations

from collections.abc import Iterator

from delivered.model.guarantee import Guarantee
from delivered.verify import receivers, scripts
from delivered.verify.fault import BROKER, Fault
from delivered.verify.random_kills import random_kills
from delivered.verify.systems import SINK_KINDS, SOURCE_KINDS
from delivered.verify.systems.base import SourceKind


def source_catalogue(guarantee: Guarantee, sink: str, source: str) -> list[Fault]:
    """Every fault of a guarantee, a sink and a source; the undisturbed run first."""
    if guarantee not in SINK_KINDS[sink].guarantees:
        return []
    kind = SOURCE_KINDS[source]
    return [
        Fault("none", "none", "an undisturbed run", scripts.nothing),
        *_any(guarantee, kind),
        *(_receivers(guarantee) if kind.queue else ()),
    ]


def _any(guarantee: Guarantee, source: SourceKind) -> Iterator[Fault]:
    write, decide = (scripts.point(guarantee, s) for s in ("write", "decide"))
    script, requires = scripts.producer_killed_at("before", "after")
    text = "the producing application is killed before a send, and after one that it could not note: it sends it again"
    yield Fault("producer-killed-at", "F1", text, script, requires)
    if source.server is not None:
        text = "the server that holds the source is killed while it is sent to and read; unconfirmed sends stay open"
        script = receivers.queue_killed if source.queue else scripts.source_killed
        fired, needs = ("source killed",), frozenset({BROKER})
        yield Fault("source-killed", "F3", text, script, fired, needs=needs, keeps_order=not source.queue)
    script, requires = scripts.worker_killed(f"{write}:after")
    yield Fault("worker-killed", "F4", "one Python worker is killed with what it held", script, requires)
    script, requires = scripts.kills("source.read:before", "source.read:after")
    yield Fault("killed-reading-directly", "F6a", "killed while records are read", script, requires)
    script, requires = scripts.kills(f"{decide}:before", f"{decide}:after")
    yield Fault("killed-deciding", "F6b", "killed before a batch is decided, and after", script, requires)
    script, requires = random_kills(3)
    yield Fault("killed-at-random", "F6b", "killed three times at random moments", script, requires)


def _receivers(guarantee: Guarantee) -> Iterator[Fault]:
    """Messages that come again come behind others: order is not judged."""
    decide = scripts.point(guarantee, "decide")
    script, requires = receivers.killed()
    text = "the receiver is killed at each of its steps, from taking messages to acknowledging them"
    yield Fault("receiver-killed", "F6c", text, script, requires, keeps_order=False)
    script, requires = receivers.killed_at_random(3)
    text = "the receiver is killed three times at random moments"
    yield Fault("receiver-killed-at-random", "F6b", text, script, requires, keeps_order=False)
    script, requires = receivers.killed_with_driver(
        ("receive.persist:before", f"{decide}:after"), ("receive.ack:before", f"{decide}:before")
    )
    text = "receiver and driver are killed together, each in the middle of a step"
    yield Fault("both-killed", "F6b", text, script, requires, keeps_order=False)
    text = (
        "a receiver is paused with what it took, its server restarts, another one takes all of it; the first wakes up"
    )
    fired, needs = ("receiver paused", "receiver woken up"), frozenset({BROKER})
    yield Fault("receiver-zombie", "F7", text, receivers.zombie, fired, needs=needs, keeps_order=False)
