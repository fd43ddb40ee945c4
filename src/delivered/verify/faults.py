"""The catalogue: which fault at which failure point, for which guarantee and sink, and what must fire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from delivered.model.guarantee import Guarantee
from delivered.verify import attempts, expiry, scripts, tables
from delivered.verify.proxy import Api, Rule
from delivered.verify.proxy_sql import SqlRule
from delivered.verify.random_kills import random_kills
from delivered.verify.scripts import Script, kills
from delivered.verify.sinks import DELTA, FILES, KAFKA, POSTGRES, SINK_KINDS, SQLITE, SinkKind
from delivered.verify.wire import Mischief

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
        workload: the one that this fault needs; None: the cell's.
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
    needs: frozenset[str] = frozenset()
    keeps_order: bool = True
    quick: bool = False
    soak: bool = False


def catalogue(guarantee: Guarantee, sink: str) -> list[Fault]:
    """Every fault of a guarantee and a sink, in the order of failure points; the undisturbed run first."""
    kind = SINK_KINDS[sink]
    found = [
        Fault("none", "none", "an undisturbed run", scripts.nothing),
        *_producer(),
        *(_kafka_network(guarantee) if sink == KAFKA else _others(kind)),
        *(_sql_network(guarantee, kind) if kind.server == POSTGRES else ()),
        *(_table_log(guarantee) if sink == DELTA else ()),
        *_server(guarantee, kind),
        *_memory(guarantee),
        *_reader(sink),
        *_consumer(guarantee, kind),
        *_zombies(guarantee, kind),
        *_state(guarantee, sink),
        *_soak(guarantee, sink),
    ]
    names = [f.name for f in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two faults of one name: {names}")
    return found


def _producer() -> Iterator[Fault]:
    yield Fault(
        "producer-killed",
        "F1",
        "the producing application is killed twice, and sends again what it was not told about",
        scripts.producer_killed,
        ("producer killed",) * 2,
    )
    script, requires = scripts.producer_killed_at("before", "after")
    text = "the producing application is killed right before a send, and after one that it could not note any more"
    yield Fault("producer-killed-at", "F1", text, script, requires)


def _kafka_network(guarantee: Guarantee) -> Iterator[Fault]:
    if guarantee is EXACTLY:
        for name, text, rules in (
            (
                "replies-lost",
                "the reply of one InitProducerId, AddPartitionsToTxn, Produce and EndTxn never arrives",
                [
                    Rule(Api.INIT_PRODUCER_ID, Mischief.LOSE_REPLY),
                    Rule(Api.ADD_PARTITIONS_TO_TXN, Mischief.LOSE_REPLY, skip=2),
                    Rule(Api.PRODUCE, Mischief.LOSE_REPLY, skip=6),
                    Rule(Api.END_TXN, Mischief.LOSE_REPLY, skip=2),
                ],
            ),
            (
                "requests-lost",
                "one InitProducerId, AddPartitionsToTxn, Produce and EndTxn never arrives",
                [
                    Rule(Api.INIT_PRODUCER_ID, Mischief.LOSE_REQUEST, skip=1),
                    Rule(Api.ADD_PARTITIONS_TO_TXN, Mischief.LOSE_REQUEST, skip=3),
                    Rule(Api.PRODUCE, Mischief.LOSE_REQUEST, skip=8),
                    Rule(Api.END_TXN, Mischief.LOSE_REQUEST, skip=3),
                ],
            ),
            (
                "late-end-txn",
                "an EndTxn arrives two seconds after its sender gave up on it, another is delayed",
                [
                    Rule(Api.END_TXN, Mischief.LATE_REQUEST, skip=1, times=2, seconds=2.0),
                    Rule(Api.END_TXN, Mischief.DELAY_REPLY, skip=2, seconds=2.0),
                ],
            ),
        ):
            script, requires = scripts.network(*rules)
            yield Fault(name, "F2", text, script, requires, needs=frozenset({PROXY}), quick=name == "replies-lost")
        return
    script, requires = scripts.network(
        Rule(Api.PRODUCE, Mischief.LOSE_REPLY, skip=4), Rule(Api.PRODUCE, Mischief.LOSE_REQUEST, skip=6)
    )
    text = "the reply of one Produce never arrives, and one Produce never arrives"
    yield Fault("produce-lost", "F2", text, script, requires, needs=frozenset({PROXY}))


def _others(kind: SinkKind) -> Iterator[Fault]:
    if kind.locks:
        text = "another program holds the table for 3 s when a batch is decided"
        yield Fault("lock-held", "F2", text, tables.lock_held, ("lock held",))


_DECISION, _STAGED = ".decision", "COPY"
"""What tells a transaction that decides, or one of a task, from others: a statement in it holds this text."""


def _sql_network(guarantee: Guarantee, kind: SinkKind) -> Iterator[Fault]:
    """Statements that end something. Under two phases a shard ends twice: prepared, then committed."""
    two = kind.two_phase and guarantee is EXACTLY
    shard = ("PREPARE TRANSACTION", "") if two else ("COMMIT", _STAGED)
    named = "PREPARE TRANSACTION, COMMIT PREPARED and decision's COMMIT" if two else "COMMIT of a shard and a decision"
    lose, drop, late = Mischief.LOSE_REPLY, Mischief.LOSE_REQUEST, Mischief.LATE_REQUEST
    for name, text, rules in (
        (
            "replies-lost",
            f"the server's answer to one {named} never arrives",
            [
                SqlRule(shard[0], lose, shard[1], skip=2),
                SqlRule("COMMIT", lose, _DECISION, skip=1),
                *([SqlRule("COMMIT PREPARED", lose, skip=3)] if two else []),
            ],
        ),
        (
            "requests-lost",
            f"one {named} never arrives",
            [
                SqlRule(shard[0], drop, shard[1], skip=3),
                SqlRule("COMMIT", drop, _DECISION, skip=2),
                *([SqlRule("COMMIT PREPARED", drop, skip=2)] if two else []),
            ],
        ),
        (
            "late-commit",
            "a decision's COMMIT arrives two seconds after its sender gave up on it, the answer to another is late",
            [
                SqlRule("COMMIT", late, _DECISION, skip=1, seconds=2.0),
                SqlRule("COMMIT", Mischief.DELAY_REPLY, _DECISION, skip=1, seconds=2.0),
                *([SqlRule("COMMIT PREPARED", late, skip=1, seconds=2.0)] if two else []),
            ],
        ),
    ):
        script, requires = scripts.network(*rules)
        yield Fault(name, "F2", text, script, requires, needs=frozenset({PROXY}))
    text = "for 3 s nothing arrives anywhere, then every connection is reset; twice"
    requires = ("black hole", "reset") * 2
    yield Fault("black-hole", "F2", text, scripts.black_hole, requires, needs=frozenset({PROXY}))


def _table_log(guarantee: Guarantee) -> Iterator[Fault]:
    # Where the writer has read the log, and has not committed yet.
    point = "commit.apply:before" if guarantee is EXACTLY else f"{scripts.point(guarantee, 'prepare')}:before"
    script, requires = tables.other_writers(point)
    text = "others append to the table, and compact it, between a batch's look at the log and its commit"
    yield Fault("other-writers", "F2", text, script, requires)
    script, requires = tables.table_altered(point)
    text = "somebody alters the table between a batch's look at the log and its commit"
    yield Fault("table-altered", "F2", text, script, requires)


def _server(guarantee: Guarantee, kind: SinkKind) -> Iterator[Fault]:
    prepare, decide = (scripts.point(guarantee, s) for s in ("prepare", "decide"))
    if kind.server is not None:
        points = [f"{prepare}:before", f"{decide}:after"]
        if guarantee is EXACTLY and not kind.two_phase:
            points.insert(1, "commit.apply:after#2")  # inside the transaction that decides
        script, requires = scripts.broker_killed(*points)
        yield Fault(
            "broker-killed",
            "F3",
            "the server is killed while a shard is sent, and after a batch is decided",
            script,
            requires,
            needs=frozenset({BROKER}),
        )
        if guarantee is EXACTLY and kind.two_phase:
            script, requires = expiry.broker_restarted("commit.decide:before", "commit.apply:before")
            text = "the server is restarted with transactions open: before a batch is decided, and before it is applied"
            yield Fault("broker-restarted", "F3", text, script, requires, needs=frozenset({BROKER}))
    if kind.server == KAFKA or (kind.two_phase and guarantee is EXACTLY):
        return
    inside = "commit.apply:after#2" if guarantee is EXACTLY else f"{prepare}:before"
    script, requires = kills(inside, f"{decide}:after")
    text = "killed inside the table's own transaction, and right after it"
    quick = guarantee is EXACTLY and kind.name == SQLITE
    yield Fault("killed-in-transaction", "F3", text, script, requires, quick=quick)


def _memory(guarantee: Guarantee) -> Iterator[Fault]:
    write, prepare = (scripts.point(guarantee, s) for s in ("write", "prepare"))
    script, requires = scripts.worker_killed(f"{write}:after", f"{prepare}:before")
    yield Fault("worker-killed", "F4", "one Python worker is killed with what it held", script, requires)
    yield Fault(
        "disk-full",
        "F4",
        "no byte is left on the disk of checkpoint and table",
        scripts.disk_full,
        ("disk full",),
        needs=frozenset({MOUNT}),
    )


def _reader(sink: str) -> Iterator[Fault]:
    if sink != KAFKA:
        text = "a reader is in the middle of its read for 3 s while a batch commits"
        yield Fault("slow-reader", "F5", text, tables.slow_reader, ("reader slow",))
        return
    script, requires = scripts.network(
        Rule(Api.FETCH, Mischief.LOSE_REPLY, skip=3, times=2),
        Rule(Api.FETCH, Mischief.LOSE_REQUEST, skip=5),
        Rule(Api.FETCH, Mischief.DELAY_REPLY, skip=6, seconds=2.0),
    )
    text = "replies of Fetch are lost and delayed between broker and source"
    yield Fault("fetch-lost", "F5", text, script, requires, needs=frozenset({PROXY}))
    yield Fault(
        "black-hole",
        "F5",
        "for 3 s nothing arrives anywhere, then every connection is reset; twice",
        scripts.black_hole,
        ("black hole", "reset") * 2,
        needs=frozenset({PROXY}),
    )


_QUICK_STAGED = {SQLITE, POSTGRES, DELTA, FILES}
_QUICK_BETWEEN = {(EXACTLY, KAFKA), (AT_LEAST, SQLITE), (AT_MOST, SQLITE)}


def _consumer(guarantee: Guarantee, kind: SinkKind) -> Iterator[Fault]:
    sink = kind.name
    write, prepare, decide = (scripts.point(guarantee, s) for s in ("write", "prepare", "decide"))
    before = ["recover.claim:after", f"{write}:before", "recover.sweep:after"]
    if guarantee is AT_MOST:
        before.insert(1, "batch.begin:after")
    between = [f"{write}:after", f"{prepare}:after", f"{decide}:before", f"{decide}:after"]
    if guarantee is EXACTLY:
        # The batch decided by the kill before is finished by recovery, which is killed too.
        between += ["recover.apply:before", "recover.apply:after@batch=0"] if kind.two_phase else []
        between += ["commit.apply:before", "commit.apply:after"]
    for name, place, text, points in (
        ("killed-before", "F6a", "killed before a record is processed", before),
        ("killed-between", "F6b", "killed at every step between processing and recording", between),
        ("killed-after", "F6c", "killed before and after Spark's own commit log", ["log:before", "log:after"]),
    ):
        script, requires = kills(*points)
        yield Fault(
            name,
            place,
            text,
            script,
            requires,
            quick=name == "killed-between" and (guarantee, sink) in _QUICK_BETWEEN,
        )
    script, requires = kills(f"{prepare}:after@batch=1", f"{decide}:after@batch=2")
    text = "killed when a batch is prepared, and when a later one is decided"
    yield Fault("killed-twice", "F6b", text, script, requires)
    script, requires = kills(f"{prepare}:after@batch=1")
    text = "killed once, when the shards of a batch are prepared"
    yield Fault("killed-after-staging", "F6b", text, script, requires, quick=guarantee is EXACTLY and sink == SQLITE)
    script, requires = kills("source.read:before", "source.read:after")
    text = "killed while records are read, through the JVM"
    yield Fault("killed-reading", "F6a", text, script, requires, workload="sql")
    text = "killed while records are read, by the task that writes them"
    yield Fault("killed-reading-directly", "F6a", text, script, requires)
    # Under at_most_once a second attempt gives its shard up, and comes to no further point.
    failing = [f"{write}:after", f"{prepare}:before", f"{prepare}:after"][: 1 if guarantee is AT_MOST else 3]
    script, requires = attempts.task_retried(*failing)
    text = f"a task fails {len(failing)} times, and is run again in the same batch"
    yield Fault("task-retried", "F6b", text, script, requires, extra=attempts.RETRIES)
    if sink == KAFKA:
        script = attempts.speculation(f"{prepare}:before")
        text = "two attempts of a task at a time, on two hosts: the second one wins, then the first one goes on"
        yield Fault("speculation", "F6b", text, script, ("a speculative attempt won",), needs=frozenset({CLUSTER}))
    met = ("poison met",) * 2
    text = "the transform fails at a record until it is mended"
    yield Fault("poison", "F6a", text, attempts.poison, met, workload="poison")
    if sink == KAFKA:
        given_up = guarantee is AT_MOST
        script = attempts.oversized_given_up if given_up else attempts.oversized
        text = "the sink cannot take a record" + (": it is given up" if given_up else " until its limit is raised")
        requires = ("record too large",) * (1 if given_up else 2)
        yield Fault("oversized", "F6b", text, script, requires, workload="oversized")
    script, requires = random_kills(3)
    yield Fault("killed-at-random", "F6b", "killed three times at random moments", script, requires)


def _zombies(guarantee: Guarantee, kind: SinkKind) -> Iterator[Fault]:
    # Paused inside the transaction that decides, or between a decision and its being applied. A driver that is paused
    # with SQLite's write lock leaves nobody else a way in, which is no guarantee's business.
    deciding = ["apply"] if guarantee is EXACTLY and kind.name != SQLITE else []
    for step in ("decide", "prepare", *deciding):
        yield Fault(
            f"zombie-{step}",
            "F7",
            f"a driver is paused before {scripts.point(guarantee, step)}, another takes over, the first wakes up",
            scripts.zombie(step),
            ("paused", "woken up"),
            quick=guarantee is EXACTLY and kind.name == SQLITE and step == "decide",
        )
    yield Fault(
        "second-driver",
        "F7",
        "a second driver starts on the checkpoint of a living one",
        scripts.second_driver,
        ("second driver",),
    )
    if guarantee is EXACTLY and kind.name == KAFKA:
        short = {"sink": {"transactionTimeout": expiry.TRANSACTION_TIMEOUT_S}}
        for name, text, moment, workload in (
            ("expired-before-decide", "prepared transactions expire before the decision", "before", None),
            ("expired-after-decide", "prepared transactions expire after the decision", "after", None),
            ("expired-random", "they expire, and the transform gives other rows the second time", "after", "random"),
            ("expired-random-sql", "the same with uuid() in SQL", "after", "random-sql"),
        ):
            yield Fault(
                name,
                "F7",
                text,
                expiry.expired(moment, workload is None),
                ("transactions expired",),
                workload=workload,
                extra=short,
            )
        text = "all of a driver is paused with a prepared batch until its transactions expired; then it goes on"
        requires = ("paused past the time-out",)
        yield Fault("paused-past-timeout", "F7", text, expiry.paused_past_timeout, requires, extra=short)
    if guarantee is EXACTLY and kind.two_phase and kind.server == POSTGRES:
        for name, text, moment, workload in (
            ("rolled-back-before-decide", "somebody rolls back what is prepared, before the decision", "before", None),
            ("rolled-back-after-decide", "somebody rolls back what is prepared, after the decision", "after", None),
            ("rolled-back-random", "the same, and the transform gives other rows the second time", "after", "random"),
        ):
            script = tables.rolled_back(moment, workload is None)
            yield Fault(name, "F7", text, script, ("prepared transactions rolled back",), workload=workload)


def _state(guarantee: Guarantee, sink: str) -> Iterator[Fault]:
    yield Fault(
        "log-entry-removed",
        "F8",
        "the last file of commits/ is removed",
        scripts.log_entry_removed,
        ("last commit removed",),
        quick=guarantee is EXACTLY and sink == SQLITE,
    )
    yield Fault(
        "older-checkpoint",
        "F8",
        "an older copy of the checkpoint is put back",
        scripts.older_checkpoint,
        ("older checkpoint put back",),
    )
    yield Fault(
        "checkpoint-deleted",
        "F8",
        "the checkpoint is deleted",
        scripts.checkpoint_deleted,
        ("checkpoint deleted",),
    )
    prepare, decide = (scripts.point(guarantee, s) for s in ("prepare", "decide"))
    requires = (f"kill@{prepare}:after", f"kill@{decide}:after")
    text = "the number of shards changes over two kills"
    script = scripts.shards_changed(scripts.by_hint)
    yield Fault("shards-changed", "F8", text, script, requires, workload="sql", keeps_order=False)
    text = "spark.sql.shuffle.partitions of a query with state changes over two kills"
    script = scripts.shards_changed(scripts.by_shuffle)
    yield Fault("shuffle-changed", "F8", text, script, requires, workload="windowed")
    text = "the source's minPartitions, and so the number of shards, changes over two kills"
    script = scripts.shards_changed(scripts.by_slices)
    yield Fault("slices-changed", "F8", text, script, requires, needs=frozenset({TOPICS}), keeps_order=False)


SOAK_KILLS, SOAK_FRAMES = 20, 12
_SMALL_BATCHES = {"rows_per_batch": 20}


def _soak(guarantee: Guarantee, sink: str) -> Iterator[Fault]:
    """Many faults in one cell, for the number of them."""
    script, requires = random_kills(SOAK_KILLS)
    text = f"killed {SOAK_KILLS} times at random moments, in small batches"
    yield Fault("soak-kills", "F6b", text, script, requires, extra=_SMALL_BATCHES, soak=True)
    if sink != KAFKA:
        return
    apis = [Api.PRODUCE] if guarantee is not EXACTLY else [Api.PRODUCE, Api.ADD_PARTITIONS_TO_TXN, Api.END_TXN]
    script, requires = scripts.network(
        *(Rule(a, Mischief.LOSE_REPLY, skip=3, times=SOAK_FRAMES, every=11) for a in apis),
        *(Rule(a, Mischief.LOSE_REQUEST, skip=8, times=SOAK_FRAMES, every=11) for a in apis),
        Rule(Api.FETCH, Mischief.LOSE_REPLY, skip=5, times=SOAK_FRAMES, every=9),
    )
    text = "every so many requests one, or its reply, never arrives"
    needs = frozenset({PROXY})
    yield Fault("soak-network", "F2", text, script, requires, extra=_SMALL_BATCHES, needs=needs, soak=True)
