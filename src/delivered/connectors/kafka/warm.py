"""Warm producers, kept in Spark's reused worker process.

Through librdkafka, a transactional id takes 50 to 500 ms to initialise. The id of a shard's next batch is known, so its
producer is initialised in the background while the current batch runs. It serves one attempt of one batch and is never
reused: one epoch, one transaction. Through Arrow, the id is one request, made when the first rows arrive: half of the
requests made ahead would be for shards that Spark then gives to another worker. Producers without transactions are
pooled.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from delivered.clients.kafka.cluster import Cluster
from delivered.clients.kafka.errors import ProducerError
from delivered.clients.kafka.fallback import Producer
from delivered.clients.kafka.login import NoAnswer
from delivered.clients.kafka.path import SINK_SETTINGS, by_arrow
from delivered.clients.kafka.protocol import Wire, server_name
from delivered.clients.kafka.sender import Sender
from delivered.clients.kafka.transactions import OpenTransaction, Transaction, describe, initialise, producer_id
from delivered.connectors.kafka.sink_options import OWNER, SinkOptions, producer_config
from delivered.connectors.kafka.transactions import transactional_id
from delivered.kits.warm import WarmClients
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.model.limits import OUTAGE_PATIENCE_S
from delivered.model.outcome import Failed, Ok, Unknown
from delivered.model.patience import unanswered, within

log = logging.getLogger(__name__)

READY_MAX = 16
"""Ready transactional producers per process: each holds a few threads and connections."""

READY_AGE_S_MAX = 300.0
START_TIMEOUT_S = OUTAGE_PATIENCE_S
READY_TIMEOUT_S = 2.0
"""For background initialisation. It must not wait out an outage: a late one would fence the task that runs by then."""
IDLE_MAX = 8

IDLE_AGE_S_MAX = 3_600.0
"""An idle sender's producer id is dropped before brokers forget it."""

AnyProducer = Producer | Sender

_lock = threading.Lock()
_ready: OrderedDict[tuple[str, ...], Ready] = OrderedDict()
_idle: WarmClients[AnyProducer] = WarmClients(IDLE_MAX)
_clusters: dict[tuple[str, ...], Cluster] = {}


@dataclass(frozen=True)
class Taken:
    """A transactional producer that holds its id.

    Attributes:
        held: as the coordinator reported it after initialisation. If another producer took the id in between, this is
            that producer's epoch, and all writes of this one are fenced: a transaction that was written in full always
            has this epoch.
    """

    producer: AnyProducer
    held: Transaction


@dataclass(frozen=True)
class Ready:
    """A transactional producer that is, or is being, initialised."""

    taken: Future[Taken]
    made_at: float


def key_of(config: Mapping[str, str], *more: str) -> tuple[str, ...]:
    return (*more, *(f"{k}={v}" for k, v in sorted(config.items())))


def take(options: SinkOptions, work: Work) -> Taken:
    """A transactional producer for one attempt of one shard of one batch; owned by the caller.

    Raises:
        ProducerError: its transactional id could not be initialised.
    """
    name = transactional_id(work)
    with _lock:
        ready = _ready.pop(_key(options, work), None)
    if ready is not None:
        with suppress(Exception):  # then start one here
            taken = ready.taken.result(START_TIMEOUT_S)
            # If the batch has run elsewhere since, another producer holds the id.
            if _holder(options, name) == taken.held:
                return taken
        _drop(ready)
    return _start(options, name)


def is_ready(options: SinkOptions, work: Work) -> bool:
    """Whether to call `take` now. If not, start initialising the producer in the background."""
    if _by_arrow(options):
        return True
    key = _key(options, work)
    with _lock:
        ready = _ready.get(key)
    if ready is None:
        make_ready(options, work)
        return False
    return ready.taken.done()


def _by_arrow(options: SinkOptions) -> bool:
    return by_arrow(OWNER, options.through, options.client, SINK_SETTINGS)


def _start(options: SinkOptions, name: str, timeout_s: float = START_TIMEOUT_S) -> Taken:
    if _by_arrow(options):
        cluster = _cluster(options)
        with within(timeout_s):
            deadline = time.monotonic() + timeout_s
            outcome = initialise(cluster.wire, name, options.transaction_timeout_s * 1000, deadline)
        match outcome:
            case Ok(held):
                config = producer_config(options, Guarantee.EXACTLY_ONCE, name)
                return Taken(Sender(cluster, config, held), held)
            case Failed(reason):
                raise ProducerError(reason.rpartition(": ")[2], reason)
            case Unknown(reason):
                raise ProducerError("_TIMED_OUT", reason)
    producer = Producer(OWNER, producer_config(options, Guarantee.EXACTLY_ONCE, name))
    try:
        with unanswered(server_name(options.client["bootstrap.servers"])):
            producer.start(timeout_s)
        return Taken(producer, _holder(options, name))
    except BaseException:
        producer.close()
        raise


def _holder(options: SinkOptions, name: str) -> Transaction:
    """The present holder of a transactional id, from its coordinator."""
    return state_of(options, name).participant


def state_of(options: SinkOptions, name: str) -> OpenTransaction:
    """The coordinator's state of a transactional id. Raises ProducerError: no answer, or unknown id."""
    try:
        found = describe(_cluster(options).wire, name)
    except NoAnswer as error:
        raise ProducerError("_TIMED_OUT", f"the holder of {name!r} is unknown: {error}") from None
    if found is None:
        raise ProducerError("_STATE", f"the coordinator does not know {name!r}")
    return found


def _cluster(options: SinkOptions) -> Cluster:
    """The process's connections."""
    client = options.resolved()
    key = key_of(client)
    with _lock:
        return _clusters.get(key) or _clusters.setdefault(key, Cluster(Wire(client), client["bootstrap.servers"]))


def _key(options: SinkOptions, work: Work) -> tuple[str, ...]:
    return key_of(options.client, repr(options), repr(work))


def make_ready(options: SinkOptions, work: Work) -> None:
    """Initialise librdkafka's producer of an attempt in the background. If that fails, `take` starts one."""
    if _by_arrow(options):
        return
    key = _key(options, work)
    old: list[Ready] = []
    with _lock:
        if key in _ready:
            return
        limit = time.monotonic() - READY_AGE_S_MAX
        for k in [k for k, r in _ready.items() if r.made_at < limit]:
            old.append(_ready.pop(k))
        while len(_ready) >= READY_MAX:
            old.append(_ready.popitem(last=False)[1])
        ready = _ready[key] = Ready(Future(), time.monotonic())

    def make() -> None:
        try:
            for entry in old:
                _drop(entry)
            ready.taken.set_result(_start(options, transactional_id(work), READY_TIMEOUT_S))
        except BaseException as error:
            log.debug("a producer could not be made ready: %s", error)
            ready.taken.set_exception(error)

    threading.Thread(target=make, daemon=True, name="delivered-ready").start()


def _drop(ready: Ready) -> None:
    """Close an unused producer once it is initialised."""
    ready.taken.add_done_callback(lambda made: None if made.exception() else made.result().producer.close())


def borrow(options: SinkOptions, guarantee: Guarantee) -> AnyProducer:
    """An idle producer without transactions, or a new one; owned by the caller until `give_back`.

    Raises:
        ProducerError: no producer id.
    """
    config = producer_config(options, guarantee, None)
    producer = _idle.take(_idle_key(options, config))
    if isinstance(producer, Sender) and time.monotonic() - producer.used_at > IDLE_AGE_S_MAX:
        producer = None
    if producer is None:
        return _new_sender(options, config, guarantee) if _by_arrow(options) else Producer(OWNER, config)
    producer.failures.clear()
    return producer


def _new_sender(options: SinkOptions, config: Mapping[str, str], guarantee: Guarantee) -> Sender:
    cluster = _cluster(options)
    if guarantee is Guarantee.AT_MOST_ONCE:
        return Sender(cluster, config, None)
    try:
        return Sender(cluster, config, producer_id(cluster.wire))
    except NoAnswer as error:
        raise ProducerError("_TIMED_OUT", str(error)) from None


def _idle_key(options: SinkOptions, config: Mapping[str, str]) -> tuple[str, ...]:
    return key_of(config, options.through)


def give_back(options: SinkOptions, guarantee: Guarantee, producer: AnyProducer) -> None:
    """Return a producer with nothing in flight to the pool."""
    _idle.give(_idle_key(options, producer_config(options, guarantee, None)), producer)


def close_all() -> None:
    """Close all warm producers. Ends no transaction."""
    with _lock:
        ready = list(_ready.values())
        _ready.clear()
    for r in ready:
        _drop(r)
    _idle.clear()


atexit.register(close_all)
