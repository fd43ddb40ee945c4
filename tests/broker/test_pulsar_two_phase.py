"""Two-phase commit into Pulsar: what a reader sees, after crashes at each step, by the brokers' own client."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.broker.send_help import killed_and_started_again
from tests.support.pulsar import native, sink
from tests.support.scans import scanned
from tests.support.servers import Pulsar
from tests.support.sinks import SHARDS, Rig, alone, offsets

from delivered.clients.pulsar.connection import Cluster
from delivered.clients.pulsar.producer import Producer
from delivered.connectors.pulsar import physical
from delivered.connectors.pulsar.client import Admin
from delivered.connectors.pulsar.committer import Marker, Transaction, markers_topic, opened_topic, settings
from delivered.connectors.pulsar.journal import SUBSCRIPTION, Topic
from delivered.connectors.sqlite import CONNECTOR as SQLITE
from delivered.engine import Sinks
from delivered.engine.context import Context
from delivered.engine.decide import commit_batch
from delivered.engine.recover import plan_batch
from delivered.engine.shard import write_shard
from delivered.model.capability import Guarantee
from delivered.model.errors import OutcomeUnknown
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
from delivered.model.rows import Rows
from delivered.model.work import Action, CheckpointView, Failed, Ok, Owner, ShardMessage


class Reader:
    """What the brokers' own client reads of a topic, from its first message."""

    def __init__(self, pulsar: Pulsar, topic: str) -> None:
        self._pulsar, self._topic = pulsar, topic

    def values(self) -> Counter[tuple[Any, Any]]:
        count = self._pulsar.admin("GET", f"persistent/public/default/{self._topic}/partitions")["partitions"]
        names = [f"{self._topic}-partition-{n}" for n in range(count)] or [self._topic]
        return Counter((m.partition_key() or None, m.data()) for name in names for m in native(self._pulsar, name))


@pytest.fixture
def topic(pulsar: Pulsar) -> str:
    return pulsar.topic(2)


@pytest.fixture
def rig(pulsar: Pulsar, tmp_path: Path, topic: str) -> Rig:
    return Rig(sink(tmp_path, pulsar, topic))


@pytest.fixture
def reader(pulsar: Pulsar, topic: str) -> Reader:
    return Reader(pulsar, topic)


def expected(rig: Rig, *batches: int) -> Counter[tuple[Any, Any]]:
    """Of both columns, as a reader sees them."""
    return Counter(
        (None if r["key"] is None else r["key"].decode(), r["value"])
        for batch in batches
        for shard in range(SHARDS)
        for r in rig.rows(batch, shard).to_pylist()
    )


def handles(messages: list[ShardMessage]) -> list[Transaction]:
    return [Transaction.of(p) for m in messages for p in m.participants]


def test_rows_are_visible_from_the_decision_on(rig: Rig, reader: Reader) -> None:
    context = rig.context()
    for batch in range(2):
        messages = rig.write(rig.plan(context, batch, first=batch == 0))
        assert reader.values() == expected(rig, *range(batch))
        commit_batch(context, batch, offsets(batch), messages)
        assert reader.values() == expected(rig, *range(batch + 1))


def test_what_was_prepared_and_not_decided_is_aborted_at_the_next_start(rig: Rig, reader: Reader) -> None:
    lost = rig.write(rig.plan(rig.context(), 0))
    context = rig.context("second")
    plan = rig.plan(context, 0)  # recovery
    committer = alone(context.committers)
    assert [type(committer.commit(work_of(rig, plan, p.shard), p)) for m in lost for p in m.participants] == [
        Failed
    ] * SHARDS
    commit_batch(context, 0, offsets(0), rig.write(plan))
    assert reader.values() == expected(rig, 0)


def test_what_a_task_opened_and_never_reported_is_aborted(rig: Rig, reader: Reader, pulsar: Pulsar, topic: str) -> None:
    """Of a task that was killed: its transaction would hide what is sent behind it for a week."""
    plan = rig.plan(rig.context(), 0)
    writers = [rig.sink.writer(work_of(rig, plan, shard), plan.guarantee, rig.schema) for shard in range(SHARDS)]
    for shard, writer in enumerate(writers):
        writer.stage(rig.rows(0, shard))
        writer.prepare(Fingerprint())
    pulsar.send(f"{topic}-partition-0", [b"plain"])
    assert reader.values() == Counter()
    context = rig.context("second")
    assert alone(context.committers).abort_orphans([]) == Ok(SHARDS)
    assert reader.values() == Counter({(None, b"plain"): 1})
    assert alone(context.committers).abort_orphans([]) == Ok(0), "the records of what has ended are forgotten"


def work_of(rig: Rig, plan: Any, shard: int) -> Any:
    from delivered.model.identity import Work

    return Work(rig.scope, plan.batch, shard, 0, plan.epoch)


def test_a_decided_batch_is_applied_by_the_next_start(rig: Rig, reader: Reader, monkeypatch: Any) -> None:
    context = rig.context()
    messages = rig.write(rig.plan(context, 0))
    monkeypatch.setattr("delivered.engine.decide._apply", dies)
    with pytest.raises(KeyboardInterrupt):
        commit_batch(context, 0, offsets(0), messages)
    monkeypatch.undo()
    assert reader.values() == Counter()
    second = rig.context("second")
    plan = rig.plan(second, 0)
    assert reader.values() == expected(rig, 0)
    assert (plan.action, plan.rewrite) == (Action.SKIP, {})
    third = rig.plan(rig.context("third"), 0)  # the ends are not known any more: the markers tell
    assert (third.action, third.rewrite) == (Action.SKIP, {})
    assert reader.values() == expected(rig, 0)


def rows_of(table: Any) -> int:
    return sum(batch.num_rows for batch in scanned(table))


def dies(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_transaction_that_expired_after_its_decision_is_written_again(
    pulsar: Pulsar, tmp_path: Path, topic: str, reader: Reader, monkeypatch: Any
) -> None:
    """P5: of two decided shards one has expired."""
    short, long = (Rig(sink(tmp_path, pulsar, topic, transactionTimeout=t), pipeline="p") for t in ("2", "600"))
    context = long.context()
    plan = long.plan(context, 0)
    messages = [
        write_shard(rig.sinks, plan, shard, 0, iter([Rows(rig.rows(0, shard))]), rig.schema)
        for shard, rig in enumerate((short, long))
    ]
    monkeypatch.setattr("delivered.engine.decide._apply", dies)
    with pytest.raises(KeyboardInterrupt):
        commit_batch(context, 0, offsets(0), messages)
    monkeypatch.undo()
    [expired, _] = handles(messages)
    until_expired(long, expired)
    second = long.context("second")
    plan = long.plan(second, 0)
    assert plan.rewrite == {0: frozenset({long.scope.sink})}
    again = [
        write_shard(long.sinks, plan, shard, 0, iter([Rows(long.rows(0, shard))]), long.schema)
        for shard in range(SHARDS)
    ]
    decision = commit_batch(second, 0, offsets(0), again)
    assert decision is not None
    assert decision.revision == 1
    assert reader.values() == expected(long, 0)


def until_expired(rig: Rig, transaction: Transaction) -> None:
    """Without ending it: a transaction that has ended takes no further partition."""
    from delivered.clients.pulsar.connection import Rejected
    from delivered.clients.pulsar.transactions import Coordinators
    from delivered.connectors.pulsar.committer import cluster

    coordinators, deadline = Coordinators(cluster(rig.sink.options)), time.monotonic() + 60
    while True:
        try:
            coordinators.add(transaction.id, [transaction.markers], deadline)
        except Rejected:
            return
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("logged", [True, False])
def test_a_dead_attempt_does_not_hide_what_was_committed(rig: Rig, reader: Reader, logged: bool) -> None:
    """P11, P31: a stage ran again, numbered as before, when what its first run had prepared was lost. The open
    transactions of that run hide the markers of what was decided, applied, and perhaps logged."""
    context = rig.context()
    plan = rig.plan(context, 0)
    rig.write(plan)
    commit_batch(context, 0, offsets(0), rig.write(plan))
    assert reader.values() == Counter()
    second = rig.context("second")
    plan = rig.plan(second, 1 if logged else 0)
    assert plan.rewrite == {}
    assert reader.values() == expected(rig, 0)


def test_a_marker_counts_only_at_its_place_and_of_its_transaction(rig: Rig) -> None:
    """Not that of another attempt, nor one that somebody wrote without a transaction."""
    context = rig.context()
    messages = rig.write(rig.plan(context, 0))
    [committed, aborted] = [p for m in messages for p in m.participants]
    committer, work = alone(context.committers), work_of(rig, messages[0].plan, 0)
    assert committer.commit(work, committed) == Ok(None)
    assert committer.abort(aborted) == Ok(None)
    assert committer.was_committed(work, committed)
    assert not committer.was_committed(work, aborted)
    held = Transaction.of(committed)
    other = replace(held, least=held.least + 1_000_000)
    assert not committer.was_committed(work, replace(committed, handle=other.to_json()))
    elsewhere = replace(held, entry=held.entry + 1)
    assert not committer.was_committed(work, replace(committed, handle=elsewhere.to_json()))


def test_a_deleted_marker_is_an_unknown_outcome(rig: Rig) -> None:
    """P3: its absence says nothing."""
    context = rig.context()
    messages = rig.write(rig.plan(context, 0))
    [prepared, _] = [p for m in messages for p in m.participants]
    commit_batch(context, 0, offsets(0), messages)
    gone = replace(Transaction.of(prepared), ledger=1 << 40)
    with pytest.raises(OutcomeUnknown, match="was deleted"):
        alone(context.committers).was_committed(
            work_of(rig, messages[0].plan, 0), replace(prepared, handle=gone.to_json())
        )


def test_records_and_markers_of_earlier_batches_are_forgotten(rig: Rig) -> None:
    """What the subscriptions keep does not grow with the batches."""
    context = rig.context()
    for batch in range(4):
        messages = rig.write(rig.plan(context, batch, first=batch == 0))
        decision = commit_batch(context, batch, offsets(batch), messages)
    assert decision is not None
    assert alone(context.committers).abort_orphans(decision.participants) == Ok(0)  # they had been committed
    options = rig.sink.options
    opened, markers = (Topic(options, name(options, rig.scope)) for name in (opened_topic, markers_topic))
    assert len([*opened.messages(opened.bounds().cursors[SUBSCRIPTION])]) == SHARDS
    first = min((h.ledger, h.entry) for h in handles(messages))
    kept = [*markers.messages(markers.bounds().cursors[SUBSCRIPTION])]
    assert (kept[0][0].ledger, kept[0][0].entry) == first
    assert len(kept) == SHARDS
    for topic in (opened, markers):
        topic.close()


def test_starts_of_one_batch_each_forget_those_of_earlier_ones(rig: Rig) -> None:
    """Whose process ends after each batch, as with availableNow."""
    for batch in range(3):
        context = rig.context(f"run {batch}")
        messages = rig.write(rig.plan(context, batch))
        commit_batch(context, batch, offsets(batch), messages)
    rig.plan(rig.context("next"), 3)
    options = rig.sink.options
    opened, markers = (Topic(options, name(options, rig.scope)) for name in (opened_topic, markers_topic))
    assert [*opened.messages(opened.bounds().cursors[SUBSCRIPTION])] == []
    kept = [at for at, data in markers.messages(markers.bounds().cursors[SUBSCRIPTION]) if Marker.from_json(data)]
    assert sorted((at.ledger, at.entry) for at in kept) == sorted((h.ledger, h.entry) for h in handles(messages))
    for topic in (opened, markers):
        topic.close()


def test_a_shard_without_rows_opens_no_transaction(rig: Rig) -> None:
    context = rig.context()
    plan = rig.plan(context, 0)
    none = pa.RecordBatch.from_pylist([], schema=rig.schema)
    message = write_shard(rig.sinks, plan, 0, 0, iter([Rows(none)]), rig.schema)
    assert [p.handle for p in message.participants] == [{}]


@pytest.mark.parametrize("decided", [True, False])
def test_one_decision_covers_pulsar_and_a_database(
    rig: Rig, reader: Reader, tmp_path: Path, monkeypatch: Any, decided: bool
) -> None:
    """SQLite decides, as it cannot prepare. The driver dies right before its transaction, or right after it."""
    table = SQLITE.sink({"path": str(tmp_path / "out.db"), "table": "orders"})
    group = Sinks.of([("pulsar", rig.sink, None), ("sqlite", table, None)])
    scope = Scope(rig.pipeline, group.decider.name, "i0")

    def run(owner: str) -> None:
        context = Context.open(group, scope, Guarantee.EXACTLY_ONCE, Owner(owner))
        group.ready_target(rig.schema)
        plan = plan_batch(context, CheckpointView("i0", 0, offsets(0), None), first=True)
        shards = [
            write_shard(group, plan, shard, 0, iter([Rows(rig.rows(0, shard))]), rig.schema) for shard in range(SHARDS)
        ]
        commit_batch(context, 0, offsets(0), shards)

    monkeypatch.setattr("delivered.engine.decide." + ("_apply" if decided else "_decide"), dies)
    with pytest.raises(KeyboardInterrupt):
        run("first")
    monkeypatch.undo()
    assert reader.values() == Counter()
    assert rows_of(table) == (expected(rig, 0).total() if decided else 0)
    run("second")
    assert reader.values() == expected(rig, 0)
    assert rows_of(table) == expected(rig, 0).total()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "point",
    [
        f"{step}:{moment}"
        for step in ("write.stage", "write.prepare", "commit.decide", "commit.apply")
        for moment in ("before", "after")
    ]
    + ["log:before"],
)
def test_killed_and_started_again(pulsar: Pulsar, tmp_path: Path, topic: str, reader: Reader, point: str) -> None:
    made = {"format": "pulsar", **pulsar.options, "topic": topic}
    killed_and_started_again(
        tmp_path, made, "exactly_once", point, lambda: (value for _, value in reader.values().elements())
    )


TOPICS, TASKS, DRIVERS = 10, 8, 4


@pytest.mark.parametrize("added", [0, 6], ids=["", "partitions added since the start"])
def test_the_first_transactions_of_a_topic_may_begin_together(
    pulsar: Pulsar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, added: int
) -> None:
    """A broker that takes a topic's first snapshot for two messages at once, of two connections, refuses the topic's
    transactions from then on (apache/pulsar#24945)."""
    own = threading.local()

    def connections(options: Any) -> Cluster:  # as tasks of several processes have
        if not hasattr(own, "cluster"):
            own.cluster = Cluster(settings(options))
        return cast("Cluster", own.cluster)

    monkeypatch.setattr("delivered.connectors.pulsar.publisher.cluster", connections)
    with ThreadPoolExecutor(TASKS) as pool:
        for number in range(2 if added else TOPICS):
            (folder := tmp_path / str(number)).mkdir()
            rig = Rig(sink(folder, pulsar, topic := pulsar.topic(2 if added else number % 2 * 2)))
            plan = rig.plan(rig.context(), 0)
            if added:
                pulsar.admin("POST", f"persistent/public/default/{topic}/partitions", 2 + added)
            writers = [rig.sink.writer(work_of(rig, plan, shard), plan.guarantee, rig.schema) for shard in range(TASKS)]
            together = threading.Barrier(TASKS)

            def write(writer: Any, rig: Rig = rig, together: threading.Barrier = together) -> Any:
                writer.stage(rig.rows(0, 0))
                together.wait()
                return writer.prepare(Fingerprint())

            handles = [promise.handle for promise in pool.map(write, writers)]
            assert len({(h.most, h.least) for h in handles}) == TASKS, topic


def test_the_first_starts_of_several_pipelines_may_be_together(
    pulsar: Pulsar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prepares the topic, and none for the other's transactions."""
    own = threading.local()

    def connections(options: Any) -> Cluster:  # as drivers have
        if not hasattr(own, "cluster"):
            own.cluster = Cluster(settings(options))
        return cast("Cluster", own.cluster)

    together = threading.Barrier(DRIVERS)

    class Together(Producer):
        def end_batch(self, deadline: float) -> None:
            with suppress(threading.BrokenBarrierError):
                together.wait(1)
            super().end_batch(deadline)

    monkeypatch.setattr("delivered.connectors.pulsar.committer.cluster", connections)
    monkeypatch.setattr("delivered.connectors.pulsar.committer.Producer", Together)
    with ThreadPoolExecutor(DRIVERS) as pool:
        for number in range(TOPICS // 2):
            (folder := tmp_path / str(number)).mkdir()
            made = sink(folder, pulsar, topic := pulsar.topic(number % 2 * 2))
            together.reset()

            def start(_: int, made: Any = made) -> None:
                alone(Rig(made).context().committers).set_up(Guarantee.EXACTLY_ONCE, decides=True)

            list(pool.map(start, range(DRIVERS)))
            rig = Rig(made)
            rig.run(0)
            assert Reader(pulsar, topic).values() == expected(rig, 0)


def test_a_weaker_guarantee_prepares_no_transactions(rig: Rig, reader: Reader) -> None:
    context = rig.context(guarantee=Guarantee.AT_LEAST_ONCE)
    commit_batch(context, 0, offsets(0), rig.write(rig.plan(context, 0)))
    assert reader.values() == expected(rig, 0)
    admin = Admin(rig.sink.options)
    assert [admin.lacks_snapshot(physical((rig.sink.options.topic, n))) for n in range(2)] == [True, True]
    assert admin.lacks_snapshot(markers_topic(rig.sink.options, context.scope)) is None, "it was created"
