"""Warm producers, kept in Spark's reused worker process.

A transactional id is initialised when the first rows of its attempt arrive, and never ahead: late, it would fence the
worker that Spark gave the shard to (decision 093). It serves one attempt of one batch: one epoch, one transaction.
Producers without transactions are pooled.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from delivered.clients.kafka.cluster import Cluster
from delivered.clients.kafka.errors import ProducerError
from delivered.clients.kafka.fallback import Producer
from delivered.clients.kafka.login import NoAnswer
from delivered.clients.kafka.partition_state import open_in
from delivered.clients.kafka.path import SINK_SETTINGS, by_arrow
from delivered.clients.kafka.protocol import Wire, server_name
from delivered.clients.kafka.sender import Sender
from delivered.clients.kafka.transactions import OpenTransaction, Transaction, describe, initialise, producer_id
from delivered.connectors.kafka.partitions import written_partitions
from delivered.connectors.kafka.sink_options import OWNER, SinkOptions, producer_config
from delivered.connectors.kafka.transactions import transactional_id
from delivered.kits.warm import WarmClients
from delivered.model.errors import DeliveredError
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.model.limits import OUTAGE_PATIENCE_S, REQUEST_TIMEOUT_S
from delivered.model.outcome import Failed, Ok, Unknown
from delivered.model.patience import unanswered, within

START_TIMEOUT_S = OUTAGE_PATIENCE_S
IDLE_MAX = 8

IDLE_AGE_S_MAX = 3_600.0
"""An idle sender's producer id is dropped before brokers forget it."""

AnyProducer = Producer | Sender

_lock = threading.Lock()
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


def key_of(config: Mapping[str, str], *more: str) -> tuple[str, ...]:
    return (*more, *(f"{k}={v}" for k, v in sorted(config.items())))


def _by_arrow(options: SinkOptions) -> bool:
    return by_arrow(OWNER, options.through, options.client, SINK_SETTINGS)


def take(options: SinkOptions, work: Work) -> Taken:
    """A transactional producer for one attempt of one shard of one batch; owned by the caller.

    Raises:
        ProducerError: its transactional id could not be initialised.
    """
    name = transactional_id(work)
    if _by_arrow(options):
        cluster = _cluster(options)
        with within(START_TIMEOUT_S):
            deadline = time.monotonic() + START_TIMEOUT_S
            delays: list[None] = [] if work.attempt == 0 else [None]
            outcome = initialise(
                cluster.wire, name, options.transaction_timeout_s * 1000, deadline, lambda: delays.append(None)
            )
        match outcome:
            case Ok(held):
                if delays:  # another attempt's transaction was ended just now
                    _check_ended(cluster.wire, options, work, held)
                config = producer_config(options, Guarantee.EXACTLY_ONCE, name)
                return Taken(Sender(cluster, config, held), held)
            case Failed(reason):
                raise ProducerError(reason.rpartition(": ")[2], reason)
            case Unknown(reason):
                raise ProducerError("_TIMED_OUT", reason)
    producer = Producer(OWNER, producer_config(options, Guarantee.EXACTLY_ONCE, name))
    try:
        with unanswered(server_name(options.client["bootstrap.servers"])):
            producer.start(START_TIMEOUT_S)
        held = state_of(options, name).participant
        _check_ended(_cluster(options).wire, options, work, held)
        return Taken(producer, held)
    except BaseException:
        producer.close()
        raise


def _check_ended(wire: Wire, options: SinkOptions, work: Work, held: Transaction) -> None:
    """Refuse an id whose last transaction is still open in a partition: this one's end would be that one's, too (P28).

    Not needed if the id was free at once: the driver has checked what earlier batches left.
    """
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    try:
        open_there, _ = open_in(wire, written_partitions(wire, options, work.scope), {held.producer_id}, deadline)
    except NoAnswer as error:
        raise ProducerError("_TIMED_OUT", f"the partitions of {held.transactional_id!r}: {error}") from None
    if open_there:
        raise DeliveredError(
            "TRANSACTION_HANGING",
            f"The previous transaction of {held.transactional_id}, producer {held.producer_id}, epoch "
            f"{open_there[0].epoch}, is reported as ended, but is still open in "
            f"{', '.join(map(str, open_there[:5]))}. Nothing was written with this id.",
            next_step="nothing if another attempt of the task succeeds; otherwise start again: recovery ends it",
        )


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
    _idle.clear()


atexit.register(close_all)
