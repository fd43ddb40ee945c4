"""What a connector can do. The planner reads nothing else of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Commit(StrEnum):
    """How a sink can make a batch count."""

    TWO_PHASE = "two_phase"
    """Tasks prepare, one decision record, then each participant is applied."""
    ONE_TRANSACTION = "one_transaction"
    """Tasks prepare by staging; rows and ledger row become visible in one transaction of the sink."""
    NONE = "none"
    """What is written is visible at once."""


@dataclass(frozen=True)
class WriteMode:
    """How rows get into a table.

    Attributes:
        keys: of an upsert; empty: rows are appended.
        version: column that tells which of two rows of one key is the newer.
        delete: boolean column whose rows delete their key.
        replaces: columns; what the table has of the values that a batch holds in them, the batch replaces.
    """

    keys: tuple[str, ...] = ()
    version: str | None = None
    delete: str | None = None
    replaces: tuple[str, ...] = ()

    @property
    def upserts(self) -> bool:
        return bool(self.keys)

    @property
    def keys_text(self) -> str:
        return ", ".join(self.keys)


APPEND = WriteMode()


@dataclass(frozen=True)
class SourceCapability:
    """
    Attributes:
        system: for people: "kafka", "log".
        replayable: reading the same offsets again gives the same records.
        why_not: why it cannot replay, if it cannot.
        repeats: why a message may be in it twice; empty: it is not.
        sent_twice: it holds what a producer sent twice as two records.
        local: it rests on files of one machine.
        assumes: what the guarantee takes for granted of this source.
    """

    system: str
    replayable: bool
    why_not: str = ""
    repeats: str = ""
    sent_twice: bool = False
    local: bool = False
    assumes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SinkCapability:
    """
    Attributes:
        system: for people: "kafka", "sqlite".
        commit: the mechanism that this sink offers for exactly_once.
        mechanism: its name in a sentence: "two-phase commit".
        stage, prepare, decide, apply: what these steps are at this sink, for the plan.
        batch_atomic: a reader sees a batch whole or not at all.
        can_disable_retries: the sink can send without ever sending twice (needed for at_most_once).
        local: it rests on files of one machine.
        prepared_timeout_s: seconds after which the sink drops a prepared participant; None: never.
        remembers: keys that were seen can lie beside its ledger: see `delivered.contract.powers`.
        write: whether every record stays, or takes the place of another one.
        assumes: what exactly_once takes for granted of the sink and its readers.
        limits: bounds to print with the plan.
    """

    system: str
    commit: Commit
    mechanism: str
    stage: str
    prepare: str
    decide: str
    apply: str
    send: str
    batch_atomic: bool
    local: bool = False
    can_disable_retries: bool = True
    prepared_timeout_s: float | None = None
    remembers: bool = False
    write: WriteMode = APPEND
    assumes: tuple[str, ...] = ()
    limits: tuple[str, ...] = field(default=())


def deciding(sinks: Sequence[SinkCapability]) -> int:
    """Which of several sinks keeps the ledger: the first that cannot prepare, for its own transaction must carry the
    decision; else the first. The guarantee plays no part, so that a pipeline can change it."""
    return next((i for i, s in enumerate(sinks) if s.commit is Commit.ONE_TRANSACTION), 0)
