"""Options of the memory connector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from delivered.model.capability import Commit
from delivered.model.options import Option, OptionTable, choice, whole_number

_WORLD = Option("world", "Name of the world, made by make_world in the same process.", required=True)

SOURCE = OptionTable(
    "delivered_memory source",
    (
        _WORLD,
        Option("maxOffsetsPerTrigger", "Records in one batch, at most.", "no bound"),
    ),
)
SINK = OptionTable(
    "delivered_memory sink",
    (
        _WORLD,
        Option("commit", "two_phase or one_transaction: how a batch counts.", "two_phase"),
        Option("valueBytesMax", "A row with a longer value is refused.", "no bound"),
    ),
)


@dataclass(frozen=True)
class MemorySourceOptions:
    world: str
    rows_max: int | None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> MemorySourceOptions:
        found = SOURCE.restore(given)
        rows = found.get("maxOffsetsPerTrigger")
        return cls(
            found["world"],
            None if rows is None else whole_number(SOURCE.owner, "maxOffsetsPerTrigger", rows, 1),
        )


@dataclass(frozen=True)
class MemorySinkOptions:
    world: str
    commit: Commit
    value_bytes_max: int | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> MemorySinkOptions:
        found = SINK.restore(given)
        allowed = [Commit.TWO_PHASE.value, Commit.ONE_TRANSACTION.value]
        longest = found.get("valueBytesMax")
        return cls(
            found["world"],
            Commit(choice(SINK.owner, "commit", found.get("commit", allowed[0]), allowed)),
            None if longest is None else whole_number(SINK.owner, "valueBytesMax", longest, 0),
        )
