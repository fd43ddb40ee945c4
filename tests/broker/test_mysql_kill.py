"""MySQL: processes and servers that really die."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from tests.support.servers import Mysql


@pytest.fixture
def server(mysql: Mysql) -> Mysql:
    return mysql


@pytest.fixture
def new_server(new_mysql: Callable[..., Mysql]) -> Callable[..., Mysql]:
    return new_mysql
