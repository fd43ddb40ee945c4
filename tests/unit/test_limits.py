"""The inequalities between limits. Violating one breaks a guarantee."""

from __future__ import annotations

import json

from delivered.model import limits
from delivered.model.capability import Guarantee
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Scope
from delivered.model.work import Decision, Prepared


def test_a_transaction_outlives_apply_and_recovery() -> None:
    assert limits.TRANSACTION_TIMEOUT_S > limits.APPLY_TIMEOUT_S + limits.RECOVERY_WAIT_S + limits.REQUEST_TIMEOUT_S


def test_the_broker_allows_the_transaction_timeout() -> None:
    """P12: a time-out above the broker's limit fails everybody's first start."""
    assert limits.TRANSACTION_TIMEOUT_S < limits.BROKER_TRANSACTION_TIMEOUT_S_DEFAULT


def test_a_dead_server_is_reported_within_15_s() -> None:
    assert limits.CONNECT_TIMEOUT_S < 15


def test_requests_end_before_what_waits_for_them() -> None:
    assert limits.CONNECT_TIMEOUT_S < limits.REQUEST_TIMEOUT_S < limits.APPLY_TIMEOUT_S


def test_no_batch_that_spark_can_run_again_was_forgotten() -> None:
    """P3: the horizon lies below every batch of a checkpoint that Spark keeps."""
    assert limits.LEDGER_HISTORY_BATCHES > limits.SPARK_BATCHES_RETAINED


def test_a_decision_fits_into_a_record_with_its_offsets() -> None:
    assert limits.OFFSETS_BYTES_MAX < limits.DECISION_BYTES_MAX < 1_000_000


def test_ids_fit_into_topic_names_and_prepared_transaction_ids() -> None:
    """249 characters for a Kafka topic, 199 for a PostgreSQL gid."""
    longest = Scope("p" * limits.NAME_LENGTH_MAX, "s" * limits.NAME_LENGTH_MAX, "i" * limits.NAME_LENGTH_MAX)
    assert len(longest.prefix) + len(str(limits.SHARDS_MAX)) + 10 < 199


def test_a_usual_batch_is_far_below_the_limit_of_a_decision() -> None:
    """1000 shards with Kafka-like handles and offsets of 1000 partitions still fit."""
    handle = {"transactional_id": "delivered.pipeline.sink.0000.0", "producer_id": 2**40, "epoch": 32_000}
    shards = tuple(Prepared(i, 0, Fingerprint(10**9, 2**64 - 1, 2**64 - 1), handle, sink="s") for i in range(1000))
    offsets = json.dumps({"topic": {str(p): 10**12 for p in range(1000)}})
    decision = Decision(Scope("p", "s", "i"), "o", Guarantee.EXACTLY_ONCE, 1, offsets, shards, {}, 0)
    assert len(decision.to_json()) < limits.DECISION_BYTES_MAX / 2


def test_a_window_holds_what_receivers_have_in_flight_many_times() -> None:
    """P22: whatever a dead receiver held comes again after at most a few windows' tenth of others."""
    from delivered.connectors import rocketmq
    from delivered.connectors.activemq import FRAME_BYTES_MIN, PREFETCH_BYTES, PREFETCH_BYTES_MAX
    from delivered.connectors.rabbitmq import PREFETCH, PREFETCH_MAX

    assert limits.DEDUP_WINDOW >= 10 * PREFETCH_MAX >= 10 * PREFETCH
    assert 10 * (PREFETCH_BYTES // FRAME_BYTES_MIN) <= limits.DEDUP_WINDOW
    assert 2 * (PREFETCH_BYTES_MAX // FRAME_BYTES_MIN) <= limits.DEDUP_WINDOW
    assert limits.DEDUP_WINDOW >= 10 * rocketmq.PREFETCH_MAX
    assert 2 * limits.RECEIVE_MESSAGES_MAX <= PREFETCH, "the next batch gathers while one is appended"
    assert limits.MESSAGE_BYTES_MAX <= limits.RECEIVE_BYTES_MAX
