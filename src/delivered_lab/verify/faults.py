"""The fault catalogue: which fault at which failure point, for which guarantee, sink and source, and what must fire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from delivered import Guarantee
from delivered_lab.supervisor import Hit
from delivered_lab.verify import interference, scripts
from delivered_lab.verify.fixture import HIT_TIMEOUT_S, Fixture
from delivered_lab.verify.interference import (
    OTHERS,
    TRANSACTION_TIMEOUT_S,
    hold_lock,
    kill_broker,
    kill_producer,
    network,
    read_slowly,
    write_as_others,
)
from delivered_lab.verify.proxy import ANSWERED, ASKED, Api, Command, NetworkFault, Rule
from delivered_lab.verify.scripts import (
    TRIES_MAX,
    Script,
    kill_at,
    kills,
    random_kills,
    remove_log_entry,
    shards_changed,
    start_a_second,
    step_name,
    worker_killed,
)
from delivered_lab.verify.services import Run
from delivered_lab.verify.systems import (
    DELTA,
    KAFKA,
    KAFKA_LIBRDKAFKA,
    POSTGRES,
    PULSAR,
    SINK_KINDS,
    SOURCE_KINDS,
    SQLITE,
)
from delivered_lab.verify.systems.base import SinkKind, SourceKind, Statements

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
        script: over a `Fixture`; of both ends, over a world of theirs.
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
    script: Callable[[Any], None]
    requires: tuple[str, ...] = ()
    workload: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    keeps_order: bool = True
    quick: bool = False
    soak: bool = False
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


DROP, LOSE, DELAY = NetworkFault.LOSE_REQUEST, NetworkFault.LOSE_REPLY, NetworkFault.DELAY_REPLY
LATE = NetworkFault.LATE_REQUEST
SOAK_FRAMES = 12
SOAK_STARTS_MAX = 30
"""A lost decision request ends the start; every start meets some of them."""
DECISION = ".decision"
"""Identifies a deciding transaction: one of its statements contains this text."""
_BLACK_HOLE = (
    "for 3 s nothing arrives anywhere, then every connection is reset; twice",
    interference.black_hole,
    ("black hole", "reset") * 2,
)
Harm = Callable[[Fixture, Run, Path], None]
_MOMENTS = ("before", "after")
_SMALL_BATCHES = {"rows_per_batch": 50}
"""Most starts complete a batch; the last ones must still find some."""
_EIGHT_BATCHES = {"rows_per_batch": 150}
_BEFORE, _RECORDED = ("recover.claim:after", "write.stage:before"), ("log:before", "log:after")
_BETWEEN = ("write.prepare:after", "commit.decide:after", "commit.apply:before")
_STORED, _WORKER, _SENDS = "commit.apply:after", "write.prepare:before", "write.prepare:before"
NOTHING = Fault("none", "none", "an undisturbed run", scripts.nothing)
_QUICK_BETWEEN = {(EXACTLY, KAFKA), (AT_LEAST, SQLITE), (AT_MOST, SQLITE)}
_EVERYWHERE = (SQLITE, KAFKA, KAFKA_LIBRDKAFKA, POSTGRES, DELTA)
SOAK_KILLS = 20
PAIRS = ("killed-together", "clocks-differ", "source-lost-end", "stage-rerun")
"""Names of the faults that hit two parts at a time."""
SMALL_BATCHES = {"rows_per_batch": 20}


def catalogue(guarantee: Guarantee, sink: str) -> list[Fault]:
    """Every fault of a guarantee and a sink, ordered by failure point; the undisturbed run first."""
    kind = SINK_KINDS[sink]
    if guarantee not in kind.guarantees:
        return []
    found = [
        NOTHING,
        *_producer(),
        *before_sink(guarantee, kind),
        *_server(guarantee, kind),
        *_memory(guarantee),
        *behind_source(kind),
        *_consumer(guarantee, kind),
        *_zombies(guarantee, kind),
        *_state(guarantee, sink),
        *_pairs(guarantee, kind),
        *_soak(guarantee, kind),
        *([everywhere(kind)] if guarantee is EXACTLY and sink in _EVERYWHERE else ()),
        each_point(guarantee, kind),
    ]
    names = [f.name for f in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two faults of one name: {names}")
    return found


def _producer() -> Iterator[Fault]:
    text = "the producing application is killed twice, and sends again what was not acknowledged"
    yield Fault("producer-killed", "F1", text, interference.producer_killed, ("producer killed",) * 2)
    text = "the producing application is killed right before a send, and after one that it could not note any more"
    yield Fault("producer-killed-at", "F1", text, *interference.producer_killed_at("before", "after"))


def _server(guarantee: Guarantee, kind: SinkKind) -> Iterator[Fault]:
    prepare, decide = (step_name(guarantee, s) for s in ("prepare", "decide"))
    exactly = guarantee is EXACTLY
    if kind.server is not None:
        points = [f"{prepare}:before", f"{decide}:after"]
        if exactly and not kind.two_phase:
            points.insert(1, "commit.apply:after#2")  # inside the deciding transaction
        text = "the server is killed while a shard is sent, and after a batch is decided"
        yield Fault("broker-killed", "F3", text, *interference.broker_killed(*points), needs=(BROKER,))
        # Half messages block nobody, so an open one cannot be detected from outside.
        if exactly and kind.two_phase and not kind.sends:
            restarted = interference.broker_restarted("commit.decide:before", "commit.apply:before")
            text = "the server is restarted with transactions open: before a batch is decided, and before it is applied"
            yield Fault("broker-restarted", "F3", text, *restarted, needs=(BROKER,))
    if kind.server == KAFKA or kind.sends or (kind.two_phase and exactly):
        return
    killed = kills("commit.apply:after#2" if exactly else f"{prepare}:before", f"{decide}:after")
    text = "killed inside the table's own transaction, and right after it"
    yield Fault("killed-in-transaction", "F3", text, *killed, quick=exactly and kind.name == SQLITE)


def _memory(guarantee: Guarantee) -> Iterator[Fault]:
    write, prepare = (step_name(guarantee, s) for s in ("write", "prepare"))
    killed = worker_killed(f"{write}:after", f"{prepare}:before")
    yield Fault("worker-killed", "F4", "one Python worker is killed with what it held", *killed)
    text = "no byte is left on the disk of checkpoint and table"
    yield Fault("disk-full", "F4", text, interference.disk_full, ("disk full",), needs=(MOUNT,))


def _consumer(guarantee: Guarantee, kind: SinkKind) -> Iterator[Fault]:
    sink, exactly, at_most = kind.name, guarantee is EXACTLY, guarantee is AT_MOST
    write, prepare, decide = (step_name(guarantee, s) for s in ("write", "prepare", "decide"))
    before = ["recover.claim:after", f"{write}:before", "recover.abort_orphans:after"]
    if at_most:
        before.insert(1, "batch.begin:after")
    yield Fault("killed-before", "F6a", "killed before a record is processed", *kills(*before))
    between = [f"{write}:after", f"{prepare}:after", f"{decide}:before", f"{decide}:after"]
    if exactly:
        # Recovery finishes the batch that was decided before the kill, and is killed too.
        between += ["recover.apply:before", "recover.apply:after@batch=0"] if kind.two_phase else []
        between += ["commit.apply:before", "commit.apply:after"]
    text = "killed at every step between processing and recording"
    yield Fault("killed-between", "F6b", text, *kills(*between), quick=(guarantee, sink) in _QUICK_BETWEEN)
    text = "killed before and after Spark's own commit log"
    yield Fault("killed-after", "F6c", text, *kills("log:before", "log:after"))
    text = "killed when a batch is prepared, and when a later one is decided"
    yield Fault("killed-twice", "F6b", text, *kills(f"{prepare}:after@batch=1", f"{decide}:after@batch=2"))
    text = "killed once, when the shards of a batch are prepared"
    quick = exactly and sink == SQLITE
    yield Fault("killed-after-staging", "F6b", text, *kills(f"{prepare}:after@batch=1"), quick=quick)
    reading = kills("source.read:before", "source.read:after")
    yield Fault("killed-reading", "F6a", "killed while records are read, through the JVM", *reading, workload="sql")
    text = "killed while records are read, by the task that writes them"
    yield Fault("killed-reading-directly", "F6a", text, *reading)
    # Under at_most_once a second attempt gives its shard up and reaches no further point.
    failing = [f"{write}:after", f"{prepare}:before", f"{prepare}:after"][: 1 if at_most else 3]
    text = f"a task fails {len(failing)} times, and is run again in the same batch"
    yield Fault("task-retried", "F6b", text, *scripts.task_retried(*failing), extra=scripts.RETRIES)
    if kind.format == KAFKA:
        script = scripts.speculation(f"{prepare}:before")
        text = "two attempts of a task at a time, on two hosts: the second one wins, then the first one goes on"
        yield Fault("speculation", "F6b", text, script, ("a speculative attempt won",), needs=(CLUSTER,))
    text = "the transform fails at a record until it is mended"
    yield Fault("poison", "F6a", text, scripts.poison, ("poison met",) * 2, workload="poison")
    if kind.format == KAFKA:
        script = scripts.oversized_given_up if at_most else scripts.oversized
        text = "the sink cannot take a record" + (": it is given up" if at_most else " until its limit is raised")
        yield Fault("oversized", "F6b", text, script, ("record too large",) * (2 - at_most), workload="oversized")
    yield Fault("killed-at-random", "F6b", "killed three times at random moments", *random_kills(3))


def _zombies(guarantee: Guarantee, kind: SinkKind) -> Iterator[Fault]:
    # Paused inside the deciding transaction, or between decide and apply. A driver paused with SQLite's write lock
    # blocks every takeover, which is outside any guarantee.
    exactly = guarantee is EXACTLY
    for step in ("decide", "prepare", *(["apply"] if exactly and kind.name != SQLITE else [])):
        text = f"a driver is paused before {step_name(guarantee, step)}, another takes over, the first wakes up"
        script, quick = scripts.zombie(step, kind.locked), exactly and kind.name == SQLITE and step == "decide"
        yield Fault(f"zombie-{step}", "F7", text, script, ("paused", "woken up"), quick=quick)
    text = "a second driver starts on the checkpoint of a living one"
    yield Fault("second-driver", "F7", text, scripts.second_driver, ("second driver",))
    if exactly and kind.expires:
        short = {"sink": {"transactionTimeout": TRANSACTION_TIMEOUT_S}}
        for name, text, moment, workload in (
            ("before-decide", "prepared transactions expire before the decision", "before", None),
            ("after-decide", "prepared transactions expire after the decision", "after", None),
            ("random", "they expire, and the transform gives other rows the second time", "after", "random"),
            ("random-sql", "the same with uuid() in SQL", "after", "random-sql"),
        ):
            script = interference.expired(moment, workload is None)
            yield Fault(f"expired-{name}", "F7", text, script, ("transactions expired",), workload, short)
        text = "all of a driver is paused with a prepared batch until its transactions expired; then it goes on"
        script, requires = interference.paused_past_timeout, ("paused past the time-out",)
        yield Fault("paused-past-timeout", "F7", text, script, requires, extra=short)
    if exactly and kind.two_phase and kind.statements is not None:
        for name, text, moment, workload in (
            ("before-decide", "somebody rolls back what is prepared, before the decision", "before", None),
            ("after-decide", "somebody rolls back what is prepared, after the decision", "after", None),
            ("random", "the same, and the transform gives other rows the second time", "after", "random"),
        ):
            script = interference.rolled_back(moment, workload is None)
            yield Fault(f"rolled-back-{name}", "F7", text, script, ("prepared transactions rolled back",), workload)


def _state(guarantee: Guarantee, sink: str) -> Iterator[Fault]:
    script: Script
    for name, text, script, fired in (
        ("log-entry-removed", "the last file of commits/ is removed", scripts.log_entry_removed, "last commit removed"),
        (
            "older-checkpoint",
            "an older copy of the checkpoint is put back",
            scripts.older_checkpoint,
            "older checkpoint put back",
        ),
        ("checkpoint-deleted", "the checkpoint is deleted", scripts.checkpoint_deleted, "checkpoint deleted"),
    ):
        quick = guarantee is EXACTLY and sink == SQLITE and name == "log-entry-removed"
        yield Fault(name, "F8", text, script, (fired,), quick=quick)
    prepare, decide = (step_name(guarantee, s) for s in ("prepare", "decide"))
    fires = (f"kill@{prepare}:after", f"kill@{decide}:after")
    text, script = "the number of shards changes over two kills", shards_changed(scripts.by_hint)
    yield Fault("shards-changed", "F8", text, script, fires, workload="sql", keeps_order=False)
    text = "spark.sql.shuffle.partitions of a query with state changes over two kills"
    yield Fault("shuffle-changed", "F8", text, shards_changed(scripts.by_shuffle), fires, workload="windowed")
    if guarantee is EXACTLY and sink == SQLITE:
        text = "the newest state of an aggregate is cut off, and then deleted; it is put back"
        harms = ("state cut off", "state deleted")
        yield Fault("state-damaged", "F8", text, scripts.state_damaged, harms, workload="totals")
    text = "the source's minPartitions, and so the number of shards, changes over two kills"
    script = shards_changed(scripts.by_slices)
    yield Fault("slices-changed", "F8", text, script, fires, needs=(TOPICS,), keeps_order=False)


def _pairs(guarantee: Guarantee, kind: SinkKind) -> Iterator[Fault]:
    """Faults of two parts at a time."""
    exactly = guarantee is EXACTLY
    prepare, decide = (step_name(guarantee, s) for s in ("prepare", "decide"))
    if kind.server is not None:
        between = [
            f"{prepare}:after",
            f"{decide}:before",
            f"{decide}:after",
            *(["commit.apply:after"] if exactly else []),
        ]
        text = "driver and server are killed together; the server is back first by up to 3 s"
        script, fires = scripts.killed_together(*between)
        yield Fault("killed-together", "F3", text, script, fires, needs=(BROKER,))
    if exactly and kind.format == KAFKA:
        text = "the source's log loses its end, which was delivered, and grows past the position"
        needs = (TOPICS, BROKER)
        yield Fault(
            "source-lost-end", "F8", text, scripts.source_lost_end, scripts.LOST_END, needs=needs, keeps_order=False
        )
    # Batches of a sink that shows each one at once are counted from one checkpoint.
    if exactly and kind.two_phase and not kind.sends and not kind.members:
        text = "three checkpoints follow each other, on hosts whose clocks differ by an hour; the second dies decided"
        yield Fault("clocks-differ", "F8", text, scripts.clocks_differ, scripts.CLOCKS)
    if guarantee is AT_MOST:
        text = "a task fails after it sent, and its stage runs again, which numbers it 0 again"
        script, fires = scripts.stage_rerun(f"{prepare}:after", f"{prepare}:before@batch=1")
        yield Fault("stage-rerun", "F6b", text, script, fires, extra=scripts.STAGE_RERUN, needs=(LOOP,))


def _soak(guarantee: Guarantee, kind: SinkKind) -> Iterator[Fault]:
    """Many faults in one case, for their sheer number."""
    text = f"killed {SOAK_KILLS} times at random moments, in small batches"
    yield Fault("soak-kills", "F6b", text, *random_kills(SOAK_KILLS), extra=SMALL_BATCHES, soak=True)
    if kind.format == KAFKA:
        text = "every so many requests one, or its reply, never arrives"
        yield soak_network(guarantee, text, SMALL_BATCHES)


# -- a source and a sink: the few faults that say most about a pair ----------------------------------------------------


def source_catalogue(guarantee: Guarantee, sink: str, source: str) -> list[Fault]:
    """Every fault of a guarantee, a sink and a source; the undisturbed run first.

    The sink's own catalogue runs with one source. Only these depend on the source: what is reread after a kill, a kill
    of its server, and kills of a queue's receivers.
    """
    if guarantee not in SINK_KINDS[sink].guarantees:
        return []
    kind = SOURCE_KINDS[source]
    return [NOTHING, *_source_faults(guarantee, kind), *(_receivers(guarantee) if kind.queue else ())]


def _source_faults(guarantee: Guarantee, source: SourceKind) -> Iterator[Fault]:
    write, decide = (step_name(guarantee, s) for s in ("write", "decide"))
    text = "the producing application is killed before a send, and after one that it could not note: it sends it again"
    yield Fault("producer-killed-at", "F1", text, *interference.producer_killed_at("before", "after"))
    if source.server is not None:
        text = "the server that holds the source is killed while it is sent to and read; unconfirmed sends stay open"
        script = interference.queue_killed if source.queue else interference.source_killed
        fires = ("source killed",)
        yield Fault("source-killed", "F3", text, script, fires, needs=(BROKER,), keeps_order=not source.queue)
    text = "one Python worker is killed with what it held"
    yield Fault("worker-killed", "F4", text, *worker_killed(f"{write}:after"))
    reading = kills("source.read:before", "source.read:after")
    yield Fault("killed-reading-directly", "F6a", "killed while records are read", *reading)
    deciding = kills(f"{decide}:before", f"{decide}:after")
    yield Fault("killed-deciding", "F6b", "killed before a batch is decided, and after", *deciding)
    yield Fault("killed-at-random", "F6b", "killed three times at random moments", *random_kills(3))


def _receivers(guarantee: Guarantee) -> Iterator[Fault]:
    """Redelivered messages come behind others, so order is not judged."""
    decide = step_name(guarantee, "decide")
    text = "the receiver is killed at each of its steps, from taking messages to acknowledging them"
    yield Fault("receiver-killed", "F6c", text, *interference.receiver_killed(), keeps_order=False)
    text = "the receiver is killed three times at random moments"
    yield Fault("receiver-killed-at-random", "F6b", text, *interference.receiver_killed_at_random(3), keeps_order=False)
    both = (("receive.persist:before", f"{decide}:after"), ("receive.ack:before", f"{decide}:before"))
    text = "receiver and driver are killed together, each in the middle of a step"
    yield Fault("both-killed", "F6b", text, *interference.receiver_and_driver_killed(*both), keeps_order=False)
    text = (
        "a receiver is paused with what it took, its server restarts, another one takes all of it; the first wakes up"
    )
    fires = ("receiver paused", "receiver woken up")
    yield Fault("receiver-zombie", "F7", text, interference.receiver_zombie, fires, needs=(BROKER,), keeps_order=False)


# -- the network, and others at work on the same table -----------------------------------------------------------------


def before_sink(guarantee: Guarantee, kind: SinkKind) -> Iterator[Fault]:
    """F2, by kind of sink."""
    if kind.server == KAFKA:
        yield from _kafka(guarantee)
    elif kind.server == PULSAR:
        yield from _pulsar(guarantee)
    elif kind.locks:
        # Prepared shards hold locks themselves, so nobody else can lock the table before the decision.
        step, when = ("write", "its rows are sent") if kind.two_phase else ("decide", "it is decided")
        text = f"another program holds the table for 3 s when a batch comes to the point where {when}"
        yield Fault("lock-held", "F2", text, interference.lock_held(step), ("lock held",))
    if kind.statements is not None:
        yield from _sql(kind.two_phase and guarantee is EXACTLY, kind.statements)
    if kind.sends and kind.server != PULSAR and "F2" not in kind.absent:
        yield from _stream()
    if kind.shared:
        yield from _table_log(guarantee)


def behind_source(kind: SinkKind) -> Iterator[Fault]:
    """F5: for Kafka, the source that feeds it; for others, the reader of the sink."""
    if "F5" in kind.absent:
        return
    if kind.server != KAFKA:
        text = "a reader is in the middle of its read for 3 s while a batch commits"
        yield Fault("slow-reader", "F5", text, interference.slow_reader, ("reader slow",))
        return
    lost = network(
        Rule(Api.FETCH, LOSE, skip=3, times=2),
        Rule(Api.FETCH, DROP, skip=5),
        Rule(Api.FETCH, DELAY, skip=6, seconds=2.0),
    )
    text = "replies of Fetch are lost and delayed between broker and source"
    yield Fault("fetch-lost", "F5", text, *lost, needs=(PROXY,))
    yield Fault("black-hole", "F5", *_BLACK_HOLE, needs=(PROXY,))


def soak_network(guarantee: Guarantee, text: str, extra: dict[str, Any]) -> Fault:
    """Faults in many of Kafka's frames."""
    apis = [Api.PRODUCE] if guarantee is not EXACTLY else [Api.PRODUCE, Api.ADD_PARTITIONS_TO_TXN, Api.END_TXN]
    lost = network(
        *(Rule(a, LOSE, skip=3, times=SOAK_FRAMES, every=11) for a in apis),
        *(Rule(a, DROP, skip=8, times=SOAK_FRAMES, every=11) for a in apis),
        Rule(Api.FETCH, LOSE, skip=5, times=SOAK_FRAMES, every=9),
        most=SOAK_STARTS_MAX,
    )
    return Fault("soak-network", "F2", text, *lost, extra=extra, needs=(PROXY,), soak=True)


def _kafka(guarantee: Guarantee) -> Iterator[Fault]:
    if guarantee is not EXACTLY:
        lost = network(Rule(Api.PRODUCE, LOSE, skip=4), Rule(Api.PRODUCE, DROP, skip=6))
        text = "the reply of one Produce never arrives, and one Produce never arrives"
        yield Fault("produce-lost", "F2", text, *lost, needs=(PROXY,))
        return
    apis = (Api.INIT_PRODUCER_ID, Api.ADD_PARTITIONS_TO_TXN, Api.PRODUCE, Api.END_TXN)
    lost = network(*(Rule(a, LOSE, skip=n) for a, n in zip(apis, (0, 2, 6, 2), strict=True)))
    text = "the reply of one InitProducerId, AddPartitionsToTxn, Produce and EndTxn never arrives"
    yield Fault("replies-lost", "F2", text, *lost, needs=(PROXY,), quick=True)
    dropped = network(*(Rule(a, DROP, skip=n) for a, n in zip(apis, (1, 3, 8, 3), strict=True)))
    text = "one InitProducerId, AddPartitionsToTxn, Produce and EndTxn never arrives"
    yield Fault("requests-lost", "F2", text, *dropped, needs=(PROXY,))
    late = network(Rule(Api.END_TXN, LATE, skip=1, times=2, seconds=2.0), Rule(Api.END_TXN, DELAY, skip=2, seconds=2.0))
    text = "an EndTxn arrives two seconds after its sender gave up on it, another is delayed"
    yield Fault("late-end-txn", "F2", text, *late, needs=(PROXY,))


def _pulsar(guarantee: Guarantee) -> Iterator[Fault]:
    if guarantee is EXACTLY:
        # The ledger's records go through Pulsar's own client.
        ours, other = "delivered", "Pulsar"
        commands = (Command.NEW_TXN, Command.ADD_PARTITION_TO_TXN, Command.SEND, Command.END_TXN)
        named = "one NewTxn, AddPartitionToTxn, Send and EndTxn, and of one Send of the ledger"

        def each(fault: NetworkFault, *skips: int) -> list[Rule]:
            rules = [Rule(c, fault, ours, skip=n) for c, n in zip(commands, skips, strict=True)]
            return [*rules, Rule(Command.SEND, fault, other, skip=4)]

        text = f"the reply of {named} never arrives"
        yield Fault("replies-lost", "F2", text, *network(*each(LOSE, 0, 2, 6, 2), most=8), needs=(PROXY,))
        text = f"the request of {named} never arrives"
        yield Fault("requests-lost", "F2", text, *network(*each(DROP, 1, 3, 8, 3), most=8), needs=(PROXY,))
        late = network(
            Rule(Command.END_TXN, LATE, skip=1, times=2, seconds=2.0),
            Rule(Command.END_TXN, DELAY, skip=2, seconds=2.0),
        )
        text = "an EndTxn arrives two seconds after its sender gave up on it, another is delayed"
        yield Fault("late-end-txn", "F2", text, *late, needs=(PROXY,))
    else:
        lost = network(Rule(Command.SEND, LOSE, skip=4), Rule(Command.SEND, DROP, skip=6))
        text = "the reply of one Send never arrives, and one Send never arrives"
        yield Fault("produce-lost", "F2", text, *lost, needs=(PROXY,))
    yield Fault("black-hole", "F2", *_BLACK_HOLE, needs=(PROXY,))


def _sql(two: bool, words: Statements) -> Iterator[Fault]:
    """Statements that end a transaction. With two phases a shard ends twice: prepared, then committed."""
    shard = (words.prepare, "") if two else ("COMMIT", words.rows)
    named = f"{words.prepare}, {words.commit} and decision's COMMIT" if two else "COMMIT of a shard and a decision"

    def committed(fault: NetworkFault, skip: int, seconds: float = 1.0) -> list[Rule]:
        return [Rule(words.commit, fault, skip=skip, seconds=seconds)] if two else []

    def ended(fault: NetworkFault, by: tuple[str, str], skip: int, seconds: float = 1.0) -> Rule:
        return Rule(by[0], fault, by[1], skip=skip, seconds=seconds)

    decision = ("COMMIT", DECISION)
    lost = network(ended(LOSE, shard, 2), ended(LOSE, decision, 1), *committed(LOSE, 3))
    yield Fault("replies-lost", "F2", f"the server's answer to one {named} never arrives", *lost, needs=(PROXY,))
    dropped = network(ended(DROP, shard, 3), ended(DROP, decision, 2), *committed(DROP, 2))
    yield Fault("requests-lost", "F2", f"one {named} never arrives", *dropped, needs=(PROXY,))
    late = network(ended(LATE, decision, 1, 2.0), ended(DELAY, decision, 1, 2.0), *committed(LATE, 1, 2.0))
    text = "a decision's COMMIT arrives two seconds after its sender gave up on it, the answer to another is late"
    yield Fault("late-commit", "F2", text, *late, needs=(PROXY,))
    yield Fault("black-hole", "F2", *_BLACK_HOLE, needs=(PROXY,))


def _stream() -> Iterator[Fault]:
    """Between a sender and a broker whose protocol the proxy does not know."""
    broken = network(
        Rule(ANSWERED, LOSE, skip=12, times=2, every=9), Rule(ASKED, DROP, skip=20, times=2, every=9), most=6
    )
    text = "the connection breaks four times: what was sent is lost, or what was answered"
    yield Fault("connection-broken", "F2", text, *broken, needs=(PROXY,))
    yield Fault("black-hole", "F2", *_BLACK_HOLE, needs=(PROXY,))


def _table_log(guarantee: Guarantee) -> Iterator[Fault]:
    # After the writer has read the log, before it commits.
    where = "commit.apply:before" if guarantee is EXACTLY else f"{step_name(guarantee, 'prepare')}:before"
    text = "others append to the table, and compact it, between a batch's look at the log and its commit"
    yield Fault("other-writers", "F2", text, *interference.other_writers(where))
    text = "somebody alters the table between a batch's look at the log and its commit"
    yield Fault("table-altered", "F2", text, *interference.table_altered(where))


# -- every failure point in one case -----------------------------------------------------------------------------------


def everywhere(kind: SinkKind) -> Fault:
    """One case that passes every failure point: kills and interference one after the other, each in a later batch.

    A case of one fault says where a guarantee breaks, and starts its pipeline two to nine times for it. A start of a
    query that keeps state takes long: these few starts show that it holds at every failure point. Under exactly_once,
    for a sink without two phases, or Kafka.
    """
    harms = _harms(EXACTLY, kind)
    rules = _replies_lost(EXACTLY, kind)
    server = kind.server is not None
    parts = {
        "F1": tuple(f"producer killed {m} a send" for m in _MOMENTS),
        "F2": _names(rules["F2"]) or harms["F2"][1],
        "F3": ("broker killed",) if server else (f"kill@{_STORED}",),
        "F4": (f"worker killed@{_WORKER}",),
        "F5": _names(rules["F5"]) or harms["F5"][1],
        "F6a": tuple(f"kill@{p}" for p in _BEFORE),
        "F6b": tuple(f"kill@{p}" for p in _BETWEEN),
        "F6c": tuple(f"kill@{p}" for p in _RECORDED),
        "F7": harms["F7"][1],
        "F8": ("last commit removed",),
    }

    def script(fixture: Fixture) -> None:
        # A resent payment would be joined twice, rightly; oracles know the source's records, not how often they came.
        kill_producer(fixture, _MOMENTS, portion=20, again=False)
        _survived(fixture, harms)
        if rules["F2"] or rules["F5"]:
            fixture.proxy.add(*(copy(r) for r in (*rules["F2"], *rules["F5"])))
        if server:
            _broker_killed(fixture)
        _worker_killed(fixture)
        for where in (*_BEFORE, *_BETWEEN, *(() if server else (_STORED,)), *_RECORDED):
            _killed(fixture, where)
        remove_log_entry(fixture)
        fixture.drain()
        if fixture.setting.proxy is not None:
            fixture.proxy.clear()

    text = "every failure point in turn: producer, network, server, worker and driver are killed or disturbed"
    fires = tuple(name for names in parts.values() for name in names)
    needs = (BROKER, PROXY) if server else ()
    return Fault("killed-everywhere", "F6b", text, script, fires, extra=_SMALL_BATCHES, needs=needs, parts=parts)


def each_point(guarantee: Guarantee, kind: SinkKind) -> Fault:
    """The same in the fewest starts that reach every failure point once, under any guarantee and for any sink."""
    write, prepare, decide = (step_name(guarantee, s) for s in ("write", "prepare", "decide"))
    harms, rules, server = _harms(guarantee, kind), _replies_lost(guarantee, kind), kind.server is not None
    before, between, recorded = f"{write}:before", f"{prepare}:after", "log:before"
    stored = _STORED if guarantee is EXACTLY else f"{decide}:after"
    worker = f"{prepare}:before"
    parts = {
        "F1": tuple(f"producer killed {m} a send" for m in _MOMENTS),
        "F3": ("broker killed",) if server else (f"kill@{stored}",),
        "F4": (f"worker killed@{worker}",),
        "F6a": (f"kill@{before}",),
        "F6b": (f"kill@{between}",),
        "F6c": (f"kill@{recorded}",),
        "F8": ("last commit removed",),
        **{place: fires for place, (_, fires, _) in harms.items()},
        **{place: _names(lost) for place, lost in rules.items() if lost},
    }

    def script(fixture: Fixture) -> None:
        kill_producer(fixture, _MOMENTS, portion=40)
        _survived(fixture, harms, before)
        lost = [copy(r) for place in rules.values() for r in place]
        if lost:
            fixture.proxy.add(*lost)
        for where in (between, recorded):
            _killed(fixture, where)
        _worker_killed(fixture, worker)
        if server:
            _broker_killed_once(fixture, worker)
        else:
            _killed(fixture, stored)
        remove_log_entry(fixture)
        fixture.drain()
        if lost:
            fixture.proxy.clear()

    text = "every failure point once, in few starts: the producer, the network, the server, a worker and the driver"
    fires = tuple(name for names in parts.values() for name in names)
    needs = (*((BROKER,) if server else ()), *((PROXY,) if any(rules.values()) else ()))
    return Fault("each-point", "F6b", text, script, fires, extra=_EIGHT_BATCHES, needs=needs, parts=parts)


def _names(rules: Sequence[Rule]) -> tuple[str, ...]:
    return tuple(r.name for r in rules for _ in range(r.times))


def _harms(guarantee: Guarantee, kind: SinkKind) -> Mapping[str, tuple[Harm, tuple[str, ...], str]]:
    """Failure point -> what a run survives, the names that fire, and the step before which it happens."""
    prepare, decide = (step_name(guarantee, s) for s in ("prepare", "decide"))
    found: dict[str, tuple[Harm, tuple[str, ...], str]] = {"F7": (start_a_second, ("second driver",), decide)}
    if kind.server != KAFKA and "F5" not in kind.absent:
        found["F5"] = (read_slowly, ("reader slow",), decide)
    if kind.shared:
        found["F2"] = (write_as_others, OTHERS, "commit.apply" if guarantee is EXACTLY else prepare)
    elif kind.locks and kind.server is None:
        found["F2"] = (hold_lock, ("lock held",), decide)
    return found


def _replies_lost(guarantee: Guarantee, kind: SinkKind) -> Mapping[str, tuple[Rule, ...]]:
    """By failure point; none without a proxy."""
    lose, exactly = NetworkFault.LOSE_REPLY, guarantee is EXACTLY
    if kind.server == KAFKA:
        transaction = (Api.INIT_PRODUCER_ID, Api.ADD_PARTITIONS_TO_TXN, Api.PRODUCE, Api.END_TXN)
        apis = transaction if exactly else (Api.PRODUCE,)
        return {"F2": tuple(Rule(a, lose, skip=1) for a in apis), "F5": (Rule(Api.FETCH, lose, skip=3, times=2),)}
    if kind.server == PULSAR:
        commands = (Command.SEND, Command.END_TXN) if exactly else (Command.SEND,)
        return {"F2": tuple(Rule(c, lose, "delivered" if exactly else "", skip=2) for c in commands), "F5": ()}
    if kind.statements is not None:
        words = kind.statements
        shard = Rule(words.prepare, lose, skip=1) if kind.two_phase and exactly else Rule("COMMIT", lose, words.rows, 1)
        # Tables of the ledger and claims name it, too: a later one decides.
        return {"F2": (shard, Rule("COMMIT", lose, DECISION, skip=4)), "F5": ()}
    if kind.sends and "F2" not in kind.absent:
        return {"F2": (Rule(ANSWERED, lose, skip=30),), "F5": ()}
    return {"F2": (), "F5": ()}


def _survived(
    fixture: Fixture, harms: Mapping[str, tuple[Harm, tuple[str, ...], str]], end: str = "write.stage:before"
) -> None:
    """One start meets each harm in a batch of its own; it is killed at a point of the batch after them."""
    points = [f"{step}:before@batch={n}!wait" for n, (_, _, step) in enumerate(harms.values(), 1)]
    run = fixture.start(",".join([*points, f"{end}@batch={len(harms) + 1}"]))
    for harm, _, _ in harms.values():
        found = run.wait_hit(HIT_TIMEOUT_S)
        if found is not None:
            harm(fixture, run, found[0])
    if (last := _stopped(fixture, run)) is not None:
        fixture.fire(f"kill@{end}", pid=last.pid, facts=dict(last.facts))


def _broker_killed(fixture: Fixture) -> None:
    """The run may survive or fail."""
    run = fixture.start(f"{_SENDS}!wait,log:before")
    found = run.wait_hit(HIT_TIMEOUT_S)
    if found is not None:
        kill_broker(fixture, run, found[0])
    _stopped(fixture, run)


def _broker_killed_once(fixture: Fixture, where: str) -> None:
    """The run may survive or fail; it goes on to the end."""
    for _ in range(TRIES_MAX):
        run = fixture.start(f"{where}!wait")
        found = run.wait_hit(HIT_TIMEOUT_S)
        if found is not None:
            kill_broker(fixture, run, found[0])
        fixture.end(run)
        if found is not None:
            return


def _worker_killed(fixture: Fixture, where: str = _WORKER) -> None:
    for _ in range(TRIES_MAX):
        run = fixture.start(where)
        found = run.wait_hit(HIT_TIMEOUT_S)
        if found is not None and run.kill_one(found[1].pid):
            fixture.fire(f"worker killed@{where}", pid=found[1].pid)
            fixture.end(run)
            return
        fixture.end(run)


def _killed(fixture: Fixture, where: str) -> None:
    """Also if starts before fail, as the network loses replies."""
    for _ in range(TRIES_MAX):
        if kill_at(fixture, where):
            return


def _stopped(fixture: Fixture, run: Run) -> Hit | None:
    """Kill a run at its next point; None: it ended before."""
    found = run.wait_hit(HIT_TIMEOUT_S)
    if found is None:
        fixture.end(run)
        return None
    fixture.kill(run)
    return found[1]
