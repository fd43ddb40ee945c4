"""Sinks that the verifier can break, alone and several in one batch, and what each of them has that a fault can take
hold of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SQLITE, KAFKA, POSTGRES, POSTGRES_2PC, DELTA, FILES = "sqlite", "kafka", "postgres", "postgres-2pc", "delta", "files"
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


SEVERAL = f"{KAFKA}-{POSTGRES}-{DELTA}"

SINK_KINDS = {
    s.name: s
    for s in (
        SinkKind(SQLITE, SQLITE, locks=True, locked="DATABASE_LOCKED"),
        SinkKind(KAFKA, KAFKA, server=KAFKA, source=KAFKA, two_phase=True),
        SinkKind(POSTGRES, POSTGRES, server=POSTGRES, locks=True),
        SinkKind(POSTGRES_2PC, POSTGRES, server=POSTGRES, two_phase=True, locks=True),
        SinkKind(DELTA, DELTA),
        SinkKind(FILES, FILES, absent={"F2": "a folder of this machine: there is no network, and nobody else writes"}),
        # Two prepare, and Delta, which cannot, decides as the last resource.
        SinkKind(SEVERAL, "", server=KAFKA, source=KAFKA, two_phase=True, members=(KAFKA, POSTGRES_2PC, DELTA)),
    )
}
