"""Sinks that the verifier can break, alone and several in one batch, and what each of them has that a fault can take
hold of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from delivered.model.guarantee import Guarantee

SQLITE, KAFKA, POSTGRES, POSTGRES_2PC, DELTA, FILES = "sqlite", "kafka", "postgres", "postgres-2pc", "delta", "files"
MYSQL, MYSQL_XA, ICEBERG = "mysql", "mysql-xa", "iceberg"
RABBITMQ, ACTIVEMQ, PULSAR, ROCKETMQ = "rabbitmq", "activemq", "pulsar", "rocketmq"
ROCKETMQ_2PC = "rocketmq-2pc"
LOG = "log"


@dataclass(frozen=True)
class SinkKind:
    """
    Attributes:
        format: in a pipeline file.
        server: kind of the server that holds it, as `delivered.brokers` names it; None: files of this machine.
        source: what feeds its pipelines unless a workload or a fault needs topics.
        two_phase: under exactly_once, shards stay open between their promise and the decision's being applied.
        locks: another program can hold what a writer must wait for.
        locked: how others are turned away while one writer holds all of the sink; None: nobody can hold it.
        members: several sinks that share every batch, all or nothing; empty: it is one.
        absent: failure point -> why nothing can be done to this sink there.
        guarantees: that it can give; of the others it is shown elsewhere that they are refused.
        sends: what a task sends is there at once, for everybody.
        ordered: a key's rows arrive in the order in which a task wrote them.
        upserts: under exactly_once a row can take the place of the one with its key.
    """

    name: str
    format: str
    server: str | None = None
    source: str = LOG
    two_phase: bool = False
    locks: bool = False
    locked: str | None = None
    members: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    guarantees: tuple[Guarantee, ...] = tuple(Guarantee)
    sends: bool = False
    ordered: bool = True
    upserts: bool = False


_NO_READER = {"F5": "its readers take messages one by one: they are not in the middle of anything"}
_OWN_ADDRESS = {"F2": "its client goes to the address that the broker names, past a proxy"}


def _sending(system: str, absent: Mapping[str, str] = _NO_READER, ordered: bool = True) -> SinkKind:
    """A broker that cannot hold a message back."""
    weaker = (Guarantee.AT_LEAST_ONCE, Guarantee.AT_MOST_ONCE)
    return SinkKind(system, system, server=system, absent=absent, guarantees=weaker, sends=True, ordered=ordered)


SEVERAL = f"{KAFKA}-{POSTGRES}-{DELTA}"

SINK_KINDS = {
    s.name: s
    for s in (
        SinkKind(SQLITE, SQLITE, locks=True, locked="DATABASE_LOCKED", upserts=True),
        SinkKind(KAFKA, KAFKA, server=KAFKA, source=KAFKA, two_phase=True),
        SinkKind(POSTGRES, POSTGRES, server=POSTGRES, locks=True, upserts=True),
        SinkKind(POSTGRES_2PC, POSTGRES, server=POSTGRES, two_phase=True, locks=True, upserts=True),
        SinkKind(MYSQL, MYSQL, server=MYSQL, locks=True, upserts=True),
        SinkKind(MYSQL_XA, MYSQL, server=MYSQL, two_phase=True, locks=True, upserts=True),
        SinkKind(DELTA, DELTA, upserts=True),
        SinkKind(ICEBERG, ICEBERG, upserts=True),
        SinkKind(FILES, FILES, absent={"F2": "a folder of this machine: there is no network, and nobody else writes"}),
        # Two prepare, and Delta, which cannot, decides as the last resource.
        SinkKind(SEVERAL, "", server=KAFKA, source=KAFKA, two_phase=True, members=(KAFKA, POSTGRES_2PC, DELTA)),
        _sending(RABBITMQ),
        _sending(ACTIVEMQ),
        _sending(PULSAR, _NO_READER | _OWN_ADDRESS),
        # Requests of many messages overtake each other; its messages with an order go one by one.
        _sending(ROCKETMQ, _NO_READER | _OWN_ADDRESS, ordered=False),
        # By transaction messages: half messages are promises.
        SinkKind(
            ROCKETMQ_2PC,
            ROCKETMQ,
            server=ROCKETMQ,
            two_phase=True,
            locked="ENDS_TAKEN",
            absent=_NO_READER | _OWN_ADDRESS,
            guarantees=(Guarantee.EXACTLY_ONCE,),
            sends=True,
            ordered=False,
        ),
    )
}
