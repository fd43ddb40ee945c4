"""The fault catalogue: which fault at which failure point, for which guarantee and sink, and what must fire; and the
faults of a source and a sink together."""

from __future__ import annotations

from collections.abc import Iterator

from delivered.model.guarantee import Guarantee
from delivered_lab.verify import interference, pairs, receivers, scripts, two_drivers
from delivered_lab.verify.everywhere import everywhere
from delivered_lab.verify.fault import AT_LEAST, AT_MOST, BROKER, CLUSTER, EXACTLY, LOOP, MOUNT, TOPICS, Fault
from delivered_lab.verify.interference import TRANSACTION_TIMEOUT_S
from delivered_lab.verify.network_faults import before_sink, behind_source, soak_network
from delivered_lab.verify.scripts import Script, kills, point, random_kills, shards_changed, worker_killed
from delivered_lab.verify.systems import DELTA, KAFKA, KAFKA_LIBRDKAFKA, POSTGRES, SINK_KINDS, SOURCE_KINDS, SQLITE
from delivered_lab.verify.systems.base import SinkKind, SourceKind

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
    prepare, decide = (point(guarantee, s) for s in ("prepare", "decide"))
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
    write, prepare = (point(guarantee, s) for s in ("write", "prepare"))
    killed = worker_killed(f"{write}:after", f"{prepare}:before")
    yield Fault("worker-killed", "F4", "one Python worker is killed with what it held", *killed)
    text = "no byte is left on the disk of checkpoint and table"
    yield Fault("disk-full", "F4", text, interference.disk_full, ("disk full",), needs=(MOUNT,))


def _consumer(guarantee: Guarantee, kind: SinkKind) -> Iterator[Fault]:
    sink, exactly, at_most = kind.name, guarantee is EXACTLY, guarantee is AT_MOST
    write, prepare, decide = (point(guarantee, s) for s in ("write", "prepare", "decide"))
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
        text = f"a driver is paused before {point(guarantee, step)}, another takes over, the first wakes up"
        script, quick = two_drivers.zombie(step, kind.locked), exactly and kind.name == SQLITE and step == "decide"
        yield Fault(f"zombie-{step}", "F7", text, script, ("paused", "woken up"), quick=quick)
    text = "a second driver starts on the checkpoint of a living one"
    yield Fault("second-driver", "F7", text, two_drivers.second_driver, ("second driver",))
    if exactly and kind.format == KAFKA:
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
    prepare, decide = (point(guarantee, s) for s in ("prepare", "decide"))
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
    prepare, decide = (point(guarantee, s) for s in ("prepare", "decide"))
    if kind.server is not None:
        between = [
            f"{prepare}:after",
            f"{decide}:before",
            f"{decide}:after",
            *(["commit.apply:after"] if exactly else []),
        ]
        text = "driver and server are killed together; the server is back first by up to 3 s"
        script, fires = pairs.killed_together(*between)
        yield Fault("killed-together", "F3", text, script, fires, needs=(BROKER,))
    if exactly and kind.format == KAFKA:
        text = "the source's log loses its end, which was delivered, and grows past the position"
        needs = (TOPICS, BROKER)
        yield Fault(
            "source-lost-end", "F8", text, pairs.source_lost_end, pairs.LOST_END, needs=needs, keeps_order=False
        )
    # Batches of a sink that shows each one at once are counted from one checkpoint.
    if exactly and kind.two_phase and not kind.sends and not kind.members:
        text = "three checkpoints follow each other, on hosts whose clocks differ by an hour; the second dies decided"
        yield Fault("clocks-differ", "F8", text, pairs.clocks_differ, pairs.CLOCKS)
    if guarantee is AT_MOST:
        text = "a task fails after it sent, and its stage runs again, which numbers it 0 again"
        script, fires = pairs.stage_rerun(f"{prepare}:after", f"{prepare}:before@batch=1")
        yield Fault("stage-rerun", "F6b", text, script, fires, extra=pairs.STAGE_RERUN, needs=(LOOP,))


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
    return [NOTHING, *_of_source(guarantee, kind), *(_receivers(guarantee) if kind.queue else ())]


def _of_source(guarantee: Guarantee, source: SourceKind) -> Iterator[Fault]:
    write, decide = (point(guarantee, s) for s in ("write", "decide"))
    text = "the producing application is killed before a send, and after one that it could not note: it sends it again"
    yield Fault("producer-killed-at", "F1", text, *interference.producer_killed_at("before", "after"))
    if source.server is not None:
        text = "the server that holds the source is killed while it is sent to and read; unconfirmed sends stay open"
        script = receivers.queue_killed if source.queue else interference.source_killed
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
    decide = point(guarantee, "decide")
    text = "the receiver is killed at each of its steps, from taking messages to acknowledging them"
    yield Fault("receiver-killed", "F6c", text, *receivers.killed(), keeps_order=False)
    text = "the receiver is killed three times at random moments"
    yield Fault("receiver-killed-at-random", "F6b", text, *receivers.killed_at_random(3), keeps_order=False)
    both = (("receive.persist:before", f"{decide}:after"), ("receive.ack:before", f"{decide}:before"))
    text = "receiver and driver are killed together, each in the middle of a step"
    yield Fault("both-killed", "F6b", text, *receivers.killed_with_driver(*both), keeps_order=False)
    text = (
        "a receiver is paused with what it took, its server restarts, another one takes all of it; the first wakes up"
    )
    fires = ("receiver paused", "receiver woken up")
    yield Fault("receiver-zombie", "F7", text, receivers.zombie, fires, needs=(BROKER,), keeps_order=False)
