"""Faults of the catalogue between a pipeline and its sink: what is lost, late, held, or done by others meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from delivered.model.guarantee import Guarantee
from delivered.verify import scripts, tables
from delivered.verify.fault import EXACTLY, PROXY, Fault
from delivered.verify.proxy import ANSWERED, ASKED, NetworkFault, Rule
from delivered.verify.proxy_kafka import Api
from delivered.verify.systems.base import SinkKind, Statements


def kafka_network(guarantee: Guarantee) -> Iterator[Fault]:
    if guarantee is EXACTLY:
        for name, text, rules in (
            (
                "replies-lost",
                "the reply of one InitProducerId, AddPartitionsToTxn, Produce and EndTxn never arrives",
                [
                    Rule(Api.INIT_PRODUCER_ID, NetworkFault.LOSE_REPLY),
                    Rule(Api.ADD_PARTITIONS_TO_TXN, NetworkFault.LOSE_REPLY, skip=2),
                    Rule(Api.PRODUCE, NetworkFault.LOSE_REPLY, skip=6),
                    Rule(Api.END_TXN, NetworkFault.LOSE_REPLY, skip=2),
                ],
            ),
            (
                "requests-lost",
                "one InitProducerId, AddPartitionsToTxn, Produce and EndTxn never arrives",
                [
                    Rule(Api.INIT_PRODUCER_ID, NetworkFault.LOSE_REQUEST, skip=1),
                    Rule(Api.ADD_PARTITIONS_TO_TXN, NetworkFault.LOSE_REQUEST, skip=3),
                    Rule(Api.PRODUCE, NetworkFault.LOSE_REQUEST, skip=8),
                    Rule(Api.END_TXN, NetworkFault.LOSE_REQUEST, skip=3),
                ],
            ),
            (
                "late-end-txn",
                "an EndTxn arrives two seconds after its sender gave up on it, another is delayed",
                [
                    Rule(Api.END_TXN, NetworkFault.LATE_REQUEST, skip=1, times=2, seconds=2.0),
                    Rule(Api.END_TXN, NetworkFault.DELAY_REPLY, skip=2, seconds=2.0),
                ],
            ),
        ):
            script, requires = scripts.network(*rules)
            yield Fault(name, "F2", text, script, requires, needs=frozenset({PROXY}), quick=name == "replies-lost")
        return
    script, requires = scripts.network(
        Rule(Api.PRODUCE, NetworkFault.LOSE_REPLY, skip=4), Rule(Api.PRODUCE, NetworkFault.LOSE_REQUEST, skip=6)
    )
    text = "the reply of one Produce never arrives, and one Produce never arrives"
    yield Fault("produce-lost", "F2", text, script, requires, needs=frozenset({PROXY}))


def others(kind: SinkKind) -> Iterator[Fault]:
    if kind.locks:
        # When shards are prepared they hold locks themselves: nobody else can have the table before the decision.
        step, when = ("write", "its rows are sent") if kind.two_phase else ("decide", "it is decided")
        text = f"another program holds the table for 3 s when a batch comes to the point where {when}"
        yield Fault("lock-held", "F2", text, tables.lock_held(step), ("lock held",))


_DECISION = ".decision"
"""What tells a transaction that decides from others: a statement in it holds this text."""


def sql_network(guarantee: Guarantee, kind: SinkKind, words: Statements) -> Iterator[Fault]:
    """Statements that end something. Under two phases a shard ends twice: prepared, then committed."""
    two = kind.two_phase and guarantee is EXACTLY
    shard = (words.prepare, "") if two else ("COMMIT", words.rows)
    named = f"{words.prepare}, {words.commit} and decision's COMMIT" if two else "COMMIT of a shard and a decision"
    lose, drop, late = NetworkFault.LOSE_REPLY, NetworkFault.LOSE_REQUEST, NetworkFault.LATE_REQUEST
    for name, text, rules in (
        (
            "replies-lost",
            f"the server's answer to one {named} never arrives",
            [
                Rule(shard[0], lose, shard[1], skip=2),
                Rule("COMMIT", lose, _DECISION, skip=1),
                *([Rule(words.commit, lose, skip=3)] if two else []),
            ],
        ),
        (
            "requests-lost",
            f"one {named} never arrives",
            [
                Rule(shard[0], drop, shard[1], skip=3),
                Rule("COMMIT", drop, _DECISION, skip=2),
                *([Rule(words.commit, drop, skip=2)] if two else []),
            ],
        ),
        (
            "late-commit",
            "a decision's COMMIT arrives two seconds after its sender gave up on it, the answer to another is late",
            [
                Rule("COMMIT", late, _DECISION, skip=1, seconds=2.0),
                Rule("COMMIT", NetworkFault.DELAY_REPLY, _DECISION, skip=1, seconds=2.0),
                *([Rule(words.commit, late, skip=1, seconds=2.0)] if two else []),
            ],
        ),
    ):
        script, requires = scripts.network(*rules)
        yield Fault(name, "F2", text, script, requires, needs=frozenset({PROXY}))
    yield _black_hole()


def _black_hole() -> Fault:
    text = "for 3 s nothing arrives anywhere, then every connection is reset; twice"
    return Fault("black-hole", "F2", text, scripts.black_hole, ("black hole", "reset") * 2, needs=frozenset({PROXY}))


def stream_network(kind: SinkKind) -> Iterator[Fault]:
    """Between a sender and a broker of whose protocol the proxy knows nothing."""
    if "F2" in kind.absent:
        return
    script, requires = scripts.network(
        Rule(ANSWERED, NetworkFault.LOSE_REPLY, skip=12, times=2, every=9),
        Rule(ASKED, NetworkFault.LOSE_REQUEST, skip=20, times=2, every=9),
        most=6,
    )
    text = "the connection breaks four times: what was sent is lost, or what was answered"
    yield Fault("connection-broken", "F2", text, script, requires, needs=frozenset({PROXY}))
    yield _black_hole()


def table_log(guarantee: Guarantee) -> Iterator[Fault]:
    # Where the writer has read the log, and has not committed yet.
    point = "commit.apply:before" if guarantee is EXACTLY else f"{scripts.point(guarantee, 'prepare')}:before"
    script, requires = tables.other_writers(point)
    text = "others append to the table, and compact it, between a batch's look at the log and its commit"
    yield Fault("other-writers", "F2", text, script, requires)
    script, requires = tables.table_altered(point)
    text = "somebody alters the table between a batch's look at the log and its commit"
    yield Fault("table-altered", "F2", text, script, requires)
