"""A sink and a source in memory, for tests without a server: both ways to commit, and fault injection.

It works only within one process, so it has no entry point: Spark's workers are other processes.
"""

from __future__ import annotations

from delivered.contract.connector import Connector, Factory
from delivered.model.capability import Commit
from delivered.model.options import Options, choice, integer, option


class _World(Options):
    world: str = option("world", "Name of the world, made by make_world in the same process.", example="tests")


class MemorySourceOptions(_World, owner="delivered_memory source"):
    rows_max: int | None = option(
        "maxOffsetsPerTrigger", "Records in one batch, at most.", integer(1), default=None, shown="no bound"
    )


class MemorySinkOptions(_World, owner="delivered_memory sink"):
    commit: Commit = option(
        "commit",
        "two_phase or one_transaction: how a batch counts.",
        choice((Commit.TWO_PHASE, Commit.ONE_TRANSACTION)),
        default=Commit.TWO_PHASE,
    )
    value_bytes_max: int | None = option(
        "valueBytesMax", "A row with a longer value is refused.", integer(0), default=None, shown="no bound"
    )


CONNECTOR = Connector(
    "memory",
    "",
    sources=Factory(MemorySourceOptions, "tests.support.memory.world:MemorySource"),
    sinks=Factory(MemorySinkOptions, "tests.support.memory.sink:MemorySink"),
)
