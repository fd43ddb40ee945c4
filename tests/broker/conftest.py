"""Which sweeps `make test` leaves to `make verify`: they take minutes and differ little from what stays."""

from __future__ import annotations

import pytest

_UPSERTS = "test_a_death_at_every_point_leaves_a_state_that_was_decided"
_GROUPS = "test_a_death_at_every_step_leaves_all_or_none_at_every_sink"
_SWEEPS = {
    "test_upsert_deaths.py": {
        f"{_UPSERTS}[{world}]"
        for world in (
            "sqlite-arrival-delete",
            "postgres-arrival-delete",
            "mysql-arrival-delete",
            "mysql-two-phase",
            "sqlite-version-delete",
            "postgres-two-phase",
        )
    },
    "test_kafka_source_faults.py": {
        "test_a_broker_killed_and_restarted_in_mid_read[plain]",
        "test_a_broker_that_stays_away_in_mid_read_is_an_error_and_no_hang[plain]",
    },
    "test_mysql_sink.py": {"test_with_a_binary_log[one_transaction]"},
    "test_pulsar_source.py": {"test_a_broker_killed_while_a_slice_is_read"},
    "test_rabbitmq.py": {
        f"test_killed_at_a_point_and_started_again[{point}]"
        for point in ("receive.take:after", "receive.persist:before", "receive.ack:after")
    },
    "test_rabbitmq_sink.py": {
        f"test_killed_and_started_again[{point}-{guarantee}]"
        for point, guarantee in (
            ("write.send:after", "at_least_once"),
            ("write.flush:after", "at_most_once"),
            ("commit.record:before", "at_least_once"),
            ("commit.record:before", "at_most_once"),
            ("log:before", "at_least_once"),
            ("log:before", "at_most_once"),
        )
    },
    "test_activemq.py": {"test_two_receivers_and_a_sender_that_sends_again"},
    "test_mysql_deaths.py": {"test_a_death_at_every_point_loses_and_repeats_nothing[one_transaction]"},
    "test_group_servers.py": {
        f"{_GROUPS}[kafka and postgres, both prepare]",
        f"{_GROUPS}[kafka, and postgres as the last resource]",
        "test_the_weaker_guarantees_keep_their_word_at_every_sink[at_most_once-kafka and postgres, both prepare]",
    },
}
"""What stays: each mechanism of each database once, by appending or by key; of several sinks those that both prepare
beside one that cannot."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in _SWEEPS.get(item.path.name, ()):
            item.add_marker("matrix")
