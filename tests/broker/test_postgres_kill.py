"""PostgreSQL: processes and servers that really die."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from tests.broker.kill_help import (  # noqa: F401
    log,
    test_a_kill_at_every_point_loses_and_repeats_nothing,
    test_connection_lost_under_an_open_shard,
    test_server_killed_with_shards_prepared,
    test_task_killed_and_run_again,
    test_the_weaker_guarantees_keep_their_word,
    test_zombie_driver_inside_its_decision_is_fenced,
    test_zombie_that_prepares_after_orphans_were_aborted_changes_nothing,
    world,
)

from delivered.model.guarantee import Guarantee
from delivered.model.identity import Scope, Work

if TYPE_CHECKING:
    from tests.support.servers import Postgres


@pytest.mark.parametrize("guarantee", [Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE])
def test_a_server_killed_under_an_upsert_starts_again_at_once(
    new_postgres: Callable[..., Postgres], guarantee: Guarantee
) -> None:
    """kill -9 of its first process: the others end their transactions on their own, and what they still log is lost.

    With unlogged tables made in such transactions 16.14 often does not get up at once: "could not create file: File
    exists" (docs/decisions/030).
    """
    server = new_postgres()
    table = server.table("key bytea PRIMARY KEY, value bytea")
    sink = server.sink(table, mechanism="two_phase", mode="upsert", keyColumns="key")
    rows = pa.record_batch({"key": [b"a", b"b"], "value": [b"1", b"2"]})
    scope = Scope("p", sink.name, "i")
    writers = [sink.writer(Work(scope, 0, shard), guarantee, rows.schema) for shard in range(8)]
    for writer in writers:
        writer.stage(rows)
    server.execute(f"INSERT INTO {server.table()} VALUES ('x', 'y')")  # what was logged before is on disk now
    server.broker.kill()
    server.broker.restart()
    assert server.execute(f"SELECT count(*) FROM {table}") == [(0,)]
    for writer in writers:
        writer.abort()


@pytest.fixture
def server(postgres: Postgres) -> Postgres:
    return postgres


@pytest.fixture
def new_server(new_postgres: Callable[..., Postgres]) -> Callable[..., Postgres]:
    return new_postgres
