"""The catalogue: which fault at which failure point, for which guarantee and sink, and what must fire."""

from __future__ import annotations

from collections.abc import Iterator

from delivered.model.guarantee import Guarantee
from delivered.verify import attempts, expiry, scripts, tables, zombies
from delivered.verify.fault import (
    AT_LEAST,
    AT_MOST,
    BROKER,
    CLUSTER,
    EXACTLY,
    MOUNT,
    PROXY,
    TOPICS,
    Fault,
)
from delivered.verify.network_faults import kafka_network, others, sql_network, stream_network, table_log
from delivered.verify.proxy import NetworkFault, Rule
from delivered.verify.proxy_kafka import Api
from delivered.verify.random_kills import random_kills
from delivered.verify.scripts import kills
from delivered.verify.systems import DELTA, FILES, KAFKA, MYSQL, POSTGRES, SINK_KINDS, SQLITE
from delivered.verify.systems.base import SinkKind


def catalogue(guarantee: Guarantee, sink: str) -> list[Fault]:
    """Every fault of a guarantee and a sink, in the order of failure points; the undisturbed run first."""
    kind = SINK_KINDS[sink]
    if guarantee not in kind.guarantees:
        return []
    found = [
        Fault("none", "none", "an undisturbed run", scripts.nothing),
        *_producer(),
        *(kafka_network(guarantee) if kind.server == KAFKA else others(kind)),
        *(sql_network(guarantee, kind, kind.statements) if kind.statements is not None else ()),
        *(stream_network(kind) if kind.sends else ()),
        *(table_log(guarantee) if kind.shared else ()),
        *_server(guarantee, kind),
        *_memory(guarantee),
        *_reader(kind),
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
        # Half messages block nobody: from outside it cannot be seen whether any is open.
        if guarantee is EXACTLY and kind.two_phase and not kind.sends:
            script, requires = expiry.broker_restarted("commit.decide:before", "commit.apply:before")
            text = "the server is restarted with transactions open: before a batch is decided, and before it is applied"
            yield Fault("broker-restarted", "F3", text, script, requires, needs=frozenset({BROKER}))
    if kind.server == KAFKA or kind.sends or (kind.two_phase and guarantee is EXACTLY):
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


def _reader(kind: SinkKind) -> Iterator[Fault]:
    if "F5" in kind.absent:
        return
    if kind.server != KAFKA:
        text = "a reader is in the middle of its read for 3 s while a batch commits"
        yield Fault("slow-reader", "F5", text, tables.slow_reader, ("reader slow",))
        return
    script, requires = scripts.network(
        Rule(Api.FETCH, NetworkFault.LOSE_REPLY, skip=3, times=2),
        Rule(Api.FETCH, NetworkFault.LOSE_REQUEST, skip=5),
        Rule(Api.FETCH, NetworkFault.DELAY_REPLY, skip=6, seconds=2.0),
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
            zombies.zombie(step, kind.locked),
            ("paused", "woken up"),
            quick=guarantee is EXACTLY and kind.name == SQLITE and step == "decide",
        )
    yield Fault(
        "second-driver",
        "F7",
        "a second driver starts on the checkpoint of a living one",
        zombies.second_driver,
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
    if guarantee is EXACTLY and kind.two_phase and kind.server in (POSTGRES, MYSQL):
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
SOAK_STARTS_MAX = 30
"""A decision whose request was lost ends a start; every start meets some of those."""
_SMALL_BATCHES = {"rows_per_batch": 20}


def _soak(guarantee: Guarantee, sink: str) -> Iterator[Fault]:
    """Many faults in one case, for the number of them."""
    script, requires = random_kills(SOAK_KILLS)
    text = f"killed {SOAK_KILLS} times at random moments, in small batches"
    yield Fault("soak-kills", "F6b", text, script, requires, extra=_SMALL_BATCHES, soak=True)
    if sink != KAFKA:
        return
    apis = [Api.PRODUCE] if guarantee is not EXACTLY else [Api.PRODUCE, Api.ADD_PARTITIONS_TO_TXN, Api.END_TXN]
    script, requires = scripts.network(
        *(Rule(a, NetworkFault.LOSE_REPLY, skip=3, times=SOAK_FRAMES, every=11) for a in apis),
        *(Rule(a, NetworkFault.LOSE_REQUEST, skip=8, times=SOAK_FRAMES, every=11) for a in apis),
        Rule(Api.FETCH, NetworkFault.LOSE_REPLY, skip=5, times=SOAK_FRAMES, every=9),
        most=SOAK_STARTS_MAX,
    )
    text = "every so many requests one, or its reply, never arrives"
    needs = frozenset({PROXY})
    yield Fault("soak-network", "F2", text, script, requires, extra=_SMALL_BATCHES, needs=needs, soak=True)
