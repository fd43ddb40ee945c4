"""Faults of the catalogue between a pipeline and its servers: loss, delay, locks, and concurrent actions of others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from delivered.model.guarantee import Guarantee
from delivered_lab.verify import interference
from delivered_lab.verify.fault import EXACTLY, PROXY, Fault
from delivered_lab.verify.interference import network
from delivered_lab.verify.proxy import ANSWERED, ASKED, NetworkFault, Rule
from delivered_lab.verify.proxy_kafka import Api
from delivered_lab.verify.scripts import point
from delivered_lab.verify.systems import KAFKA
from delivered_lab.verify.systems.base import SinkKind, Statements

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


def before_sink(guarantee: Guarantee, kind: SinkKind) -> Iterator[Fault]:
    """F2, by kind of sink."""
    if kind.server == KAFKA:
        yield from _kafka(guarantee)
    elif kind.locks:
        # Prepared shards hold locks themselves, so nobody else can lock the table before the decision.
        step, when = ("write", "its rows are sent") if kind.two_phase else ("decide", "it is decided")
        text = f"another program holds the table for 3 s when a batch comes to the point where {when}"
        yield Fault("lock-held", "F2", text, interference.lock_held(step), ("lock held",))
    if kind.statements is not None:
        yield from _sql(kind.two_phase and guarantee is EXACTLY, kind.statements)
    if kind.sends and "F2" not in kind.absent:
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
    where = "commit.apply:before" if guarantee is EXACTLY else f"{point(guarantee, 'prepare')}:before"
    text = "others append to the table, and compact it, between a batch's look at the log and its commit"
    yield Fault("other-writers", "F2", text, *interference.other_writers(where))
    text = "somebody alters the table between a batch's look at the log and its commit"
    yield Fault("table-altered", "F2", text, *interference.table_altered(where))
