"""Producers that are ready before they are needed, kept in the reused worker process.

A transactional id takes 50 to 500 ms to become usable. The id of a shard's next batch is known, so it is made ready in
the background while the current batch runs. A ready producer serves one batch and one attempt, and is never used again:
one epoch, one transaction.

What is sent without transactions borrows a producer and gives it back.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from delivered.connectors.kafka.clients import make_producer
from delivered.connectors.kafka.produce import Producer, ProducerError, ProducerId
from delivered.connectors.kafka.protocol import NoAnswer, Wire
from delivered.connectors.kafka.sink_options import SinkOptions
from delivered.connectors.kafka.transactions import describe
from delivered.model.errors import DeliveredError

log = logging.getLogger(__name__)

READY_MAX = 16
"""Ready transactional producers per process: each holds a few threads and connections."""

READY_AGE_S_MAX = 300.0
IDLE_MAX = 8

_lock = threading.Lock()
_ready: OrderedDict[tuple[str, ...], Ready] = OrderedDict()
_idle: dict[tuple[str, ...], list[Producer]] = {}
_wires: dict[tuple[str, ...], Wire] = {}


class Ready:
    """A transactional producer, or the promise of one."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.producer: Producer | None = None
        self.made_at = time.monotonic()
        self.thrown_away = False


def key_of(config: Mapping[str, str], *more: str) -> tuple[str, ...]:
    return (*more, *(f"{k}={v}" for k, v in sorted(config.items())))


def take(config: Mapping[str, str], work: str, timeout_s: float) -> tuple[Producer, bool]:
    """A transactional producer for one attempt of one shard of one batch; it is the caller's alone.

    Args:
        work: names the attempt; a producer made ready for another is not given.

    Returns:
        The producer, and whether it was made ready before: then somebody may have fenced it since.

    Raises:
        ProducerError: its transactional id could not be taken.
    """
    with _lock:
        ready = _ready.pop(key_of(config, work), None)
    if ready is not None:
        ready.done.wait(timeout_s)
        with _lock:
            producer = ready.producer
            ready.thrown_away = producer is None
        if producer is not None:
            return producer, True
    return started(config, timeout_s), False


def started(config: Mapping[str, str], timeout_s: float) -> Producer:
    """Make a transactional producer and take its id."""
    producer = make_producer(config)
    try:
        producer.start(timeout_s)
    except BaseException:
        producer.close()
        raise
    return producer


def prepare_next(config: Mapping[str, str], work: str, timeout_s: float, also: Callable[[], object]) -> None:
    """Make the producer for a coming attempt ready in the background. Failing is no harm: it is made when needed.

    Args:
        also: run in the same background, for what else the next attempt wants warm.
    """
    key = key_of(config, work)
    old: list[Ready] = []
    with _lock:
        if key in _ready:
            return
        limit = time.monotonic() - READY_AGE_S_MAX
        for k in [k for k, r in _ready.items() if r.made_at < limit]:
            old.append(_ready.pop(k))
        if len(_ready) >= READY_MAX:
            ready = None
        else:
            ready = _ready[key] = Ready()
    for entry in old:
        _drop(entry)
    if ready is not None:
        threading.Thread(
            target=_make, args=(config, ready, timeout_s, also), daemon=True, name="delivered-ready"
        ).start()


def _make(config: Mapping[str, str], ready: Ready, timeout_s: float, also: Callable[[], object]) -> None:
    try:
        producer = started(config, timeout_s)
    except ProducerError as error:
        log.debug("a producer could not be made ready: %s", error)
    else:
        with _lock:
            if not ready.thrown_away:
                ready.producer = producer
        if ready.producer is None:
            producer.close()
        also()
    finally:
        ready.done.set()


def _drop(ready: Ready) -> None:
    with _lock:
        ready.thrown_away = True
        producer, ready.producer = ready.producer, None
    if producer is not None:
        producer.close()


def retire(producer: Producer) -> None:
    """Free a producer whose transaction is somebody else's now, out of the way of the task."""
    threading.Thread(target=producer.close, daemon=True, name="delivered-retire").start()


def holder_of(options: SinkOptions, transactional_id: str) -> ProducerId | None:
    """Who holds a transactional id now, as its coordinator says; None: nobody, or it did not tell."""
    client = options.resolved()
    with _lock:
        wire = _wires.setdefault(key_of(client), Wire(client))
    try:
        found = describe(wire, transactional_id)
    except (NoAnswer, DeliveredError) as error:
        log.debug("who holds %s is not known: %s", transactional_id, error)
        return None
    return None if found is None else ProducerId(found.producer_id, found.epoch)


def borrow(config: Mapping[str, str]) -> Producer:
    """An idle producer without transactions, or a new one; the caller's alone until it is given back."""
    with _lock:
        idle = _idle.get(key_of(config))
        producer = idle.pop() if idle else None
    if producer is None:
        return make_producer(config)
    producer.failures.clear()
    return producer


def give_back(config: Mapping[str, str], producer: Producer) -> None:
    """Keep a producer that has nothing under way for the next shard."""
    with _lock:
        kept = sum(len(v) for v in _idle.values()) < IDLE_MAX
        if kept:
            _idle.setdefault(key_of(config), []).append(producer)
    if not kept:
        retire(producer)


def close_all() -> None:
    """Free everything that is kept ready. No transaction is ended by this."""
    with _lock:
        ready, idle = list(_ready.values()), [p for kept in _idle.values() for p in kept]
        _ready.clear()
        _idle.clear()
    for r in ready:
        _drop(r)
    for producer in idle:
        producer.close()


atexit.register(close_all)
