"""What `make test` leaves to `make verify`: sweeps that take minutes and differ little from what stays.

Parameters that are left out one by one carry the mark where they stand.
"""

from __future__ import annotations

import pytest

_ZOMBIE = "test_zombie_cannot_bring_an_old_state_back"
_UPSERTS = "test_a_kill_at_every_point_leaves_a_state_that_was_decided"
_GROUPS = "test_a_kill_at_every_step_leaves_all_or_none_at_every_sink"
_SWEEPS = {
    "broker/test_upsert_kill.py": {
        f"{_UPSERTS}[{world}]"
        for world in (
            "sqlite-arrival-delete",
            "postgres-arrival-delete",
            "mysql-arrival-delete",
            "mysql-two-phase",
            "sqlite-version-delete",
            "postgres-two-phase",
            "mysql-version-delete",
        )
    }
    | {
        f"{_ZOMBIE}[{world}-delete]"
        for world in ("sqlite-arrival", "postgres-arrival", "postgres-version", "mysql-arrival")
    },
    "broker/test_kafka_source_faults.py": {
        "test_a_broker_killed_and_restarted_in_mid_read[plain]",
        "test_a_broker_that_stays_away_in_mid_read_is_an_error_and_no_hang[native]",
        "test_a_broker_that_stays_away_in_mid_read_is_an_error_and_no_hang[plain]",
    },
    "broker/test_mysql_sink.py": {"test_with_a_binary_log[one_transaction]"},
    "broker/test_pulsar_source.py": {"test_a_broker_killed_while_a_slice_is_read"},
    "broker/test_pulsar_sink.py": {"test_killed_and_started_again[write.flush:after-at_least_once]"},
    "broker/test_rabbitmq_stream.py": {"test_a_server_killed_in_the_middle_of_a_slice"},
    "broker/test_rabbitmq.py": {"test_senders_that_send_again_and_receivers_that_are_killed"}
    | {
        f"test_killed_at_a_point_and_started_again[{point}]"
        for point in ("receive.take:after", "receive.persist:before", "receive.ack:after")
    },
    "broker/test_rabbitmq_sink.py": {
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
    "broker/test_activemq.py": {
        "test_two_receivers_and_a_sender_that_sends_again",
        "test_the_broker_is_killed_between_take_and_acknowledgement",
    },
    "broker/test_ledger_million.py": {"test_markers_and_decisions_of_many_batches_in_postgres"},
    "broker/test_postgres_kill.py": {"test_a_kill_at_every_point_loses_and_repeats_nothing[one_transaction]"},
    "broker/test_mysql_kill.py": {"test_a_kill_at_every_point_loses_and_repeats_nothing[one_transaction]"},
    "broker/test_group_servers.py": {
        f"{_GROUPS}[kafka and postgres, both prepare]",
        f"{_GROUPS}[kafka, and postgres as the last resource]",
        "test_the_weaker_guarantees_keep_their_word_at_every_sink[at_most_once-kafka and postgres, both prepare]",
    },
    # A stream is killed through Spark into SQLite, into Kafka and PostgreSQL at once, and beside a cluster's worker.
    "spark/test_delta_stream.py": {"test_killed_after_the_decision_and_started_again"},
    "spark/test_iceberg_stream.py": {"test_killed_after_the_decision_and_started_again"},
    "spark/test_mysql_stream.py": {"test_killed_between_two_xa_commits_then_it_audits_clean"},
    "spark/test_postgres_stream.py": {
        f"test_killed_with_everything_and_started_again[{how}]" for how in ("one_transaction", "two_phase")
    },
    # The definition that the job is held to, over random damage, knows each class.
    "spark/test_audit_job.py": {
        f"test_a_damaged_sink_is_seen[{damage}]"
        for damage in ("duplicated", "three copies", "unexpected", "swap across keys", "empty sink", "everything twice")
    },
    "spark/test_dedup.py": {"test_what_the_audit_is_sure_of_is_so_whatever_the_order"},
    "spark/test_bridges.py": {"test_rabbitmq_to_postgres_over_a_kill_of_each"},
    "spark/test_cli_run.py": {"test_a_signal_lets_the_running_batch_finish[Ctrl-C]"},
    "verify/test_broken_sinks.py": {"test_a_broken_sink_is_found_out_under_spark_too"},
    "crash/test_group.py": {
        f"test_one_crash_at_every_point[last resource-exactly_once-{death}]" for death in ("tree", "fail", "zombie")
    }
    | {f"test_one_crash_at_every_point[both prepare-exactly_once-{death}]" for death in ("kill", "fail")},
    "crash/test_receiver.py": {
        f"test_poison_goes_to_the_dead_letters_whenever_it_is_killed[receive.{point}-2]"
        for point in ("aside:before", "aside:after", "persist:before", "persist:after", "ack:after")
    },
}
"""What stays: each mechanism of each database once, by appending or by key; of several sinks those that both prepare
beside one that cannot."""

_WEAKER = {
    "crash/test_delta_crash.py": {"test_killed_once_at_each_point", "test_zombie_driver_is_fenced"},
    "crash/test_files_crash.py": {"test_killed_once_at_each_point", "test_zombie_driver_is_fenced"},
    "crash/test_iceberg_crash.py": {"test_killed_once_at_each_point", "test_zombie_driver_is_fenced"},
    "crash/test_group.py": {"test_one_crash_at_every_point", "test_two_crashes"},
    "crash/test_dead_letters.py": {"test_one_crash_at_every_point"},
}
"""Under the weaker guarantees these are swept over memory and SQLite."""


_OVER_S3 = {
    "test_batches_are_visible_once_and_add_up",
    "test_batch_prepared_by_a_dead_driver_runs_again",
    "test_nothing_is_visible_before_the_decision",
    "test_recovery_finishes_a_decided_batch",
    "test_abort_orphans_leaves_others_and_the_decided_alone",
}


def is_sweep(item: pytest.Item) -> bool:
    """Whether `make test` leaves it out."""
    place = f"{item.path.parent.name}/{item.path.name}"
    if item.name in _SWEEPS.get(place, ()):
        return True
    if getattr(item, "originalname", item.name) in _WEAKER.get(place, ()) and "exactly_once" not in item.name:
        return True
    if place == "crash/test_sqlite_crash.py" and item.name.startswith("test_killed_once_at_each_point[at_least_once"):
        return True
    if "delta-s3" in item.name:  # the requests are what differs from a folder, and these make them all
        return getattr(item, "originalname", item.name) not in _OVER_S3
    # Each starts a process that imports for seconds.
    return place == "crash/test_iceberg_crash.py" and "zombie_driver" in item.name and "claim" not in item.name
